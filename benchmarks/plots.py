"""Pictures of the results, on logarithmic axes."""

from pathlib import Path
from typing import Any

PEERS = ("FlexAttention, compiled", "FLA chunk_lightnet", "SDPA cuDNN")
STEP, TRAINING, FIGURE = (Path(f"assets/{name}.svg") for name in ("one-more-token", "training", "forward"))

Lines = dict[str, list[tuple[int, float]]]  # by contender, length and what it took


def draw(found: dict[str, dict[str, Any]], path: Path) -> bool:
    """Plot the ops' time per token, a panel for each machine and pass; False where there is nothing to plot."""
    panels = {
        f"{title}, {what}": curves(document, what)
        for title, document in found.items()
        for what in ("forward", "forward+backward")
    }
    return plot(panels, path, "tokens in a sequence", "nanoseconds per token")


def draw_models(found: dict[str, dict[str, Any]], folder: Path) -> dict[str, Path]:
    """Plot what there is of whole models; by what it shows, where the picture is within `folder`."""
    pictures = {
        "Time of one more token against the context": (
            STEP, "context, tokens", "milliseconds per step", one_more_token(found)
        ),
        "Training speed against the context": (
            TRAINING, "tokens in a sequence", "tokens per second", by_context(found, "Training", "tokens_per_s")
        ),
        "Runtime of a forward pass against the context, as in the paper's figure 7": (
            FIGURE, "tokens in a sequence", "milliseconds per step", by_size(found)
        ),
    }  # fmt: skip
    return {
        words: path for words, (path, across, up, panels) in pictures.items() if plot(panels, folder / path, across, up)
    }


def one_more_token(found: dict[str, dict[str, Any]]) -> dict[str, Lines]:
    """A panel for each machine and batch size."""
    panels: dict[str, Lines] = {}
    for title, document in found.items():
        for row in document["rows"]:
            if row["table"] == "One more token" and row.get("ms_per_step"):
                panel = panels.setdefault(f"{title.partition(', on ')[2]}, batch {row['batch']}", {})
                panel.setdefault(row["model"], []).append((row["context"], row["ms_per_step"]))
    return panels


def by_context(found: dict[str, dict[str, Any]], table: str, cell: str) -> dict[str, Lines]:
    """A panel for each machine, a line for each model."""
    panels: dict[str, Lines] = {}
    for title, document in found.items():
        for row in document["rows"]:
            if row["table"] == table and row.get(cell):
                name = row["model"] if row["by"] == "latte" else f"{row['model']} ({row['by']})"
                panel = panels.setdefault(title.partition(", on ")[2], {})
                panel.setdefault(name, []).append((row["context"], row[cell]))
    return panels


def by_size(found: dict[str, dict[str, Any]]) -> dict[str, Lines]:
    """A panel for each size of the larger shapes: "Latte-R-SWA++ 2.6B" is a line in the panel "2.6B"."""
    panels: dict[str, Lines] = {}
    for lines in by_context(found, "Forward, larger shapes", "ms_per_step").values():
        for label, points in lines.items():
            model, _, size = label.partition(" (")[0].rpartition(" ")
            panels.setdefault(f"{size} parameters", {})[model] = points
    return panels


def plot(panels: dict[str, Lines], path: Path, across: str, up: str) -> bool:
    """Write a picture on logarithmic axes; False, and no file, where there is nothing to plot."""
    panels = {title: lines for title, lines in panels.items() if lines}
    if not panels:
        path.unlink(missing_ok=True)
        return False
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
            axis.set(title=title, xlabel=across, ylabel=up)
        for axis in axes.flat[len(panels) :]:
            axis.remove()
        figure.legend(list(drawn.values()), list(drawn), loc="outside lower center", ncols=3, frameon=False)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, metadata={"Date": None, "Creator": None})
        plt.close(figure)
    return True


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
