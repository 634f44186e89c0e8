"""One pass, chunks and single tokens are the same function; caches do not know of each other."""

import copy
import re

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, StaticCache

from latte.models import LatteModel
from latte.models.cache import tensors
from latte.models.learned_positions import check_positions
from tests.models.forms import (
    FORMS,
    MAIN_FORMS,
    WINDOW,
    assert_same_cache,
    make_config,
    make_model,
    make_tokens,
    padded,
)

LENGTH = 37  # longer than the window
CLOSE = {"rtol": 1e-5, "atol": 2e-5}


def read(model, tokens: Tensor, cache, cuts: list[int], mask: Tensor | None = None) -> Tensor:
    """Logits of all tokens, read in pieces that end at `cuts`."""
    pieces = []
    for start, stop in zip([0, *cuts], [*cuts, tokens.shape[1]], strict=True):
        seen = None if mask is None else mask[:, :stop]
        pieces.append(model(tokens[:, start:stop], attention_mask=seen, past_key_values=cache).logits)
    return torch.cat(pieces, dim=1)


@pytest.mark.parametrize("kind", ["dynamic", "static", "in place"])
@pytest.mark.parametrize("cuts", [[1, 2, 3], [WINDOW + 2], [5, 6, 23], list(range(1, LENGTH))], ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_cutting_a_text_anywhere_changes_nothing(form, cuts, kind):
    model, tokens = make_model(form), make_tokens(2, LENGTH)
    config = model.config
    cache = DynamicCache(config=config) if kind == "dynamic" else StaticCache(config=config, max_cache_len=LENGTH)
    expected = model(tokens).logits
    with torch.set_grad_enabled(kind != "in place"):  # only then can a static state be overwritten
        torch.testing.assert_close(read(model, tokens, cache, cuts), expected, **CLOSE)
    assert int(cache.get_seq_length()) == LENGTH


@pytest.mark.parametrize("form", MAIN_FORMS)
def test_position_ids_may_be_given(form):
    """As `generate` does, and they begin anywhere."""
    model, tokens = make_model(form), make_tokens(2, LENGTH)
    positions = torch.arange(LENGTH).expand(2, -1) + 5
    expected = model(tokens).logits
    torch.testing.assert_close(model(tokens, position_ids=positions).logits, expected, **CLOSE)
    cache = model(tokens[:, :20], position_ids=positions[:, :20]).past_key_values
    rest = model(tokens[:, 20:], position_ids=positions[:, 20:], past_key_values=cache).logits
    torch.testing.assert_close(rest, expected[:, 20:], **CLOSE)


@pytest.mark.parametrize("form", MAIN_FORMS)
def test_two_caches_at_once(form):
    """Nothing is kept in the model: texts that are read in turns do not mix."""
    model, first, second = make_model(form), make_tokens(1, LENGTH), make_tokens(1, LENGTH, seed=1)
    caches = [DynamicCache(config=model.config) for _ in range(2)]
    pieces: list[list[Tensor]] = [[], []]
    for start in range(0, LENGTH, 7):
        for tokens, cache, piece in zip((first, second), caches, pieces, strict=True):
            piece.append(model(tokens[:, start : start + 7], past_key_values=cache).logits)
    for tokens, piece in zip((first, second), pieces, strict=True):
        torch.testing.assert_close(torch.cat(piece, dim=1), model(tokens).logits, **CLOSE)


@torch.no_grad()
@pytest.mark.parametrize("form", MAIN_FORMS)
def test_a_copied_cache_goes_its_own_way(form):
    model, tokens = make_model(form), make_tokens(1, LENGTH)
    cache = model(tokens).past_key_values
    twin = copy.deepcopy(cache)
    model(make_tokens(1, 5), past_key_values=twin)
    torch.testing.assert_close(
        model(tokens[:, :3], past_key_values=cache).logits, model(torch.cat([tokens, tokens[:, :3]], 1)).logits[:, -3:],
        **CLOSE,
    )  # fmt: skip


@pytest.mark.parametrize("form", ["latte", "latte conv", "macchiato", "window"])
def test_the_cache_does_not_grow(form):
    model = make_model(form)
    sizes = []
    for length in (WINDOW, 500):
        cache = model(make_tokens(1, length)).past_key_values
        sizes.append(sum(tensor.numel() for layer in cache.layers for tensor in tensors(layer.state)))
    assert sizes[0] == sizes[1]


@pytest.mark.parametrize("form", ["latte rglru", "macchiato"])
def test_no_influence_of_the_future(form):
    model, tokens = make_model(form), make_tokens(1, LENGTH)
    changed = tokens.clone()
    changed[:, 20:] = make_tokens(1, LENGTH - 20, seed=3)
    torch.testing.assert_close(model(changed).logits[:, :20], model(tokens).logits[:, :20], **CLOSE)


@pytest.mark.parametrize("form", FORMS)
def test_what_stands_in_padding_does_not_matter(form):
    """Not even to the last bit, in any of the ways to read."""
    model, tokens = make_model(form), make_tokens(3, LENGTH)
    outputs = []
    for filler in (0, 77):
        ids, mask = padded(tokens, [LENGTH, 20, 3], filler)
        whole = model(ids, attention_mask=mask)
        cut = read(model, ids, DynamicCache(config=model.config), [9, 30], mask)
        outputs.append((whole.logits[mask.bool()], cut[mask.bool()], whole.past_key_values))
    for a, b in zip(outputs[0][:2], outputs[1][:2], strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)
    assert_same_cache(outputs[0][2], outputs[1][2], atol=0)


@pytest.mark.parametrize("cuts", [[], [9, 30]], ids=["whole", "cut"])
@pytest.mark.parametrize("form", FORMS)
def test_padded_rows_are_as_they_are_alone(form, cuts):
    model, lengths = make_model(form), [LENGTH, 20, 3]
    ids, mask = padded(make_tokens(3, LENGTH), lengths)
    logits = read(model, ids, DynamicCache(config=model.config), cuts, mask)
    for row, length in enumerate(lengths):
        alone = model(ids[row : row + 1, LENGTH - length :]).logits[0]
        torch.testing.assert_close(logits[row, LENGTH - length :], alone, **CLOSE)


@pytest.mark.parametrize("form", MAIN_FORMS)
def test_padding_may_stand_on_the_right_and_in_holes(form):
    model, tokens = make_model(form), make_tokens(2, 29)
    mask = torch.ones_like(tokens)
    mask[0, 23:] = 0
    mask[1, 5:9] = 0
    logits = model(tokens, attention_mask=mask).logits
    torch.testing.assert_close(logits[0, :23], model(tokens[:1, :23]).logits[0], **CLOSE)
    torch.testing.assert_close(logits[1, :5], model(tokens[1:, :5]).logits[0], **CLOSE)
    assert logits.isfinite().all()


def test_a_mask_of_scores_is_refused():
    model = make_model("macchiato")
    with pytest.raises(
        ValueError, match=r"attention_mask has shape \[1, 1, 5, 5\]; it must be \[batch, tokens so far\]"
    ):
        model(make_tokens(1, 5), attention_mask=torch.zeros(1, 1, 5, 5))
    with pytest.raises(ValueError, match=r"attention_mask has shape \[1, 3\]"):
        model(make_tokens(1, 5), attention_mask=torch.ones(1, 3))
    with pytest.raises(ValueError, match=r"attention_mask is a dict; it must be a tensor \[batch, tokens so far\]"):
        model(make_tokens(1, 5), attention_mask={"full_attention": torch.ones(1, 5)})
    added = torch.tensor([[-torch.inf, -torch.inf, 0, 0, 0]])
    for mask in (added, added.clamp(min=-1e4).bfloat16(), added * torch.nan):
        with pytest.raises(ValueError, match=r"attention_mask holds negative.* it must be 1 at real tokens and 0 at"):
            model(make_tokens(1, 5), attention_mask=mask)
    cache = model(make_tokens(1, 4)).past_key_values
    with pytest.raises(ValueError, match="attention_mask holds negative"):
        model(make_tokens(1, 1), attention_mask=added, past_key_values=cache)


@pytest.mark.parametrize("dtype", [torch.bool, torch.int8, torch.int64, torch.bfloat16, torch.float32])
def test_masks_of_any_dtype(dtype):
    model, tokens = make_model("macchiato"), make_tokens(1, 5)
    mask = torch.tensor([[0, 0, 1, 1, 1]])
    given = model(tokens, attention_mask=mask.to(dtype)).logits
    assert torch.equal(given, model(tokens, attention_mask=mask).logits)


def test_a_mask_of_a_past_that_is_not_given_is_refused():
    """Who forgets the cache would have logits of the last tokens alone."""
    model, tokens = make_model("macchiato"), make_tokens(1, 9)
    mask = torch.ones(1, 9)
    cache = model(tokens[:, :4]).past_key_values
    with pytest.raises(ValueError, match=r"attention_mask has shape \[1, 9\].* 5 are given, and there is no cache"):
        model(tokens[:, 4:], attention_mask=mask)
    after = model(tokens[:, 4:], attention_mask=mask, past_key_values=cache).logits
    torch.testing.assert_close(after, model(tokens).logits[:, 4:], rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("form", MAIN_FORMS)
@pytest.mark.parametrize("shape", [(1, 8), (3, 9), (2, 9, 1)], ids=str)
def test_position_ids_that_do_not_fit_are_refused(form, shape):
    message = re.escape(f"position_ids has shape {list(shape)}; it must be [2, 9], or [1, 9]")
    with pytest.raises(ValueError, match=message):
        make_model(form)(make_tokens(2, 9), position_ids=torch.zeros(shape, dtype=torch.long))


@pytest.mark.parametrize("positions", ["learned", "sinusoidal"])
def test_positions_of_embeddings(positions):
    """They tell tokens apart where nothing else does, and go on in the cache."""
    model = make_model("latte", positions=positions, max_position_embeddings=LENGTH)
    tokens = torch.full((1, LENGTH), 5)
    expected = model(tokens).logits
    assert (expected[0, 3] - expected[0, 17]).abs().max() > 1e-3
    static = StaticCache(config=model.config, max_cache_len=LENGTH)
    for cache in (DynamicCache(config=model.config), static, static):
        cache.reset()
        torch.testing.assert_close(read(model, tokens, cache, [9, 10]), expected, **CLOSE)
    ids, mask = padded(tokens, [20])
    torch.testing.assert_close(model(ids, attention_mask=mask).logits[:, -20:], expected[:, :20], **CLOSE)


def test_more_tokens_than_learned_positions():
    """Wherever they come from; padding does not count, nor the row that texts are packed in."""
    model, tokens = make_model("latte", positions="learned", max_position_embeddings=7), make_tokens(1, 8)
    message = r"a token is at position 7 and max_position_embeddings is 7: learned positions are 0 to 6; shorten"
    with pytest.raises(ValueError, match=message):
        model(tokens)
    for cache in (DynamicCache(config=model.config), StaticCache(config=model.config, max_cache_len=8)):
        model(tokens[:, :7], past_key_values=cache)
        with pytest.raises(ValueError, match=message):
            model(tokens[:, 7:], past_key_values=cache)
    with pytest.raises(ValueError, match="a token is at position 9 and"):
        model(tokens[:, :3], position_ids=torch.tensor([[7, 8, 9]]))
    padding = torch.tensor([[0, 0, 1, 1, 1, 1, 1, 1]])
    torch.testing.assert_close(
        model(tokens, attention_mask=padding).logits[:, 2:], model(tokens[:, 2:]).logits, **CLOSE
    )  # fmt: skip
    packed = model(tokens, cu_seq_lens_q=torch.tensor([0, 3, 8]), use_cache=False).logits
    torch.testing.assert_close(packed[:, 3:], model(tokens[:, 3:]).logits, **CLOSE)


def test_learned_positions_are_checked_without_waiting():
    """Where values would have to be fetched, only when there are more tokens than positions."""
    cache = DynamicCache(config=make_config("latte"))
    cache.layers[0].seen, cache.layers[0].is_initialized = 3, True
    elsewhere = torch.empty((1, 4), dtype=torch.long, device="meta")
    check_positions(elsewhere, 7, cache)
    with pytest.raises(RuntimeError, match="meta"):
        check_positions(elsewhere, 6, cache)
    static = StaticCache(config=make_config("latte"), max_cache_len=9)
    static.layers[0].is_initialized = True
    check_positions(elsewhere, 3, static)  # whose length is known to the device alone


@pytest.mark.parametrize("form", MAIN_FORMS)
def test_embeddings_in_place_of_tokens(form):
    model, tokens = make_model(form), make_tokens(2, 13)
    embeds = model.get_input_embeddings()(tokens)
    torch.testing.assert_close(model(inputs_embeds=embeds).logits, model(tokens).logits, rtol=0, atol=0)
    with pytest.raises(ValueError, match="exactly one"):
        model(tokens, inputs_embeds=embeds)
    with pytest.raises(ValueError, match="exactly one"):
        model()


def test_a_bidirectional_backbone_sees_the_whole_text_and_keeps_no_cache():
    torch.manual_seed(0)
    model = LatteModel(make_config("macchiato", causal=False)).eval()
    tokens = make_tokens(1, 23)
    changed = tokens.clone()
    changed[:, -1] += 1
    output = model(tokens)
    assert (output.last_hidden_state - model(changed).last_hidden_state)[:, 0].abs().max() > 1e-4
    assert output.past_key_values is None


def test_hidden_states_are_recorded():
    model, tokens = make_model("macchiato"), make_tokens(2, 13)
    output = model(tokens, output_hidden_states=True)
    assert [tuple(x.shape) for x in output.hidden_states] == 3 * [(2, 13, 30)]
    assert model(tokens).hidden_states is None
    assert isinstance(model(tokens, return_dict=False), tuple)
