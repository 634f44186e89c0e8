"""Figures without a plotting library: text for a terminal, inline SVG for a page.

The SVG takes its colours from the CSS variables of the page around it (`--ink`, `--faint`, `--series-1`, …), so that
one figure suits a light and a dark page.
"""

import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import NamedTuple

SHADES = " ·░▒▓█"
WIDTH, HEIGHT = 640, 320
LEFT, RIGHT, TOP, BOTTOM = 56, 104, 32, 44


class Point(NamedTuple):
    """A place in a figure, in pixels from its top left corner."""

    x: float
    y: float


def text_heat_map(matrix: Sequence[Sequence[float]]) -> str:
    """Draw a matrix of probabilities with two characters per entry; darker is larger."""
    return "\n".join("".join(2 * shade(value) for value in row) for row in matrix)


def shade(probability: float) -> str:
    """The character for a probability: a space for exactly 0, then ever more ink."""
    if probability == 0:
        return SHADES[0]
    # The square root tells small probabilities apart: most entries of a long row are small.
    return SHADES[min(1 + int(math.sqrt(probability) * (len(SHADES) - 1)), len(SHADES) - 1)]


def svg_heat_map(matrix: Sequence[Sequence[float]], *, title: str, cell: int = 15) -> str:
    """Draw a matrix of probabilities as squares, with the value of each on hover."""
    size = cell * len(matrix)
    squares = [
        f'<rect x="{s * cell}" y="{t * cell}" width="{cell - 1}" height="{cell - 1}" rx="2" class="cell" '
        f'fill-opacity="{math.sqrt(value):.3f}"><title>p(s={s} | t={t}) = {value:.3f}</title></rect>'
        for t, row in enumerate(matrix)
        for s, value in enumerate(row)
        if value > 0
    ]
    return (
        f'<svg viewBox="0 0 {size} {size}" width="{size}" height="{size}" role="img" aria-label="{escape(title)}">'
        f'<rect width="{size}" height="{size}" class="plate"/>{"".join(squares)}</svg>'
    )


def svg_line_chart(
    positions: Sequence[int], series: Mapping[str, Sequence[float]], *, title: str, x_label: str, y_label: str
) -> str:
    """Draw one line per series over positions that double from one to the next, each line named at its end."""
    top = nice_ceiling(max(max(values) for values in series.values()))
    parts = [*y_axis(top, y_label), *x_axis(positions, x_label)]
    ends = label_heights([place(positions, positions[-1], values[-1], top).y for values in series.values()])
    for number, ((name, values), end) in enumerate(zip(series.items(), ends, strict=True), start=1):
        points = [place(positions, x, y, top) for x, y in zip(positions, values, strict=True)]
        parts.append(line(name, points, end, colour=f"var(--series-{number})"))
    return (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)}" class="chart">'
        f"{''.join(parts)}</svg>"
    )


def place(positions: Sequence[int], x: float, y: float, top: float) -> Point:
    """Where a value stands: x on a logarithmic axis, y on a linear one that starts at 0."""
    first, last = math.log(positions[0]), math.log(positions[-1])
    along = (math.log(x) - first) / (last - first) if last > first else 0.5
    return Point(LEFT + along * (WIDTH - LEFT - RIGHT), HEIGHT - BOTTOM - y / top * (HEIGHT - TOP - BOTTOM))


def y_axis(top: float, label: str) -> list[str]:
    """Five horizontal lines with their values, and the label of the axis."""
    parts = [f'<text x="{LEFT}" y="{TOP - 16}" class="label">{escape(label)}</text>']
    for tick in range(5):
        value = top * tick / 4
        y = HEIGHT - BOTTOM - tick / 4 * (HEIGHT - TOP - BOTTOM)
        parts.append(f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}" class="grid"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{y + 4:.1f}" class="label end">{value:g}</text>')
    return parts


def x_axis(positions: Sequence[int], label: str) -> list[str]:
    """A value under each position, and the label of the axis."""
    parts = [
        f'<text x="{place(positions, x, 0, 1).x:.1f}" y="{HEIGHT - BOTTOM + 18}" class="label middle">{x:,}</text>'
        for x in positions
    ]
    middle = (LEFT + WIDTH - RIGHT) / 2
    return [*parts, f'<text x="{middle}" y="{HEIGHT - 6}" class="label middle">{escape(label)}</text>']


def line(name: str, points: Sequence[Point], label_y: float, *, colour: str) -> str:
    """One line with a dot at each measurement and its name beside the last."""
    path = " ".join(f"{point.x:.1f},{point.y:.1f}" for point in points)
    dots = "".join(f'<circle cx="{point.x:.1f}" cy="{point.y:.1f}" r="3.5" fill="{colour}"/>' for point in points)
    return (
        f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>{dots}'
        f'<text x="{points[-1].x + 10:.1f}" y="{label_y + 4:.1f}" fill="{colour}" class="name">{escape(name)}</text>'
    )


def label_heights(wanted: Sequence[float], gap: float = 16) -> list[float]:
    """Move labels up as far as they must to keep a gap, lowest first, so that close lines stay readable."""
    heights = list(wanted)
    free = math.inf
    for index in sorted(range(len(wanted)), key=lambda i: -wanted[i]):
        heights[index] = min(wanted[index], free)
        free = heights[index] - gap
    return heights


def nice_ceiling(value: float) -> float:
    """The smallest of 1, 2, 4, 6, 8 or 10 times a power of ten that is not below the value."""
    power = 10.0 ** math.floor(math.log10(value))
    return next(step * power for step in (1, 2, 4, 6, 8, 10) if step * power >= value)
