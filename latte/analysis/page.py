"""The report of an inspection: one HTML file that needs nothing else, in which a person can point and click."""

import base64
import json
import zlib
from collections.abc import Sequence
from html import escape
from importlib.resources import files
from typing import Any

import numpy as np

from latte.analysis.inspection import Inspection
from latte.analysis.measures import LayerMeasures
from latte.analysis.records import NEAREST, LayerRecord

SCRIPTS = ("data.js", "text.js", "panels.js", "app.js")


def render_page(inspection: Inspection, texts: Sequence[str], *, title: str, notes: Sequence[str] = ()) -> str:
    """The page for the shown tokens, whose texts are given; `notes` are told at its top."""
    assets = files("latte.analysis") / "assets"
    read = {name: (assets / name).read_text(encoding="utf-8") for name in ("page.html", "page.css", *SCRIPTS)}
    numbers = {measured.name: number for number, measured in enumerate(inspection.measures)}
    blocks: dict[str, str] = {}
    layers = [_layer(record, inspection, numbers, blocks) for record in inspection.records]
    meta = {
        "about": _about(inspection),
        "notes": list(notes),
        "texts": list(texts),
        "layers": layers,
        "start": _start(inspection, numbers),
        "heads": head_measures(inspection),
    }
    parts = {
        "title": escape(title),
        "style": read["page.css"],
        "meta": script_json(meta),
        "scripts": "\n".join(f"<script>\n{read[name]}</script>" for name in SCRIPTS),
        "blocks": "\n".join(
            f'<script type="text/plain" id="{name}">{block}</script>' for name, block in blocks.items()
        ),
    }
    page = read["page.html"]
    pieces = [piece.partition("}}") for piece in page.split("{{")]  # once through: what is put in is not read again
    return pieces[0][0] + "".join(parts[name] + rest for name, _, rest in pieces[1:])


def script_json(value: Any) -> str:
    """JSON that can stand in a script element: nothing in it can end the element or begin a comment."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")


def pack(numbers: np.ndarray) -> str:
    """16-bit numbers as text: all low bytes, then all high bytes, which compress better apart."""
    data = numbers.astype("<u2", copy=False).tobytes()
    compressor = zlib.compressobj(6, wbits=-15)
    packed = compressor.compress(data[0::2] + data[1::2]) + compressor.flush()
    return base64.b64encode(packed).decode("ascii")


def _layer(
    record: LayerRecord, inspection: Inspection, numbers: dict[str, int], blocks: dict[str, str]
) -> dict[str, Any]:
    """What the page knows of a layer; its arrays go to `blocks`."""
    form, number = record.form, numbers[record.form.name]
    arrays = {
        "states": record.states,
        "keys": record.keys,
        "distances": record.near_distance,
        "weights": record.near_weight,
    }
    names = {part: f"layer-{number}-{part}" for part, array in arrays.items() if array is not None}
    blocks |= {name: pack(array) for part, name in names.items() if (array := arrays[part]) is not None}
    usage = inspection.measures[number].usage
    return {
        "name": form.name,
        "number": str(number),
        "heads": form.num_heads,
        "latents": form.num_latents or 0,
        "window": form.window or 0,
        "causal": form.causal,
        "nearest": NEAREST,
        "keyLow": [] if record.key_low is None else record.key_low.flatten().tolist(),
        "keyStep": [] if record.key_step is None else record.key_step.flatten().tolist(),
        "usage": None if usage is None else _rounded(usage.usage.tolist()),
        "blocks": names,
    }


def head_measures(inspection: Inspection) -> list[dict[str, Any]]:
    """A head's measures over the whole text, for all heads of all layers."""
    rows = {record.form.name: row for row, record in enumerate(inspection.records)}
    return [
        {"layer": str(number), "head": head, "row": rows.get(measured.name)} | _head(measured, head)
        for number, measured in enumerate(inspection.measures)
        for head in range(measured.form.num_heads)
    ]


def _head(measured: LayerMeasures, head: int) -> dict[str, Any]:
    """One head's measures over the whole text, its latents together."""
    found: dict[str, Any] = {}
    usage, reach, scores = measured.usage, measured.latent_reach, measured.score_reach
    if usage is not None:
        share = usage.window_share
        found |= {
            "effective": usage.effective_latents[head].item(),
            "collapse": usage.collapse_score[head].item(),
            "collapsed": bool(usage.collapsed[head]),
            "idle": bool(usage.idle[head]),
            "entropy": usage.entropy[head].item(),
            "information": usage.information[head].item(),
        }
        if share is not None:
            found["window"] = share[head].item()
    if usage is not None and reach is not None:
        together = measured.heads_reach()
        found |= {"distance": together.mean[head].item(), "within": together.within(0.9)[head].item()}
    if scores is not None:
        found["scoreDistance"] = scores.mean[head].item()
    return found


def _start(inspection: Inspection, numbers: dict[str, int]) -> dict[str, int]:
    """The head to show first: the one whose choices tell most of the token."""
    best, start = -1.0, {"layer": 0, "head": 0}
    for row, record in enumerate(inspection.records):
        usage = inspection.measures[numbers[record.form.name]].usage
        if usage is not None and float(usage.information.max()) > best:
            best = float(usage.information.max())
            start = {"layer": row, "head": int(usage.information.argmax())}
    return start


def _about(inspection: Inspection) -> str:
    forms = [measured.form for measured in inspection.measures]
    latents = sorted({form.num_latents for form in forms if form.num_latents})
    windows = sorted({form.window for form in forms if form.window})
    words = [f"{inspection.tokens:,} tokens", f"{len(forms)} layers", f"{forms[0].num_heads} heads"]
    words.append(f"{'/'.join(map(str, latents))} latents per head" if latents else "no latents")
    if windows:
        words.append(f"window {'/'.join(map(str, windows))}")
    return " · ".join(words)


def _rounded(rows: list[list[float]]) -> list[list[float]]:
    return [[round(value, 6) for value in row] for row in rows]
