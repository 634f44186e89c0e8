"""`latte convert`: give a pretrained model linear-time attention, and keep its weights."""

import json as jsonlib
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

if TYPE_CHECKING:
    from torch import Tensor

    from latte.convert import Conversion


def convert(
    source: Annotated[
        str, typer.Argument(metavar="SOURCE", help="A folder, a name on the hub, or a GGUF file (or a folder of them).")
    ],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The folder to write.")],
    window: Annotated[int, typer.Option(help="Tokens that a converted layer sees directly, itself included.")] = 128,
    latents: Annotated[int, typer.Option(help="Latents per head.")] = 16,
    mixer: Annotated[Literal["none", "conv", "rglru"], typer.Option(help="What feeds the latents.")] = "rglru",
    layers: Annotated[
        str, typer.Option(help="Layers to convert: all, global (those that see all tokens), or numbers, e.g. 0,3,5.")
    ] = "all",
    initial_window_share: Annotated[
        float, typer.Option(help="p(0|t) before training; 1 is exactly the source restricted to its window.")
    ] = 0.95,
    calibrate: Annotated[
        Path | None,
        typer.Option(
            metavar="TEXT",
            help="Fit the latents, without training, on some of this text: .txt, .jsonl, also .xz, .gz, .bz2, .zst.",
        ),
    ] = None,
    calibration_tokens: Annotated[int, typer.Option(help="Of one stretch of TEXT.")] = 2048,
    calibration_texts: Annotated[int, typer.Option(min=1, help="Stretches of TEXT.")] = 12,
    text_field: Annotated[str, typer.Option(help="Of TEXT in JSON lines, the field with the text.")] = "text",
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"],
        typer.Option(help="Of the weights written; auto is the source's own, float32 from GGUF."),
    ] = "auto",
    max_shard_size: Annotated[
        str | None, typer.Option(help="Of a file of weights, e.g. 500MB.", show_default="5GB; a layer if --low-memory")
    ] = None,
    low_memory: Annotated[
        bool, typer.Option("--low-memory", help="Hold one file of the output in memory, never the whole model.")
    ] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the model in OUT, if there is one.")] = False,
    gguf_file: Annotated[str | None, typer.Option(help="The GGUF file in SOURCE, if there are several.")] = None,
    seed: Annotated[int, typer.Option(min=-(2**63), max=2**63 - 1, help="Of the new weights.")] = 0,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON document instead of the summary.")] = False,
) -> None:
    """Replace the attention of a pretrained model by a window and latents; all its weights are kept.

    Families: Gemma 2, Gemma 3 (text), Llama, Mistral, Qwen2, Qwen3. OUT appears when it is complete.
    """
    if find_spec("transformers") is None:
        raise ValueError("conversion needs Transformers, not installed here; pip install 'latte-attention[convert]'")
    chosen = parse_layers(layers)
    text = None
    if calibrate is not None:
        text = CalibrationText(calibrate, text_field, calibration_tokens, calibration_texts, window)
    from latte.convert import Settings, convert_checkpoint

    settings = Settings(window, latents, mixer, chosen, initial_window_share)
    made = convert_checkpoint(
        source, out, settings, dtype=dtype, max_shard_size=max_shard_size, low_memory=low_memory, overwrite=overwrite,
        gguf_file=gguf_file, seed=seed, calibration=text, note=note,
    )  # fmt: skip
    if json:
        typer.echo(jsonlib.dumps(asdict(made)))
    else:
        summarise(made)


@dataclass(frozen=True)
class CalibrationText:
    """Stretches of a file's documents, in tokens of the source."""

    path: Path
    field: str
    tokens: int
    count: int
    window: int

    def __post_init__(self) -> None:
        if not self.path.is_file():
            raise ValueError(f"--calibrate {self.path}: there is no such file")

    def __call__(self, tokenizer: Any) -> "list[Tensor]":
        from latte.convert.calibration import LEAST_PAST_WINDOW
        from latte.convert.stretches import choose_stretches
        from latte.tasks.evaluation import Encoder, read_documents

        least = self.window + LEAST_PAST_WINDOW
        if self.tokens < least:
            raise ValueError(
                f"--calibration-tokens {self.tokens}: with a window of {self.window} it must be {least} or more"
            )
        encoder = Encoder(tokenizer)
        documents = map(encoder.encode, read_documents(self.path, self.field))
        rows = choose_stretches(documents, tokens=self.tokens, count=self.count, least=least, begin=encoder.bos)
        if not rows:
            raise ValueError(
                f"--calibrate {self.path}: with a window of {self.window} no document has the {least} tokens that it "
                "needs; give longer text, or a shorter --window"
            )
        return rows


def parse_layers(text: str) -> str | list[int]:
    """Numbers of layers, or one of the words for them."""
    if text in ("all", "global"):
        return text
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise ValueError(f"--layers {text}: it must be all, global, or numbers of layers, e.g. 0,3,5") from None


def note(message: str) -> None:
    typer.echo(f"latte: {message}", err=True)


def summarise(made: "Conversion") -> None:
    typer.echo(f"{made.out}: {made.family}, {made.parameters:,} parameters in {made.dtype}, {made.bytes:,} bytes")
    begin = f"window share {made.initial_window_share:g}"
    if made.calibration_tokens:
        begin = f"calibrated on {made.calibration_tokens:,} tokens"
    typer.echo(
        f"converted {len(made.layers)} of {made.num_layers} layers: window {made.window}, "
        f"{made.num_latents} latents per head, mixer {made.mixer}, {begin}"
    )
    share = made.new_parameters / made.parameters
    typer.echo(f"{made.new_parameters:,} parameters are new ({share:.1%}) and want training; the rest is the source's")
    note(f"done in {made.seconds:.1f} s")
