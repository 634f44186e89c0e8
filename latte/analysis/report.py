"""One self-contained HTML page of what a tour saw."""

from collections.abc import Iterable, Sequence
from html import escape

from latte.analysis.figures import svg_heat_map, svg_line_chart
from latte.analysis.tour import CutCheck, Reading, Speed, Steps, Tour

STYLE = """
:root { color-scheme: light dark; --page: #fbfaf8; --ink: #24211e; --faint: #6f6860; --rule: #e2ddd6; --plate: #f1ede7;
  --series-1: #b3541e; --series-2: #1f6f8b; --series-3: #6b4fa0; --cell: #1f6f8b; }
@media (prefers-color-scheme: dark) { :root { --page: #181614; --ink: #ece7e0; --faint: #a39a8f; --rule: #3a352f;
  --plate: #24211d; --series-1: #f0935a; --series-2: #5fb8d6; --series-3: #b39be6; --cell: #6cc4e0; } }
body { margin: 0 auto; max-width: 52rem; padding: 2rem 1.25rem 4rem; background: var(--page); color: var(--ink);
  font: 16px/1.55 system-ui, sans-serif; }
h1 { font-size: 1.7rem; margin-bottom: 0; } h2 { font-size: 1.2rem; margin-top: 2.5rem; }
p, figcaption { color: var(--faint); } figure { margin: 0; }
.row { display: flex; flex-wrap: wrap; gap: 1.5rem; } .row figure { flex: 1 1 14rem; max-width: 15.5rem; }
figcaption { font-size: .85rem; } figcaption b { color: var(--ink); } figcaption span { white-space: nowrap; }
svg { max-width: 100%; height: auto; } .chart { width: 100%; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; width: 100%; }
th, td { text-align: right; padding: .35rem .6rem; border-bottom: 1px solid var(--rule); }
th { font-weight: 600; } th:first-child, td:first-child { text-align: left; }
.plate { fill: var(--plate); } .cell { fill: var(--cell); } .grid { stroke: var(--rule); }
.label { fill: var(--faint); font-size: 12px; } .name { font-size: 13px; font-weight: 600; }
.end { text-anchor: end; } .middle { text-anchor: middle; }
"""


def render_report(tour: Tour) -> str:
    """Render the tour as an HTML page that loads nothing from elsewhere."""
    sections = [
        readings_section(tour.readings),
        cuts_section(tour.cuts),
        speed_section(tour.speed),
        steps_section(tour.steps),
    ]
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>Latte on this machine</title><style>{STYLE}</style></head><body>\n"
        "<h1>Latte on this machine</h1>\n<p>Attention as a latent probabilistic model, in linear time.</p>\n"
        f"{''.join(sections)}</body></html>\n"
    )


def section(title: str, explanation: str, body: str) -> str:
    """A heading, a paragraph and what they are about."""
    return f"<section><h2>{escape(title)}</h2><p>{escape(explanation)}</p>{body}</section>\n"


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """An HTML table of plain text."""
    head = "".join(f"<th>{escape(cell)}</th>" for cell in header)
    body = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows)
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def readings_section(readings: list[Reading]) -> str:
    """The attention matrices, side by side."""
    figures = "".join(
        f"<figure>{svg_heat_map(reading.weights, title=f'p(s|t) of {reading.name}')}"
        f"<figcaption><b>{escape(reading.name)}</b>: {escape(reading.meaning)}. "
        f"Rows sum to 1 within <span>{reading.largest_row_error:.1e}</span>.</figcaption></figure>"
        for reading in readings
    )
    explanation = "A row per token t, a column per token s; the colour is p(s|t), the weight of s in the output at t."
    return section("Attention is a probability", explanation, f'<div class="row">{figures}</div>')


def cuts_section(cuts: list[CutCheck]) -> str:
    """How far two pieces are from one."""
    rows = [(cut.name, f"{cut.tokens:,}", f"{cut.cut:,}", f"{cut.largest_difference:.1e}") for cut in cuts]
    explanation = "The state is all that the past contributes: a sequence run in two pieces gives what one piece gives."
    return section("Cut = whole", explanation, table(["op", "tokens", "cut after", "largest difference"], rows))


def speed_section(speed: Speed) -> str:
    """Time per token as a chart and as numbers."""
    chart = svg_line_chart(
        speed.lengths,
        {curve.name: curve.microseconds_per_token for curve in speed.curves},
        title="Time per token against the length of the sequence",
        x_label="tokens in the sequence",
        y_label="µs per token, forward pass",
    )
    rows = [
        (f"{length:,}", *(f"{curve.microseconds_per_token[index]:.2f}" for curve in speed.curves))
        for index, length in enumerate(speed.lengths)
    ]
    numbers = table(["tokens", *(f"{curve.name}, µs" for curve in speed.curves)], rows)
    explanation = f"Softmax attention pays for the whole context at every token. Measured in {speed.setting}."
    return section("Linear time", explanation, chart + numbers)


def steps_section(steps: list[Steps]) -> str:
    """What one more token costs."""
    rows = [
        (
            step.name,
            f"{step.context:,}",
            f"{step.microseconds:.0f}",
            f"{step.state_bytes:,}",
            f"{step.kv_cache_bytes:,}",
        )
        for step in steps
    ]
    header = ["op", "context", "step, µs", "state, bytes", "softmax cache, bytes"]
    explanation = "Generating one more token takes the same time and memory however long the context is."
    return section("Constant memory", explanation, table(header, rows))
