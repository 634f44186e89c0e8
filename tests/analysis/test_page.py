"""What the page is given: numbers to 16 bits, texts that cannot break it, and nothing from elsewhere."""

import base64
import json
import re
import zlib

import numpy as np
import pytest
import torch

from latte import LatteForSequenceClassification
from latte.analysis.inspection import Inspection, inspect_tokens, shown_tokens
from latte.analysis.page import pack, render_page
from latte.analysis.projections import layer_forms
from latte.analysis.records import NEAREST, STEPS, bytes_per_token
from latte.analysis.rows import attention_row, trace
from latte.analysis.token_texts import token_texts
from tests.analysis.small import FORMS, HEADS, LATENTS, make_model, make_tokens

T = 43


def unpacked(text, dtype="<u2"):
    data = zlib.decompress(base64.b64decode(text), wbits=-15)
    planes = np.frombuffer(data, dtype=np.uint8).reshape(2, -1)
    return planes.T.copy().view(dtype).ravel()


def test_blocks_hold_all_numbers():
    numbers = np.random.default_rng(0).integers(0, STEPS + 1, (3, 5, 7)).astype(np.uint16)
    assert (unpacked(pack(numbers)) == numbers.ravel()).all()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("chunk", [5, 100])
def test_records_give_attention_again(form, chunk):
    model, tokens = make_model(form), make_tokens(T)
    seen = inspect_tokens(model, tokens, chunk=chunk, shown=T - 2)
    traces = trace(model, tokens)
    for record in seen.records:
        layer = traces[record.form.name]
        for token in (0, 3, T - 3):
            row = attention_row(layer, token)
            if record.states is not None:
                assert record.states.shape == (HEADS, T - 2, record.form.num_states)
                np.testing.assert_allclose(record.states[:, token] / STEPS, row.states, atol=0.5001 / STEPS)
                keys = record.key_low[:, None] + record.key_step[:, None] * record.keys[:, : token + 1]
                weights = torch.softmax(torch.from_numpy(keys), dim=1)  # p(s|l,t) as [H s L]
                parts = weights * row.states[:, None, record.form.num_states - LATENTS :]
                torch.testing.assert_close(parts.double(), row.through(torch.arange(token + 1)), rtol=1e-3, atol=1e-6)
            if record.near_weight is not None:
                assert_nearest(record, row, token)


def assert_nearest(record, row, token):
    """The largest local weights, largest first, and where they are."""
    share = np.ones(HEADS) if row.states is None else row.states[:, 0].numpy()
    for head in range(HEADS):
        local = row.local[head].numpy() / share[head]
        count = min(NEAREST, len(local))
        expected = np.argsort(-local, kind="stable")[:count]
        assert record.near_weight[head, token, count:].tolist() == [0] * (NEAREST - count)
        weights = record.near_weight[head, token, :count] / STEPS
        np.testing.assert_allclose(weights, local[expected], atol=1 / STEPS)
        places = token - record.near_distance[head, token, :count].astype(int) - row.local_begin
        np.testing.assert_allclose(local[places], local[expected], atol=1e-6)


@pytest.mark.parametrize("form", ["macchiato", "window", "softmax"])
def test_records_of_a_model_that_reads_both_ways(form):
    settings = {} if form == "softmax" else {"mixer": "conv"}
    model = make_model(form, LatteForSequenceClassification, causal=False, pad_token_id=0, **settings)
    tokens = make_tokens(T)
    record, layer = inspect_tokens(model, tokens).records[1], trace(model, tokens)["model.layers.1.attention"]
    assert record.near_weight is not None
    ahead = 0
    for token in range(T):
        row = attention_row(layer, token)
        share = torch.ones(HEADS).double() if row.states is None else row.states[:, 0]
        for head in range(HEADS):
            local = torch.zeros(T).double()
            local[row.local_begin : row.local_begin + row.local.shape[1]] = row.local[head] / share[head]
            places = (token - record.near_distance[head, token].astype(int)) % 2**16
            weights = record.near_weight[head, token] / STEPS
            np.testing.assert_allclose(weights, local.topk(NEAREST).values.numpy(), atol=1 / STEPS)
            np.testing.assert_allclose(weights, local[places].numpy() * (weights > 0), atol=1 / STEPS)
            ahead += (places[weights > 0.01] > token).sum()
    assert ahead > T


def test_what_is_shown_is_what_can_be_told_apart():
    model = make_model("latte", LatteForSequenceClassification, causal=False, pad_token_id=0)
    with pytest.raises(ValueError, match=f"shown is {T - 1} and the text has {T} tokens; the model reads both ways"):
        inspect_tokens(model, make_tokens(T), shown=T - 1)
    with pytest.raises(ValueError, match="it must be at most 65536"):
        inspect_tokens(make_model("latte"), make_tokens(65_537), shown=65_537)


def test_a_page_fits_its_size():
    model = make_model()
    assert bytes_per_token(layer_forms(model)) == 2 * 2 * HEADS * (2 * LATENTS + 1 + 2 * NEAREST)
    assert shown_tokens(model, None, 1000) == 1000
    assert shown_tokens(model, [0], 10**9) // 2 == shown_tokens(model, None, 10**9)
    with pytest.raises(ValueError, match="no layer 2; the model has layers 0 to 1"):
        shown_tokens(model, [2], 10)


HOSTILE = "</script><script>alert(1)</script><!-- {{meta}} \u2028 ‮ \x00 & \"'"


def page_of(seen: Inspection, texts, **options):
    return render_page(seen, texts, title="<b>a & b</b>", **options)


def test_texts_cannot_break_the_page():
    seen = inspect_tokens(make_model(), make_tokens(3))
    page = page_of(seen, [HOSTILE] * 3, notes=["<i>note</i>"])
    assert "<script>alert" not in page
    assert "<i>note" not in page
    assert "<title>&lt;b&gt;a &amp; b&lt;/b&gt;</title>" in page
    meta = json.loads(re.search(r'id="meta">(.*?)</script>', page, re.DOTALL)[1])
    assert meta["texts"] == [HOSTILE] * 3
    assert meta["notes"] == ["<i>note</i>"]


def test_the_page_loads_nothing_from_elsewhere():
    page = page_of(inspect_tokens(make_model(), make_tokens(T)), ["x"] * T)
    assert not re.search(r"https?://|<img|@import|url\(|src=", page)
    assert set(re.findall(r'href="([^"]*)"', page)) == {"data:,"}


def test_meta_has_the_measures():
    seen = inspect_tokens(make_model(), make_tokens(T), layers=[1])
    meta = json.loads(re.search(r'id="meta">(.*?)</script>', page_of(seen, ["x"] * T), re.DOTALL)[1])
    assert [layer["number"] for layer in meta["layers"]] == ["1"]
    assert len(meta["heads"]) == 2 * HEADS  # measures are of all layers
    assert {head["row"] for head in meta["heads"]} == {None, 0}
    usage = seen.measures[1].usage
    assert [head["effective"] for head in meta["heads"][HEADS:]] == pytest.approx(usage.effective_latents.tolist())
    assert meta["start"] == {"layer": 0, "head": int(usage.information.argmax())}
    assert "43 tokens" in meta["about"]


def decode_bytes(tokens):
    return bytes(tokens).decode(errors="replace")


@pytest.mark.parametrize("text", ["plain", "aé–ß🙂z", "🙂🙂", "é"])
def test_token_texts_put_together_are_the_text(text):
    ids = list(text.encode())
    texts = token_texts(ids, decode_bytes)
    assert len(texts) == len(ids)
    assert "".join(texts) == text


def test_tokens_that_are_no_letters():
    ids = [0xFF] * 12 + list(b"ok") + [0xC3]
    texts = token_texts(ids, decode_bytes)
    assert "".join(texts).replace("\N{REPLACEMENT CHARACTER}", "") == "ok"
    assert texts[13] == "k"
