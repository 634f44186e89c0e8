"""Encoder and decoder: step = parallel, a summary of the source in place of the source, generation."""

import copy

import pytest
import torch
from torch.nn import functional as F
from torch.testing import assert_close
from transformers import AutoModelForSeq2SeqLM, DynamicCache, EncoderDecoderCache, StaticCache

from latte import LatteConfig, LatteForSeq2SeqLM
from latte.models.recomputation import recompute_layers
from tests.models.small import (
    FORMS,
    HEADS,
    HIDDEN,
    LATENTS,
    TIGHT,
    VOCAB,
    WIDTH,
    idle_parameters,
    make_ids,
    make_model,
    pad,
    tensors,
)

B, SOURCE, TARGET, CROSS = 3, 19, 17, 5
SETTINGS = {"num_encoder_layers": 3, "num_cross_latents": CROSS, "pad_token_id": 0, "decoder_start_token_id": 1}
GREEDY = {"max_new_tokens": 13, "min_new_tokens": 13, "do_sample": False}


def make(form="macchiato", **settings):
    model = make_model(LatteForSeq2SeqLM, form, **(SETTINGS | settings))
    model.tie_weights()
    return model


def make_cache(model, kind=DynamicCache, **options):
    return EncoderDecoderCache(*(kind(config=model.config, **options) for _ in range(2)))


def cached(cache):
    """Every tensor of both caches."""
    layers = [*cache.self_attention_cache.layers, *cache.cross_attention_cache.layers]
    return [x for layer in layers for x in tensors(layer.state)]


@pytest.mark.parametrize("form", FORMS)
def test_packed_pairs_are_as_they_are_alone(form):
    """Several pairs in a row of sources and a row of targets: logits, loss and gradients."""
    model, sources, targets = make(form, positions="learned", max_position_embeddings=20), [13, 5, 19], [7, 17, 3]
    pairs = [(make_ids(1, s, seed=s), make_ids(1, t, seed=50 + t)) for s, t in zip(sources, targets, strict=True)]
    pairs[1][1][0, 4:7] = -100
    bounds = {"cu_seq_lens_k": [0, 13, 18, 37], "cu_seq_lens_q": [0, 7, 24, 27]}
    source, labels = (torch.cat(parts, dim=1) for parts in zip(*pairs, strict=True))
    counted = int((labels != -100).sum())
    packed = model(
        source, labels=labels, num_items_in_batch=counted, return_logits=True,
        **{name: torch.tensor(value, dtype=torch.int32) for name, value in bounds.items()},
    )  # fmt: skip
    alone = [model(s, labels=t, num_items_in_batch=counted, return_logits=True) for s, t in pairs]
    assert_close(packed.logits, torch.cat([output.logits for output in alone], dim=1), **TIGHT)
    assert packed.past_key_values is None
    loss = sum(output.loss for output in alone)
    assert_close(packed.loss, loss, rtol=1e-6, atol=1e-6)  # which is in float32
    grads = torch.autograd.grad(packed.logits.square().sum(), list(model.parameters()))
    expected = torch.autograd.grad(sum(output.logits.square().sum() for output in alone), list(model.parameters()))
    assert_close(grads, expected, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("form", FORMS)
def test_shapes_loss_and_gradients(form, tied):
    model = make(form, tie_word_embeddings=tied, positions="learned", max_position_embeddings=SOURCE)
    source, labels = make_ids(B, SOURCE), make_ids(B, SOURCE, seed=2)
    labels[1, 5:] = -100
    outputs = model(source, labels=labels, output_hidden_states=True)
    assert outputs.logits.shape == (B, SOURCE, VOCAB)
    assert outputs.encoder_last_hidden_state.shape == (B, SOURCE, HIDDEN)
    assert (len(outputs.encoder_hidden_states), len(outputs.decoder_hidden_states)) == (4, 3)
    expected = F.cross_entropy(outputs.logits.flatten(0, 1), labels.flatten())
    assert_close(outputs.loss.double(), expected, rtol=0, atol=1e-5)
    loss = model(source, labels=labels, return_logits=False).loss
    assert_close(loss, expected, **TIGHT)
    assert torch.autograd.grad(outputs.loss, outputs.logits)[0].abs().sum() > 0
    assert idle_parameters(model, loss) == []
    assert (model.lm_head.weight is model.get_encoder().embed_tokens.weight) is tied


def test_directions():
    """The encoder sees both ways, the decoder only what came before, and the source as a whole."""
    model, source, target = make(), make_ids(1, SOURCE), make_ids(1, TARGET, seed=2)

    def run(source, target):
        outputs = model(source, decoder_input_ids=target)
        return outputs.encoder_last_hidden_state[0], outputs.logits[0]

    read, logits = run(source, target)
    changed = source.clone()
    changed[:, -1] -= 1
    other_read, other_logits = run(changed, target)
    assert ((read - other_read).abs().amax(dim=1) > 1e-9).all()
    assert ((logits - other_logits).abs().amax(dim=1) > 1e-9).all()
    changed = target.clone()
    changed[:, 7] -= 1
    difference = (run(source, changed)[1] - logits).abs().amax(dim=1)
    assert (difference[:7] < 1e-12).all()
    assert (difference[7:] > 1e-9).all()


def test_labels_make_the_decoder_inputs():
    model, source = make(), make_ids(B, SOURCE)
    labels = torch.tensor([[5, 6, 7], [8, -100, -100], [9, 10, -100]])
    inputs = torch.tensor([[1, 5, 6], [1, 8, 0], [1, 9, 10]])
    assert model.prepare_decoder_input_ids_from_labels(labels).equal(inputs)
    by_hand = model(source, decoder_input_ids=inputs, labels=labels)
    assert_close(model(source, labels=labels).loss, by_hand.loss, **TIGHT)
    embeds = model.get_input_embeddings()(inputs)
    assert_close(model(source, decoder_inputs_embeds=embeds).logits, by_hand.logits, **TIGHT)
    model.config.decoder_start_token_id, model.config.bos_token_id = None, 4
    assert model.prepare_decoder_input_ids_from_labels(labels)[:, 0].eq(4).all()


def test_training_holds_no_logits_unless_asked():
    model, ids = make().train(), make_ids(B, SOURCE)
    outputs = model(ids, labels=ids)
    assert outputs.logits is None
    assert outputs.past_key_values is None
    assert model(ids, labels=ids, return_logits=True).logits.shape == (B, SOURCE, VOCAB)
    summed = model(ids, labels=ids, num_items_in_batch=torch.tensor(7)).loss
    assert_close(summed, outputs.loss * ids.numel() / 7, **TIGHT)
    model.lm_head = torch.nn.Sequential(model.lm_head)  # as an adapter would wrap it: the plain way then
    assert_close(model(ids, labels=ids).loss.double(), outputs.loss, rtol=0, atol=1e-5)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("form", FORMS)
def test_padding_of_the_source_does_not_matter(form, side):
    model, source, target = make(form), make_ids(B, SOURCE), make_ids(B, TARGET, seed=2)
    expected = model(source, decoder_input_ids=target).logits
    for tokens, content in ((5, 3), (5, 41), (13, 3)):
        ids, mask = pad(source, side, tokens, content)
        assert_close(model(ids, mask, decoder_input_ids=target).logits, expected, **TIGHT)
    for row in range(B):
        one = slice(row, row + 1)
        assert_close(model(source[one], decoder_input_ids=target[one]).logits[0], expected[row], **TIGHT)


@pytest.mark.parametrize("form", FORMS)
def test_padding_of_the_target_does_not_matter(form):
    model, source, target = make(form), make_ids(B, SOURCE), make_ids(B, TARGET, seed=2)
    ids, mask = pad(target, "left", 5, 41)
    padded = model(source, decoder_input_ids=ids, decoder_attention_mask=mask).logits[:, 5:]
    assert_close(padded, model(source, decoder_input_ids=target).logits, **TIGHT)


@pytest.mark.parametrize("positions", ["none", "sinusoidal"])
@pytest.mark.parametrize("form", FORMS)
@torch.no_grad()
def test_steps_are_the_whole(form, positions):
    """Token by token, after a prompt, with nothing of the source but what the cache has kept."""
    model, (source, mask) = make(form, positions=positions), pad(make_ids(B, SOURCE), "left", 3, 9)
    target = make_ids(B, TARGET, seed=2)
    expected = model(source, mask, decoder_input_ids=target).logits
    outputs = model(source, mask, decoder_input_ids=target[:, :5], use_cache=True)
    pieces, cache = [outputs.logits], outputs.past_key_values
    for t in range(5, TARGET):
        outputs = model(decoder_input_ids=target[:, t : t + 1], past_key_values=cache)
        assert outputs.encoder_last_hidden_state is None
        pieces.append(outputs.logits)
    assert_close(torch.cat(pieces, dim=1), expected, **TIGHT)


@torch.no_grad()
def test_cache_does_not_depend_on_the_length_of_the_source():
    model, target, shapes = make(), make_ids(B, TARGET, seed=2), []
    for tokens in (SOURCE, 97):
        cache = model(make_ids(B, tokens), decoder_input_ids=target, use_cache=True).past_key_values
        shapes.append([x.shape for x in cached(cache)])
        assert not any(tokens in shape for shape in shapes[-1])
    assert shapes[0] == shapes[1]
    state = cache.cross_attention_cache.layers[0].state
    assert state.attention.mean.shape == (B, HEADS, CROSS, WIDTH)
    assert state.position.tolist() == [97] * B


@torch.no_grad()
def test_source_is_read_once():
    model, reads = make(), []
    for layer in model.get_decoder().layers:
        layer.cross_attention.value.register_forward_hook(lambda *_: reads.append("summary"))
    model.get_encoder().register_forward_hook(lambda *_: reads.append("encoder"))
    model.generate(make_ids(B, SOURCE), **GREEDY)
    assert reads == ["encoder", "summary", "summary"]


@torch.no_grad()
def test_cache_follows_rows():
    """Reordered for beams, repeated, selected: the next step is that of the rows chosen."""
    model, source, target = make(), make_ids(B, SOURCE), make_ids(B, TARGET, seed=2)
    cache = model(source, decoder_input_ids=target[:, :-1], use_cache=True).past_key_values
    expected = model(source, decoder_input_ids=target).logits[:, -1:]
    rows = torch.tensor([2, 0, 0])
    for change, chosen in (
        (lambda cache: cache.reorder_cache(rows), rows),
        (lambda cache: cache.batch_repeat_interleave(2), torch.arange(B).repeat_interleave(2)),
        (lambda cache: cache.batch_select_indices(rows[:2]), rows[:2]),
    ):
        moved = copy.deepcopy(cache)
        change(moved)
        logits = model(decoder_input_ids=target[chosen, -1:], past_key_values=moved).logits
        assert_close(logits, expected[chosen], **TIGHT)


@pytest.mark.parametrize("kind", [DynamicCache, StaticCache])
@torch.no_grad()
def test_cache_begins_anew_with_another_source(kind):
    model, source, target = make(), make_ids(B, SOURCE), make_ids(B, TARGET, seed=2)
    cache = make_cache(model, kind, **({"max_cache_len": TARGET} if kind is StaticCache else {}))
    for ids in (source, source.flip(0)):
        cache.reset()
        logits = model(ids, decoder_input_ids=target, past_key_values=cache).logits
        assert_close(logits, model(ids, decoder_input_ids=target).logits, **TIGHT)


@pytest.mark.parametrize("options", [{}, {"num_beams": 3}, {"num_beams": 5, "num_return_sequences": 2}], ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_generate_with_and_without_cache(form, options):
    """And with a padded source; no token comes twice, so that there is something to see."""
    model, source = make(form, tie_word_embeddings=False), make_ids(B, SOURCE)
    options = {**options, "no_repeat_ngram_size": 1}
    ids = model.generate(source, **GREEDY, **options)
    assert ids.shape == (B * options.get("num_return_sequences", 1), 14)
    assert ids[:, 0].eq(1).all()
    assert len(ids.unique(dim=0)) == len(ids)
    assert torch.equal(ids, model.generate(source, **GREEDY, **options, use_cache=False))
    padded, mask = pad(source, "left", 5, 41)
    assert torch.equal(ids, model.generate(padded, attention_mask=mask, **GREEDY, **options))


def test_generate_in_other_ways():
    model, source = make(tie_word_embeddings=False), make_ids(B, SOURCE)
    ids = model.generate(source, **GREEDY)
    assert torch.equal(ids, model.generate(source, **GREEDY, cache_implementation="static"))
    for row in range(B):  # assistants help one sequence at a time
        one = source[row : row + 1]
        for options in ({"prompt_lookup_num_tokens": 3}, {"assistant_model": make(num_hidden_layers=1)}):
            assert torch.equal(ids[row : row + 1], model.generate(one, **GREEDY, **options))
    prompt = ids[:, :5]
    assert torch.equal(
        ids, model.generate(source, decoder_input_ids=prompt, **GREEDY | {"max_new_tokens": 9, "min_new_tokens": 9})
    )
    read = model.get_encoder()(source)
    assert torch.equal(ids, model.generate(encoder_outputs=read, **GREEDY))
    torch.manual_seed(0)
    sampled = model.generate(source, do_sample=True, max_new_tokens=5, min_new_tokens=5, num_return_sequences=2)
    assert sampled.shape == (2 * B, 6)


@torch.no_grad()
def test_tokens_taken_back():
    model, source, target = make(), make_ids(B, SOURCE), make_ids(B, TARGET, seed=2)
    cache = make_cache(model)
    cache.activate_past_recording()
    model(source, decoder_input_ids=target[:, :7], past_key_values=cache)
    model(decoder_input_ids=target[:, 11:15], past_key_values=cache)
    cache.crop(-4)
    logits = model(decoder_input_ids=target[:, 7:], past_key_values=cache).logits
    assert_close(logits, model(source, decoder_input_ids=target).logits[:, 7:], **TIGHT)


@pytest.mark.usefixtures("fresh_dynamo")
def test_compile():
    """Training in one graph, and one graph for every step on a static cache."""
    model, (source, mask), target = make(), pad(make_ids(B, SOURCE), "left", 3, 9), make_ids(B, TARGET, seed=2)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    losses = [run(source, mask, labels=target, use_cache=False).loss for run in (compiled, model)]
    assert_close(*losses, **TIGHT)
    gradients = [torch.autograd.grad(loss, list(model.parameters())) for loss in losses]
    assert_close(*gradients, **TIGHT)
    graphs = []

    def count(graph, inputs):
        graphs.append(graph)
        return graph

    with torch.no_grad():
        cache = make_cache(model, StaticCache, max_cache_len=TARGET)
        model(source, mask, decoder_input_ids=target[:, :5], past_key_values=cache)
        step = torch.compile(model, fullgraph=True, backend=count)
        pieces = [step(decoder_input_ids=target[:, t : t + 1], past_key_values=cache).logits for t in range(5, TARGET)]
        expected = model(source, mask, decoder_input_ids=target).logits[:, 5:]
    assert_close(torch.cat(pieces, dim=1), expected, **TIGHT)
    assert len(graphs) == 1


def test_gradient_checkpointing():
    model, source, labels = make().train(), make_ids(B, SOURCE), make_ids(B, TARGET, seed=2)
    gradients = []
    for reentrant in (None, False, True):
        if reentrant is not None:
            recompute_layers(model, {"use_reentrant": reentrant})
        model.zero_grad()
        model(source, labels=labels).loss.backward()
        gradients.append([parameter.grad.clone() for parameter in model.parameters()])
    assert_close(gradients[1], gradients[0], **TIGHT)
    assert_close(gradients[2], gradients[0], **TIGHT)


@pytest.mark.parametrize("tied", [True, False])
def test_save_and_load(tmp_path, tied):
    model, source = make(tie_word_embeddings=tied), make_ids(B, SOURCE)
    model.save_pretrained(tmp_path)
    loaded, report = AutoModelForSeq2SeqLM.from_pretrained(tmp_path, output_loading_info=True)
    assert type(loaded) is LatteForSeq2SeqLM
    assert not any(report.values())
    assert (len(loaded.get_encoder().layers), len(loaded.get_decoder().layers)) == (3, 2)
    assert_close(loaded(source, labels=source).logits, model(source, labels=source).logits, **TIGHT)
    assert torch.equal(loaded.generate(source, **GREEDY), model.generate(source, **GREEDY))


def test_settings():
    config = LatteConfig(hidden_size=24, vocab_size=11, num_hidden_layers=1, num_latents=LATENTS)
    model = LatteForSeq2SeqLM(config)
    assert (model.config.num_encoder_layers, model.config.num_cross_latents) == (1, LATENTS)
    assert model.config.is_encoder_decoder
    assert not config.is_encoder_decoder
    model.resize_token_embeddings(13)
    assert model(torch.tensor([[12]]), decoder_input_ids=torch.tensor([[12]])).logits.shape == (1, 1, 13)
    assert model.lm_head.weight is model.get_encoder().embed_tokens.weight
    with pytest.raises(ValueError, match="causal is False; the decoder is causal and the encoder is not"):
        make(causal=False)
    with pytest.raises(ValueError, match=r"num_cross_latents and num_latents are None; .*set one"):
        make("full", num_cross_latents=None)


def test_wrong_inputs():
    model, ids = make(decoder_start_token_id=None), make_ids(B, SOURCE)
    with pytest.raises(ValueError, match="decoder_start_token_id and bos_token_id are None; set one"):
        model(ids, labels=ids)
    with pytest.raises(ValueError, match="decoder_input_ids and decoder_inputs_embeds: give exactly one"):
        model(ids)
    with pytest.raises(ValueError, match="input_ids and inputs_embeds: give exactly one"):
        model(decoder_input_ids=ids)
    for name in ("attention_mask", "decoder_attention_mask"):
        with pytest.raises(ValueError, match="attention_mask holds negative numbers"):
            model(ids, decoder_input_ids=ids, **{name: -torch.ones(ids.shape)})
    with pytest.raises(ValueError, match="past_key_values is DynamicCache; it must be an EncoderDecoderCache"):
        model(ids, decoder_input_ids=ids, past_key_values=DynamicCache(config=model.config))
    with pytest.raises(ValueError, match="past_key_values has 1 layers and the model 2"):
        model(ids, decoder_input_ids=ids, past_key_values=make_cache(make(num_hidden_layers=1)))
    with pytest.raises(ValueError, match="seq_idx is given; this model takes one sequence per row"):
        model(ids, decoder_input_ids=ids, seq_idx=ids)
    with pytest.raises(ValueError, match="position_ids is given; a source's tokens are counted"):
        model(ids, decoder_input_ids=ids, position_ids=ids)
    with pytest.raises(ValueError, match="past_key_values has 1 layers and the model 2"):  # a draft that leaves early
        model.generate(ids[:1], **GREEDY, decoder_start_token_id=1, assistant_early_exit=1)
    bounds = torch.tensor([0, ids.shape[1]])
    with pytest.raises(ValueError, match="cu_seq_lens_q bounds the targets and cu_seq_lens_k the sources; give both"):
        model(ids, decoder_input_ids=ids, cu_seq_lens_q=bounds)
    packed = {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds}
    with pytest.raises(ValueError, match="packed pairs are read at once; leave past_key_values out"):
        model(ids[:1], decoder_input_ids=ids[:1], past_key_values=make_cache(model), **packed)


def test_learns_to_reverse():
    torch.manual_seed(0)
    config = LatteConfig(
        vocab_size=7, hidden_size=32, num_hidden_layers=1, num_heads=4, num_latents=8, positions="learned",
        max_position_embeddings=5, initializer_range=0.2, decoder_start_token_id=0,
    )  # fmt: skip
    model = LatteForSeq2SeqLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(150):
        source = torch.randint(1, 7, (64, 5))
        loss = model(source, labels=source.flip(1)).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[0] > 1.5
    assert losses[-1] < 0.3
    source = torch.randint(1, 7, (64, 5))
    answers = model.eval().generate(source, max_new_tokens=5, do_sample=False)[:, 1:]
    assert answers.eq(source.flip(1)).float().mean() > 0.9
