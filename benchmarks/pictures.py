"""One picture of lines, the same bytes for the same numbers."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

Lines = Mapping[str, Sequence[Sequence[float]]]


def draw_lines(lines: Lines, path: Path, across: str, up: str, scale: str = "linear", base: str = "") -> bool:
    """Points of lines by label; `base` makes the x axis logarithmic. False, and no file, where there is no point."""
    lines = {label: points for label, points in lines.items() if points}
    if not lines:
        path.unlink(missing_ok=True)
        return False
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot as plt
    from matplotlib.ticker import EngFormatter, LogFormatter

    style: dict[Any, Any] = {"svg.hashsalt": "latte", "svg.fonttype": "none", "axes.grid": True, "grid.alpha": 0.3}
    with plt.rc_context(style):
        figure, axis = plt.subplots(figsize=(7, 4), layout="constrained")
        for label, points in lines.items():
            axis.plot(*zip(*points, strict=True), marker="o", markersize=3, label=label)
        if base:
            axis.set_xscale("log", base=int(base))
            axis.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
        elif across == "tokens":  # 20 M and not 2 · 10⁷
            axis.xaxis.set_major_formatter(EngFormatter())
        axis.set(xlabel=across, ylabel=up, yscale=scale)
        if scale == "log":  # 30, 40, 60, 100 and not 3 × 10¹
            axis.yaxis.set_major_formatter(LogFormatter())
            axis.yaxis.set_minor_formatter(LogFormatter())
        axis.legend(frameon=False)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, metadata={"Date": None, "Creator": None})
        plt.close(figure)
    return True
