"""Pictures of CIFAR-10 from files of each form, and the plans of Table 8."""

import lzma

import numpy as np
import pytest
import torch

from latte.models import LatteConfig, LatteForPairClassification, LatteForSequenceClassification
from latte.tasks import TASKS, task_class
from latte.tasks.lra import ImageClassification, ImageSettings
from latte.tasks.lra.image import to_grey
from latte.tasks.lra.table8 import TABLE_8

DICE = np.random.default_rng(0)
COLOURS = DICE.integers(0, 256, (10, 32, 32, 3), dtype=np.uint8)
LABELS = DICE.integers(0, 10, 10)
SHARES = COLOURS[..., 0] / 255 * 0.2989 + COLOURS[..., 1] / 255 * 0.587 + COLOURS[..., 2] / 255 * 0.114
GREY = np.floor(SHARES * 255.5).astype(np.uint8)  # tf.image.rgb_to_grayscale


def write_arrays(path, pixels=GREY, **others) -> None:
    arrays = {"x_train": pixels, "y_train": LABELS, "x_test": pixels[:3], "y_test": LABELS[:3]} | others
    np.savez(path, **arrays)


def write_binary(folder) -> None:
    planes = COLOURS.transpose(0, 3, 1, 2).reshape(10, -1)
    rows = np.concatenate([LABELS[:, None].astype(np.uint8), planes], axis=1)
    for number in range(5):
        (folder / f"data_batch_{number + 1}.bin").write_bytes(rows[2 * number : 2 * number + 2].tobytes())
    (folder / "test_batch.bin").write_bytes(rows[:3].tobytes())


@pytest.mark.parametrize("form", ["file", "folder", "packed", "colours", "binary"])
def test_pictures_of_every_form_are_the_same(tmp_path, form):
    path = tmp_path / "gray32.npz"
    if form == "binary":
        write_binary(tmp_path)
    else:
        write_arrays(path, COLOURS if form == "colours" else GREY)
    if form == "packed":
        with lzma.open(tmp_path / "gray32.npz.xz", "wb") as file:
            file.write(path.read_bytes())
        path.unlink()
    source = path if form in ("file", "colours") else tmp_path
    data = ImageClassification(ImageSettings(data=str(source), validation_examples=4)).prepare()
    assert (len(data.train), len(data.validation), len(data.test)) == (6, 4, 3)
    for place, example in enumerate([*data.train, *data.validation]):
        assert np.array_equal(example["pixel_values"].numpy(), GREY[place].reshape(-1))
        assert example["labels"] == LABELS[place]
    assert torch.equal(data.test[2]["pixel_values"], data.train[2]["pixel_values"])


def test_white_stays_white():
    greys = np.arange(256, dtype=np.uint8)
    assert np.array_equal(to_grey(np.stack([greys] * 3, axis=-1)), greys)


def test_pictures_from_the_hub(tmp_path, monkeypatch):
    datasets, image = pytest.importorskip("datasets"), pytest.importorskip("PIL.Image")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "hub")
    for split, count in (("train", 10), ("test", 3)):
        pictures = [image.fromarray(colours) for colours in COLOURS[:count]]
        rows = datasets.Dataset.from_dict({"img": pictures, "label": LABELS[:count].tolist()})
        rows.to_parquet(tmp_path / "cifar10" / "data" / f"{split}-00000-of-00001.parquet")
    data = ImageClassification(ImageSettings(data=f"hub:{tmp_path / 'cifar10'}", validation_examples=4)).prepare()
    assert np.array_equal(data.train[5]["pixel_values"].numpy(), GREY[5].reshape(-1))


def test_pictures_make_batches_for_a_model(tmp_path):
    write_arrays(tmp_path / "a.npz")
    task = ImageClassification(ImageSettings(data=str(tmp_path), validation_examples=1))
    data = task.prepare()
    model = LatteForSequenceClassification(LatteConfig.from_preset("latte-tiny", num_hidden_layers=1, **data.model))
    with torch.no_grad():
        sums = task.measure(model.eval(), data.collate([data.train[0], data.train[1]]))
    assert sums["loss"][1] == sums["accuracy"][1] == 2


@pytest.mark.parametrize(
    ("others", "message"),
    [
        ({"x_train": GREY[:, :16]}, r"shape \(10, 16, 32\)"),
        ({"x_train": GREY / 255.0}, "dtype float64"),
        ({"y_train": LABELS + 100}, "they must be from 0 to 9"),
        ({"y_train": LABELS[:9]}, r"labels \(9,\)"),
    ],
)
def test_arrays_that_are_no_pictures(tmp_path, others, message):
    write_arrays(tmp_path / "a.npz", **others)
    with pytest.raises(ValueError, match=message):
        ImageClassification(ImageSettings(data=str(tmp_path / "a.npz"))).prepare()


def test_files_that_are_missing_or_of_another_form(tmp_path):
    def read():
        ImageClassification(ImageSettings(data=str(tmp_path / "a"))).prepare()

    with pytest.raises(ValueError, match="no such file or folder"):
        read()
    (tmp_path / "a").mkdir()
    with pytest.raises(ValueError, match=r"has no cifar10\.npz or data_batch_1\.bin; it has nothing"):
        read()
    np.savez(tmp_path / "a" / "b.npz", images=GREY)
    with pytest.raises(ValueError, match="no column 'x_train', 'y_train', 'x_test', 'y_test'; it has 'images'"):
        read()
    (tmp_path / "a" / "b.npz").write_bytes(b"PK\x03\x04 and nothing")
    with pytest.raises(ValueError, match=r"is no \.npz file"):
        read()
    (tmp_path / "a" / "data_batch_1").touch()
    with pytest.raises(ValueError, match=r"in pickles, .* take the binary version"):
        read()


@pytest.mark.parametrize("name", ["a.npz", "a.npz.xz", "a.npz.gz", "a.npz.zst"])
@pytest.mark.parametrize("content", [b"", b"PK and no more", b"no arrays"])
def test_broken_files_are_named(tmp_path, name, content):
    (tmp_path / name).write_bytes(content)
    with pytest.raises((ValueError, OSError), match=rf"{name}.*(no \.npz file|damaged)"):
        ImageClassification(ImageSettings(data=str(tmp_path / name))).prepare()


def test_a_pickle_in_an_array_is_not_loaded(tmp_path):
    write_arrays(tmp_path / "a.npz", y_train=np.array([{"a": 1}] * 10, dtype=object))
    with pytest.raises(ValueError, match="allow_pickle=False"):
        ImageClassification(ImageSettings(data=str(tmp_path / "a.npz"))).prepare()


@pytest.mark.parametrize("name", TABLE_8)
def test_plans_are_models_of_the_paper_s_size(name):
    """Table 8, row by row: layers, heads, latents in all, width; and what a step is counted in."""
    model_class = LatteForPairClassification if name == "retrieval" else LatteForSequenceClassification
    for plan in task_class(name).plans.values():
        task_class(name).settings_class(**plan.settings)
        pixels = {"input_kind": "pixels"} if name in ("image", "pathfinder") else {}
        with torch.device("meta"):
            model_class(LatteConfig.from_preset(plan.preset, **plan.model, **pixels))
    row, config = TABLE_8[name], LatteConfig.from_preset(plan.preset, **plan.model)
    assert (config.num_hidden_layers, config.num_heads, config.window) == (6, 4, 128)
    assert config.num_latents * config.num_heads == row.latents
    assert plan.budget.steps * plan.budget.batch_size == pytest.approx(row.epochs * row.examples, rel=1e-3)


def test_all_tasks_are_found_by_name():
    for name in set(TASKS) - {"lm"}:
        task = task_class(name)
        assert task.name == name
        assert "default" in task.plans
        assert task.best == ("accuracy", "max")
