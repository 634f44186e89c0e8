"""Perplexity against length, and loss against position, for one model or several."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from latte.tasks.evaluation.perplexity import PerplexityReport

KINDS = (".png", ".svg", ".pdf")


def check_plot(path: Path) -> None:
    """Raise ValueError where no plot can be written: better before hours of work than after."""
    if path.suffix.lower() not in KINDS:
        raise ValueError(f"--plot {path}: the name must end with {', '.join(KINDS)}")
    if not path.parent.is_dir():
        raise ValueError(f"--plot {path}: there is no folder {path.parent}")
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise ValueError("--plot needs matplotlib, which is not installed; pip install matplotlib") from error


def plot_perplexity(reports: Mapping[str, PerplexityReport], path: Path) -> None:
    """Write the figure; `reports` has a report by the name of its model."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    by_position = any(report.positions for report in reports.values())
    figure = Figure(figsize=(10 if by_position else 5.5, 4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(1, 2 if by_position else 1, squeeze=False)[0]
    for name, report in reports.items():
        draw_lengths(axes[0], name, report)
        if by_position:
            draw_positions(axes[1], name, report)
    for axis in axes:
        axis.set_xscale("log", base=2)
        axis.grid(alpha=0.3)
        axis.legend(frameon=False)
    lengths = sorted({result.length for report in reports.values() for result in report.lengths})
    axes[0].set_xticks(lengths, [short(length) for length in lengths])
    spread = [result.perplexity.value for report in reports.values() for result in report.lengths]
    if max(spread) > 4 * min(spread):
        axes[0].set_yscale("log")
    temporary = path.with_name(f".{path.name}.{os.getpid()}{path.suffix}")
    try:
        figure.savefig(temporary, dpi=150)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def draw_lengths(axis: Any, name: str, report: PerplexityReport) -> None:
    results = report.lengths
    errors = [result.perplexity.error or 0.0 for result in results]
    values = [result.perplexity.value for result in results]
    axis.errorbar([result.length for result in results], values, errors, marker="o", capsize=3, label=name)
    axis.set(xlabel="tokens of context", ylabel="perplexity", title=f"{report.mode} windows")


def draw_positions(axis: Any, name: str, report: PerplexityReport) -> None:
    middles = [(bucket.start * (bucket.end - 1)) ** 0.5 for bucket in report.positions]
    losses = [bucket.loss.value for bucket in report.positions]
    errors = [bucket.loss.error or 0.0 for bucket in report.positions]
    (line,) = axis.plot(middles, losses, marker=".", label=name)
    low, high = ([loss + sign * error for loss, error in zip(losses, errors, strict=True)] for sign in (-1, 1))
    axis.fill_between(middles, low, high, color=line.get_color(), alpha=0.2, linewidth=0)
    axis.set(
        xlabel="position", ylabel="loss (nats per token)", title=f"by position, up to {report.lengths[-1].length:,}"
    )


def short(length: int) -> str:
    return f"{length // 1024}K" if length % 1024 == 0 else str(length)
