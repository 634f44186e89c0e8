"""The demonstration's report: one HTML page that loads nothing from elsewhere."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape

from latte.analysis.figures import svg_line_chart

STYLE = """
:root { color-scheme: light dark; --page: #fbfaf8; --ink: #24211e; --faint: #6f6860; --rule: #e2ddd6; --plate: #f1ede7;
  --series-1: #b3541e; --series-2: #1f6f8b; --series-3: #6b4fa0; }
@media (prefers-color-scheme: dark) { :root { --page: #181614; --ink: #ece7e0; --faint: #a39a8f; --rule: #3a352f;
  --plate: #24211d; --series-1: #f0935a; --series-2: #5fb8d6; --series-3: #b39be6; } }
body { margin: 0 auto; max-width: 52rem; padding: 2rem 1.25rem 4rem; background: var(--page); color: var(--ink);
  font: 16px/1.55 system-ui, sans-serif; }
h1 { font-size: 1.7rem; margin-bottom: 0; } h2 { font-size: 1.2rem; margin-top: 2.5rem; }
p { color: var(--faint); }
pre { background: var(--plate); padding: 1rem; overflow-x: auto; font-size: .85rem; line-height: 1.45; }
pre b { color: var(--series-1); }
iframe { width: 100%; height: 46rem; border: 1px solid var(--rule); border-radius: .4rem; background: var(--page); }
svg { max-width: 100%; height: auto; } .chart { width: 100%; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; width: 100%; }
th, td { text-align: right; padding: .35rem .6rem; border-bottom: 1px solid var(--rule); }
th { font-weight: 600; } th:first-child, td:first-child { text-align: left; }
 .grid { stroke: var(--rule); }
.label { fill: var(--faint); font-size: 12px; } .name { font-size: 13px; font-weight: 600; }
.end { text-anchor: end; } .middle { text-anchor: middle; }
"""


@dataclass(frozen=True)
class Lesson:
    """How a model learned."""

    preset: str
    parameters: int
    source: str  # what it read
    steps: int
    tokens: int
    seconds: float
    training: list[tuple[int, float]]  # tokens so far, loss
    validation: list[tuple[int, float]]
    bits_per_byte: float


@dataclass(frozen=True)
class Writing:
    """What it wrote, and what its state took before and after."""

    prompt: str
    text: str
    tokens: int
    tokens_per_s: float
    state_bytes_before: int
    state_bytes_after: int


@dataclass(frozen=True)
class Costs:
    """What one more token costs a model after each of the contexts."""

    name: str
    milliseconds: list[float]
    cache_bytes: list[int]
    reading_tokens_per_s: list[float]


@dataclass(frozen=True)
class Story:
    """All that the demonstration saw; `setting` says on what machine."""

    lesson: Lesson
    writing: Writing
    contexts: list[int]
    costs: list[Costs]
    setting: str


def render_report(story: Story, latents_page: str) -> str:
    """The story as a page; `latents_page` is a whole page of its own, shown within."""
    sections = [
        lesson_section(story.lesson),
        writing_section(story.writing),
        costs_section(story),
        latents_section(latents_page),
    ]
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>Latte on this machine</title><style>{STYLE}</style></head><body>\n"
        "<h1>Latte on this machine</h1>\n<p>A small Macchiato language model, trained, run and looked at here: "
        f"{escape(story.setting)}.</p>\n{''.join(sections)}</body></html>\n"
    )


def section(title: str, explanation: str, body: str) -> str:
    """A heading, a paragraph and what they are about."""
    return f"<section><h2>{escape(title)}</h2><p>{escape(explanation)}</p>{body}</section>\n"


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """An HTML table of plain text."""
    head = "".join(f"<th>{escape(cell)}</th>" for cell in header)
    body = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows)
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def lesson_section(lesson: Lesson) -> str:
    """Loss against tokens."""
    chart = svg_line_chart(
        {"training": lesson.training, "validation": lesson.validation},
        title="Loss against tokens read",
        x_label="tokens read",
        y_label="loss, nats per token",
        dots=False,
    )
    explanation = (
        f"{lesson.preset}, {lesson.parameters:,} parameters, read {lesson.tokens:,} tokens of {lesson.source} in "
        f"{lesson.steps:,} steps and {lesson.seconds:.0f} s, {lesson.tokens / lesson.seconds:,.0f} a second. Files it "
        f"has not read cost it {lesson.bits_per_byte:.2f} bits per byte."
    )
    return section("It learns", explanation, chart)


def writing_section(writing: Writing) -> str:
    """The prompt and what follows it."""
    explanation = (
        f"{writing.tokens:,} tokens after a prompt, {writing.tokens_per_s:,.0f} a second. All that it remembers took "
        f"{writing.state_bytes_before:,} bytes after the prompt and {writing.state_bytes_after:,} at the end."
    )
    return section("It writes", explanation, f"<pre><b>{escape(writing.prompt)}</b>{escape(writing.text)}</pre>")


def costs_section(story: Story) -> str:
    """Time and memory of one more token, as a chart and as numbers."""
    chart = svg_line_chart(
        {costs.name: list(zip(story.contexts, costs.milliseconds, strict=True)) for costs in story.costs},
        title="Time of one more token against the context",
        x_label="tokens before",
        y_label="ms for one more token",
        doubling=True,
    )
    rows = [
        (f"{context:,}", *(cell for costs in story.costs for cell in cost_cells(costs, index)))
        for index, context in enumerate(story.contexts)
    ]
    header = [f"{costs.name}, {what}" for costs in story.costs for what in ("ms", "bytes")]
    explanation = (
        "Softmax attention keeps every token and looks at all of them each time. Macchiato keeps a state that does not "
        "grow, so one more token costs the same however many came before. Both models have the same size."
    )
    return section("Constant time and memory", explanation, chart + table(["tokens before", *header], rows))


def cost_cells(costs: Costs, index: int) -> tuple[str, str]:
    return f"{costs.milliseconds[index]:.2f}", f"{costs.cache_bytes[index]:,}"


def latents_section(page: str) -> str:
    """The page of `latte inspect`, within."""
    explanation = (
        "What the trained model does with a file that it has not read. Point at a token to see through which latents "
        "it looks, click it to see where to; click a latent to see the tokens that it gathers."
    )
    return section("Its latents", explanation, f'<iframe title="latents" srcdoc="{escape(page)}"></iframe>')
