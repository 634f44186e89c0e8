"""Write docs/benchmarks.md and its plot from the results kept in benchmarks/results. `make docs` runs it.

python benchmarks/docs.py
"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PLOT = Path("assets/time-per-token.svg")
PEERS = ("FlexAttention, compiled", "FLA chunk_lightnet", "SDPA cuDNN")

Lines = dict[str, list[tuple[int, float]]]  # by contender, length and nanoseconds per token

SECTIONS = {
    "cpu-ops.json": ("On a CPU", "latte bench ops --output benchmarks/results/cpu-ops.json"),
    "h200-ops.json": (
        "On an NVIDIA H200",
        "python benchmarks/ops.py --device cuda --output benchmarks/results/h200-ops.json",
    ),
}
INTRODUCTION = """\
# Benchmarks

This page is written by `benchmarks/docs.py` from the files in `benchmarks/results/`, which `benchmarks/ops.py` wrote;
no figure is entered by hand. Where rows were taken out of a file afterwards, its remarks say which and why. Inputs are
random numbers from a fixed seed.

- **wall** is the time of a call as a program sees it: the host launches, the GPU follows, and gaps between launches
  count. On a GPU it is the median of `triton.testing.do_bench`, which empties the L2 cache before every call.
- **device** is the GPU's work alone: the call is captured in a CUDA graph and replayed
  (`triton.testing.do_bench_cudagraph`, median).
- **limit** is what the memory alone needs: every input read once and every output written once, and for backward
  inputs and dy read and gradients written, over the bandwidth of a copy measured in the same run. **times limit** is
  device over limit.
- On a CPU the contenders take turns, and the time is the median of **runs**; **peak memory** is that of a fresh
  process, by its resident set, and the results of the call are part of it.
- Results count only beside a right answer: outputs and all gradients are compared with float64 in the same run, by
  ‖difference‖ / ‖right‖, and run twice to see the same bits.
- A row says **ok** or **missed** where there is a target, **wrong** if its results failed the comparison, and
  **skipped**, with the reason, where a contender does not run.
"""


def main(results: Path = ROOT / "benchmarks" / "results", docs: Path = ROOT / "docs") -> int:
    """Write the page and the plot; the same results give the same files."""
    if str(ROOT) not in sys.path:
        sys.path.insert(0, str(ROOT))
    found = {name: load(results / name) for name in SECTIONS if (results / name).is_file()}
    plotted = draw(found, docs / PLOT)
    (docs / "benchmarks.md").write_text(page(found, plotted), encoding="utf-8")
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


def draw(found: dict[str, dict[str, Any]], path: Path) -> bool:
    """Plot time per token, a panel for each machine and pass; False, and no file, where there is nothing to plot."""
    panels = {
        f"{SECTIONS[name][0]}, {what}": curves(document, what)
        for name, document in found.items()
        for what in ("forward", "forward+backward")
    }
    panels = {title: lines for title, lines in panels.items() if lines}
    if not panels:
        path.unlink(missing_ok=True)
        return False
    plot(panels, path)
    return True


def plot(panels: dict[str, Lines], path: Path) -> None:
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot as plt
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    labels = list(dict.fromkeys(label for lines in panels.values() for label in lines))
    style: dict[Any, Any] = {"svg.hashsalt": "latte", "svg.fonttype": "none", "axes.grid": True, "grid.alpha": 0.3}
    rows = -(-len(panels) // 2)
    with plt.rc_context(style):
        figure, axes = plt.subplots(rows, 2, figsize=(9, 0.6 + 3.2 * rows), squeeze=False, layout="constrained")
        drawn = {}
        for axis, (title, lines) in zip(axes.flat, panels.items(), strict=False):
            for label, points in lines.items():
                colour = f"C{labels.index(label)}"  # the same in every panel
                (drawn[label],) = axis.loglog(*zip(*points, strict=True), color=colour, marker="o", markersize=3)
            axis.set_xscale("log", base=2)
            axis.xaxis.set_major_locator(LogLocator(base=4))
            axis.xaxis.set_major_formatter(FuncFormatter(lambda tokens, _: length(tokens)))
            axis.yaxis.set_minor_formatter(NullFormatter())
            axis.set(title=title, xlabel="tokens in a sequence", ylabel="nanoseconds per token")
        for axis in axes.flat[len(panels) :]:
            axis.remove()
        figure.legend(list(drawn.values()), list(drawn), loc="outside lower center", ncols=3, frameon=False)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, metadata={"Date": None, "Creator": None})
        plt.close(figure)


def length(tokens: float) -> str:
    return f"{tokens / 2**20:g}M" if tokens >= 2**20 else f"{tokens / 2**10:g}K"


def curves(document: dict[str, Any], what: str) -> Lines:
    """Length and nanoseconds per token of every contender; of other people's kernels, one or two lengths will do."""
    lines: Lines = {}
    for row in document["rows"]:
        taken = row.get("ns_per_token")
        if taken is None and row.get("by") in PEERS and row.get("head_dim") == 64:  # those timed at some lengths only
            milliseconds = row.get("device_ms") or row.get("wall_ms")
            taken = milliseconds and 1e6 * milliseconds / (row["batch"] * row["tokens"])
        if taken and row["pass"] == what:
            label = row["op"] if row["by"] == "latte" else f"{row['op']} ({row['by']})"
            lines.setdefault(label, []).append((row["tokens"], taken))
    return {label: sorted(points) for label, points in lines.items()}


if __name__ == "__main__":
    sys.exit(main())
