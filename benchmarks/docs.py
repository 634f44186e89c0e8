"""Write docs/benchmarks.md, docs/experiments.md and their pictures from the results kept in benchmarks/results.

`make docs` runs it.

python benchmarks/docs.py
"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PLOT = Path("assets/time-per-token.svg")

SECTIONS = {
    "cpu-ops.json": ("On a CPU", "latte bench ops --output benchmarks/results/cpu-ops.json"),
    "h200-ops.json": (
        "On an NVIDIA H200",
        "python benchmarks/ops.py --device cuda --output benchmarks/results/h200-ops.json",
    ),
}
HOST_SECTIONS = {"cpu-host.json": "Around a call, on a CPU"}
INTRODUCTION = """\
# Benchmarks

This page is written by `benchmarks/docs.py` from the files in `benchmarks/results/`, which the programs beside it
wrote; no figure is entered by hand. Where rows were taken out of a file afterwards, its remarks say which and why.
Inputs are random numbers from a fixed seed.

- **wall** is the time of a call as a program sees it: the host launches, the GPU follows, and gaps between launches
  count. On a GPU it is the median of `triton.testing.do_bench`, which empties the L2 cache before every call.
- **one thread**, where a run has it, is wall with backward in the thread that calls it
  (`torch.autograd.set_multithreading_enabled(False)`). By default PyTorch runs a GPU's backward in a thread of its own,
  which has to wake first. Targets are judged by wall.
- **device** is the GPU's work alone: the call is captured in a CUDA graph and replayed
  (`triton.testing.do_bench_cudagraph`, median).
- **limit** is what the memory alone needs: every input read once and every output written once, and for backward
  inputs and dy read and gradients written, over the bandwidth of a copy measured in the same run. **times limit** is
  device over limit.
- On a CPU the contenders take turns, and the time is the median of **runs**; **peak memory** is that of a fresh
  process, by its resident set, and the results of the call are part of it.
- Results of ops count only beside a right answer: outputs and all gradients are compared with float64 in the same run,
  by ‖difference‖ / ‖right‖, and run twice to see the same bits.
- **Around a call** is what the host does from one call of an op to the next, its launches left out: Python, PyTorch's
  graph and its allocator, for calls like one made before. On a CPU it is the process's CPU time, the median of rounds.
- A row says **ok** or **missed** where there is a target, **wrong** if its results failed the comparison, and
  **skipped**, with the reason, where a contender does not run.
"""
MODELS = """\
## Whole models

Models have random weights from a fixed seed and read random tokens. The transformer beside ours has the same width,
layers, feed-forward and vocabulary, the same code but for its attention, and FlashAttention without a mask tensor.

- **Training** is forward, backward and a step of AdamW, with weights in the dtype that is named; the loss of both holds
  no logits. **Forward** computes all hidden states and the logits of the last token, as for a prompt. A step has the
  same number of tokens at every context, until one sequence has more. Times are medians; the first step, in which the
  compiler works, is apart.
- **One more token** is a step of greedy generation from a cache. On a GPU the step is compiled and captured as a CUDA
  graph. Ours has read its context; the transformer's keys and values are random, exactly as many as the context has
  tokens, and read without a mask, which is the least that a transformer's step can do. Before it is timed, the last
  token's logits by way of the cache are compared with those of the whole sequence at once.
"""
MODEL_SECTIONS = {
    "cpu-decode.json": "One more token, on a CPU",
    "h200-decode.json": "One more token, on an NVIDIA H200",
    "cpu-model.json": "Training and forward, on a CPU",
    "h200-model.json": "Training and forward, on an NVIDIA H200",
    "h200-400m.json": "Forward of the 400M shapes, on an NVIDIA H200",
    "h200-training.json": "Training at 1,024 tokens, once more, on an NVIDIA H200",
}
NOT_DRAWN = {"h200-training.json"}  # one more row of a line that has it already


def main(results: Path = ROOT / "benchmarks" / "results", docs: Path = ROOT / "docs") -> int:
    """Write the page and the plot; the same results give the same files."""
    if str(ROOT) not in sys.path:
        sys.path.insert(0, str(ROOT))
    from benchmarks import experiment_docs, plots

    found = {name: load(results / name) for name in SECTIONS if (results / name).is_file()}
    models = {name: load(results / name) for name in MODEL_SECTIONS if (results / name).is_file()}
    plotted = plots.draw({SECTIONS[name][0]: document for name, document in found.items()}, docs / PLOT)
    drawn = {MODEL_SECTIONS[name]: document for name, document in models.items() if name not in NOT_DRAWN}
    pictures = plots.draw_models(drawn, docs)
    host = {name: load(results / name) for name in HOST_SECTIONS if (results / name).is_file()}
    text = page(found, plotted) + sections(host, HOST_SECTIONS) + model_page(models, pictures)
    (docs / "benchmarks.md").write_text(text, encoding="utf-8")
    kept = {name: results / name for name in experiment_docs.FILES if (results / name).is_file()}
    trained = {name: json.loads(path.read_text(encoding="utf-8")) for name, path in kept.items()}
    (docs / "experiments.md").write_text(experiment_docs.page(trained, docs), encoding="utf-8")
    return 0


def load(path: Path) -> dict[str, Any]:
    document = json.loads(path.read_text(encoding="utf-8"))
    if document["quick"]:
        raise ValueError(f"{path} is of a --quick run, which is a look and no result; measure again without it")
    return document


def page(found: dict[str, dict[str, Any]], plotted: bool) -> str:
    parts = [INTRODUCTION]
    if plotted:
        parts.append(f"![Time per token against the length of the sequence, on logarithmic axes]({PLOT})\n")
    for name, (title, command) in SECTIONS.items():
        parts.append(f"## {title}\n")
        if name in found:
            parts += section(found[name])
        else:
            parts.append(f"There are no results yet. On such a machine, run\n\n```sh\n{command}\n```\n")
    return "\n".join(parts)


def model_page(found: dict[str, dict[str, Any]], pictures: dict[str, Path]) -> str:
    """What whole models gave; nothing where they were not measured."""
    if not found:
        return ""
    parts = ["", MODELS, *(f"![{words}]({path})\n" for words, path in pictures.items())]
    return "\n".join(parts) + sections(found, MODEL_SECTIONS)


def sections(found: dict[str, dict[str, Any]], titles: dict[str, str]) -> str:
    """What there is, each under its title."""
    parts = [f"\n## {titles[name]}\n\n" + "\n".join(section(found[name])) for name in titles if name in found]
    return "".join(parts)


def section(document: dict[str, Any]) -> list[str]:
    """Where, when and how it was measured, then every table."""
    from benchmarks.rows import heading, show, tables

    machine, versions = document["machine"], document["versions"]
    hardware = f"{machine['gpu']}, host {machine['cpu']}" if "gpu" in machine else machine["cpu"]
    software = ", ".join(f"{name} {version}" for name, version in versions.items())
    facts = ", ".join(f"{heading(name)} {show(value)}" for name, value in document["facts"].items())
    parts = [
        f"{hardware}, {machine['cores']} cores; {software}. Measured on {document['date']} by",
        f"\n```sh\n{document['command']}\n```\n",
        f"Settings: {facts}.\n",
    ]
    remarks = document.get("remarks", [])  # written into the file afterwards, by whoever found something to say
    if remarks:
        parts.append("\n".join(f"- {remark}" for remark in remarks) + "\n")
    for name, rows in tables(document["rows"]).items():
        parts.append(f"### {name}\n\n{markdown_table(rows)}\n")
    return parts


def markdown_table(rows: Sequence[dict[str, Any]]) -> str:
    from benchmarks.rows import columns, heading, show

    names = columns(rows)
    words = [any(isinstance(row.get(name), str) for row in rows) for name in names]
    lines = [[heading(name) for name in names], ["---" if word else "---:" for word in words]]
    lines += [[show(row.get(name)).replace("|", "\\|") for name in names] for row in rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


if __name__ == "__main__":
    sys.exit(main())
