"""Measures read in pieces are those of plain sums over all pairs of tokens."""

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

from latte import LatteForSeq2SeqLM, LatteForSequenceClassification
from latte.analysis.measures import head_agreement, measure
from latte.analysis.projections import layer_forms
from latte.analysis.reach import LatentReach, Reach, ScoreReach, two_way_reach
from latte.analysis.usage import LayerUsage, UsageMeter
from tests.analysis.small import HEADS, LATENTS, WINDOW, make_model, make_tokens, slow_logits

T = 151  # beyond a lag of 128, where not every token is sampled


def slow_reach(p, weights, lag, stride=1):
    """Mean distance and what lies `lag` back or farther, weighted by p [T]; weights [T T] are p(s|l,t)."""
    place = torch.arange(len(p))
    distance = (place[:, None] - place).abs()
    mean = (p * (weights * distance).sum(dim=1)).sum() / p.sum()
    far = (weights * (distance >= lag)).sum(dim=1)[::stride]
    return mean.item(), ((p[::stride] * far).sum() / p[::stride].sum()).item()


def causal_weights(keys):
    """p(s|l,t) as [T T] of key logits [T]."""
    scores = keys.expand(len(keys), -1).masked_fill(torch.ones(len(keys), len(keys)).triu(1).bool(), -torch.inf)
    return torch.softmax(scores, dim=-1)


@pytest.mark.parametrize("chunk", [1, 64, T])
def test_latents_look_back_as_far_as_all_pairs_say(chunk):
    torch.manual_seed(0)
    keys, p = 5 * torch.randn(T, 2, 3, dtype=torch.float64), torch.rand(T, 2, 3, dtype=torch.float64)
    meter = LatentReach(T)
    for start in range(0, T, chunk):
        meter.add(p[start : start + chunk], keys[start : start + chunk])
    reach = meter.result()
    assert reach.lags.tolist() == [1, 2, 4, 8, 16, 32, 64, 128]
    for head in range(2):
        for latent in range(3):
            weights = causal_weights(keys[:, head, latent])
            for index, lag in enumerate(reach.lags.tolist()):
                mean, tail = slow_reach(p[:, head, latent], weights, lag, stride=max(1, lag // 64))
                assert reach.tails[head, latent, index].item() == pytest.approx(tail, abs=1e-12)
            assert reach.mean[head, latent].item() == pytest.approx(mean, abs=1e-9)


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 200), st.lists(st.integers(1, 199), max_size=4), st.floats(0, 300), st.integers(0, 2**16))
def test_cutting_anywhere_changes_nothing(length, cuts, size, seed):
    generator = torch.Generator().manual_seed(seed)
    keys = size * torch.randn(length, 2, 3, dtype=torch.float64, generator=generator)
    p = torch.rand(length, 2, 3, dtype=torch.float64, generator=generator)
    whole, cut = LatentReach(length), LatentReach(length)
    whole.add(p, keys)
    bounds = sorted({0, length, *(place for place in cuts if place < length)})
    for start, stop in pairwise(bounds):
        cut.add(p[start:stop], keys[start:stop])
    assert_close((cut.result().mean, cut.result().tails), (whole.result().mean, whole.result().tails))
    tails = whole.result().tails
    assert (tails >= 0).all()
    assert (tails.diff(dim=-1) <= 0).all()
    assert (whole.result().profile().sum(dim=-1) - 1).abs().max() < 1e-9
    assert whole.result().within(0.5).le(whole.result().within(0.9) + 1e-9).all()


def test_huge_logits_stay_exact():
    keys = torch.zeros(T, 1, 2, dtype=torch.float64)
    keys[10, 0, 0], keys[20, 0, 0] = 1e4, -1e4  # all weight on token 10 once it is there
    p = torch.zeros(T, 1, 2, dtype=torch.float64)
    p[90] = 1.0
    meter = LatentReach(T)
    meter.add(p, keys)
    reach = meter.result()
    assert reach.mean[0].tolist() == pytest.approx([80, 45])
    assert reach.tails[0, 0].tolist() == pytest.approx([1, 1, 1, 1, 1, 1, 1, 0])


def test_two_way_latents():
    torch.manual_seed(0)
    keys, p = 3 * torch.randn(T, 1, 2, dtype=torch.float64), torch.rand(T, 1, 2, dtype=torch.float64)
    reach = two_way_reach(p, keys)
    for latent in range(2):
        weights = torch.softmax(keys[:, 0, latent], dim=0).expand(T, T)
        for index, lag in enumerate(reach.lags.tolist()):
            mean, tail = slow_reach(p[:, 0, latent], weights, lag)
            assert reach.tails[0, latent, index].item() == pytest.approx(tail)
        assert reach.mean[0, latent].item() == pytest.approx(mean)


def test_within_finds_where_the_weight_lies():
    tails = torch.tensor([[1.0, 1.0, 0.5, 0.0], [0.0, 0.0, 0.0, 0.0], [1.0, 1.0, 1.0, 1.0]]).double()
    reach = Reach(11, torch.zeros(3).double(), torch.tensor([1, 2, 4, 8]), tails)
    assert reach.within(0.5).tolist() == pytest.approx([4, 2**0.5 - 1, math.sqrt(9 * 13) - 1])
    assert reach.within(0.75)[0].item() == pytest.approx(math.sqrt(5 * 9) - 1)  # halfway from 4 to 8
    assert_close(reach.profile().sum(dim=1), torch.ones(3).double())
    assert reach.profile()[0].tolist() == [0, 0, 0.5, 0.5, 0]
    with pytest.raises(ValueError, match="share is 1"):
        reach.within(1)


@pytest.mark.parametrize("form", ["macchiato", "window", "softmax"])
def test_scores_look_back_as_far_as_all_pairs_say(form):
    from latte.analysis.rows import attention_matrix, trace

    model, ids = make_model(form), make_tokens(T)
    measures = measure(model, ids, chunk=37)
    for measured, traced in zip(measures, trace(model, ids).values(), strict=True):
        scores_only = traced.parts._replace(latent_query=None, latent_key=None)
        matrix = attention_matrix(type(traced)(traced.form, scores_only))
        logits = traced.parts.latent_query
        uses = torch.ones(T, HEADS).double() if logits is None else torch.softmax(logits, dim=-1)[..., 0]
        for head in range(HEADS):
            for index, lag in enumerate(measured.score_reach.lags.tolist()):
                mean, tail = slow_reach(uses[:, head], matrix[head], lag)
                assert measured.score_reach.tails[head, index].item() == pytest.approx(tail, abs=1e-9)
            assert measured.score_reach.mean[head].item() == pytest.approx(mean)
        if form != "softmax":
            assert (measured.score_reach.within(0.99) <= WINDOW - 1).all()


def test_long_texts_are_sampled():
    form = layer_forms(make_model("softmax"))[0]
    meter = ScoreReach(form, total=100, samples=10)
    rows = []
    meter._count = lambda uses, row, own: rows.append(own)
    for _ in range(4):
        meter.add(torch.ones(25, HEADS), torch.randn(25, HEADS, 4), torch.randn(25, HEADS, 4))
    assert rows == list(range(0, 100, 10))


@pytest.mark.parametrize("form", ["latte", "macchiato"])
@pytest.mark.parametrize("chunk", [13, 1000])
def test_a_model_read_in_pieces(form, chunk):
    model, ids = make_model(form), make_tokens(T)
    measures = measure(model, ids, chunk=chunk)
    with torch.no_grad(), UsageMeter(model) as meter:
        model(ids[None])
    for measured, usage, (logits, keys) in zip(measures, meter.layers(), slow_logits(model, ids[None]), strict=True):
        p = torch.softmax(logits[0], dim=-1)
        assert measured.tokens == T
        assert_close((measured.usage.usage, measured.usage.entropy), (usage.usage, usage.entropy))
        states = p.shape[-1]
        counts = [[(p[:, head].argmax(dim=-1) == state).sum() for state in range(states)] for head in range(HEADS)]
        assert_close(measured.chosen, torch.tensor(counts) / T, check_dtype=False)
        latent = LATENTS - 1
        mean, _ = slow_reach(p[:, 1, states - 1], causal_weights(keys[0, :, 1, latent]), 1)
        assert measured.latent_reach.mean[1, latent].item() == pytest.approx(mean)


def test_a_model_that_reads_both_ways():
    model = make_model(kind=LatteForSequenceClassification, causal=False, pad_token_id=0)
    ids = make_tokens(T)
    measured = measure(model, ids, chunk=10)[0]
    with torch.no_grad(), UsageMeter(model) as meter:
        model(ids[None])
    assert_close(measured.usage.usage, meter.layers()[0].usage)
    assert measured.latent_reach.mean.max() < T


def agreement_of(p):
    """Of p(l|t) [T H S]."""
    usage = p.mean(dim=0)
    entropy = -torch.special.xlogy(p, p).sum(dim=-1).mean(dim=0)
    joint = torch.einsum("tal,tbm->albm", p, p) / len(p)
    return head_agreement(joint, LayerUsage("layer", p.shape[2], len(p), entropy, usage))


def test_heads_agree_whatever_their_latents_are_numbered():
    torch.manual_seed(0)
    choice = torch.arange(120)
    same = torch.nn.functional.one_hot(choice % 4, 4).double()
    renamed = same[:, [2, 0, 3, 1]]
    other = torch.nn.functional.one_hot(choice // 30, 4).double()  # every pair of choices equally often
    agreement = agreement_of(torch.stack([same, renamed, other], dim=1))
    assert_close(agreement, torch.tensor([[1, 1, 0], [1, 1, 0], [0, 0, 1]]).double(), rtol=0, atol=1e-2)


def test_uncertain_heads_agree_less_even_with_themselves():
    sharp = torch.tensor([[0.9, 0.1], [0.1, 0.9]]).double().repeat(10, 1)
    agreement = agreement_of(torch.stack([sharp, sharp.flip(1)], dim=1))
    assert_close(agreement[0, 0], agreement[0, 1])
    assert 0.3 < agreement[0, 0] < 0.9


def test_heads_that_always_choose_alike_tell_nothing():
    assert agreement_of(torch.full((9, 2, 3), 1 / 3).double()).tolist() == [[0, 0], [0, 0]]


def test_one_token():
    (measured, _) = measure(make_model(), make_tokens(1))
    assert measured.latent_reach.mean.abs().max() == 0
    assert measured.latent_reach.within(0.5).tolist() == [[0] * LATENTS] * HEADS
    assert measured.record()["score_reach"]["within_90"] == [0] * HEADS


@pytest.mark.parametrize(
    ("tokens", "words"), [(torch.zeros(0, dtype=torch.long), "at least one"), (make_tokens(1, 3), "of one text")]
)
def test_bad_tokens(tokens, words):
    with pytest.raises(ValueError, match=words):
        measure(make_model(), tokens)


def test_a_model_without_attention_of_ours():
    with pytest.raises(ValueError, match="Linear has no attention layer of Latte"):
        measure(torch.nn.Linear(2, 2), make_tokens(3))


@pytest.mark.parametrize(
    ("kind", "settings", "words"),
    [
        (LatteForSequenceClassification, {"pooling": "cls"}, 'pooling "cls" .* model.base_model'),
        (LatteForSequenceClassification, {"input_kind": "continuous", "input_size": 2}, 'input_kind is "continuous"'),
        (LatteForSeq2SeqLM, {}, r"a source and a target; give its encoder, model.get_encoder\(\)"),
    ],
)
def test_models_that_read_more_than_tokens(kind, settings, words):
    model = make_model("latte", kind, pad_token_id=0, **settings)
    with pytest.raises(ValueError, match=words):
        measure(model, make_tokens(T))


def test_the_parts_that_do_read_tokens():
    model = make_model("latte", LatteForSeq2SeqLM, pad_token_id=0)
    assert measure(model.get_encoder(), make_tokens(T))[0].tokens == T
    with pytest.raises(ValueError, match="LatteDecoder does not read tokens"):
        measure(model.get_decoder(), make_tokens(T))
    assert (
        measure(make_model("latte", LatteForSequenceClassification, pooling="cls").model, make_tokens(T))[0].tokens == T
    )


@pytest.mark.parametrize("form", ["latte", "macchiato", "softmax"])
def test_some_of_the_heads_are_not_taken_for_all(form):
    """As tensor parallelism deals them out: there are more heads than a process has projections of."""
    model = make_model(form)
    for layer in model.model.layers:
        layer.attention.num_heads *= 2
    with pytest.raises(ValueError, match="tensor parallelism"):
        measure(model, make_tokens(T))


def test_records_hold_all():
    record = measure(make_model(), make_tokens(T))[0].record()
    assert (record["heads"], record["latents"], record["window"], record["tokens"]) == (HEADS, LATENTS, WINDOW, T)
    assert len(record["usage"][0]) == LATENTS + 1
    assert len(record["latent_reach"]["within_90"][0]) == LATENTS
    assert measure(make_model("softmax"), make_tokens(T))[0].record().keys() == {
        "layer", "tokens", "heads", "latents", "window", "score_reach"
    }  # fmt: skip


@pytest.mark.parametrize("form", ["latte", "macchiato", "window", "softmax"])
def test_numbers_that_are_not_finite_are_refused(form):
    """A token of the second piece spoils what comes after it, and is named."""
    model, tokens = make_model(form), make_tokens(20)
    tokens[13], tokens[:13] = 1, tokens[:13].clamp(min=2)
    with torch.no_grad():
        model.model.embed_tokens.weight[1] = torch.nan
    with pytest.raises(
        ValueError, match=r"layers\.0\.attention: its .* of token 13 is not finite.*embed_tokens\.weight"
    ):
        measure(model, tokens, chunk=8)
