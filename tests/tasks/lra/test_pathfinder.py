"""Pathfinder: labels against an independent reading of strokes and of pixels, and no cue but the paths."""

import time

import numpy as np
import pytest
import torch

from latte.models import LatteConfig, LatteForSequenceClassification
from latte.tasks.generation import block_generator
from latte.tasks.lra import Pathfinder, PathfinderSettings
from latte.tasks.lra.paths import DRAWINGS
from latte.tasks.lra.pictures import make_pictures

SMALL = {"strokes": 6, "examples": 12, "validation_examples": 4, "test_examples": 4}


@pytest.fixture(scope="module")
def pictures():
    return make_pictures(block_generator(0, "train", 0), 300, DRAWINGS[32], 14)


def groups(strokes: np.ndarray, reach: float) -> list[int]:
    """Strokes joined wherever an end of one is within `reach` of an end of another: the number of each one's group."""
    ends = strokes.reshape(-1, 2, 2)
    number = list(range(len(ends)))
    for first in range(len(ends)):
        for second in range(first):
            apart = np.linalg.norm(ends[first][:, None] - ends[second][None], axis=-1).min()
            if apart <= reach:
                number = [number[first] if n == number[second] else n for n in number]
    return number


@pytest.mark.parametrize("size", [32, 128])
def test_dots_are_joined_where_the_label_says_so(size):
    drawing = DRAWINGS[size]
    made = make_pictures(block_generator(1, "train", 0), 60, drawing, 14)
    for index in range(60):
        strokes = made.strokes[index].reshape(-1, 2, 2)
        strokes = strokes[~np.isnan(strokes[:, 0, 0])]
        assert len(strokes) >= 28
        number = groups(strokes, drawing.gap + 1e-6)
        of_dots = []
        for dot in made.dots[index]:
            apart = np.linalg.norm(strokes - dot, axis=-1).min(axis=1)
            assert apart.min() == 0
            of_dots.append(number[int(apart.argmin())])
        assert (of_dots[0] == of_dots[1]) == made.labels[index]


def test_paths_keep_apart(pictures):
    drawing = DRAWINGS[32]
    share = np.linspace(0, 1, 5)[:, None]
    for strokes in pictures.strokes[:100]:
        points = strokes[:, :, :1] + share * (strokes[:, :, 1:] - strokes[:, :, :1])
        points = points.reshape(len(points), -1, 2)
        for first in range(len(points)):
            for second in range(first):
                apart = np.linalg.norm(points[first][:, None] - points[second][None], axis=-1)
                assert not np.nanmin(apart, initial=99) < drawing.gap + 0.2  # more than from stroke to stroke


def joined_by_ink(pixels: np.ndarray, dots: np.ndarray, reach: float) -> bool:
    """Whether one dot is reached from the other over pixels with ink that are no more than `reach` apart."""
    ink = np.argwhere(pixels > 60)
    near = np.linalg.norm(ink[:, None] - ink[None], axis=-1) <= reach
    start, goal = (np.linalg.norm(ink + 0.5 - dot, axis=-1).argmin() for dot in dots)
    reached = np.zeros(len(ink), bool)
    reached[start] = True
    while True:
        more = near[reached].any(axis=0)
        if (more == reached).all():
            return bool(reached[goal])
        reached = more


def test_labels_can_be_read_off_the_pixels():
    drawing = DRAWINGS[128]
    made = make_pictures(block_generator(2, "train", 0), 60, drawing, 14)
    seen = [joined_by_ink(*picture, reach=drawing.gap) for picture in zip(made.pixels, made.dots, strict=True)]
    assert (np.array(seen) == made.labels).mean() > 0.95


def test_ink_is_where_strokes_and_dots_are(pictures):
    assert pictures.pixels.shape == (300, 32, 32)
    assert pictures.pixels.dtype == np.uint8
    cells = np.floor(pictures.dots).astype(int)
    rows = np.arange(300)
    for dot in (0, 1):
        assert (pictures.pixels[rows, cells[:, dot, 0], cells[:, dot, 1]] == 255).all()
    middles = np.floor(pictures.strokes.mean(axis=3))
    there = ~np.isnan(middles[..., 0])
    row, path, stroke = there.nonzero()
    y, x = middles[row, path, stroke].astype(int).T
    assert (pictures.pixels[row, y, x] > 0).all()


def test_nothing_simple_tells_the_label():
    """Of no simple measure of a picture does any threshold do better than chance would on so many."""
    pixels, labels, _, dots = make_pictures(block_generator(0, "train", 0), 1500, DRAWINGS[32], 9)
    apart = np.linalg.norm(dots[:, 0] - dots[:, 1], axis=-1)
    measures = {
        "distance of the dots": apart,
        "ink": pixels.sum(axis=(1, 2)),
        "bright pixels": (pixels > 200).sum(axis=(1, 2)),
        "height of the dots": dots[..., 0].mean(axis=1),
        "distance of the dots from the middle": np.linalg.norm(dots - 16, axis=-1).mean(axis=1),
        "ink between the dots": _ink_between(pixels, dots),
        "ink around the dots": _ink_around(pixels, dots),
    }
    for name, values in measures.items():
        best = _best_threshold(values.astype(float), labels)
        assert best < 0.56, f"{name}: {best}"
    assert abs(labels.mean() - 0.5) < 0.04
    gap = apart[labels == 1].mean() - apart[labels == 0].mean()
    assert abs(gap) < 0.5


def _best_threshold(values: np.ndarray, labels: np.ndarray) -> float:
    order = np.argsort(values, kind="stable")
    right = np.concatenate([[0], np.cumsum(np.where(labels[order], 1, -1))]) / len(labels)
    share = labels.mean()
    return float(max((1 - share + right).max(), (share - right).max()))


def _ink_between(pixels: np.ndarray, dots: np.ndarray) -> np.ndarray:
    """Ink on the straight line from dot to dot."""
    share = np.linspace(0, 1, 24)[:, None]
    points = np.floor(dots[:, :1] + share * (dots[:, 1:] - dots[:, :1])).astype(int)
    return pixels[np.arange(len(pixels))[:, None], points[..., 0], points[..., 1]].sum(axis=1)


def _ink_around(pixels: np.ndarray, dots: np.ndarray) -> np.ndarray:
    y, x = np.indices((32, 32)) + 0.5
    total = np.zeros(len(pixels))
    for index, (picture, ends) in enumerate(zip(pixels, dots, strict=True)):
        near = sum(np.hypot(y - end[0], x - end[1]) < 5 for end in ends)
        total[index] = (picture * (near > 0)).sum()
    return total


def prepare(cache, seed: int = 0, **words):
    return Pathfinder(PathfinderSettings(**(SMALL | {"workers": 1} | words), cache=str(cache)), seed=seed)


def test_an_example_depends_on_seed_split_and_index_alone(tmp_path):
    few, many = prepare(tmp_path).prepare(), prepare(tmp_path, examples=30).prepare()
    other = prepare(tmp_path, seed=1).prepare()
    assert torch.equal(few.train[11]["pixel_values"], many.train[11]["pixel_values"])
    assert not torch.equal(few.train[0]["pixel_values"], other.train[0]["pixel_values"])
    assert not torch.equal(few.train[0]["pixel_values"], few.test[0]["pixel_values"])
    assert len(many.train) == 30


def test_a_model_is_measured(tmp_path):
    task = prepare(tmp_path)
    data = task.prepare()
    assert data.tokens_per_example == 1024
    batch = data.collate([data.train[index] for index in range(3)])
    assert batch["pixel_values"].shape == (3, 1024)
    model = LatteForSequenceClassification(
        LatteConfig.from_preset("latte-tiny", num_hidden_layers=1, **data.model)
    ).eval()
    with torch.no_grad():
        sums, outputs = task.measure(model, batch), model(**batch)
    assert sums["loss"][0] / 3 == pytest.approx(outputs.loss.item(), rel=1e-4)
    assert sums["accuracy"] == (float((outputs.logits.argmax(-1) == batch["labels"]).sum()), 3.0)


def write_release(folder, made, as_array: bool = False) -> None:
    """Pictures in the form of the official release: folders of .png files, and lists that are called .npy."""
    image = pytest.importorskip("PIL.Image")
    (folder / "metadata").mkdir(parents=True)
    for part in (0, 1):
        (folder / "imgs" / str(part)).mkdir(parents=True)
        rows = []
        for number, index in enumerate(range(part, len(made.labels), 2)):
            name = f"sample_{number}.png"
            image.fromarray(made.pixels[index]).save(folder / "imgs" / str(part) / name)
            rows.append(
                [f"imgs/{part}", name, str(number), str(made.labels[index]), "1.0", "14", "4", "2", "0.5", "1", "1"]
            )
        path = folder / "metadata" / f"{part}.npy"
        if as_array:
            np.save(path, np.array(rows))
        else:
            path.write_text("".join(" ".join(row) + "\n" for row in rows))


@pytest.mark.parametrize("as_array", [False, True])
def test_the_official_release_is_read(tmp_path, pictures, as_array):
    some = type(pictures)(*(array[:20] for array in pictures))
    folder = tmp_path / "curv_contour_length_14"
    write_release(folder, some, as_array)
    (folder / "imgs" / "1" / "sample_9.png").write_bytes(b"")  # as some in the release are
    data = Pathfinder(PathfinderSettings(data=str(folder), cache=str(tmp_path / "cache"))).prepare()
    assert (len(data.train), len(data.validation), len(data.test)) == (15, 2, 2)
    order = [*range(0, 20, 2), *range(1, 19, 2)]
    splits = [*data.train, *data.validation, *data.test]
    for example, index in zip(splits, order, strict=True):
        assert np.array_equal(example["pixel_values"].numpy(), some.pixels[index].reshape(-1))
        assert example["labels"] == some.labels[index]


def test_a_release_that_is_none(tmp_path, pictures):
    def read(**words):
        return Pathfinder(
            PathfinderSettings(data=str(tmp_path / "a"), cache=str(tmp_path / "cache"), **words)
        ).prepare()

    with pytest.raises(ValueError, match="no such file or folder"):
        read()
    (tmp_path / "a").mkdir()
    with pytest.raises(ValueError, match=r"has no metadata/0\.npy; it has nothing"):
        read()
    (tmp_path / "a").rmdir()
    write_release(tmp_path / "a", type(pictures)(*(array[:20] for array in pictures)))
    with pytest.raises(ValueError, match="is 32 × 32 pixels; size is 128"):
        read(size=128)
    (tmp_path / "a" / "metadata" / "0.npy").write_text("imgs/0 sample_0.png\n")
    with pytest.raises(ValueError, match=r"line 1: 'imgs/0 sample_0\.png'; folder, file, number and label are wanted"):
        read()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ({"size": 64}, "size is 64; it must be one of 32, 128"),
        ({"strokes": 40}, "strokes is 40"),
        ({"examples": 0}, "0"),
    ],
)
def test_settings_that_cannot_be(words, message):
    with pytest.raises(ValueError, match=message):
        PathfinderSettings(**words)


@pytest.mark.bench
def test_two_hundred_thousand_pictures_take_a_quarter_of_an_hour(tmp_path):
    begin = time.perf_counter()
    Pathfinder(
        PathfinderSettings(examples=16_000, validation_examples=2_000, test_examples=2_000, cache=str(tmp_path))
    ).prepare()
    assert time.perf_counter() - begin < 90  # a tenth of them
