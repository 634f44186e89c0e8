"""Pictures of Pathfinder (Linsley et al. 2018): two dashed paths, shorter ones, and two dots at ends of the paths.

The dots are at the two ends of one path (label 1), or at an end of each (label 0). Which it is is drawn last, between
a place of each kind that are about equally far apart, so that nothing but following the paths tells.
"""

from typing import NamedTuple

import numpy as np

from latte.tasks.lra.paths import DRAWINGS, Drawing, Squares, draw_paths, draw_whole_paths

SQUARES = 1024  # begun at a time
ATTEMPTS = (2, 6)  # at the first and the second path of a square
STROKE_INK, DOT_INK = 0.75, 1.0
ENDS_OF_ONE = np.array([[0, 1], [2, 3]])  # ends of the first path are 0 and 1, of the second 2 and 3
ENDS_OF_BOTH = np.array([[0, 2], [0, 3], [1, 2], [1, 3]])

__all__ = ["DRAWINGS", "Pictures", "make_pictures"]


class Pictures(NamedTuple):
    """Pictures with their labels, and what is on them: strokes that are not there are NaN."""

    pixels: np.ndarray  # [n, size, size], 0 to 255
    labels: np.ndarray  # 1 where the dots are joined
    strokes: np.ndarray  # [n, paths, strokes, 2, 2]; the first two paths are the long ones
    dots: np.ndarray  # [n, 2, 2]


def make_pictures(generator: np.random.Generator, count: int, drawing: Drawing, strokes: int) -> Pictures:
    """So many pictures, with that many strokes in the two paths."""
    parts, found = [], 0
    while found < count:
        parts.append(_make_some(generator, drawing, strokes))
        found += len(parts[-1].labels)
    return Pictures(*(np.concatenate(arrays)[:count] for arrays in zip(*parts, strict=True)))


def _make_some(generator: np.random.Generator, drawing: Drawing, strokes: int) -> Pictures:
    """Pictures from the squares on which everything found its place."""
    squares = Squares(SQUARES, drawing)
    first, done = draw_whole_paths(generator, squares, strokes, ATTEMPTS[0])
    first, squares.taken = first[done], squares.taken[done]
    second, done = draw_whole_paths(generator, squares, strokes, ATTEMPTS[1])
    first, second, squares.taken = first[done], second[done], squares.taken[done]
    ends = np.stack([first[:, 0, 0], first[:, -1, 1], second[:, 0, 0], second[:, -1, 1]], axis=1)
    labels, chosen, able = _place_dots(generator, ends, _room(ends, first, second, drawing), drawing)
    squares.taken = squares.taken[able]
    dots = np.take_along_axis(ends, chosen[:, :, None], axis=1)[able]
    paths = [first[able], second[able], *_distract(generator, squares, ends[able], strokes)]
    lines = np.stack(paths, axis=1)
    return Pictures(_ink(lines, dots, drawing), labels[able].astype(np.uint8), lines, dots)


def _room(ends: np.ndarray, first: np.ndarray, second: np.ndarray, drawing: Drawing) -> np.ndarray:
    """At which ends [n, 4] a dot keeps a gap to the other path."""
    least = drawing.radius + drawing.gap + drawing.thickness / 2
    others = np.stack([second, second, first, first], axis=1)
    points = np.concatenate([others.reshape(*others.shape[:2], -1, 2), others.mean(axis=-2)], axis=2)
    return (np.linalg.norm(points - ends[:, :, None], axis=-1) >= least).all(axis=-1)


def _place_dots(
    generator: np.random.Generator, ends: np.ndarray, room: np.ndarray, drawing: Drawing
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Labels, the two ends chosen for the dots, and on which squares it can be done.

    Wanted are two ends of one path and one of each, which differ in their distance by a 32nd of the side at most.
    """
    apart = np.linalg.norm(ends[:, :, None] - ends[:, None], axis=-1)
    joined, parted = apart[:, *ENDS_OF_ONE.T], apart[:, *ENDS_OF_BOTH.T]
    able = np.abs(joined[:, :, None] - parted[:, None]) <= drawing.size / 32
    least = 2 * drawing.radius + drawing.gap
    able &= ((joined >= least) & room[:, ENDS_OF_ONE].all(axis=-1))[:, :, None]
    able &= ((parted >= least) & room[:, ENDS_OF_BOTH].all(axis=-1))[:, None]
    able = able.reshape(len(ends), -1)
    choice = (able * generator.random(able.shape)).argmax(axis=1)
    labels = generator.integers(0, 2, len(ends))
    one, both = np.divmod(choice, len(ENDS_OF_BOTH))
    return labels, np.where(labels[:, None], ENDS_OF_ONE[one], ENDS_OF_BOTH[both]), able.any(axis=1)


def _distract(generator: np.random.Generator, squares: Squares, ends: np.ndarray, strokes: int) -> list[np.ndarray]:
    """Paths a third as long, or shorter where there is no room, that keep away from wherever a dot may be."""
    drawing = squares.drawing
    wider = max(drawing.radius + drawing.gap + drawing.thickness / 2 - drawing.separation, 0)
    around = wider * np.array([[1, 0], [-1, 0], [0, 1], [0, -1]])
    squares.take(np.arange(len(ends)), (ends[:, :, None] + around).reshape(len(ends), -1, 2))
    paths = []
    for _ in range(drawing.distractors):
        path, _ = draw_paths(generator, squares, max(strokes // 3, 1))
        paths.append(np.pad(path, ((0, 0), (0, strokes - path.shape[1]), (0, 0), (0, 0)), constant_values=np.nan))
    return paths


def _ink(paths: np.ndarray, dots: np.ndarray, drawing: Drawing) -> np.ndarray:
    """Strokes and dots as grey values, with soft edges a pixel wide."""
    edge = int(np.ceil(max(drawing.dash + drawing.thickness, 2 * drawing.radius))) + 2  # a place for what juts out
    size = drawing.size + 2 * edge
    ink = np.zeros((len(dots), size, size), np.float32)
    lines = paths.reshape(len(paths), -1, 2, 2) + edge
    for number in range(lines.shape[1]):
        rows = (~np.isnan(lines[:, number, 0, 0])).nonzero()[0]
        start, end = lines[rows, number].swapaxes(0, 1)
        _draw(ink, rows, start, end, drawing.thickness / 2, STROKE_INK, drawing.dash / 2)
    for dot in (dots + edge).swapaxes(0, 1):
        _draw(ink, np.arange(len(dot)), dot, dot, drawing.radius, DOT_INK, 0)
    return np.rint(255 * ink[:, edge:-edge, edge:-edge]).astype(np.uint8)


def _draw(
    ink: np.ndarray, rows: np.ndarray, start: np.ndarray, end: np.ndarray, half: float, strength: float, reach: float
) -> None:
    """One segment in each of some pictures: all that is within `half` of it. It reaches so far from its middle."""
    window = np.arange(2 * int(np.ceil(reach + half + 1)) + 1)
    corner = np.floor((start + end) / 2).astype(np.int64) - len(window) // 2
    y, x = (corner[:, 0, None] + window)[:, :, None], (corner[:, 1, None] + window)[:, None]
    start_y, start_x = start.T[:, :, None, None]
    along_y, along_x = (end - start).T[:, :, None, None]
    from_y, from_x = y + 0.5 - start_y, x + 0.5 - start_x
    share = np.clip((from_y * along_y + from_x * along_x) / np.maximum(along_y**2 + along_x**2, 1e-9), 0, 1)
    off = np.hypot(from_y - share * along_y, from_x - share * along_x)
    place = rows[:, None, None], y, x
    ink[place] = np.maximum(ink[place], strength * np.clip(0.5 + half - off, 0, 1))
