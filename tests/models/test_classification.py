"""Sequence classification: pooling, padding, inputs of each kind, losses."""

import pytest
import torch
from torch.nn import functional as F
from torch.testing import assert_close
from transformers import AutoConfig, AutoModelForSequenceClassification, DynamicCache

from latte import LatteConfig, LatteForCausalLM, LatteForPairClassification, LatteForSequenceClassification
from latte.models.recomputation import recompute_layers
from tests.models.small import FORMS, HIDDEN, SIZES, TIGHT, VOCAB, idle_parameters, make_ids, make_model, pad

B, T, LABELS = 3, 17, 5
POOLINGS = ("mean", "last", "cls")
PLACES = {"max_position_embeddings": 29}


def make(form="macchiato", **settings):
    return make_model(LatteForSequenceClassification, form, **({"num_labels": LABELS} | settings))


@pytest.mark.parametrize("pooling", POOLINGS)
@pytest.mark.parametrize("form", FORMS)
def test_shapes_and_hidden_states(form, pooling):
    outputs = make(form, pooling=pooling)(make_ids(B, T), output_hidden_states=True)
    assert outputs.logits.shape == (B, LABELS)
    assert outputs.loss is None
    assert [x.shape for x in outputs.hidden_states] == [(B, T + (pooling == "cls"), HIDDEN)] * 3


def test_is_bidirectional_unless_causal_is_chosen():
    ids = make_ids(1, T)
    changed = ids.clone()
    changed[:, -1] = (ids[:, -1] - 2) % VOCAB
    for settings, causal in (({}, False), ({"causal": False}, False), ({"causal": True}, True)):
        model = make(**settings)
        assert model.config.causal is causal
        first, other = (model(x, output_hidden_states=True).hidden_states[-1][:, 0] for x in (ids, changed))
        assert torch.allclose(first, other, rtol=1e-12, atol=1e-12) is causal  # float64: all but rounding


def test_config_of_the_caller_is_left_alone():
    config = LatteConfig(**SIZES)
    assert LatteForSequenceClassification(config).config.causal is False
    assert config.causal is True


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("pooling", POOLINGS)
def test_pooling_by_hand(pooling, side):
    """Row by row, without padding: the mean, the last, or the first of one token more."""
    model = make(pooling=pooling, positions="learned", **PLACES)
    lengths = (T, 1, 11)
    ids, mask = torch.full((B, T), 7), torch.zeros(B, T, dtype=torch.long)
    vectors = []
    for row, length in enumerate(lengths):
        real = slice(T - length, None) if side == "left" else slice(0, length)
        ids[row, real], mask[row, real] = make_ids(1, length, seed=row)[0], 1
        embeds = model.model.embed_tokens(ids[row : row + 1, real])
        if pooling == "cls":
            embeds = torch.cat([model.class_token.weight.expand(1, 1, -1), embeds], dim=1)
        hidden = model.model(inputs_embeds=embeds).last_hidden_state[0]
        vectors.append({"mean": hidden.sum(dim=0) / length, "last": hidden[-1], "cls": hidden[0]}[pooling])
    assert_close(model(ids, mask).logits, model.classifier(torch.stack(vectors)), **TIGHT)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("pooling", POOLINGS)
@pytest.mark.parametrize("form", FORMS)
def test_padding_does_not_matter(form, pooling, side):
    """Neither what stands there nor how long it is; and a row alone gives what it gives in a batch."""
    model, ids = make(form, pooling=pooling, positions="sinusoidal"), make_ids(B, T)
    expected = model(ids).logits
    for tokens, content in ((5, 3), (5, 41), (13, 3)):
        assert_close(model(*pad(ids, side, tokens, content)).logits, expected, **TIGHT)
    assert torch.equal(model(*pad(ids, side, 5, 3)).logits, model(*pad(ids, side, 5, 41)).logits)
    for row in range(B):
        assert_close(model(ids[row : row + 1]).logits[0], expected[row], **TIGHT)


@pytest.mark.parametrize("pooling", POOLINGS)
def test_row_of_padding_alone_is_finite(pooling):
    model, mask = make(pooling=pooling), torch.ones(B, T)
    mask[1] = 0
    outputs = model(make_ids(B, T), mask, labels=torch.arange(B))
    assert outputs.logits.isfinite().all()
    assert idle_parameters(model, outputs.loss) == []


@pytest.mark.parametrize(
    "settings",
    [
        {"positions": "learned", **PLACES},
        {"pooling": "last"},
        {"pooling": "cls"},
        {"input_kind": "pixels"},
        {"input_kind": "continuous", "input_size": 3, "positions": "learned", **PLACES},
    ],
    ids=lambda settings: " ".join(map(str, settings.values())),
)
@pytest.mark.parametrize("form", FORMS)
def test_gradient_reaches_every_parameter(form, settings):
    model = make(form, **settings)
    name, kind = model.main_input_name, settings.get("input_kind")
    values = torch.randn(B, 29, 3, dtype=torch.float64)
    inputs = values if kind == "continuous" else make_ids(B, 28)
    loss = model(**{name: inputs}, labels=torch.arange(B)).loss
    assert idle_parameters(model, loss) == []


def test_pixels_are_tokens_read_row_by_row():
    model = make(input_kind="pixels")
    assert model.config.vocab_size == model.config.input_size == 256
    image = torch.randint(0, 256, (B, 5, 7), dtype=torch.uint8)
    embeds = model.model.embed_tokens(image.flatten(1).long())
    assert torch.equal(model(pixel_values=image).logits, model(inputs_embeds=embeds).logits)
    assert torch.equal(model(pixel_values=image.flatten(1)).logits, model(pixel_values=image).logits)
    assert make(input_kind="pixels", input_size=17).config.vocab_size == 17


def test_continuous_inputs_are_projected():
    model = make(input_kind="continuous", input_size=3)
    values = torch.randn(B, T, 3, dtype=torch.float64)
    weight, bias = model.model.embed_tokens.weight, model.model.embed_tokens.bias
    assert_close(model(input_values=values).logits, model(inputs_embeds=values @ weight.T + bias).logits, **TIGHT)
    values[0, 4:] = torch.nan  # padding may hold anything
    mask = torch.ones(B, T)
    mask[0, 4:] = 0
    assert_close(model(input_values=values, attention_mask=mask).logits[:1], model(input_values=values[:1, :4]).logits)


def test_positions_are_what_tells_order():
    """Without positions, mixer and window, the mean over a sequence cannot tell it from its shuffling."""
    ids = make_ids(B, T)
    shuffled = ids[:, torch.randperm(T, generator=torch.Generator().manual_seed(2))]
    for positions, same in (("none", True), ("learned", False), ("sinusoidal", False)):
        model = make("latte", mixer="none", positions=positions, **PLACES)
        difference = (model(ids).logits - model(shuffled).logits).abs().max()
        assert bool(difference < 1e-10) is same
    with pytest.raises(ValueError, match='positions is "learned" and max_position_embeddings'):
        make(positions="learned", max_position_embeddings=None)
    with pytest.raises(ValueError, match="at position 29 and max_position_embeddings is 29"):
        make(positions="learned", **PLACES)(make_ids(1, 30))


def test_position_ids():
    model, ids = make(), make_ids(B, T)
    places = torch.arange(T)[None].expand(B, -1)
    assert_close(model(ids, position_ids=places).logits, model(ids).logits, **TIGHT)
    stretched = model(ids, position_ids=2 * places).logits  # would be packed sequences of one token in a language model
    assert (stretched - model(ids).logits).abs().max() > 1e-6


def test_losses_are_those_of_the_problem():
    ids = make_ids(B, T)
    model = make(num_labels=1)
    labels = torch.randn(B, dtype=torch.float64)
    outputs = model(ids, labels=labels)
    assert_close(outputs.loss, F.mse_loss(outputs.logits[:, 0], labels))
    assert model.config.problem_type == "regression"
    model, labels = make(), torch.tensor([4, 0, 2])
    outputs = model(ids, labels=labels)
    assert_close(outputs.loss, F.cross_entropy(outputs.logits, labels))
    labels = torch.rand(B, LABELS, dtype=torch.float64).round()
    outputs = make()(ids, labels=labels)
    assert_close(outputs.loss, F.binary_cross_entropy_with_logits(outputs.logits, labels))
    outputs = make(problem_type="regression")(ids, labels=labels)
    assert_close(outputs.loss, F.mse_loss(outputs.logits, labels))


@pytest.mark.parametrize("settings", [{"pooling": "cls"}, {"causal": True, "pooling": "last"}], ids=["cls", "causal"])
def test_save_and_load(tmp_path, settings):
    model, ids = make(positions="learned", **PLACES, **settings), make_ids(B, T)
    model.save_pretrained(tmp_path)
    loaded, report = AutoModelForSequenceClassification.from_pretrained(tmp_path, output_loading_info=True)
    assert type(loaded) is LatteForSequenceClassification
    assert not any(report.values())
    assert loaded.config.causal is model.config.causal
    assert loaded.config.num_labels == LABELS
    assert_close(loaded(ids).logits, model(ids).logits, **TIGHT)
    assert AutoConfig.from_pretrained(tmp_path).pooling == settings["pooling"]


def test_backbone_of_a_language_model_stays_causal(tmp_path):
    make_model(LatteForCausalLM).save_pretrained(tmp_path)
    model, report = LatteForSequenceClassification.from_pretrained(tmp_path, num_labels=3, output_loading_info=True)
    assert sorted(report["missing_keys"]) == ["classifier.bias", "classifier.weight"]
    assert model.config.causal is True
    assert model.classifier.weight.std() < 0.1  # made anew
    assert LatteForSequenceClassification.from_pretrained(tmp_path, causal=False).config.causal is False


def test_gradient_checkpointing():
    model, ids = make(pooling="cls").train(), make_ids(B, T)
    gradients = []
    for _ in range(2):
        loss = model(ids, labels=torch.arange(B)).loss
        gradients.append(torch.autograd.grad(loss, list(model.parameters())))
        recompute_layers(model)
    assert_close(*gradients, **TIGHT)


@pytest.mark.usefixtures("fresh_dynamo")
def test_compile():
    model, (ids, mask) = make(pooling="cls", positions="learned", **PLACES), pad(make_ids(B, T), "left", 3, 5)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    assert_close(compiled(ids, mask).logits, model(ids, mask).logits, **TIGHT)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_mean_over_many_tokens_in_half_precision(dtype):
    """Sums beyond float16's range on the way to a mean within it."""
    model = make("latte").to(dtype)
    with torch.no_grad():
        model.model.norm.weight.fill_(300.0)
    assert model(make_ids(1, 997)).logits.isfinite().all()


def test_learns_the_majority():
    """Which of two tokens is the more frequent."""
    torch.manual_seed(0)
    config = LatteConfig(vocab_size=2, hidden_size=16, num_hidden_layers=1, num_heads=2, num_latents=4)
    model = LatteForSequenceClassification(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-2)
    losses = []
    for _ in range(40):
        ids = (torch.rand(64, 31) < torch.rand(64, 1)).long()
        loss = model(ids, labels=(ids.sum(dim=1) > 15).long()).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[0] > 0.5
    assert sum(losses[-5:]) / 5 < 0.25


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"pooling": "max"}, "pooling is 'max'; it must be one of 'mean', 'last', 'cls'"),
        ({"input_kind": "sound"}, "input_kind is 'sound'; it must be one of 'tokens', 'pixels', 'continuous'"),
        ({"input_kind": "continuous"}, 'input_size is None and input_kind "continuous"; say how many channels'),
        ({"input_size": 3}, 'input_size is 3 and input_kind "tokens"'),
        ({"pooling": "cls", "causal": True}, 'pooling is "cls" and causal True.*choose "last"'),
    ],
)
def test_wrong_settings(settings, text):
    with pytest.raises(ValueError, match=text):
        make(**settings)


IDS, VALUES = make_ids(B, T), torch.randn(B, T, 3)
CONTINUOUS = {"input_kind": "continuous", "input_size": 3}


@pytest.mark.parametrize(
    ("settings", "inputs", "text"),
    [
        ({}, {}, "nothing is given; input_kind is 'tokens': give input_ids, or inputs_embeds in its place"),
        ({}, {"pixel_values": IDS}, "pixel_values is given; input_kind is 'tokens'"),
        ({}, {"input_ids": IDS, "inputs_embeds": VALUES}, "input_ids and inputs_embeds is given"),
        ({}, {"input_ids": IDS[0]}, r"input_ids has shape \[17\]; it must be \[B, T\]"),
        ({}, {"input_ids": VALUES}, "input_ids has dtype torch.float32; it must be integers below 53"),
        ({}, {"input_ids": IDS[:, :0]}, "nothing to give positions to or to pool"),
        (CONTINUOUS, {"input_ids": IDS}, "input_ids is given; input_kind is 'continuous': give input_values"),
        (CONTINUOUS, {"input_values": VALUES[..., :2]}, r"input_values has shape \[3, 17, 2\].*must be \[B, T, 3\]"),
        ({"input_kind": "pixels"}, {"pixel_values": VALUES}, "pixel_values has dtype torch.float32"),
        ({}, {"input_ids": IDS, "attention_mask": IDS[:, 1:]}, r"attention_mask has shape \[3, 16\].*be \[3, 17\]"),
        (
            {},
            {"input_ids": IDS, "attention_mask": -1.0 * IDS},
            "attention_mask holds negative.*1 at real tokens",
        ),
        ({}, {"input_ids": IDS, "seq_idx": IDS}, "seq_idx is given; this model takes one sequence per row"),
        ({"pooling": "cls"}, {"input_ids": IDS, "position_ids": IDS}, 'position_ids are given and pooling is "cls"'),
    ],
)
def test_wrong_inputs(settings, inputs, text):
    with pytest.raises(ValueError, match=text):
        make(**settings)(**inputs)


@pytest.mark.parametrize("kind", [LatteForSequenceClassification, LatteForPairClassification])
def test_no_cache_is_kept_or_taken(kind):
    model, ids = make_model(kind), make_ids(2, 9)
    inputs = {"input_ids": ids} | ({"input_ids_b": ids[:, :4]} if kind is LatteForPairClassification else {})
    for use_cache in (True, False):
        assert torch.equal(model(**inputs, use_cache=use_cache).logits, model(**inputs).logits)
    with pytest.raises(ValueError, match="past_key_values is given; a classifier reads its sequences whole"):
        model(**inputs, past_key_values=DynamicCache(config=model.config))
