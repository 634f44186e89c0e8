"""Dashed paths that wind over a square without touching each other, for many squares at once.

A path is a row of strokes. It turns before each by an angle drawn from Linsley et al.'s law, with a density of
cos²(continuity · angle). Squares in which a path finds no way on are given up.
"""

from typing import NamedTuple

import numpy as np

TRIES = 16  # places tried for a stroke before the path is stuck
CELLS = 64  # along each side of a square, at which it is noted what is taken
SAMPLES = 4  # points of a stroke, with the gap before it, that are looked at


class Drawing(NamedTuple):
    """Measures of a picture, in pixels."""

    size: int
    dash: float  # length of a stroke
    gap: float  # from the end of a stroke to the next
    separation: float  # least distance between strokes that are no neighbours
    thickness: float
    radius: float  # of the dots
    continuity: float  # how straight paths are: 1 allows turns of up to 90°, 2 of 45°
    distractors: int  # paths without dots
    border: float  # left free at the edges


DRAWINGS = {  # thickness, radius, continuity and distractors are Long Range Arena's
    32: Drawing(
        size=32, dash=2.0, gap=1.5, separation=2.7, thickness=1.0, radius=1.5, continuity=1.0, distractors=5, border=2.0
    ),
    128: Drawing(
        size=128,
        dash=5.0,
        gap=3.0,
        separation=6.0,
        thickness=1.5,
        radius=3.0,
        continuity=1.8,
        distractors=8,
        border=4.0,
    ),
}


class Squares:
    """Which parts of many squares are too close to a stroke for another one.

    Each square is 64 × 64 cells, a row of which is one 64-bit number.
    """

    def __init__(self, count: int, drawing: Drawing) -> None:
        self.drawing = drawing
        self.cells_per_pixel = CELLS / drawing.size
        self.reach = int(drawing.separation * self.cells_per_pixel)
        self.taken = np.zeros((count, CELLS + 2 * self.reach), np.uint64)  # with rows beyond the edges

    def free(self, rows: np.ndarray, points: np.ndarray) -> np.ndarray:
        """Whether all of points [n, …, points, 2] in the squares `rows` [n] can be drawn on."""
        low, high = self.drawing.border, self.drawing.size - self.drawing.border
        inside = ((points >= low) & (points <= high)).all(axis=(-1, -2))
        y, x = self._cells(points)
        rows = rows.reshape(-1, *[1] * (points.ndim - 2))
        bits = (self.taken[rows, y + self.reach] >> x.astype(np.uint64)) & np.uint64(1)
        return np.logical_and(inside, ~bits.any(axis=-1))

    def take(self, rows: np.ndarray, points: np.ndarray) -> None:
        """Keep others away from points [n, points, 2] in the squares `rows` [n], which are different ones."""
        all_y, all_x = self._cells(points)
        for y, x in zip(all_y.T, all_x.T, strict=True):
            left, right = np.maximum(x - self.reach, 0), np.maximum(self.reach - x, 0)
            for down in range(-self.reach, self.reach + 1):
                half = int(np.sqrt(self.reach**2 - down**2))
                chord = np.uint64(((1 << (2 * half + 1)) - 1) << (self.reach - half))
                self.taken[rows, y + self.reach + down] |= chord << left.astype(np.uint64) >> right.astype(np.uint64)

    def _cells(self, points: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        cells = np.clip(points * self.cells_per_pixel, 0, CELLS - 1).astype(np.int64)
        return cells[..., 0], cells[..., 1]


def draw_whole_paths(
    generator: np.random.Generator, squares: Squares, strokes: int, attempts: int
) -> tuple[np.ndarray, np.ndarray]:
    """A path of that many strokes on each square, as `draw_paths` gives it, and on which squares there is one."""
    ends, done = np.full((len(squares.taken), strokes, 2, 2), np.nan), np.zeros(len(squares.taken), np.bool_)
    for _ in range(attempts):
        open_squares = (~done).nonzero()[0]
        attempt = Squares(len(open_squares), squares.drawing)
        attempt.taken[:] = squares.taken[open_squares]
        drawn, lengths = draw_paths(generator, attempt, strokes)
        whole = lengths == strokes
        rows = open_squares[whole]
        ends[rows], squares.taken[rows], done[rows] = drawn[whole], attempt.taken[whole], True
    return ends, done


def draw_paths(generator: np.random.Generator, squares: Squares, strokes: int) -> tuple[np.ndarray, np.ndarray]:
    """A path on each square: the ends of its strokes [squares, strokes, 2, 2], and how many strokes it came to.

    A stroke is out of bounds for others, and for its own path from the next but one on.
    """
    drawing = squares.drawing
    count = len(squares.taken)
    ends, lengths = np.full((count, strokes, 2, 2), np.nan), np.zeros(count, np.intp)
    angles = np.empty(count)
    going = np.arange(count)
    for stroke in range(strokes):
        if stroke == 0:
            start, angle = _anywhere(generator, len(going), drawing)
        else:
            start, angle = _onwards(generator, ends[going, stroke - 1, 1], angles[going], drawing)
        end = start + drawing.dash * _direction(angle)
        free = squares.free(going, _along(start, end, drawing))
        ahead = squares.free(going, (end + (drawing.gap + drawing.dash) * _direction(angle))[..., None, :])
        chosen = (free * (1 + ahead)).argmax(axis=1)  # the first that does not lead straight into a wall, if any
        able = np.any(free, axis=1)
        if stroke > 0:  # the stroke before is out of bounds from now on, also where it was the last
            squares.take(going, _along(ends[going, stroke - 1, 0], ends[going, stroke - 1, 1], drawing))
        pick = able.nonzero()[0], chosen[able]
        going = going[able]
        ends[going, stroke, 0], ends[going, stroke, 1], angles[going] = start[pick], end[pick], angle[pick]
        lengths[going] = stroke + 1
    squares.take(going, _along(ends[going, -1, 0], ends[going, -1, 1], drawing))
    return ends, lengths


def _anywhere(generator: np.random.Generator, count: int, drawing: Drawing) -> tuple[np.ndarray, np.ndarray]:
    """Where a path may begin, and in which direction: [count, tries, 2] and [count, tries]."""
    start = generator.uniform(drawing.border, drawing.size - drawing.border, (count, TRIES, 2))
    return start, generator.uniform(-np.pi, np.pi, (count, TRIES))


def _onwards(
    generator: np.random.Generator, end: np.ndarray, angle: np.ndarray, drawing: Drawing
) -> tuple[np.ndarray, np.ndarray]:
    """Where a path may go on from `end` [count, 2], and in which directions; half of a turn is made in the gap."""
    turn = TURNS[generator.integers(0, len(TURNS), (len(end), TRIES))] / drawing.continuity
    start = end[:, None] + drawing.gap * _direction(angle[:, None] + turn / 2)
    return start, angle[:, None] + turn


def _turn_quantiles(count: int) -> np.ndarray:
    """Evenly likely angles between −π/2 and π/2 whose density is cos²(angle)."""
    angles = np.linspace(-np.pi / 2, np.pi / 2, count)
    cumulative = 0.5 + (angles + np.sin(2 * angles) / 2) / np.pi
    return np.interp((np.arange(count) + 0.5) / count, cumulative, angles)


TURNS = _turn_quantiles(4096)


def _direction(angle: np.ndarray) -> np.ndarray:
    return np.stack([np.sin(angle), np.cos(angle)], axis=-1)


def _along(start: np.ndarray, end: np.ndarray, drawing: Drawing) -> np.ndarray:
    """Points […, samples, 2] from the middle of the gap before a stroke to its end."""
    share = np.linspace(-drawing.gap / drawing.dash / 2, 1, SAMPLES)[:, None]
    return start[..., None, :] + share * (end - start)[..., None, :]
