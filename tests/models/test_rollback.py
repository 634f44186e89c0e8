"""Tokens that are taken back leave no trace, in whatever way they were read."""

import pytest
import torch
from transformers import DynamicCache, StaticCache

from latte.models import save_cache
from latte.models.rollback import LIMIT
from tests.models.forms import FORMS, MAIN_FORMS, assert_same_cache, make_config, make_model, make_tokens

CLOSE = {"rtol": 1e-5, "atol": 2e-5}


def recording(model) -> DynamicCache:
    cache = DynamicCache(config=model.config)
    cache.activate_past_recording()
    return cache


@pytest.mark.parametrize("pieces", [[19], [7, 12], [7, 5, 1, 1, 1, 1, 1, 1, 1], 19 * [1]], ids=str)
@pytest.mark.parametrize("taken", [1, 5, 12, 19])
@pytest.mark.parametrize("form", FORMS)
def test_taken_back_is_never_read(form, taken, pieces):
    model, tokens = make_model(form), make_tokens(2, 19)
    cache = recording(model)
    for piece in tokens.split(pieces, dim=1):
        model(piece, past_key_values=cache)
    cache.crop(-taken)
    assert cache.get_seq_length() == 19 - taken
    rest = make_tokens(2, 6, seed=3)
    text = torch.cat([tokens[:, : 19 - taken], rest], dim=1)
    torch.testing.assert_close(model(rest, past_key_values=cache).logits, model(text).logits[:, 19 - taken :], **CLOSE)
    assert_same_cache(cache, model(text).past_key_values)


@pytest.mark.parametrize("form", MAIN_FORMS)
def test_again_and_again(form):
    """As assisted decoding does: read a draft, keep some of it, go on."""
    model, prompt = make_model(form), make_tokens(1, 17)
    cache, text = recording(model), prompt
    model(prompt, past_key_values=cache)
    for step in range(30):
        draft = make_tokens(1, 1 + step % 5, seed=step)
        kept = step % (draft.shape[1] + 1)
        logits = model(draft, past_key_values=cache).logits
        expected = model(torch.cat([text, draft], dim=1)).logits[:, text.shape[1] :]
        torch.testing.assert_close(logits, expected, **CLOSE)
        cache.crop(kept - draft.shape[1])
        text = torch.cat([text, draft[:, :kept]], dim=1)
        assert cache.get_seq_length() == text.shape[1]


@pytest.mark.parametrize("form", ["latte rglru", "macchiato"])
def test_a_long_prompt_is_remembered_in_part(form):
    """Its last tokens can be taken back; what is kept for that does not grow with the prompt."""
    model, tokens = make_model(form), make_tokens(1, 3 * LIMIT + 5)
    cache = recording(model)
    torch.testing.assert_close(model(tokens, past_key_values=cache).logits, model(tokens).logits, **CLOSE)
    recorded = cache.layers[0].recording
    assert sum(stretch.tokens for stretch in recorded.stretches) == LIMIT
    cache.crop(-LIMIT)
    rest = make_tokens(1, 4)
    expected = model(torch.cat([tokens[:, :-LIMIT], rest], dim=1)).logits[:, -4:]
    torch.testing.assert_close(model(rest, past_key_values=cache).logits, expected, **CLOSE)


@torch.no_grad()
def test_many_steps_are_remembered_in_part():
    model, tokens = make_model("macchiato"), make_tokens(1, 3 * LIMIT)
    cache = recording(model)
    for t in range(3 * LIMIT):
        model(tokens[:, t : t + 1], past_key_values=cache)
        kept = sum(stretch.tokens for stretch in cache.layers[0].recording.stretches)
        assert min(t + 1, LIMIT) <= kept <= 2 * LIMIT
    cache.crop(-LIMIT)
    model(tokens[:, :1], past_key_values=cache)
    text = torch.cat([tokens[:, :-LIMIT], tokens[:, :1]], dim=1)
    assert_same_cache(cache, model(text).past_key_values, atol=1e-4)


def test_the_number_of_tokens_to_keep():
    """What older releases of Transformers say."""
    model, tokens = make_model("macchiato"), make_tokens(1, 13)
    cache = recording(model)
    model(tokens, past_key_values=cache)
    cache.crop(20)
    assert cache.get_seq_length() == 13
    model(tokens[:, :2], past_key_values=cache)
    cache.crop(9)
    assert cache.get_seq_length() == 9


def test_further_back_than_was_recorded():
    model, cache = make_model("macchiato"), recording(make_model("macchiato"))
    model(make_tokens(1, 3 * LIMIT), past_key_values=cache)
    with pytest.raises(ValueError, match="than were recorded"):
        cache.crop(-LIMIT - 1)


def test_a_settled_past_stays():
    model, cache = make_model("macchiato"), recording(make_model("macchiato"))
    model(make_tokens(1, 9), past_key_values=cache)
    cache.crop(0)
    with pytest.raises(ValueError, match="than were recorded"):
        cache.crop(-1)


def test_what_cannot_be_taken_back():
    model, tokens = make_model("macchiato"), make_tokens(1, 9)
    cache = model(tokens).past_key_values
    cache.crop(0)
    with pytest.raises(ValueError, match=r"activate_past_recording\(\)"):
        cache.crop(-1)
    with pytest.raises(ValueError, match=r"activate_past_recording\(\)"):
        cache.crop(3)
    static = StaticCache(config=make_config("macchiato"), max_cache_len=20)
    with pytest.raises(ValueError, match="a static cache cannot take tokens back"):
        static.activate_past_recording()
    with pytest.raises(ValueError, match="a static cache cannot take tokens back"):
        static.crop(-1)
    with pytest.raises(ValueError, match="packed sequences cannot be taken back"):
        model(tokens, past_key_values=recording(model), cu_seq_lens_q=torch.tensor([0, 4, 9]))


def test_recording_can_end_after_a_cut():
    """As `generate` does when it gives a cache back."""
    model, tokens = make_model("macchiato"), make_tokens(1, 13)
    cache = recording(model)
    model(tokens, past_key_values=cache)
    cache.crop(-4)
    for layer in cache.layers:
        layer.record_past = False
    model(tokens[:, 9:], past_key_values=cache)
    assert cache.layers[0].recording is None
    assert_same_cache(cache, model(tokens).past_key_values)


def test_rows_of_a_recording_move_with_the_cache():
    model, tokens = make_model("macchiato"), make_tokens(3, 13)
    cache, rows = recording(model), torch.tensor([2, 2, 0])
    mask = torch.ones_like(tokens)
    mask[1:, :2] = 0
    model(tokens, attention_mask=mask, past_key_values=cache)
    cache.reorder_cache(rows)
    cache.crop(-4)
    logits = model(tokens[rows, 9:], past_key_values=cache).logits
    expected = model(tokens[rows], attention_mask=mask[rows]).logits[:, 9:]
    torch.testing.assert_close(logits, expected, **CLOSE)


def test_a_cut_cache_is_not_saved(tmp_path):
    model, tokens = make_model("macchiato"), make_tokens(1, 13)
    cache = recording(model)
    model(tokens, past_key_values=cache)
    cache.crop(-4)
    with pytest.raises(ValueError, match="tokens were taken back"):
        save_cache(cache, tmp_path / "cut", model.config)


def test_a_recording_cache_begins_anew():
    model, tokens = make_model("macchiato"), make_tokens(1, 13)
    cache = recording(model)
    model(tokens, past_key_values=cache)
    cache.reset()
    model(tokens, past_key_values=cache)
    cache.crop(-13)
    torch.testing.assert_close(model(tokens, past_key_values=cache).logits, model(tokens).logits, **CLOSE)
