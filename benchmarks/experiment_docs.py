"""docs/experiments.md: training runs and evaluations kept in benchmarks/results, in words, tables and curves."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.pictures import Lines, draw_lines

FILES = ("h200-lm.json", "h200-mqar.json", "cpu-mqar.json", "h200-smollm2.json", "cpu-smollm2.json", "h200-gemma3.json")
INTRODUCTION = """\
# Experiments

This page is written by `benchmarks/docs.py` from files in `benchmarks/results/` that `benchmarks/experiments.py` has
made of training runs and evaluations; no figure is entered by hand. ± is a standard error.
"""
Document = dict[str, Any]


def page(found: dict[str, Document], docs: Path) -> str:
    parts = [INTRODUCTION]
    for name, document in found.items():
        parts += section(document, docs, name.removesuffix(".json"))
    return "\n".join(parts)


def section(document: Document, docs: Path, stem: str) -> list[str]:
    software = ", ".join(f"{name} {version}" for name, version in document["versions"].items())
    parts = [f"## {document['title']}\n", f"{document['machine']}; {software}; {document['date']}.\n"]
    parts += [f"- {remark}" for remark in document["remarks"]] + [""]
    for caption, draw in (
        ("Validation during training", curves),
        ("Accuracy by number of pairs", by_pairs),
        ("Perplexity by length of context", by_length),
        ("Loss by position in the text", by_position),
    ):
        lines, axes = draw(document)
        path = Path("assets") / f"{stem}-{slug(caption)}.svg"
        if draw_lines(lines, docs / path, **axes):
            parts.append(f"![{caption}]({path})\n")
    tables: list[Callable[[Document], list[list[str]]]] = [run_table, pair_table, length_table, task_table, speed_table]
    parts += [f"{markdown(rows)}\n" for make in tables if len(rows := make(document)) > 1]
    if document["runs"]:
        parts.append(f"What is not in a table:\n\n{settings_list(document['runs'])}\n")
    return parts


def slug(words: str) -> str:
    return re.sub(r"\W+", "-", words.lower())


def markdown(rows: list[list[str]]) -> str:
    rule = ["---"] + ["---:"] * (len(rows[0]) - 1)
    return "\n".join(f"| {' | '.join(row)} |" for row in (rows[0], rule, *rows[1:]))


def run_table(document: Document) -> list[list[str]]:
    head = ["run", "parameters", "steps", "tokens", "seconds", "at the end"]
    return [head] + [
        [run["label"], "" if run["parameters"] is None else f"{run['parameters']:,}", steps_of(run),
         f"{run['tokens']:,}", f"{run['seconds']:,.0f}", f"{run['metric']} {run['final'][run['metric']]:.4g}"]
        for run in document["runs"]
    ]  # fmt: skip


def steps_of(run: dict[str, Any]) -> str:
    planned = run.get("planned_steps")
    return f"{run['steps']:,}" if planned is None else f"{run['steps']:,}, stopped ({planned:,} planned)"


def pairs_of(run: dict[str, Any]) -> dict[int, float]:
    """Accuracy by number of pairs, where a task gives it."""
    found = ((re.fullmatch(r"accuracy_(\d+)_pairs", name), value) for name, value in run["final"].items())
    return {int(match[1]): value for match, value in found if match}


def pair_table(document: Document) -> list[list[str]]:
    runs = [(run["label"], pairs_of(run)) for run in document["runs"]]
    counts = sorted({count for _, pairs in runs for count in pairs})
    rows = [[label, *(f"{pairs[n]:.1%}" if n in pairs else "" for n in counts)] for label, pairs in runs if pairs]
    return [["accuracy at pairs", *map(str, counts)], *rows] if counts else []


def models_of(document: Document) -> list[dict[str, Any]]:
    return [model for part in document["evaluations"] for model in part["models"]]


def length_table(document: Document) -> list[list[str]]:
    models = [model for model in models_of(document) if model.get("perplexity")]
    lengths = sorted({row[0] for model in models for row in model["perplexity"]})
    known = [{row[0]: f"{row[1]:.2f} ± {row[2]:.2f}" for row in model["perplexity"]} for model in models]
    rows = [[model["label"], *(cells.get(n, "") for n in lengths)] for model, cells in zip(models, known, strict=True)]
    return [["perplexity at", *(f"{n:,}" for n in lengths)], *rows] if lengths else []


def task_table(document: Document) -> list[list[str]]:
    models = [model for model in models_of(document) if model["tasks"]]
    names = list(dict.fromkeys(name for model in models for name in model["tasks"]))

    def cell(found: list[float] | None) -> str:
        return f"{100 * found[0]:.1f} ± {100 * found[1]:.1f} % of {found[2]:,}" if found else ""

    return [["", *names]] + [[model["label"], *(cell(model["tasks"].get(n)) for n in names)] for model in models]


def speed_table(document: Document) -> list[list[str]]:
    rows = [
        [model["label"], f"{row['length']:,}", f"{row['prefill_tokens_per_s']:,.0f}",
         f"{row['tokens_per_s']:,.0f}", f"{row['cache_bytes'] / 1e6:,.1f}"]
        for model in models_of(document)
        for row in model.get("speed", ())
    ]  # fmt: skip
    return [["speed of", "context", "tokens/s read", "tokens/s written", "cache, MB"], *rows]


def settings_list(runs: list[dict[str, Any]]) -> str:
    """What all runs share, once, then what each has of its own."""
    known = [run["settings"] for run in runs]
    shared = {k: v for k, v in known[0].items() if all(k in other and other[k] == v for other in known)}
    lines = [f"- all: {words(shared)}"]
    for run in runs:
        own = {name: value for name, value in run["settings"].items() if name not in shared}
        lines += [f"- {run['label']}: {words(own)}"] if own else []
    return "\n".join(lines)


def words(settings: dict[str, Any]) -> str:
    def show(value: Any) -> str:
        if isinstance(value, dict):
            return "(" + words(value) + ")"
        return " ".join(map(str, value)) if isinstance(value, list) else str(value)

    return ", ".join(f"{name} {show(value)}" for name, value in settings.items() if value not in ("", [], {}))


def curves(document: Document) -> tuple[Lines, dict[str, str]]:
    runs = document["runs"]
    metric = runs[0]["metric"] if runs else ""
    lines = {run["label"]: run["validation"] for run in runs if run["metric"] == metric}
    return lines, {"across": "tokens", "up": metric, "scale": "log" if metric == "perplexity" else "linear"}


def by_pairs(document: Document) -> tuple[Lines, dict[str, str]]:
    lines = {run["label"]: sorted(pairs.items()) for run in document["runs"] if (pairs := pairs_of(run))}
    return lines, {"across": "pairs of key and value", "up": "accuracy", "base": "2"}


def by_length(document: Document) -> tuple[Lines, dict[str, str]]:
    lines = {model["label"]: [row[:2] for row in model.get("perplexity", ())] for model in models_of(document)}
    return lines, {"across": "tokens of context", "up": "perplexity", "scale": "log", "base": "2"}


def by_position(document: Document) -> tuple[Lines, dict[str, str]]:
    lines = {
        model["label"]: [[(row[0] + row[1]) / 2, row[2]] for row in model.get("loss_by_position", ())]
        for model in models_of(document)
    }
    return lines, {"across": "position", "up": "loss, nats", "base": "2"}
