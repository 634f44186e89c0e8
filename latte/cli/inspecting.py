"""What `latte inspect` does: read a text with a model, look, and write down what was seen."""

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from latte.analysis import plots
from latte.analysis.inspection import DRAWN, Inspection, choose_layers, inspect_tokens, shown_tokens
from latte.analysis.page import head_measures, render_page
from latte.analysis.projections import LayerForm, layer_forms
from latte.analysis.rows import AttentionRow, attention_row, trace
from latte.analysis.token_texts import token_texts
from latte.analysis.training import UsageHistory, read_usage_history
from latte.cli.generate import read_prompt
from latte.cli.generation import Loaded, encode, load

__all__ = ["Seen", "document", "draw", "load", "look", "page", "read_tokens", "usage_history"]

BYTES_PER_TEXT_BYTE = 64  # tokens, their Python numbers and what a tokenizer needs on the way
MEMORY_SHARE = 0.5  # of what is free


@dataclass
class Seen:
    """What was seen, and what a person should know about it."""

    loaded: Loaded
    tokens: Tensor  # [T]
    inspection: Inspection
    texts: list[str]  # of the shown tokens
    rows: list[AttentionRow]  # of the token that was asked for, layer by layer
    notes: list[str] = field(default_factory=list)

    @property
    def heads(self) -> list[dict[str, Any]]:
        return head_measures(self.inspection)

    def text_of(self, token: int) -> str:
        return self.texts[token] if token < len(self.texts) else self.loaded.tokenizer.decode([int(self.tokens[token])])


def read_tokens(
    loaded: Loaded, text: str | None, file: Path | None, limit: int | None, note: Callable[[str], None]
) -> Tensor:
    """The text's tokens [T]: as many as were asked for, and as memory holds."""
    if (text is None) == (file is None):
        raise ValueError("give the text to look at with --text TEXT or --file FILE, one of them")
    room = int(free_memory() * MEMORY_SHARE / BYTES_PER_TEXT_BYTE)
    if file is not None and file.is_file() and file.stat().st_size > room:
        note(f"{file} has {file.stat().st_size:,} bytes and memory has room for {room:,}: the rest is not read")
        with file.open("rb") as opened:
            data = opened.read(room)
        data = data if loaded.reads_bytes else data.decode(errors="ignore").encode()  # the cut may be within a letter
    else:
        data = read_prompt(text, file)
    if not data:
        raise ValueError("the text to look at is empty; give it at least one token")
    tokens = encode(loaded, data)[0][:limit]
    needed = len(tokens) * growing_bytes(layer_forms(loaded.model), loaded.model.dtype)
    if needed > free_memory() * MEMORY_SHARE:
        raise ValueError(
            f"softmax attention over {len(tokens):,} tokens keeps about {needed / 2**30:.1f} GiB of keys and values, "
            f"more than half of the free memory; read less of the text with --max-tokens"
        )
    return tokens


def growing_bytes(forms: list[LayerForm], dtype: torch.dtype) -> int:
    """What full softmax attention keeps of each token: keys and values, and keys once more to be measured."""
    full = [form for form in forms if form.num_latents is None and form.window is None]
    return sum(3 * form.key_width * dtype.itemsize for form in full)


def free_memory() -> int:
    """Bytes of memory that are free; a great many where the system does not say."""
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return 1 << 62


def look(
    loaded: Loaded,
    tokens: Tensor,
    *,
    layers: list[int] | None,
    show: int,
    chunk: int,
    token: int | None,
    progress: Callable[[int, int], None] | None,
) -> Seen:
    """Measure, and keep what report and figures show."""
    model, total = loaded.model, len(tokens)
    if token is not None and not -total <= token < total:
        raise ValueError(f"--token {token}: the text has tokens 0 to {total - 1}")
    forms = choose_layers(layer_forms(model), layers)
    wanted = min(show, total)
    shown = shown_tokens(model, layers, wanted)
    inspection = inspect_tokens(model, tokens, layers=layers, shown=shown, chunk=chunk, progress=progress)
    rows = []
    if token is not None:
        names = [form.name for form in forms]
        rows = [attention_row(traced, token) for traced in trace(model, tokens, names, chunk=chunk).values()]
    texts = token_texts(inspection.ids, loaded.tokenizer.decode)
    seen = Seen(loaded, tokens, inspection, texts, rows)
    if shown < wanted:
        seen.notes.append(
            f"The report shows the first {shown:,} tokens, for its size; choose some layers to see more of them."
        )
    elif shown < total:
        seen.notes.append(f"The report shows the first {shown:,} tokens; measures are of all {total:,}.")
    if not inspection.has_latents:
        seen.notes.append("The model has no latents; what is left to see is how its softmax attention looks back.")
    if loaded.random_weights:
        seen.notes.append("The weights are random: what is shown says nothing of a trained model.")
    return seen


def page(seen: Seen, name: str) -> str:
    return render_page(seen.inspection, seen.texts, title=f"Latents of {name}", notes=seen.notes)


def usage_history(seen: Seen, name: str, metrics: Path | None) -> UsageHistory | None:
    """That of a run's metrics, or of those around the model's folder, which may have none."""
    if metrics is not None:
        return read_usage_history(metrics)
    path = Path(name)
    places = [path, *path.resolve().parents[:2]] if path.is_dir() else []
    found = next((place / "metrics.jsonl" for place in places if (place / "metrics.jsonl").is_file()), None)
    try:
        return None if found is None else read_usage_history(found)
    except ValueError as error:
        seen.notes.append(f"There is no figure of usage over training: {error}.")
        return None


def draw(seen: Seen, folder: Path, kinds: list[str], history: UsageHistory | None) -> list[Path]:
    """Write the figures that the model has, and return where they are."""
    folder.mkdir(parents=True, exist_ok=True)
    inspection, texts = seen.inspection, seen.texts[:DRAWN]
    figures = {
        "distances": plots.distance_profiles(inspection.measures),
        "attention": plots.attention_maps(inspection.traces, texts),
    }
    if inspection.has_latents:
        figures["states"] = plots.state_maps(inspection.traces, texts)
        figures["usage"] = plots.usage_maps(inspection.measures)
    if history is not None:
        figures["training"] = plots.usage_over_training(history)
    written = []
    for name, figure in figures.items():
        for kind in kinds:
            written.append(folder / f"{name}.{kind}")
            plots.save(figure, written[-1])
    return written


def document(name: str, seen: Seen) -> dict[str, Any]:
    """Everything that was measured, as plain numbers."""
    return {
        "model": name,
        "random_weights": seen.loaded.random_weights,
        "device": str(seen.loaded.model.device),
        "dtype": str(seen.loaded.model.dtype).removeprefix("torch."),
        "tokens": seen.inspection.tokens,
        "shown_tokens": len(seen.texts),
        "has_latents": seen.inspection.has_latents,
        "layers": [measured.record() for measured in seen.inspection.measures],
        "attention": [row_record(row, seen) for row in seen.rows],
        "notes": seen.notes,
    }


def row_record(row: AttentionRow, seen: Seen, count: int = 20) -> dict[str, Any]:
    heads = [
        {
            "window_share": row.local_share[head].item(),
            "states": None if row.states is None else row.states[head].tolist(),
            "top": [
                attended._asdict() | {"text": seen.text_of(attended.position)} for attended in row.top(head, count)
            ],
        }
        for head in range(row.weights.shape[0])
    ]
    return {"layer": row.trace.form.name, "token": row.token, "text": seen.text_of(row.token), "heads": heads}
