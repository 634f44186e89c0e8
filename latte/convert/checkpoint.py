"""`convert_checkpoint`: from a pretrained model on disk, or on the hub, to a converted one on disk."""

import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor

from latte.convert.calibration import calibrate
from latte.convert.folder import check_free, check_space, put_back, remove_leftovers, saving, whole_folder
from latte.convert.latents import new_parameters
from latte.convert.model import convert
from latte.convert.settings import conversion_config
from latte.convert.source import Source, find_source
from latte.convert.streaming import StreamedConversion, write_streamed
from latte.models import LatteConvertedForCausalLM
from latte.models.converted_configuration import check_conversion
from latte.models.families import FAMILIES
from latte.ops.triton.tiles import MAX_LATENTS

DEFAULT_SHARD = "5GB"
Calibration = Callable[[Any], Sequence[Tensor]]
UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}


@dataclass(frozen=True)
class Settings:
    """The options of `latte.convert.convert`."""

    window: int = 128
    num_latents: int = 16
    mixer: str = "rglru"
    layers: str | Sequence[int] = "all"
    initial_window_share: float = 0.95


@dataclass(frozen=True)
class Conversion:
    """What was made."""

    source: str
    out: str
    family: str
    layers: list[int]
    num_layers: int
    window: int
    num_latents: int
    mixer: str
    initial_window_share: float
    dtype: str
    parameters: int
    new_parameters: int
    bytes: int
    seconds: float
    calibration_tokens: int = 0  # of the text by which latents were calibrated


def convert_checkpoint(
    name: str,
    out: Path,
    settings: Settings,
    *,
    dtype: str = "auto",
    max_shard_size: str | None = None,
    low_memory: bool = False,
    overwrite: bool = False,
    gguf_file: str | None = None,
    seed: int = 0,
    calibration: Calibration | None = None,
    note: Callable[[str], None] = lambda _: None,
) -> Conversion:
    """Convert the model called `name` and write it, with its tokenizer, to the folder `out`.

    With `low_memory` the source's files are read tensor by tensor and at most one file of the output is in memory.
    The folder appears when it is complete. `seed` is that of the new weights. `calibration` makes of the source's
    tokenizer the rows for `calibrate`, which runs on a GPU where there is one.
    """
    start = time.perf_counter()
    check_conversion(settings.window, settings.num_latents, settings.mixer, settings.initial_window_share)
    shard = parse_size(max_shard_size) if max_shard_size is not None else None
    source = find_source(name, gguf_file, note)
    if low_memory and source.gguf_file is not None:
        raise ValueError("--low-memory does not read GGUF, which is decoded as a whole; leave it out")
    if low_memory and calibration is not None:
        raise ValueError("--calibrate runs the whole source, which --low-memory never holds; leave one of them out")
    put_back(out, note)
    check_free(out, source.folder, overwrite)
    remove_leftovers(out)
    if settings.num_latents > MAX_LATENTS:
        note(
            f"num_latents is {settings.num_latents}, and the kernels for GPUs take up to {MAX_LATENTS}: to use it "
            f'there, write "backend": "torch" into {out / "config.json"}, which is slower'
        )
    job = Job(source, out, settings, dtype, shard, seed, calibration, note)
    spared = low_memory or source.gguf_file is not None or calibration is not None  # as far as that can be
    with failures_explained(spared), torch.random.fork_rng(devices=[]):
        model, tokens = (convert_streamed(job), 0) if low_memory else convert_loaded(job)
    return report(name, out, model, time.perf_counter() - start, tokens)


@dataclass(frozen=True)
class Job:
    source: Source
    out: Path
    settings: Settings
    dtype: str
    shard: int | None
    seed: int
    calibration: Calibration | None
    note: Callable[[str], None]


def convert_loaded(job: Job) -> tuple[LatteConvertedForCausalLM, int]:
    """The model that was written, and with how many tokens it was calibrated."""
    if job.source.gguf_file is None:
        conversion_config(job.source.config(), **vars(job.settings))  # what cannot be is found before weights are read
    rows = [] if job.calibration is None else job.calibration(job.source.tokenizer())
    job.note(f"reading {job.source.name}")
    source = job.source.load(job.dtype)
    torch.manual_seed(job.seed)
    model = convert(source, **vars(job.settings))
    tokens = sum(map(len, rows))
    if job.calibration is not None:
        job.note(f"calibrating the latents on {len(rows)} stretches of text, {tokens:,} tokens")
        calibrate(model, source, rows, device="cuda" if torch.cuda.is_available() else "cpu")
    check_space(job.out, sum(weight.nbytes for weight in model.parameters()))
    job.note(f"writing {job.out}")
    with whole_folder(job.out) as folder:
        with saving():
            model.save_pretrained(folder, max_shard_size=job.shard or DEFAULT_SHARD)
        job.source.copy_companions(folder)
    return model, tokens


def convert_streamed(job: Job) -> LatteConvertedForCausalLM:
    config = conversion_config(job.source.config(), **vars(job.settings))
    dtype = None if job.dtype == "auto" else getattr(torch, job.dtype)
    conversion = StreamedConversion(job.source.folder, config, dtype)
    check_space(job.out, conversion.size)
    job.note(f"converting {job.source.name} to {job.out}, file by file")
    torch.manual_seed(job.seed)
    with whole_folder(job.out) as folder:
        write_streamed(conversion, folder, job.shard)
        job.source.copy_companions(folder)
    return conversion.model


def parse_size(text: str) -> int:
    """Bytes of a size such as 500MB or 5GB."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)B?", text.strip().upper())
    if match is None or not (size := int(float(match[1]) * UNITS[match[2]])):
        raise ValueError(f"--max-shard-size {text}: it must be a size, e.g. 500MB or 5GB")
    return size


@contextmanager
def failures_explained(spared: bool) -> Iterator[None]:
    """Turn errors of full memory and of broken files into one that says what to do."""
    remedy = "free some memory" if spared else "use --low-memory, or --dtype bfloat16"
    try:
        yield
    except SafetensorError as error:
        raise ValueError(f"a file of the source's weights is broken ({error}); copy it again") from error
    except torch.OutOfMemoryError as error:
        raise ValueError("the GPU's memory is full; use fewer --calibration-tokens or --calibration-texts") from error
    except MemoryError as error:
        raise ValueError(f"the machine's memory is full; {remedy}") from error
    except RuntimeError as error:
        if "allocate memory" not in str(error):
            raise
        raise ValueError(f"the machine's memory is full; {remedy}") from error


def report(name: str, out: Path, model: LatteConvertedForCausalLM, seconds: float, tokens: int) -> Conversion:
    config = model.config
    return Conversion(
        source=name,
        out=str(out),
        family=FAMILIES[config.source["model_type"]].name,
        layers=config.layers,
        num_layers=config.num_hidden_layers,
        window=config.window,
        num_latents=config.num_latents,
        mixer=config.mixer,
        initial_window_share=config.initial_window_share,
        dtype=str(config.dtype).removeprefix("torch."),
        parameters=sum(weight.numel() for weight in model.parameters()),
        new_parameters=sum(weight.numel() for weight in new_parameters(model).values()),
        bytes=sum(path.stat().st_size for path in out.glob("*.safetensors")),
        seconds=seconds,
        calibration_tokens=tokens,
    )
