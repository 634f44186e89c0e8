"""Figures for papers and pages, by matplotlib: PNG, SVG or PDF, as the file's name says."""

from collections.abc import Callable, Sequence
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec

import torch
from torch import Tensor

from latte.analysis.files import replacing
from latte.analysis.measures import LayerMeasures
from latte.analysis.projections import Projected
from latte.analysis.rows import LayerTrace, attention_matrix, attention_row
from latte.analysis.training import UsageHistory

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FORMATS = ("png", "svg", "pdf")
STYLE: dict[Any, Any] = {
    "font.size": 8,
    "axes.titlesize": 8,
    "axes.labelsize": 8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "latte",  # the same file each time
    "pdf.fonttype": 42,
}
SHADES = "magma"
LABELLED = 40  # tokens up to which their texts stand under a map
Arguments = ParamSpec("Arguments")


def styled(draw: "Callable[Arguments, Figure]") -> "Callable[Arguments, Figure]":
    """Draw in our style, whatever else is drawn in this process."""

    @wraps(draw)
    def drawn(*args: Arguments.args, **kwargs: Arguments.kwargs) -> "Figure":
        try:
            import matplotlib
        except ImportError as error:
            raise ValueError("figures need matplotlib, which is not installed; pip install matplotlib") from error
        with matplotlib.rc_context(STYLE):
            return draw(*args, **kwargs)

    return drawn


@styled
def state_maps(traces: Sequence[LayerTrace], texts: Sequence[str]) -> "Figure":
    """p(l|t) of all layers and heads, as in the paper's figure 6: a column per token, the window at the bottom.

    Of as many tokens as texts are given.
    """
    traces = [trace for trace in traces if trace.parts.latent_query is not None]
    if not traces:
        raise ValueError("the model has no latents; there are no maps of p(l|t) to draw")
    figure, axes = _grid(len(traces), traces[0].form.num_heads, width=2.0, height=1.1)
    image = None
    for row, trace in enumerate(traces):
        logits = trace.parts.latent_query
        assert logits is not None
        for head, p in enumerate(torch.softmax(logits[: len(texts)].float(), dim=-1).permute(1, 2, 0).cpu()):
            axis = axes[row][head]
            image = axis.imshow(
                p.numpy(), origin="lower", aspect="auto", vmin=0, vmax=1, cmap=SHADES, interpolation="nearest"
            )
            _title(axis, row, head, _short(trace.form.name))
            _row_ticks(axis, head, len(p), [_first_state(trace), str(trace.form.num_latents)])
            _token_ticks(axis, texts[: p.shape[1]], shown=row == len(traces) - 1)
    _colour_bar(figure, image, "p(l|t)")
    return figure


@styled
def attention_maps(traces: Sequence[LayerTrace], texts: Sequence[str]) -> "Figure":
    """p(s|t) among as many tokens as texts are given, all layers and heads: a row per token t, a column per token s."""
    if not traces:
        raise ValueError("there is no layer to draw")
    figure, axes = _grid(len(traces), traces[0].form.num_heads, width=1.4, height=1.4)
    image = None
    for row, trace in enumerate(traces):
        for head, weights in enumerate(_first_weights(trace, len(texts)).float().cpu()):
            axis = axes[row][head]
            # the square root tells small probabilities apart: most entries of a long row are small
            image = axis.imshow(weights.sqrt().numpy(), vmin=0, vmax=1, cmap=SHADES, interpolation="nearest")
            _title(axis, row, head, _short(trace.form.name))
            _row_ticks(axis, head, len(weights), ["0", str(len(weights) - 1)])
            _token_ticks(axis, texts[: len(weights)], shown=row == len(traces) - 1)
    bar = _colour_bar(figure, image, "p(s|t)")
    bar.set_ticks([0, 0.1**0.5, 0.5, 1], labels=["0", "0.1", "0.25", "1"])
    return figure


def _first_weights(trace: LayerTrace, tokens: int) -> Tensor:
    """p(s|t) among the first tokens, [H N N]; rows sum to less than 1 where they attend to later ones."""
    if trace.form.causal:
        parts = Projected(*(None if x is None else x[:tokens] for x in trace.parts))
        return attention_matrix(LayerTrace(trace.form, parts))
    shown = min(tokens, trace.tokens)
    return torch.stack([attention_row(trace, token).weights[:, :shown] for token in range(shown)], dim=1)


@styled
def usage_maps(measures: Sequence[LayerMeasures]) -> "Figure":
    """Average p(l|t): a panel per layer, a row per head, the number of latents in effect beside it."""
    usages = [measured.usage for measured in measures if measured.usage is not None]
    if not usages:
        raise ValueError("the model has no latents; there is no usage to draw")
    figure, axes = _grid(len(usages), 1, width=4.5, height=0.16 * len(usages[0].usage))
    top, image = max(float(usage.usage.max()) for usage in usages), None
    for row, usage in enumerate(usages):
        axis = axes[row][0]
        image = axis.imshow(usage.usage.numpy(), aspect="auto", vmin=0, vmax=top, cmap=SHADES, interpolation="nearest")
        axis.set_ylabel(_short(usage.name))
        heads = range(len(usage.usage))
        axis.set_yticks(heads, [f"head {head}" for head in heads], fontsize=6)
        _beside(axis, [f"{x:.1f}" for x in usage.effective_latents.tolist()])
        states = usage.usage.shape[1]
        first = "window" if usage.window_share is not None else "1"
        axis.set_xticks([0, states - 1], [first, str(usage.num_latents)] if row == len(usages) - 1 else ["", ""])
    axes[0][0].set_title("average p(l|t); right: latents in effect")
    _colour_bar(figure, image, "")
    return figure


@styled
def distance_profiles(measures: Sequence[LayerMeasures]) -> "Figure":
    """How far back attention looks: its weight in steps of distance that double, a panel per layer, a line per head."""
    if not measures:
        raise ValueError("there is no layer to draw")
    columns = min(4, len(measures))
    rows = -(-len(measures) // columns)
    figure, axes = _grid(rows, columns, width=2.1, height=1.5, between=(0.15, 0.5), sharey=True)
    for index, measured in enumerate(measures):
        axis = axes[index // columns][index % columns]
        _profiles(axis, measured)
        axis.set_title(_short(measured.name))
    for axis in [axis for row in axes for axis in row][len(measures) :]:
        axis.set_visible(False)
    for row in axes:
        row[0].set_ylabel("share of weight")
    handles = [axes[0][0].plot([], [], colour, label=label)[0] for colour, label in PARTS.values()]
    axes[0][0].legend(handles=handles, loc="upper right", frameon=False, fontsize=6)
    figure.supxlabel("distance t − s, in tokens", fontsize=8, y=0.02)
    return figure


PARTS = {"latents": ("C0-", "latents"), "scores": ("C1--", "window or softmax")}


def _profiles(axis: "Axes", measured: LayerMeasures) -> None:
    if measured.latent_reach is not None:
        _profile_lines(axis, measured.heads_reach().profile(), PARTS["latents"][0])
    if measured.score_reach is not None:
        _profile_lines(axis, measured.score_reach.profile(), PARTS["scores"][0])
    count = max(len(r.lags) for r in (measured.latent_reach, measured.score_reach) if r is not None)
    ticks = list(range(0, count + 1, 2))
    axis.set_xticks(ticks, ["0" if tick == 0 else _thousands(2 ** (tick - 1)) for tick in ticks])


def _profile_lines(axis: "Axes", profiles: Tensor, style: str) -> None:
    for head in profiles.tolist():
        axis.plot(range(len(head)), head, style, alpha=0.6, linewidth=1)


@styled
def usage_over_training(history: UsageHistory) -> "Figure":
    """Latents in effect, the window's share, and heads collapsed or idle as training goes on, a colour per layer.

    Thick lines are means over heads, thin ones single heads.
    """
    figure, axes = _grid(1, 3, width=2.2, height=1.8, between=(0.45, 0))
    effect, window, lost = axes[0]
    effect.set_title("latents in effect")
    window.set_title("window's share, mean p(0|t)")
    lost.set_title("heads collapsed, and idle (dashed)")
    for layer, name in enumerate(history.names):
        colour = f"C{layer % 10}"
        _head_lines(effect, history.steps, history.effective_latents[:, layer], colour)
        if history.window_share is not None:
            _head_lines(window, history.steps, history.window_share[:, layer], colour)
        for heads, style in ((history.collapsed & ~history.idle, "-"), (history.idle, "--")):
            label = _short(name) if style == "-" else None
            lost.plot(
                history.steps, heads[:, layer].sum(dim=1).numpy(), style, color=colour, linewidth=1.2, label=label
            )
    if history.window_share is None:
        window.text(0.5, 0.5, "no window", ha="center", va="center", transform=window.transAxes)
    effect.set_ylim(bottom=0)
    for axis in axes[0]:
        axis.set_xlabel("step")
    lost.legend(loc="center left", bbox_to_anchor=(1, 0.5), frameon=False, fontsize=6)
    return figure


def _head_lines(axis: "Axes", steps: list[int], values: Tensor, colour: str) -> None:
    """A thick line for the mean over heads of values [steps H], thin ones for the heads."""
    axis.plot(steps, values.numpy(), color=colour, linewidth=0.5, alpha=0.5)
    axis.plot(steps, values.mean(dim=1).numpy(), color=colour, linewidth=1.6)


def save(figure: "Figure", path: Path) -> None:
    """Write a figure whole or not at all; the path's ending says in which format."""
    import matplotlib

    kind = path.suffix.removeprefix(".")
    if kind not in FORMATS:
        raise ValueError(f"{path}: figures are written as {', '.join(FORMATS)}; end the name with one of them")
    metadata = {"png": {}, "svg": {"Date": None}, "pdf": {"CreationDate": None}}[kind]
    with replacing(path) as file, matplotlib.rc_context(STYLE):
        figure.savefig(file, format=kind, dpi=160, metadata=metadata)


LEFT, RIGHT, TOP, BOTTOM = 0.75, 1.0, 0.3, 0.6  # inches around a grid
BETWEEN = 0.12  # inches between panels, unless told


def _grid(
    rows: int,
    columns: int,
    *,
    width: float,
    height: float,
    between: tuple[float, float] = (BETWEEN, BETWEEN),
    **more: Any,
) -> tuple["Figure", Any]:
    """Panels of a size in inches; a layout that is computed instead would take minutes for a hundred of them."""
    from matplotlib.figure import Figure

    across, down = between
    size = (
        LEFT + columns * width + (columns - 1) * across + RIGHT,
        TOP + rows * height + (rows - 1) * down + BOTTOM,
    )
    figure = Figure(figsize=size)
    place = {
        "left": LEFT / size[0], "right": 1 - RIGHT / size[0], "top": 1 - TOP / size[1], "bottom": BOTTOM / size[1],
        "wspace": across / width, "hspace": down / height,
    }  # fmt: skip
    return figure, figure.subplots(rows, columns, squeeze=False, gridspec_kw=place, **more)


def _title(axis: "Axes", row: int, head: int, layer: str) -> None:
    if row == 0:
        axis.set_title(f"head {head}")
    if head == 0:
        axis.set_ylabel(layer)


def _row_ticks(axis: "Axes", head: int, rows: int, labels: list[str]) -> None:
    """The first and the last row's labels, for the first head alone."""
    if head == 0:
        axis.set_yticks([0, rows - 1], labels)
    else:
        axis.set_yticks([])


def _token_ticks(axis: "Axes", texts: Sequence[str], *, shown: bool) -> None:
    if not shown or len(texts) > LABELLED:
        axis.set_xticks([0, len(texts) - 1] if shown else [])
        return
    labels = [text.replace("\n", "↵").replace(" ", "␣").replace("$", r"\$")[:10] for text in texts]
    axis.set_xticks(range(len(texts)), labels, rotation=90, fontsize=5)


def _colour_bar(figure: "Figure", image: Any, label: str) -> Any:
    """To the right of all panels, three inches high at most."""
    width, height = figure.get_size_inches()
    inside = height - TOP - BOTTOM
    high = min(3.0, inside)
    box = (1 - 0.65 / width, (BOTTOM + (inside - high) / 2) / height, 0.1 / width, high / height)
    return figure.colorbar(image, cax=figure.add_axes(box), label=label)


def _beside(axis: "Axes", labels: Sequence[str]) -> None:
    """Numbers to the right of a map's rows."""
    for row, label in enumerate(labels):
        axis.annotate(
            label, (1.01, row), xycoords=("axes fraction", "data"), va="center", fontsize=6, annotation_clip=False
        )


def _first_state(trace: LayerTrace) -> str:
    return "1" if trace.form.window is None else "window"


def _short(name: str) -> str:
    """The number of a layer, where its name has one."""
    numbers = [part for part in name.split(".") if part.isdigit()]
    return f"layer {numbers[0]}" if len(numbers) == 1 else name


def _thousands(number: int) -> str:
    return f"{number // 1024}K" if number >= 1024 else str(number)
