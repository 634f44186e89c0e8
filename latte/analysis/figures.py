"""Line charts without a plotting library, as inline SVG for a page.

The SVG takes its colours from the CSS variables of the page around it (`--ink`, `--faint`, `--series-1`, …), so that
one figure suits a light and a dark page.
"""

import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import NamedTuple

WIDTH, HEIGHT = 640, 320
LEFT, RIGHT, TOP, BOTTOM = 56, 104, 32, 44
TICKS = 5

Curve = Sequence[tuple[float, float]]


class Point(NamedTuple):
    """A place in a figure, in pixels from its top left corner."""

    x: float
    y: float


class Axes(NamedTuple):
    """From values to places: y is linear from 0, x linear or, where positions double, logarithmic."""

    first: float
    last: float
    top: float
    doubling: bool

    def place(self, x: float, y: float) -> Point:
        first, last, at = (math.log(v) if self.doubling else v for v in (self.first, self.last, x))
        along = (at - first) / (last - first) if last > first else 0.5
        return Point(LEFT + along * (WIDTH - LEFT - RIGHT), HEIGHT - BOTTOM - y / self.top * (HEIGHT - TOP - BOTTOM))


def svg_line_chart(
    series: Mapping[str, Curve], *, title: str, x_label: str, y_label: str, doubling: bool = False, dots: bool = True
) -> str:
    """One line per series, named at its end; `doubling` says that each x is twice the one before."""
    places = sorted({x for curve in series.values() for x, _ in curve})
    top = nice_ceiling(max(y for curve in series.values() for _, y in curve))
    axes = Axes(places[0] if doubling else 0.0, places[-1], top, doubling)
    ticks = places if doubling else [places[-1] * tick / TICKS for tick in range(TICKS + 1)]
    parts = [*y_axis(top, y_label), *x_axis(axes, ticks, x_label)]
    ends = label_heights([axes.place(*curve[-1]).y for curve in series.values()])
    for number, ((name, curve), end) in enumerate(zip(series.items(), ends, strict=True), start=1):
        points = [axes.place(x, y) for x, y in curve]
        parts.append(line(name, points, end, colour=f"var(--series-{number})", dots=dots))
    return (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)}" class="chart">'
        f"{''.join(parts)}</svg>"
    )


def y_axis(top: float, label: str) -> list[str]:
    """Horizontal lines with their values, and the label of the axis."""
    parts = [f'<text x="{LEFT}" y="{TOP - 16}" class="label">{escape(label)}</text>']
    for tick in range(TICKS):
        value = top * tick / (TICKS - 1)
        y = HEIGHT - BOTTOM - tick / (TICKS - 1) * (HEIGHT - TOP - BOTTOM)
        parts.append(f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}" class="grid"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{y + 4:.1f}" class="label end">{value:g}</text>')
    return parts


def x_axis(axes: Axes, ticks: Sequence[float], label: str) -> list[str]:
    """A value under each tick, and the label of the axis."""
    parts = [
        f'<text x="{axes.place(x, 0).x:.1f}" y="{HEIGHT - BOTTOM + 18}" class="label middle">{short_number(x)}</text>'
        for x in ticks
    ]
    middle = (LEFT + WIDTH - RIGHT) / 2
    return [*parts, f'<text x="{middle}" y="{HEIGHT - 6}" class="label middle">{escape(label)}</text>']


def short_number(value: float) -> str:
    """1,024 as it is, 2,400,000 as 2.4M."""
    return f"{value / 1e6:g}M" if value >= 1e6 else f"{value:,.0f}"


def line(name: str, points: Sequence[Point], label_y: float, *, colour: str, dots: bool) -> str:
    """One line, perhaps with a dot at each measurement, and its name beside the last."""
    path = " ".join(f"{point.x:.1f},{point.y:.1f}" for point in points)
    marks = "".join(
        f'<circle cx="{point.x:.1f}" cy="{point.y:.1f}" r="3.5" fill="{colour}"/>' for point in (points if dots else ())
    )
    return (
        f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>{marks}'
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
