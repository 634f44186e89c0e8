"""The report in a real browser: it loads without a complaint, and pointing and clicking show what Python computes."""

import json

import pytest
import torch

from latte import LatteForSequenceClassification
from latte.analysis.inspection import Inspection, inspect_tokens
from latte.analysis.page import head_measures, render_page
from latte.analysis.rows import attention_row, trace
from latte.analysis.token_texts import token_texts
from tests.analysis.small import HEADS, LATENTS, WINDOW, make_model
from tests.browser.devtools import Page

TEXT = "def brew(cup):\n    return 'latte & <b>foam</b>'  # ä, 🙂\n" * 3 + "</script><script>window.broken = 1</script>"
IDS = torch.tensor(list(TEXT.encode()))
HEAD, TOKEN, STATE = 1, 40, 3
NAME = "model.layers.1.attention"


def decode(tokens):
    return bytes(tokens).decode(errors="replace")


def write_report(path, form, ids=IDS, **settings):
    model = make_model(form, vocab_size=256, **settings)
    seen = inspect_tokens(model, ids)
    path.write_text(render_page(seen, token_texts(seen.ids, decode), title="A <model>"), encoding="utf-8")
    return model, seen


class Opened:
    def __init__(self, browser, path, form, **settings):
        self.model, self.seen = write_report(path, form, **settings)
        browser.events.clear()
        self.page = Page(browser)
        self.page.prefer("light")
        self.page.open(path)

    def go(self, layer, head):
        self.page.evaluate(f"report.letGo(); report.go({layer}, {head})")

    def row(self, token, name=NAME):
        return attention_row(trace(self.model, IDS)[name], token)


@pytest.fixture(scope="module", params=["macchiato", "latte"])
def opened(request, browser, tmp_path_factory):
    return Opened(browser, tmp_path_factory.mktemp("report") / "report.html", request.param)


@pytest.fixture
def page(opened):
    """At rest, with the second layer's head shown."""
    opened.go(1, HEAD)
    opened.page.send("Input.dispatchMouseEvent", type="mouseMoved", x=5, y=5)
    return opened.page


def numbers(page, selector):
    script = f"[...document.querySelectorAll({json.dumps(selector)})].map((node) => node.textContent)"
    return [float(text) for text in page.evaluate(script)]


def listed(page, selector):
    """The tokens and the weights of a list."""
    rows = page.evaluate(
        f"[...document.querySelectorAll('{selector} .row')].map((row) => [Number(row.dataset.token), "
        "Number(row.querySelector('.number').textContent)])"
    )
    return [row[0] for row in rows], [row[1] for row in rows]


def test_it_loads_without_a_complaint_and_shows_the_text(opened, page):
    assert page.complaints() == []
    assert page.text("h1") == "A <model>"
    assert page.evaluate("report.texts.join('')") == TEXT
    assert page.evaluate("window.broken") is None
    assert page.evaluate("document.querySelectorAll('#text b').length") == 0
    shown = page.evaluate("[...document.querySelectorAll('#text .line')].map((line) => line.textContent).join('')")
    assert shown.startswith("def brew(cup):↵    return 'latte & <b>foam</b>'")


def test_pointing_shows_the_choice(opened, page):
    states = opened.seen.records[1].form.num_states
    for token in (TOKEN, TOKEN + 1):
        page.hover(f'[data-token="{token}"]')
        page.wait_for(f"document.querySelector('#token-title').textContent.startsWith('Token {token} ')")
        shown = numbers(page, "#states .number")
        assert len(shown) == states
        assert shown == pytest.approx(opened.row(token).states[HEAD].tolist(), abs=6e-4)


def test_the_grid_has_every_layer_and_head(opened, page):
    """What is drawn for another head is what that head chooses; a click goes there."""
    page.hover(f'[data-token="{TOKEN}"]')
    for layer in range(2):
        row = opened.row(TOKEN, f"model.layers.{layer}.attention")
        for head in range(HEADS):
            drawn = page.evaluate(f"report.layers[{layer}].choice({head}, {TOKEN})")
            assert drawn == pytest.approx(row.states[head].tolist(), abs=1e-5)
    before = page.evaluate("document.querySelector('#matrix').toDataURL()")
    page.hover(f'[data-token="{TOKEN + 5}"]')
    assert page.evaluate("document.querySelector('#matrix').toDataURL()") != before
    left = page.evaluate(
        "(() => { const box = document.querySelector('#matrix').getBoundingClientRect(); "
        "const { label, cell, height } = report.grid; return [box.x + label + cell * 0.5, box.y + height * 0.5]; })()"
    )
    for kind in ("mousePressed", "mouseReleased"):
        page.send("Input.dispatchMouseEvent", type=kind, x=left[0], y=left[1], button="left", clickCount=1)
    page.wait_for("report.layer === 0 && report.head === 0")
    assert page.evaluate("[document.querySelector('#layer').value, document.querySelector('#head').value]") == [
        "0",
        "0",
    ]


def test_clicking_shows_what_a_token_attends_to(opened, page):
    page.click(f'[data-token="{TOKEN}"]')
    page.wait_for("document.querySelectorAll('#attends .row').length > 0")
    row = opened.row(TOKEN)
    tokens, weights = listed(page, "#attends")
    exact = row.weights[HEAD]
    assert weights == pytest.approx([exact[token].item() for token in tokens], abs=6e-4)
    assert weights == pytest.approx(exact.topk(len(tokens)).values.tolist(), abs=6e-4)
    everything = page.evaluate(f"Array.from(report.current.row({HEAD}, {TOKEN}).weights)")
    assert everything == pytest.approx(exact.tolist(), abs=1e-4)  # a window of 7 is kept whole
    for place in tokens[:4]:
        parts = page.evaluate(f"report.current.parts({HEAD}, {TOKEN}, {place})")
        latents = row.through(torch.tensor([place]))[HEAD, 0].tolist()
        local = [] if row.local is None else [exact[place].item() - sum(latents)]
        assert parts == pytest.approx(local + latents, abs=1e-4)
    assert "attends to" in page.text("#attends-title")
    if row.local is not None:
        assert page.text("#split-words").startswith(f"Window {row.local_share[HEAD]:.3f}")
    colours = page.evaluate(
        f"[{tokens[0]}, {TOKEN + 1}].map((token) => document.getElementById(`token-${{token}}`).style.backgroundColor)"
    )
    assert "0.75" in colours[0]  # the most attended has the strongest colour, the future none
    assert colours[1] == ""


def test_clicking_a_latent_shows_what_it_gathers(opened, page):
    page.click(f'[data-token="{TOKEN}"]')
    page.click(f'#states [data-state="{STATE}"]')
    page.wait_for("document.querySelectorAll('#gathers .row').length > 0")
    record = opened.seen.records[1]
    latent = STATE - (record.form.num_states - LATENTS)
    keys = trace(opened.model, IDS)[NAME].parts.latent_key[: TOKEN + 1, HEAD, latent]
    gathered = torch.softmax(keys.double(), dim=0)
    tokens, weights = listed(page, "#gathers")
    assert weights == pytest.approx(gathered.topk(len(tokens)).values.tolist(), abs=6e-4)
    assert weights == pytest.approx([gathered[token].item() for token in tokens], abs=6e-4)
    chosen = torch.softmax(trace(opened.model, IDS)[NAME].parts.latent_query[:, HEAD], dim=-1)[:, STATE]
    assert listed(page, "#choosers")[1] == pytest.approx(chosen.topk(12).values.tolist(), abs=6e-4)
    assert page.evaluate(f"document.querySelector('#states [data-state=\"{STATE}\"]').ariaPressed") == "true"
    assert f"up to token {TOKEN}" in page.text("#legend")
    page.click(f'#states [data-state="{STATE}"]')  # again: let go
    page.wait_for("document.querySelectorAll('#gathers .row').length === 0")


def test_keys_alone_are_enough(opened, page):
    page.evaluate("document.querySelector('#text').focus()")
    page.press("Home")
    for key in ("ArrowRight", "ArrowRight", "ArrowDown", "ArrowUp"):
        page.press(key)
    assert page.evaluate("report.cursor") == 2
    assert page.text("#token-title").startswith("Token 2 ")
    assert page.evaluate("document.querySelector('#text').getAttribute('aria-activedescendant')") == "token-2"
    page.press("Enter")
    page.wait_for("document.querySelectorAll('#attends .row').length > 0")
    assert page.evaluate("document.getElementById('token-2').ariaSelected") == "true"
    page.press("[")
    page.wait_for("report.layer === 0")
    page.press(".")
    page.wait_for(f"report.head === {HEAD + 1}")
    page.press("Escape")
    page.wait_for("report.selected === -1 && document.querySelectorAll('#attends .row').length === 0")
    page.evaluate("document.querySelector('#states button').focus()")
    page.press("?")
    assert page.evaluate("document.querySelector('#help').open") is True
    page.evaluate("document.querySelector('#help').close()")
    page.evaluate("document.querySelector('#text').focus()")
    page.press("End")
    assert page.evaluate("report.cursor") == len(IDS) - 1


def test_light_and_dark(page):
    background = "getComputedStyle(document.body).backgroundColor"
    light = page.evaluate(background)
    page.prefer("dark")
    dark = page.evaluate(background)
    assert light != dark
    page.click("#theme")
    assert page.evaluate(background) == light
    page.prefer("light")
    assert page.evaluate(background) == light
    page.click("#theme")
    assert page.evaluate(background) == dark
    page.evaluate("delete document.documentElement.dataset.theme")


def test_the_table_has_the_measures(opened, page):
    rows = page.evaluate("[...document.querySelectorAll('#measures tbody tr')].map((row) => row.cells[2].textContent)")
    expected = [f"{head['effective']:.1f}" for head in head_measures(opened.seen)]
    assert rows == expected
    page.evaluate("document.querySelector('#summary').open = true")
    page.click("#measures tbody tr:nth-child(1)")
    page.wait_for("report.layer === 0 && report.head === 0")
    page.evaluate("document.querySelector('#summary').open = false")
    assert page.complaints() == []


def test_a_model_without_latents(browser, tmp_path):
    opened = Opened(browser, tmp_path / "report.html", "softmax")
    page = opened.page
    assert "no latents" in page.text("#states")
    opened.go(1, HEAD)
    page.click(f'[data-token="{TOKEN}"]')
    page.wait_for("document.querySelectorAll('#attends .row').length > 0")
    tokens, weights = listed(page, "#attends")
    exact = opened.row(TOKEN).weights[HEAD]
    assert weights == pytest.approx(exact.topk(8).values.tolist()[: len(weights)], abs=6e-4)
    assert [exact[token].item() for token in tokens] == pytest.approx(weights, abs=6e-4)
    rest = page.evaluate(f"report.current.row({HEAD}, {TOKEN}).rest")
    assert rest == pytest.approx(1 - exact.topk(8).values.sum().item(), abs=1e-4)
    assert page.complaints() == []


@pytest.mark.parametrize("form", ["macchiato", "softmax"])
def test_a_model_that_reads_both_ways(browser, tmp_path, form):
    settings = {"mixer": "conv"} if form == "macchiato" else {}
    kind = {"kind": LatteForSequenceClassification, "causal": False, "pad_token_id": 0}
    opened = Opened(browser, tmp_path / "report.html", form, **settings, **kind)
    page = opened.page
    opened.go(1, HEAD)
    exact = opened.row(TOKEN).weights[HEAD]
    page.click(f'[data-token="{TOKEN}"]')
    page.wait_for("document.querySelectorAll('#attends .row').length > 0")
    tokens, weights = listed(page, "#attends")
    assert [exact[token].item() for token in tokens[:4]] == pytest.approx(weights[:4], abs=1e-3)
    assert weights == pytest.approx(exact.topk(len(tokens)).values.tolist(), abs=2e-3)
    found = page.evaluate(f"report.current.near({HEAD}, {TOKEN}).map(([place]) => place)")
    assert max(found) > TOKEN > min(found)
    ways = page.evaluate(
        "[...document.querySelectorAll('#attends .name small')].map((node) => node.textContent.trim())"
    )
    away = [token - TOKEN for token in tokens]
    assert ways == [f"+{d}" if d > 0 else f"−{-d}" if d else "itself" for d in away]
    assert page.complaints() == []


def test_sixteen_thousand_tokens_stay_smooth(browser, tmp_path):
    words = (TEXT * 120).encode()[:16_384]
    path = tmp_path / "report.html"
    _, seen = write_report(path, "macchiato", torch.tensor(list(words)))
    assert isinstance(seen, Inspection)
    browser.events.clear()
    page = Page(browser)
    page.open(path)
    assert page.evaluate("report.texts.length") == 16_384
    assert page.evaluate("document.querySelectorAll('.token').length") < 6000  # only what is in sight
    assert page.evaluate(SCROLL) < 100  # milliseconds of work for a jump by half a page, on a busy machine
    page.evaluate("report.select(16383, true)")
    page.wait_for("document.querySelectorAll('#attends .row').length > 0")
    assert page.evaluate("document.getElementById('token-16383') !== null")
    assert page.complaints() == []


SCROLL = """(async () => {
  const text = document.getElementById("text");
  const times = [];
  for (let step = 0; step < 41; step++) {
    text.scrollTop += 400;
    const start = performance.now();
    report.view.render();
    text.getBoundingClientRect();
    times.push(performance.now() - start);
    await new Promise((resolve) => requestAnimationFrame(resolve));
  }
  return times.sort((a, b) => a - b)[20];
})()"""


def test_the_window_is_kept_whole_here():
    assert WINDOW <= 8  # otherwise rows above would not be exact
