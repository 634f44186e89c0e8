"""Losses of tokens, against all logits and `cross_entropy`."""

import pytest
import torch
from torch.testing import assert_close

from latte.tasks.evaluation.scoring import HiddenHead, LogitHead, Scorer
from tests.tasks.evaluation.small import NAMES, VOCABULARY, make_model, random_tokens, slow_losses

CLOSE = {"rtol": 1e-4, "atol": 1e-4}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("chunk", [None, 1, 7, 16, 37])
def test_losses_are_those_of_all_logits(name, chunk):
    model, tokens = make_model(name), random_tokens(3, 37)
    assert_close(Scorer(model, chunk).losses(tokens), slow_losses(model, tokens), **CLOSE)


@pytest.mark.parametrize("name", ["macchiato", "llama", "gemma2"])
def test_the_models_own_logits_in_slices_give_the_same(name):
    model, tokens = make_model(name), random_tokens(3, 37)
    scorer = Scorer(model)
    scorer.head = LogitHead(model, rows=15)
    assert_close(scorer.losses(tokens), slow_losses(model, tokens), **CLOSE)


@pytest.mark.parametrize("name", NAMES)
def test_hidden_states_are_used_where_they_make_the_logits(name):
    expected = LogitHead if name == "cohere" else HiddenHead
    assert type(Scorer(make_model(name)).head) is expected


@pytest.mark.parametrize("name", ["macchiato", "gemma2"])
def test_a_softcap_matters(name):
    model, tokens = make_model(name), random_tokens(2, 20)
    scorer = Scorer(model)
    scorer.head = HiddenHead(scorer.head.decoder, scorer.head.weight, None)
    assert (scorer.losses(tokens) - slow_losses(model, tokens)).abs().max() > 0.01


@pytest.mark.parametrize("name", ["macchiato", "llama", "gemma2"])
def test_the_last_layer_never_runs_on_a_sequence(name):
    model = make_model(name)
    scorer = Scorer(model, 8)
    model.lm_head.register_forward_pre_hook(lambda *_: pytest.fail("the logits of all tokens were made"))
    scorer.losses(random_tokens(2, 20))


def test_the_chunk_suits_the_model():
    assert Scorer(make_model("macchiato")).chunk == 8192
    assert Scorer(make_model("llama")).chunk is None
    assert Scorer(make_model("llama"), 5).chunk == 5
    assert Scorer(make_model("gemma2", attn_implementation="eager")).chunk == 1024
    assert Scorer(make_model("gemma3")).chunk == 4096


@pytest.mark.parametrize("name", ["macchiato", "llama", "gemma3"])
def test_reading_and_stepping(name):
    model, tokens = make_model(name), random_tokens(2, 21)
    scorer = Scorer(model, 8)
    logits, _ = scorer.step(tokens[:, 20:], scorer.read(tokens[:, :20]))
    with torch.no_grad():
        assert_close(logits, model(tokens, use_cache=False).logits[:, -1], **CLOSE)
    assert logits.shape == (2, VOCABULARY)


def test_bfloat16():
    model, tokens = make_model("macchiato").bfloat16(), random_tokens(2, 30)
    scorer = Scorer(model)
    assert type(scorer.head) is HiddenHead
    losses = scorer.losses(tokens)
    assert losses.dtype == torch.float32
    assert_close(losses, slow_losses(model, tokens), rtol=0.02, atol=0.05)
