"""Cache layers: what Transformers does to them, saving, and caches of other models."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import Cache, DynamicCache, EncoderDecoderCache, StaticCache
from transformers.cache_utils import DynamicLayer

from latte.models import load_cache, save_cache
from latte.models.cache import StateLayer, StaticStateLayer, tensors
from tests.models.forms import (
    FORMS,
    MAIN_FORMS,
    STATE_FORMS,
    VOCABULARY,
    WINDOW,
    assert_same_cache,
    make_config,
    make_model,
    make_tokens,
    padded,
)

CLOSE = {"rtol": 1e-5, "atol": 2e-5}
LENGTH = 19


def read(form: str, kind: str = "dynamic", batch: int = 3) -> tuple:
    """A model, the tokens that it has read, and its cache after them."""
    model, tokens = make_model(form), make_tokens(batch, LENGTH)
    config = model.config
    cache = DynamicCache(config=config) if kind == "dynamic" else StaticCache(config=config, max_cache_len=40)
    with torch.no_grad():
        model(tokens, past_key_values=cache)
    return model, tokens, cache


def next_logits(model, tokens, cache) -> torch.Tensor:
    """Logits of one more token, the same for every row."""
    rows = cache.layers[0].batch_size
    return model(torch.full((rows, 1), 7), past_key_values=cache).logits


def test_layers_are_ours():
    config = make_config("macchiato")
    assert [type(layer) for layer in DynamicCache(config=config).layers] == 2 * [StateLayer]
    assert [type(layer) for layer in StaticCache(config=config, max_cache_len=9).layers] == 2 * [StaticStateLayer]
    assert not DynamicCache(config=config).is_compileable
    assert StaticCache(config=config, max_cache_len=9).is_compileable
    assert StaticCache(config=config, max_cache_len=9).get_max_length() == 9
    assert DynamicCache(config=config).get_max_length() == -1


@pytest.mark.parametrize("kind", ["dynamic", "static"])
@pytest.mark.parametrize("form", MAIN_FORMS)
def test_rows_can_be_reordered_repeated_and_selected(form, kind):
    rows = torch.tensor([2, 0, 0])
    for change, expected in (
        (lambda cache: cache.reorder_cache(rows), rows),
        (lambda cache: cache.batch_repeat_interleave(2), torch.tensor([0, 0, 1, 1, 2, 2])),
        (lambda cache: cache.batch_select_indices(torch.tensor([1])), torch.tensor([1])),
    ):
        model, tokens, cache = read(form, kind)
        change(cache)
        assert cache.batch_size == len(expected)
        other = make_model(form)(tokens[expected]).past_key_values
        torch.testing.assert_close(next_logits(model, tokens, cache), next_logits(model, tokens, other), **CLOSE)


@pytest.mark.parametrize("kind", ["dynamic", "static"])
@pytest.mark.parametrize("form", MAIN_FORMS)
def test_a_reset_cache_is_a_new_one(form, kind):
    model, _, cache = read(form, kind)
    before = [tensor.data_ptr() for layer in cache.layers for tensor in tensors(layer.state)]
    cache.reset()
    assert int(cache.get_seq_length()) == 0
    again = make_tokens(3, 11, seed=2)
    torch.testing.assert_close(model(again, past_key_values=cache).logits, model(again).logits, **CLOSE)
    assert int(cache.get_seq_length()) == 11
    if kind == "static":
        assert [tensor.data_ptr() for layer in cache.layers for tensor in tensors(layer.state)] == before


@pytest.mark.parametrize("form", MAIN_FORMS)
def test_a_static_state_stays_where_it_is(form):
    model, _, cache = read(form, "static")
    places = [tensor.data_ptr() for layer in cache.layers for tensor in tensors(layer.state)]
    for _ in range(3):
        next_logits(model, None, cache)
    assert [tensor.data_ptr() for layer in cache.layers for tensor in tensors(layer.state)] == places


class NewBytes(TorchDispatchMode):
    """Counts the bytes of tensors that operations make, other than views of what was there."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        output = func(*args, **(kwargs or {}))
        given = {x.untyped_storage().data_ptr() for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)}
        for x in tree_leaves(output):
            if isinstance(x, torch.Tensor) and x.untyped_storage().data_ptr() not in given:
                self.count += x.numel() * x.element_size()
        return output


@torch.no_grad()
@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("value_heads", [1, 3])
def test_a_step_of_full_attention_copies_no_keys_and_values(value_heads, softcap):
    """Per place of the cache there is an entry of a mask, or some scores, and never a key."""
    made = []
    for room in (64, 1064):
        model = make_model("softmax", head_dim=64, num_value_heads=value_heads, softcap=softcap)
        cache = StaticCache(config=model.config, max_cache_len=room)
        model(make_tokens(1, LENGTH), past_key_values=cache)
        with NewBytes() as new:
            next_logits(model, None, cache)
        made.append(new.count)
    layers, heads, a_key = 2, 3, 64 * 4
    allowed = 4 if softcap is None else 4 * (6 * heads + 1)  # the mask as numbers; scores on their way through the cap
    assert (made[1] - made[0]) / 1000 / layers <= allowed < a_key


@pytest.mark.parametrize("settings", [{}, {"num_value_heads": 1}, {"softcap": 2.0, "num_value_heads": 1}], ids=str)
@pytest.mark.parametrize("cuts", [[7], [7, 8, 9, 17]], ids=str)
def test_full_attention_in_a_static_cache_is_that_in_a_dynamic_one(settings, cuts):
    """With padding, read in pieces, into more room than is needed, and again after a text with NaN in its past."""
    model = make_model("softmax", **settings)
    ids, mask = padded(make_tokens(3, LENGTH), [LENGTH, 12, 5])
    static = StaticCache(config=model.config, max_cache_len=29)
    for cache in (static, static):
        cache.reset()
        dynamic = DynamicCache(config=model.config)
        for start, stop in zip([0, *cuts], [*cuts, LENGTH], strict=True):
            a, b = (
                model(ids[:, start:stop], attention_mask=mask[:, :stop], past_key_values=past).logits
                for past in (cache, dynamic)
            )
            real = mask[:, start:stop].bool()
            torch.testing.assert_close(a[real], b[real], **CLOSE)
        with torch.no_grad():
            cache.layers[0].state.attention.keys.fill_(torch.nan)


@pytest.mark.parametrize("form", MAIN_FORMS)
@torch.no_grad()
def test_no_tokens_change_nothing(form):
    model, tokens, cache = read(form, "static")
    assert model(tokens[:, :0], past_key_values=cache).logits.shape == (3, 0, VOCABULARY)
    torch.testing.assert_close(next_logits(model, tokens, cache), next_logits(*read(form, "static")), **CLOSE)


def test_packed_texts_go_on_in_a_static_cache():
    model, bounds = make_model("softmax"), torch.tensor([0, 4, 13])
    caches = DynamicCache(config=model.config), StaticCache(config=model.config, max_cache_len=30)
    for seed in range(2):
        row = make_tokens(1, 13, seed)
        a, b = (model(row, cu_seq_lens_q=bounds, past_key_values=cache).logits for cache in caches)
        torch.testing.assert_close(a, b, **CLOSE)


def test_a_full_static_cache_says_so():
    model, tokens = make_model("softmax"), make_tokens(1, 8)
    cache = StaticCache(config=model.config, max_cache_len=8)
    model(tokens, past_key_values=cache)
    with pytest.raises(ValueError, match=r"room for 8 tokens and 9 are read; make it with max_cache_len=9 or more"):
        model(tokens[:, :1], past_key_values=cache)
    with pytest.raises(ValueError, match="room for 8 tokens and 9 are read"):
        model(make_tokens(1, 9), past_key_values=StaticCache(config=model.config, max_cache_len=8))


def test_sizes_for_masks():
    _, _, cache = read("macchiato")
    assert cache.get_mask_sizes(3, 0) == (LENGTH + 3, 0)
    assert cache.get_seq_length() == LENGTH
    assert cache.is_sliding == [False, False]
    assert cache.is_croppable
    assert len(list(cache)) == 2


def test_states_can_be_moved():
    _, _, cache = read("macchiato")
    cache.layers[0].offload()
    assert {tensor.device.type for tensor in tensors(cache.layers[0].state)} == {"cpu"}


def test_nothing_is_read_by_a_cache_before_the_first_forward():
    cache = DynamicCache(config=make_config("macchiato"))
    assert (cache.get_seq_length(), cache.batch_size, cache.get_mask_sizes(5, 0)) == (0, -1, (5, 0))
    cache.reorder_cache(torch.tensor([0]))
    cache.reset()
    assert cache.get_seq_length() == 0


@pytest.mark.parametrize("kind", ["dynamic", "static"])
@pytest.mark.parametrize("form", FORMS)
def test_a_prefix_can_be_saved(form, kind, tmp_path):
    model, tokens, cache = read(form, kind)
    path = tmp_path / "prefix.safetensors"
    save_cache(cache, path, model.config)
    loaded = load_cache(path, model.config)
    if kind == "static" and form == "softmax":  # which has room for more
        assert loaded.layers[0].state.attention.keys.shape[1] == LENGTH
        torch.testing.assert_close(next_logits(model, tokens, loaded), next_logits(model, tokens, cache), **CLOSE)
        return
    assert_same_cache(loaded, cache, atol=0)
    torch.testing.assert_close(next_logits(model, tokens, loaded), next_logits(model, tokens, cache), rtol=0, atol=0)


def test_a_padded_prefix_can_be_saved(tmp_path):
    """In full attention all layers hold the same mask."""
    model, (tokens, mask) = make_model("softmax"), padded(make_tokens(2, LENGTH), [LENGTH, 5])
    with torch.no_grad():
        cache = model(tokens, attention_mask=mask).past_key_values
        save_cache(cache, tmp_path / "prefix", model.config)
        loaded = load_cache(tmp_path / "prefix", model.config)
        torch.testing.assert_close(next_logits(model, tokens, loaded), next_logits(model, tokens, cache), **CLOSE)


@pytest.mark.parametrize("form", STATE_FORMS)
def test_a_saved_prefix_is_small(form, tmp_path):
    model = make_model(form)
    sizes = []
    for length in (WINDOW, 300):
        path = tmp_path / f"{length}.safetensors"
        save_cache(model(make_tokens(1, length)).past_key_values, path, model.config)
        sizes.append(path.stat().st_size)
    assert sizes[0] == pytest.approx(sizes[1], abs=8)  # the number of tokens read is written down


def test_one_prefix_begins_many_texts(tmp_path):
    model, prefix = make_model("macchiato"), make_tokens(1, LENGTH)
    save_cache(model(prefix).past_key_values, tmp_path / "prefix", model.config)
    cache = load_cache(tmp_path / "prefix", model.config)
    cache.batch_repeat_interleave(3)
    questions = make_tokens(3, 5, seed=4)
    expected = model(torch.cat([prefix.expand(3, -1), questions], dim=1)).logits[:, LENGTH:]
    torch.testing.assert_close(model(questions, past_key_values=cache).logits, expected, **CLOSE)


def test_a_prefix_of_another_model_is_refused(tmp_path):
    model, _, cache = read("macchiato")
    save_cache(cache, tmp_path / "prefix", model.config)
    with pytest.raises(ValueError, match=r"is a cache of another model, .* window=11.* window=5"):
        load_cache(tmp_path / "prefix", make_config("macchiato", window=5))
    model, _, cache = read("linear")  # whose states are of the same shapes, and mean something else
    save_cache(cache, tmp_path / "features", model.config)
    assert load_cache(tmp_path / "features", model.config).get_seq_length() == cache.get_seq_length()
    with pytest.raises(ValueError, match=r"is a cache of another model, .* feature_map=elu\+1"):
        load_cache(tmp_path / "features", make_config("latte conv"))
    with pytest.raises(ValueError, match="the cache has read nothing"):
        save_cache(DynamicCache(config=model.config), tmp_path / "empty", model.config)


@pytest.mark.parametrize(
    ("cache", "message"),
    [
        (DynamicCache(), r"has 0 layers and the model 2; .* make one with DynamicCache\(config=model.config\)"),
        (Cache(layers=[DynamicLayer(), DynamicLayer()]), "has layers of type DynamicLayer; it is of another model"),
        (DynamicCache(config=make_config("macchiato", num_hidden_layers=3)), "has 3 layers and the model 2"),
        (((None, None),), "past_key_values is tuple; it must be a Cache"),
        (EncoderDecoderCache(DynamicCache(), DynamicCache()), "is EncoderDecoderCache; it must be a Cache with layers"),
    ],
    ids=["unconfigured", "keys and values", "another depth", "tuple", "encoder-decoder"],
)
def test_a_cache_of_another_model_is_refused(cache, message):
    with pytest.raises(ValueError, match=message):
        make_model("macchiato")(make_tokens(1, 3), past_key_values=cache)


def test_states_of_another_shape_are_refused():
    cache = make_model("macchiato", window=5)(make_tokens(1, 13)).past_key_values
    with pytest.raises(ValueError, match=r"state.keys has shape \[1, 4, 3, 10\]; it must be \[B=1, w-1=10, "):
        make_model("macchiato")(make_tokens(1, 3), past_key_values=cache)
    cache = make_model("latte rglru")(make_tokens(1, 13)).past_key_values
    with pytest.raises(ValueError, match="state"):
        make_model("latte")(make_tokens(1, 3), past_key_values=cache)


@pytest.mark.parametrize("kind", ["dynamic", "static"])
@pytest.mark.parametrize(
    ("form", "settings"),
    [("macchiato", {"window": 5}), ("latte conv", {"num_latents": 1}), ("softmax", {"num_heads": 1})],
)
@torch.no_grad()
def test_a_step_from_a_state_of_another_shape_is_refused(form, settings, kind):
    config = make_config(form, **settings)
    cache = DynamicCache(config=config) if kind == "dynamic" else StaticCache(config=config, max_cache_len=40)
    make_model(form, **settings)(make_tokens(1, 13), past_key_values=cache)
    with pytest.raises(ValueError, match=r"state\..* has shape .*; it must be \[B=1, "):
        make_model(form)(make_tokens(1, 1), past_key_values=cache)


def test_another_batch_than_the_cache_s_is_refused():
    model, _, cache = read("macchiato")
    with pytest.raises(ValueError, match="state"):
        model(make_tokens(2, 3), past_key_values=cache)


def test_keys_and_values_have_no_place_in_a_state():
    _, _, cache = read("macchiato")
    with pytest.raises(TypeError, match="holds a state"):
        cache.update(torch.zeros(1), torch.zeros(1), 0)


def test_training_makes_no_cache_unless_it_is_given_one():
    model, tokens = make_model("macchiato").train(), make_tokens(1, 13)
    assert model(tokens).past_key_values is None
    cache = DynamicCache(config=model.config)
    first = model(tokens, past_key_values=cache).logits
    second = model(tokens, past_key_values=cache).logits
    (gradient,) = torch.autograd.grad(second.square().sum() + 0 * first.sum(), [model.model.embed_tokens.weight])
    assert gradient.abs().sum() > 0
    assert second.shape == (1, 13, VOCABULARY)


@pytest.mark.parametrize("form", STATE_FORMS)
def test_one_token_is_written_in_place_unless_someone_needs_the_state_as_it_is(form):
    model, tokens = make_model(form), make_tokens(2, LENGTH)
    with torch.no_grad():
        expected = model(tokens).logits[:, -1:]
    for reading in (torch.no_grad, torch.inference_mode, torch.enable_grad):
        cache = DynamicCache(config=model.config)
        with reading():
            loss = model(tokens[:, :-1], past_key_values=cache, use_cache=True).logits.square().mean()
        before = [x.data_ptr() for x in tensors(cache.layers[0].state)]
        with torch.no_grad():
            logits = model(tokens[:, -1:], past_key_values=cache, use_cache=True).logits
        torch.testing.assert_close(logits, expected, **CLOSE)
        same = before == [x.data_ptr() for x in tensors(cache.layers[0].state)]
        assert same == (reading is torch.no_grad)
        if reading is torch.enable_grad:
            loss.backward()  # what it needs is as it was


@pytest.mark.parametrize("form", STATE_FORMS)
def test_counters_of_steps_are_made_once_unless_they_do_not_fit(form):
    model, tokens = make_model(form), make_tokens(2, LENGTH)
    cache = DynamicCache(config=model.config)
    made = []
    for reading, select in ((torch.inference_mode, None), (torch.inference_mode, None), (torch.no_grad, [1])):
        with reading():
            if select is not None:  # of what was made in inference mode, by a batch of another size
                cache.batch_select_indices(torch.tensor(select))
                model(tokens[:1, :2], past_key_values=cache)
            elif not made:
                model(tokens, past_key_values=cache)
            model(tokens[: 1 if select else 2, :1], past_key_values=cache)
        made.append(cache.layers[0].counters)
    assert made[0] is made[1] is not None
    assert made[2] is not made[1]
    assert made[2].arrivals.tolist() == [0]
