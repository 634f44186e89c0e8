"""Pathfinder: are two dots joined by one of the dashed paths of a picture? With 128 × 128 pixels it is Path-X."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np

from latte.tasks.base import Budget, Plan, TaskData
from latte.tasks.classes import Classification, ImageExamples
from latte.tasks.generation import block_generator, check_counts, number_of_blocks, wanted_of_block
from latte.tasks.lra.files import find_file, folder_of, source_of
from latte.tasks.lra.options import cache_option, workers_option
from latte.tasks.lra.pictures import DRAWINGS, make_pictures
from latte.tasks.lra.table8 import paper_plan
from latte.tasks.store import StoreWriter, fingerprint, stored
from latte.tasks.workers import Progress, map_blocks, steps_of

VERSION = 1  # of the generator
BLOCK = 500
SHARES = {"train": (0.0, 0.8), "validation": (0.8, 0.9), "test": (0.9, 1.0)}  # of the official release's pictures


@dataclass(frozen=True)
class PathfinderSettings:
    """Where pictures come from, or what they look like and how many there are."""

    data: str | None = field(
        default=None,
        metadata={
            "help": "Folder of the official release with metadata and imgs, e.g. pathfinder32/curv_contour_length_14; "
            "made here if left out."
        },
    )
    size: int = field(default=32, metadata={"help": "Pixels along a side: 32, or 128 for Path-X."})
    strokes: int = field(default=14, metadata={"help": "Strokes in each of the two paths; 14 is hard, 6 easy."})
    examples: int = field(default=160_000, metadata={"help": "Pictures to train on."})
    validation_examples: int = field(default=20_000, metadata={"help": "Pictures to look at during training."})
    test_examples: int = field(default=20_000, metadata={"help": "Pictures for the final figures."})
    cache: str | None = cache_option()
    workers: int = workers_option()

    def __post_init__(self) -> None:
        check_counts(self, "examples", "validation_examples", "test_examples")
        if self.size not in DRAWINGS:
            raise ValueError(f"size is {self.size}; it must be one of {', '.join(map(str, DRAWINGS))}")
        if not 3 <= self.strokes <= 16:
            raise ValueError(f"strokes is {self.strokes}; it must be from 3, a path, to 16, which just fit in")

    @property
    def counts(self) -> dict[str, int]:
        """Examples of each split."""
        return {"train": self.examples, "validation": self.validation_examples, "test": self.test_examples}


def picture_block(settings: PathfinderSettings, seed: int, split: str, block: int) -> tuple[np.ndarray, np.ndarray]:
    """Pixels and labels of one block of a split, made here; of the last, as much as is wanted."""
    wanted = wanted_of_block(settings.counts[split], block, BLOCK)
    made = make_pictures(block_generator(seed, split, block), wanted, DRAWINGS[settings.size], settings.strokes)
    return made.pixels, made.labels


def write_pictures(
    settings: PathfinderSettings, seed: int, writer: StoreWriter, progress: Progress | None = None
) -> None:
    """Make all splits, block by block."""
    for split, examples in settings.counts.items():
        count = number_of_blocks(examples, BLOCK)
        tell = progress and steps_of(progress, f"drawing Pathfinder, {split}", count)
        made = map_blocks(partial(picture_block, settings, seed, split), count, settings.workers, tell)
        for pixels, labels in made:
            writer.append(f"{split}_pixels", pixels)
            writer.append(f"{split}_labels", labels)


def read_metadata(path: Path) -> list[tuple[str, int]]:
    """Pictures named in a file of the official release, with their labels.

    The files are called .npy and hold text: folder, file, number, label and the measures of a picture on each line.
    Linsley et al.'s own program writes the same as an array.
    """
    if path.read_bytes()[:6] == b"\x93NUMPY":
        rows = [[str(cell) for cell in row] for row in np.load(path, allow_pickle=False)]
    else:
        rows = [line.split() for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    pictures = []
    for number, row in enumerate(rows, start=1):
        if len(row) < 4 or row[3] not in ("0", "1"):
            raise ValueError(f"{path}, line {number}: {' '.join(row[:4])!r}; folder, file, number and label are wanted")
        pictures.append((f"{row[0]}/{row[1]}", int(row[3])))
    return pictures


def read_picture(path: Path, size: int) -> np.ndarray:
    """A picture as grey values [size, size]."""
    try:
        from PIL import Image
    except ImportError:
        raise ValueError(f"{path}: to read pictures install pillow: pip install pillow") from None
    with Image.open(path) as image:
        pixels = np.asarray(image.convert("L"))
    if pixels.shape != (size, size):
        raise ValueError(f"{path} is {pixels.shape[1]} × {pixels.shape[0]} pixels; size is {size}")
    return pixels


def read_pictures(folder: Path, size: int, writer: StoreWriter, progress: Progress | None = None) -> None:
    """Copy a folder of the official release; 80, 10 and 10 % are the splits, as in Long Range Arena.

    Its empty files, of which there are a few, are left out, as there.
    """
    listed = [picture for path in metadata_files(folder) for picture in read_metadata(path)]
    pictures = [(folder / name, label) for name, label in listed if (folder / name).stat().st_size]
    if len(pictures) < 10:
        raise ValueError(f"{folder} has {len(pictures)} pictures; ten at least are wanted for three splits")
    done = 0
    for split, (first, last) in SHARES.items():
        for path, label in pictures[int(first * len(pictures)) : int(last * len(pictures))]:
            writer.append(f"{split}_pixels", read_picture(path, size)[None])
            writer.append(f"{split}_labels", np.array([label], np.uint8))
            done += 1
            if progress is not None and done % 1000 == 0:
                progress("reading Pathfinder", done, len(pictures))


def metadata_files(folder: Path) -> list[Path]:
    """The lists of a folder's pictures, in the order of their numbers."""
    files = sorted((folder / "metadata").glob("*.npy"), key=lambda path: (len(path.stem), path.stem))
    if not files:
        find_file(folder / "metadata" if (folder / "metadata").is_dir() else folder, "metadata/0.npy")
    return files


class Pathfinder(Classification[PathfinderSettings]):
    """Two classes: joined or not."""

    name = "pathfinder"
    settings_class = PathfinderSettings
    plans = {  # noqa: RUF012 - a ClassVar in the base class
        "default": Plan(
            preset="macchiato-tiny",
            budget=Budget(steps=10_000, batch_size=64, learning_rate=1e-3, warmup_steps=1_000, weight_decay=0.03),
            model={"positions": "sinusoidal"},
            settings={"strokes": 6, "examples": 50_000, "validation_examples": 2_000, "test_examples": 2_000},
        ),
        "paper": paper_plan("pathfinder"),
    }

    def prepare(self, progress: Callable[[str, int, int], None] | None = None) -> TaskData:
        settings = self.settings
        if settings.data is None:
            description = {
                "generator": VERSION,
                "seed": self.seed,
                "drawing": DRAWINGS[settings.size]._asdict(),
                "strokes": settings.strokes,
                "counts": settings.counts,
            }
            make = partial(write_pictures, settings, self.seed, progress=progress)
        else:
            folder = folder_of(settings.data)
            description = {"files": source_of(*metadata_files(folder)), "size": settings.size, "reader": VERSION}
            make = partial(read_pictures, folder, settings.size, progress=progress)
        arrays = stored(settings.cache, self.name, description, make)
        splits = {split: ImageExamples(arrays[f"{split}_pixels"], arrays[f"{split}_labels"]) for split in SHARES}
        return TaskData(
            train=splits["train"],
            validation=splits["validation"],
            test=splits["test"],
            head="classification",
            model={"input_kind": "pixels", "input_size": 256, "num_labels": 2},
            fingerprint=fingerprint(self.name, description),
            tokens_per_example=settings.size**2,
            facts={"source": settings.data or "made here", **{name: len(split) for name, split in splits.items()}},
        )
