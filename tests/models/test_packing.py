"""Texts packed into a row are as they are apart, however the packing is said."""

import pytest
import torch
from torch import Tensor
from transformers import DataCollatorWithFlattening, DynamicCache

from tests.models.forms import FORMS, MAIN_FORMS, make_model, make_tokens

LENGTHS = [13, 1, 29, 5]
BOUNDS = [0, 13, 14, 43, 48]
CLOSE = {"rtol": 1e-5, "atol": 2e-5}


@pytest.fixture
def texts() -> list[Tensor]:
    return [make_tokens(1, length, seed=length) for length in LENGTHS]


def packed(texts: list[Tensor], how: str) -> dict[str, Tensor]:
    row = torch.cat(texts, dim=1)
    positions = torch.cat([torch.arange(text.shape[1]) for text in texts])[None]
    match how:
        case "position_ids":
            return {"input_ids": row, "position_ids": positions}
        case "cu_seq_lens_q":
            return {"input_ids": row, "cu_seq_lens_q": torch.tensor(BOUNDS, dtype=torch.int32)}
        case _:
            index = torch.cat([torch.full((1, text.shape[1]), i) for i, text in enumerate(texts)], dim=1)
            return {"input_ids": row, "seq_idx": index.int()}


@pytest.mark.parametrize("how", ["position_ids", "cu_seq_lens_q", "seq_idx"])
@pytest.mark.parametrize("form", FORMS)
def test_packed_is_apart(form, how, texts):
    model = make_model(form)
    expected = torch.cat([model(text).logits for text in texts], dim=1)
    torch.testing.assert_close(model(**packed(texts, how)).logits, expected, **CLOSE)


@pytest.mark.parametrize("form", MAIN_FORMS)
def test_losses_and_gradients_of_packed_texts(form, texts):
    """No text predicts the first token of the next: that is what the collator's labels say."""
    model = make_model(form).train()
    collate = DataCollatorWithFlattening(return_flash_attn_kwargs=True, return_seq_idx=True, return_tensors="pt")
    batch = collate([{"input_ids": text[0].tolist()} for text in texts])
    gradients = []
    for loss in (model(**batch).loss, apart(model, texts)):
        model.zero_grad()
        loss.backward()
        gradients.append([parameter.grad.clone() for parameter in model.parameters()])
    torch.testing.assert_close(model(**batch).loss, apart(model, texts), **CLOSE)
    torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-4, atol=1e-5)


def apart(model, texts: list[Tensor]) -> Tensor:
    count = sum(length - 1 for length in LENGTHS)
    return sum(model(text, labels=text, num_items_in_batch=count).loss for text in texts if text.shape[1] > 1)


@pytest.mark.parametrize("form", MAIN_FORMS)
def test_several_rows_with_several_texts(form, texts):
    model = make_model(form)
    long, short = torch.cat(texts, dim=1), make_tokens(1, 48, seed=9)
    positions = torch.stack([packed(texts, "position_ids")["position_ids"][0], torch.arange(48)])
    logits = model(torch.cat([long, short]), position_ids=positions).logits
    expected = torch.cat([model(text).logits for text in texts], dim=1)
    torch.testing.assert_close(logits[:1], expected, **CLOSE)
    torch.testing.assert_close(logits[1:], model(short).logits, **CLOSE)


@pytest.mark.parametrize("form", ["latte rglru", "macchiato", "softmax"])
def test_packed_prompts_go_on_as_a_batch(form, texts):
    """A cache that has read packed texts has a row for each of them."""
    model = make_model(form)
    cache = DynamicCache(config=model.config)
    model(**packed(texts, "cu_seq_lens_q"), past_key_values=cache)
    token = torch.full((len(texts), 1), 7)
    step = model(token, past_key_values=cache).logits
    for row, text in enumerate(texts):
        alone = model(torch.cat([text, token[:1]], dim=1)).logits[0, -1]
        torch.testing.assert_close(step[row, 0], alone, **CLOSE)


def test_positions_that_begin_anew_do_not_pack_with_a_mask_or_a_cache():
    """Padding has positions too, as `generate` makes them: only the mask says where texts begin."""
    model, tokens = make_model("macchiato"), make_tokens(1, 20)
    positions = torch.cat([torch.zeros(7, dtype=torch.long), torch.arange(13)])[None]
    mask = torch.cat([torch.zeros(1, 7), torch.ones(1, 13)], dim=1).long()
    logits = model(tokens, attention_mask=mask, position_ids=positions).logits
    torch.testing.assert_close(logits[:, 7:], model(tokens[:, 7:]).logits, **CLOSE)


def test_packing_several_rows_by_bounds_is_refused():
    with pytest.raises(ValueError, match="cu_seqlens is given with batch size 2"):
        make_model("latte")(make_tokens(2, 5), cu_seq_lens_q=torch.tensor([0, 2, 5]))


@pytest.mark.parametrize(
    ("bounds", "message"),
    [
        ([0, 5, 19], "cu_seqlens ends at 19; it must end at the number of tokens, 20"),
        ([0, 5, 25], "cu_seqlens ends at 25"),
        ([0.0, 20.0], "cu_seqlens has dtype torch.float32"),
        ([0], r"cu_seqlens has shape \[1\]"),
    ],
)
@pytest.mark.parametrize("form", MAIN_FORMS)
def test_bounds_that_do_not_fit_the_row_are_refused(form, bounds, message):
    with pytest.raises(ValueError, match=message):
        make_model(form)(make_tokens(1, 20), cu_seq_lens_q=torch.tensor(bounds))


@pytest.mark.parametrize("form", MAIN_FORMS)
def test_packed_texts_go_on_from_a_row_each(form):
    model, tokens = make_model(form), make_tokens(1, 20)
    cache = model(tokens).past_key_values
    with pytest.raises(ValueError, match="state"):
        model(tokens, cu_seq_lens_q=torch.tensor([0, 5, 20]), past_key_values=cache)


def test_numbers_of_texts_are_one_for_each_token():
    model, tokens = make_model("macchiato"), make_tokens(2, 20)
    index = torch.tensor([8 * [0] + 12 * [1]])
    expected = model(tokens, seq_idx=index.expand(2, -1)).logits
    torch.testing.assert_close(model(tokens, seq_idx=index).logits, expected, **CLOSE)
    with pytest.raises(ValueError, match=r"seq_idx has shape \[1, 19\]; it must be \[2, 20\], or \[1, 20\]"):
        model(tokens, seq_idx=index[:, :19])


def test_under_compile_packing_must_be_said(fresh_dynamo):
    """The number of texts would be one graph each; positions alone are checked and then refused."""
    model, tokens = make_model("macchiato"), make_tokens(1, 20)
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    plain = torch.arange(20)[None]
    torch.testing.assert_close(compiled(tokens, position_ids=plain).logits, model(tokens).logits, **CLOSE)
    bounds = torch.tensor([0, 8, 20])
    expected = model(tokens, cu_seq_lens_q=bounds).logits
    torch.testing.assert_close(compiled(tokens, cu_seq_lens_q=bounds).logits, expected, **CLOSE)
    anew = torch.cat([torch.arange(8), torch.arange(12)])[None]
    with pytest.raises(RuntimeError, match="cu_seq_lens_q"):
        compiled(tokens, position_ids=anew)
