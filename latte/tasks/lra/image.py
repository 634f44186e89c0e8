"""Image classification: what is on a picture of CIFAR-10, read as 1,024 grey pixels in a row?"""

import io
import zipfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from latte.tasks.base import Budget, Plan, TaskData
from latte.tasks.classes import Classification, ImageExamples
from latte.tasks.generation import check_counts
from latte.tasks.lra.files import check_columns, find_file, folder_of, is_on_hub, load_from_hub, read_bytes
from latte.tasks.lra.table8 import paper_plan
from latte.tasks.store import fingerprint

SIDE, CLASSES = 32, 10
ARRAYS = ("x_train", "y_train", "x_test", "y_test")
LUMA = np.array([0.2989, 0.5870, 0.1140])  # of red, green and blue in grey, as TensorFlow has them
ZIP = (b"PK\3\4", b"PK\5\6")  # what an .npz file begins with
Pictures = tuple[np.ndarray, np.ndarray]


@dataclass(frozen=True)
class ImageSettings:
    """Where pictures are."""

    data: str = field(
        default="cifar10",
        metadata={
            "help": "A .npz file, packed or not, with x_train, y_train, x_test and y_test, or its folder; a folder "
            'with the binary version of CIFAR-10; or "hub:uoft-cs/cifar10".'
        },
    )
    validation_examples: int = field(
        default=5_000,
        metadata={"help": "Pictures to look at during training: the last of those to train on."},
    )

    def __post_init__(self) -> None:
        check_counts(self, "validation_examples")


def to_grey(pixels: np.ndarray) -> np.ndarray:
    """Grey values of colours in the last dimension, rounded as TensorFlow does, which Long Range Arena takes them from.

    It rounds v / 255 · 255.5 down: white stays white, though the weights come to 0.9999.
    """
    return (pixels @ LUMA * (255.5 / 255)).astype(np.uint8)


def read_arrays(path: Path) -> tuple[Pictures, Pictures]:
    """Pictures to train on and to test with, from arrays in one .npz file."""
    content = read_bytes(path)
    if not content.startswith(ZIP):  # NumPy would offer to unpickle it
        raise ValueError(f"{path} is no .npz file; save the arrays with numpy.savez")
    try:
        with np.load(io.BytesIO(content), allow_pickle=False) as arrays:
            check_columns(str(path), list(arrays), ARRAYS)
            x_train, y_train, x_test, y_test = (arrays[name] for name in ARRAYS)
    except (zipfile.BadZipFile, zlib.error, EOFError, OSError) as error:
        raise ValueError(f"{path} is no .npz file: {error}") from None
    return _checked(path, x_train, y_train), _checked(path, x_test, y_test)


def read_binary(folder: Path) -> tuple[Pictures, Pictures]:
    """Pictures of CIFAR-10's binary version: a byte for the class, and a plane each of red, green and blue."""
    train = [_read_batch(find_file(folder, f"data_batch_{number}.bin")) for number in range(1, 6)]
    pixels, labels = (np.concatenate(arrays) for arrays in zip(*train, strict=True))
    return (pixels, labels), _read_batch(find_file(folder, "test_batch.bin"))


def _read_batch(path: Path) -> Pictures:
    content = np.frombuffer(read_bytes(path), np.uint8)
    row = 1 + 3 * SIDE**2
    if not len(content) or len(content) % row:
        raise ValueError(f"{path} has {len(content)} bytes; {row} for each picture are wanted")
    rows = content.reshape(-1, row)
    colours = rows[:, 1:].reshape(-1, 3, SIDE, SIDE).transpose(0, 2, 3, 1)
    return _checked(path, to_grey(colours), rows[:, 0])


def read_hub(data: str) -> tuple[Pictures, Pictures]:
    """Pictures of the splits train and test of a dataset with img and label."""
    splits = load_from_hub(data, ("img", "label"))
    read = []
    for split in ("train", "test"):
        if split not in splits:
            raise ValueError(f"{data} has no split {split!r}; it has {', '.join(map(repr, splits))}")
        colours = np.stack([np.asarray(row["img"].convert("RGB")) for row in splits[split]])
        read.append(_checked(data, to_grey(colours), np.array(splits[split]["label"])))
    return read[0], read[1]


def read_images(data: str) -> tuple[Pictures, Pictures]:
    """Pictures to train on and to test with, from wherever they are."""
    if is_on_hub(data):
        return read_hub(data)
    path = folder_of(data)
    if path.is_file():
        return read_arrays(path)
    if (path / "data_batch_1").exists():
        raise ValueError(
            f"{path} is CIFAR-10's Python version, in pickles, which can run code and are not read; "
            "take the binary version: data_batch_1.bin, …"
        )
    if list(path.glob("data_batch_1.bin*")):
        return read_binary(path)
    packed = sorted(file for file in path.iterdir() if ".npz" in file.suffixes)
    return read_arrays(packed[0] if len(packed) == 1 else find_file(path, "cifar10.npz", "data_batch_1.bin"))


def _checked(source: Path | str, pixels: np.ndarray, labels: np.ndarray) -> Pictures:
    labels = labels.reshape(-1)
    if pixels.ndim == 4 and pixels.shape[-1] == 3:
        pixels = to_grey(pixels)
    if pixels.dtype != np.uint8 or pixels.shape != (len(labels), SIDE, SIDE):
        raise ValueError(
            f"{source}: pictures have dtype {pixels.dtype} and shape {pixels.shape}, labels {labels.shape}; they must "
            f"be uint8, [n, {SIDE}, {SIDE}] in grey or [n, {SIDE}, {SIDE}, 3], and [n]"
        )
    if not len(labels) or not 0 <= labels.min() <= labels.max() < CLASSES:
        raise ValueError(
            f"{source}: labels are {np.unique(labels)[:12].tolist()}; they must be from 0 to {CLASSES - 1}"
        )
    return pixels, labels.astype(np.uint8)


class ImageClassification(Classification[ImageSettings]):
    """Ten classes of things and animals."""

    name = "image"
    settings_class = ImageSettings
    plans = {  # noqa: RUF012 - a ClassVar in the base class
        "default": Plan(
            preset="macchiato-tiny",
            budget=Budget(steps=10_000, batch_size=32, learning_rate=1e-3, warmup_steps=1_000, weight_decay=0.05),
            model={"positions": "sinusoidal"},
        ),
        "paper": paper_plan("image"),
    }

    def prepare(self, progress: Callable[[str, int, int], None] | None = None) -> TaskData:
        if progress is not None:
            progress("reading pictures", 0, 1)
        (pixels, labels), test = read_images(self.settings.data)
        train = len(labels) - self.settings.validation_examples
        if train < 1:
            raise ValueError(
                f"validation_examples is {self.settings.validation_examples}, and there are {len(labels)} pictures to "
                "train on; make it less"
            )
        splits = {
            "train": ImageExamples(pixels[:train], labels[:train]),
            "validation": ImageExamples(pixels[train:], labels[train:]),
            "test": ImageExamples(*test),
        }
        return TaskData(
            train=splits["train"],
            validation=splits["validation"],
            test=splits["test"],
            head="classification",
            model={"input_kind": "pixels", "input_size": 256, "num_labels": CLASSES},
            fingerprint=fingerprint(self.name, train, pixels, labels, *test),
            tokens_per_example=SIDE**2,
            facts={"source": self.settings.data, **{name: len(split) for name, split in splits.items()}},
        )
