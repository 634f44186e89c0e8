"""Keep what training runs and evaluations gave, as one file under benchmarks/results.

python benchmarks/experiments.py --title "…" --run "label=runs/lm" --evaluation "label=eval.json" --output results.json

A run is a folder that `latte train` has written; an evaluation a file of `latte evaluate --output`. Kept of them are
settings, curves and final figures, no weights and no texts.
"""

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

UNTOLD = (
    "output", "model", "track", "readers", "log_every", "eval_every", "eval_examples", "eval_batch_size", "save_every",
    "keep", "sample_tokens", "explosion", "max_rollbacks", "on_nan", "device", "parallel", "workers", "verify", "steps",
    "validation_examples", "test_examples",
)  # fmt: skip
TEACHING = ("teacher", "loss_weight", "distill_logits", "distill_layers", "distill_inputs", "distill_temperature")
CURVES = ("perplexity", "accuracy", "loss")  # the first of them that a task has


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--title", required=True, help="what was tried")
    parser.add_argument("--machine", required=True, help="what it ran on")
    parser.add_argument("--date", required=True, help="when")
    parser.add_argument("--run", action="append", default=[], metavar="LABEL=FOLDER")
    parser.add_argument("--evaluation", action="append", default=[], metavar="LABEL=FILE")
    parser.add_argument("--remark", action="append", default=[], help="what a reader must know, repeatable")
    parser.add_argument("--output", type=Path, required=True)
    options = parser.parse_args(arguments)
    try:
        document = collect(options)
    except (OSError, ValueError, KeyError) as error:
        print(f"benchmarks/experiments.py: error: {type(error).__name__}: {error}", file=sys.stderr)
        return 2
    options.output.write_text(json.dumps(document, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
    return 0


def collect(options: argparse.Namespace) -> dict[str, Any]:
    runs = [run(label, Path(folder)) for label, folder in map(split, options.run)]
    found = [evaluation(label, Path(path)) for label, path in map(split, options.evaluation)]
    return {
        "title": options.title,
        "date": options.date,
        "machine": options.machine,
        "versions": next((part.pop("versions") for part in (*runs, *found) if "versions" in part), {}),
        "remarks": options.remark,
        "runs": [{name: value for name, value in part.items() if name != "versions"} for part in runs],
        "evaluations": [{name: value for name, value in part.items() if name != "versions"} for part in found],
    }


def split(pair: str) -> tuple[str, str]:
    label, equals, path = pair.partition("=")
    if not equals:
        raise ValueError(f"{pair!r} has no '='; write LABEL=PATH")
    return label, path


def run(label: str, folder: Path) -> dict[str, Any]:
    """Settings, curves and the end of a run; the folder's files are those of `latte train`."""
    saved = json.loads((folder / "run.json").read_text(encoding="utf-8"))
    lines = (folder / "metrics.jsonl").read_bytes().split(b"\n")  # texts may have other ends of lines
    rows = [json.loads(line) for line in lines if line]
    checks = [row for row in rows if row["split"] == "validation"]
    metric = next(name for name in CURVES if name in checks[-1])
    whole = (folder / "result.json").exists()
    result = json.loads((folder / "result.json").read_text(encoding="utf-8")) if whole else cut_short(rows)
    return {
        "label": label,
        "task": saved["task"],
        "settings": without_paths(told(saved["run"], saved["settings"])),
        "parameters": result["parameters"],
        "steps": result["step"],
        **({} if whole else {"planned_steps": saved["run"]["steps"]}),
        "tokens": result["tokens"],
        "seconds": round(result["seconds"], 1),
        "metric": metric,
        "validation": [[row["tokens"], row[metric]] for row in checks],
        "training_loss": [[row["tokens"], row["loss"]] for row in thin([r for r in rows if r["split"] == "train"])],
        "final": result["test"] or result["validation"],
        "versions": saved["versions"],
    }


def cut_short(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """What a run that was stopped has in place of a result: where it stood, and its last validation."""
    last = [row for row in rows if row["split"] == "train"][-1]
    validation = [row for row in rows if row["split"] == "validation"][-1]
    stood = {name: last[name] for name in ("step", "tokens", "seconds")}
    return {**stood, "parameters": None, "test": None, "validation": validation}


def told(training: dict[str, Any], task: dict[str, Any]) -> dict[str, Any]:
    """Settings that say what was done, without those that change no result or were not in use."""
    idle = () if training["teacher"] != "none" else TEACHING
    idle += () if "lora" in training["trainable"] else ("lora_rank",)
    idle += ("preset",) if training.get("model") else ()
    numbers = {name: value for name, value in task.items() if isinstance(value, int | float | list)}
    both = {**training, **numbers}
    return {name: value for name, value in both.items() if name not in (*UNTOLD, *idle) and value is not False}


def thin(rows: list[dict[str, Any]], most: int = 100) -> list[dict[str, Any]]:
    return rows[:: max(1, len(rows) // most)]


def without_paths(settings: dict[str, Any]) -> dict[str, Any]:
    """File names in place of paths: where things lay is nobody's business."""

    def name(value: Any) -> Any:
        if isinstance(value, list):
            return [name(part) for part in value]
        return Path(value).name if isinstance(value, str) and "/" in value else value

    return {key: name(value) for key, value in settings.items() if value is not None}


def evaluation(label: str, path: Path) -> dict[str, Any]:
    document = json.loads(path.read_text(encoding="utf-8"))
    settings = {name: document["settings"][name] for name in ("mode", "max_tokens", "limit", "bos", "text")}
    parts = [(label, document["model"])] + ([("source", document["against"])] if document.get("against") else [])
    return {
        "label": label,
        "settings": without_paths(settings),
        "models": [{"label": name, **measures(part)} for name, part in parts],
        "versions": document["versions"],
    }


def measures(part: dict[str, Any]) -> dict[str, Any]:
    """Perplexities, losses by position, tasks and speed, each with its standard error where it has one."""
    kept: dict[str, Any] = {"dtype": part["dtype"], "parameters": part["parameters"]}
    if part.get("perplexity"):
        kept["perplexity"] = [[x["length"], *pair(x["perplexity"])] for x in part["perplexity"]["lengths"]]
        kept["loss_by_position"] = [[x["start"], x["end"], *pair(x["loss"])] for x in part["perplexity"]["positions"]]
    kept["tasks"] = dict(tasks(part))
    if part.get("speed"):
        kept["speed"] = part["speed"]
    return kept


def pair(number: dict[str, float]) -> tuple[float, float]:
    return number["value"], number["error"]


def tasks(part: dict[str, Any]) -> Iterator[tuple[str, list[float]]]:
    if part.get("lambada"):
        yield "LAMBADA accuracy", [*pair(part["lambada"]["accuracy"]), part["lambada"]["passages"]]
    if part.get("blimp"):
        yield "BLiMP accuracy", [*pair(part["blimp"]["accuracy"]), part["blimp"]["pairs"]]


if __name__ == "__main__":
    raise SystemExit(main())
