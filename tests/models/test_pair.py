"""Pair classification: two towers that share their weights."""

import pytest
import torch
from torch.nn import functional as F
from torch.testing import assert_close
from transformers import AutoModelForSequenceClassification

from latte import LatteConfig, LatteForPairClassification
from tests.models.small import FORMS, HIDDEN, TIGHT, idle_parameters, make_ids, make_model, pad

B, FIRST, SECOND, LABELS = 3, 17, 11, 5


def make(form="macchiato", **settings):
    return make_model(LatteForPairClassification, form, **({"num_labels": LABELS} | settings))


def make_pair():
    return {"input_ids": make_ids(B, FIRST), "input_ids_b": make_ids(B, SECOND, seed=2)}


@pytest.mark.parametrize("pooling", ["mean", "last", "cls"])
@pytest.mark.parametrize("form", FORMS)
def test_shapes_and_gradients(form, pooling):
    model = make(form, pooling=pooling, positions="learned", max_position_embeddings=FIRST + (pooling == "cls"))
    outputs = model(**make_pair(), labels=torch.arange(B), output_hidden_states=True)
    assert outputs.logits.shape == (B, LABELS)
    extra = pooling == "cls"
    assert [x.shape for x in outputs.hidden_states] == [(B, FIRST + extra, HIDDEN)] * 3
    assert [x.shape for x in outputs.hidden_states_b] == [(B, SECOND + extra, HIDDEN)] * 3
    assert_close(outputs.loss, F.cross_entropy(outputs.logits, torch.arange(B)))
    assert idle_parameters(model, outputs.loss) == []


def test_features_by_hand():
    """One backbone for both, the mean of each, and a, b, a − b, a ∘ b side by side."""
    model, pair = make(), make_pair()
    a, b = (model.model(ids).last_hidden_state.mean(dim=1) for ids in pair.values())
    features = torch.cat([a, b, a - b, a * b], dim=1)
    inner, _, outer = model.pair_classifier
    hidden = F.gelu(features @ inner.weight.T + inner.bias)
    assert_close(model(**pair).logits, hidden @ outer.weight.T + outer.bias, **TIGHT)
    assert model.config.causal is False


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("pooling", ["mean", "last", "cls"])
def test_padding_does_not_matter(pooling, side):
    model, pair = make(pooling=pooling), make_pair()
    expected = model(**pair).logits
    ids, mask = pad(pair["input_ids"], side, 5, 41)
    ids_b, mask_b = pad(pair["input_ids_b"], side, 13, 3)
    padded = model(input_ids=ids, attention_mask=mask, input_ids_b=ids_b, attention_mask_b=mask_b).logits
    assert_close(padded, expected, **TIGHT)
    for row in range(B):
        alone = model(**{name: x[row : row + 1] for name, x in pair.items()}).logits
        assert_close(alone[0], expected[row], **TIGHT)


def test_inputs_of_other_kinds():
    model, pair = make(), make_pair()
    embeds = [model.get_input_embeddings()(ids) for ids in pair.values()]
    assert torch.equal(model(inputs_embeds=embeds[0], inputs_embeds_b=embeds[1]).logits, model(**pair).logits)
    images = [torch.randint(0, 256, (B, 5, width), dtype=torch.uint8) for width in (3, 7)]
    logits = make(input_kind="pixels")(pixel_values=images[0], pixel_values_b=images[1]).logits
    assert logits.shape == (B, LABELS)
    values = [torch.randn(B, tokens, 3) for tokens in (FIRST, SECOND)]
    model = make(input_kind="continuous", input_size=3)
    outputs = model(input_values=values[0], input_values_b=values[1], labels=torch.arange(B))
    assert idle_parameters(model, outputs.loss) == []


def test_save_and_load(tmp_path):
    model, pair = make(pooling="cls"), make_pair()
    model.save_pretrained(tmp_path)
    loaded, report = LatteForPairClassification.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(report.values())
    assert loaded.config.architectures == ["LatteForPairClassification"]
    assert_close(loaded(**pair).logits, model(**pair).logits, **TIGHT)
    single, report = AutoModelForSequenceClassification.from_pretrained(tmp_path, output_loading_info=True)
    assert "classifier.weight" in report["missing_keys"]  # a pair's classifier is not taken for another
    assert torch.equal(single.class_token.weight, model.class_token.weight)


def test_learns_whether_two_sequences_are_about_the_same():
    """Whether both have more ones, or both more zeros: nothing that one of them tells alone."""
    torch.manual_seed(0)
    config = LatteConfig(vocab_size=2, hidden_size=16, num_hidden_layers=1, num_heads=2, num_latents=4)
    model = LatteForPairClassification(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-2)
    losses = []
    for _ in range(60):
        first, second = ((torch.rand(64, size) < torch.rand(64, 1).round() * 0.6 + 0.2).long() for size in (31, 23))
        labels = ((first.float().mean(dim=1) > 0.5) == (second.float().mean(dim=1) > 0.5)).long()
        loss = model(input_ids=first, input_ids_b=second, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[0] > 0.5
    assert sum(losses[-5:]) / 5 < 0.2


def test_wrong_inputs():
    model, pair = make(), make_pair()
    with pytest.raises(
        ValueError, match=r"nothing is given; input_kind is 'tokens': give input_ids_b, or inputs_embeds_b"
    ):
        model(input_ids=pair["input_ids"])
    with pytest.raises(ValueError, match="there are 3 first and 2 second sequences; pair them up"):
        model(input_ids=pair["input_ids"], input_ids_b=pair["input_ids_b"][:2])
    with pytest.raises(ValueError, match=r"attention_mask_b has shape \[3, 17\]; it must be \[3, 11\]"):
        model(**pair, attention_mask_b=torch.ones(B, FIRST))
