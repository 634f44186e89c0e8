"""Settings: presets and their sizes, derived values, other names, and what makes no model."""

import json
import pickle

import pytest
import torch
from huggingface_hub.errors import StrictDataclassError

from latte.models import PRESETS, LatteConfig, LatteForCausalLM
from tests.models.forms import make_config

TABLE_1 = {  # millions of parameters in the paper
    "latte": 111,
    "latte++": 140,
    "latte-conv++": 140,
    "latte-conv-swa++": 153,
    "latte-r++": 139,
    "latte-r-swa++": 153,
    "transformer++": 151,
    "r-swa++": 141,
}


def count_parameters(name: str) -> int:
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in LatteForCausalLM(LatteConfig.from_preset(name)).parameters())


@pytest.mark.parametrize("name", TABLE_1)
def test_paper_presets_have_the_paper_s_sizes(name):
    assert count_parameters(name) == pytest.approx(1e6 * TABLE_1[name], rel=0.02)


@pytest.mark.parametrize(("suffix", "size"), [("400m", 4e8), ("2.6b", 2.6e9)])
@pytest.mark.parametrize(("form", "within"), [("latte", 0.12), ("macchiato", 0.03), ("transformer", 0.03)])
def test_timing_shapes_have_their_sizes(form, suffix, size, within):
    """Pure Latte has the same shape and no queries and keys of a window."""
    assert count_parameters(f"{form}-{suffix}") == pytest.approx(size, rel=within)


@pytest.mark.parametrize("name", [name for name in PRESETS if name.endswith("tiny")])
def test_tiny_presets_are_tiny(name):
    assert count_parameters(name) < 1e6


def test_every_preset_makes_settings():
    for name in PRESETS:
        assert LatteConfig.from_preset(name).hidden_size == PRESETS[name]["hidden_size"]


def test_overrides_replace_settings_of_a_preset():
    config = LatteConfig.from_preset("macchiato-tiny", window=31, num_attention_heads=2)
    assert (config.window, config.num_heads, config.head_dim) == (31, 2, 64)
    assert PRESETS["macchiato-tiny"]["window"] == 128


def test_unknown_presets_and_overrides_are_named():
    with pytest.raises(ValueError, match=r"preset is 'mocha'; it must be one of 'latte', 'latte\+\+'"):
        LatteConfig.from_preset("mocha")
    with pytest.raises(ValueError, match="widnow: no such setting"):
        LatteConfig.from_preset("latte", widnow=5)


def test_values_that_follow_from_others():
    config = LatteConfig(hidden_size=48, num_heads=4)
    assert (config.head_dim, config.num_value_heads, config.intermediate_size) == (12, 4, 192)


def test_other_names_of_settings():
    config = LatteConfig(num_attention_heads=6, num_key_value_heads=2, hidden_act="relu", hidden_size=60)
    assert (config.num_heads, config.num_value_heads, config.activation, config.head_dim) == (6, 2, "relu", 10)
    config.num_attention_heads = 3
    assert config.num_heads == 3


def test_saved_settings_come_back(tmp_path):
    config = make_config("macchiato", rope_theta=500.0)
    config.save_pretrained(tmp_path)
    assert LatteConfig.from_pretrained(tmp_path).to_dict() == config.to_dict()
    assert json.loads((tmp_path / "config.json").read_text())["rope_parameters"]["rope_theta"] == 500.0


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"hidden_size": 30, "num_heads": 4}, "hidden_size is 30, which is no multiple of num_heads, 4"),
        ({"num_value_heads": 5}, "num_heads is 8, which is no multiple of num_value_heads, 5"),
        ({"num_latents": 0}, "num_latents is 0; it must be an integer of at least 1"),
        ({"window": 0}, "window is 0; it must be an integer of at least 1"),
        ({"window": -3}, "window is -3"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0"),
        ({"mixer": "attention"}, "mixer is 'attention'; it must be one of 'none', 'conv', 'rglru'"),
        ({"norm": "batchnorm"}, "norm is 'batchnorm'"),
        ({"feedforward": "moe"}, "feedforward is 'moe'"),
        ({"activation": "swish"}, "activation is 'swish'"),
        ({"positions": "absolute"}, "positions is 'absolute'; it must be one of 'none', 'learned', 'sinusoidal'"),
        ({"positions": "learned"}, 'positions is "learned" and max_position_embeddings None'),
        ({"positions": "learned", "max_position_embeddings": 0}, "max_position_embeddings is 0"),
        ({"positions": "sinusoidal", "hidden_size": 27, "num_heads": 3}, "hidden_size 27; make it even"),
        ({"window": 5, "rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor is 0.5"),
        (
            {"window": 5, "rope_parameters": {"rope_type": "spiral"}},
            "rope_type is 'spiral'; it must be one of 'default', ",
        ),
        ({"window": 5, "rope_parameters": {"rope_theta": -1.0}}, "rope_theta is -1.0; it must be a positive number"),
        ({"window": 5, "rope_parameters": {"rope_theta": "big"}}, "rope_theta is 'big'"),
        ({"norm_eps": -1e-6}, "norm_eps is -1e-06; it must be positive and finite"),
        ({"norm_eps": float("nan")}, "norm_eps is nan"),
        ({"initializer_range": -0.1}, "initializer_range is -0.1; it must be finite, and not negative"),
        ({"window": 5, "head_dim": 7}, "queries and keys are 7 wide .*; make head_dim, or window_head_dim, even"),
        ({"window": 5, "window_head_dim": 3}, "queries and keys are 3 wide"),
        ({"window": 5, "softcap": 0.0}, "softcap is 0.0; it must be positive"),
        ({"logits_softcap": 0.0}, "logits_softcap is 0.0; it must be positive and finite in float32 "),
        ({"logits_softcap": 1e39}, r"logits_softcap is 1e\+39; it must be positive and finite in float32 "),
        (
            {"pad_token_id": 9999, "vocab_size": 100},
            "pad_token_id is 9999; it must be 0 to 99, below vocab_size",
        ),
        ({"pad_token_id": 256, "input_kind": "pixels"}, "pad_token_id is 256; it must be 0 to 255"),
        ({"pad_token_id": -1}, "pad_token_id is -1; it must be 0 to 50256"),
        ({"decoder_start_token_id": 50_257}, "decoder_start_token_id is 50257; it must be 0 to 50256"),
        ({"logits_softcap": -30.0}, "logits_softcap is -30.0"),
        ({"num_labels": 0}, "num_labels is 0; it must be an integer of at least 1"),
        ({"num_labels": None}, "num_labels is None; it must be an integer of at least 1"),
        (
            {"rope_parameters": {"rope_type": "linear", "factor": 2.0}},
            "rope_type is 'linear' and latents have no rotary",
        ),
    ],
)
def test_settings_that_make_no_model(settings, message):
    with pytest.raises(ValueError, match=message):
        LatteConfig(**settings)


def test_settings_of_another_type_are_refused():
    with pytest.raises(StrictDataclassError, match="window"):
        LatteConfig(window="wide")


def test_rope_is_checked_where_there_is_something_to_turn():
    assert LatteConfig(hidden_size=40, num_heads=8).head_dim == 5  # odd, and no window
    with pytest.raises(ValueError, match="even"):
        LatteForCausalLM(LatteConfig(hidden_size=40, num_heads=8, window=3, vocab_size=7, num_hidden_layers=1))


def test_where_nothing_is_turned_there_are_no_rope_parameters(tmp_path):
    """Transformers asks whether a model has them, and so whether rotary positions can be scaled."""
    config = make_config("latte")
    assert not hasattr(config, "rope_parameters")
    assert "rope_parameters" not in config.to_dict()
    config.save_pretrained(tmp_path)
    assert LatteConfig.from_pretrained(tmp_path).to_dict() == config.to_dict()
    assert not hasattr(pickle.loads(pickle.dumps(config)), "rope_parameters")
    assert make_config("macchiato").rope_parameters == {"rope_type": "default", "rope_theta": 10_000.0}
    LatteForCausalLM(LatteConfig.from_pretrained(tmp_path, window=5))  # there now are some


def test_a_mixer_has_no_place_in_full_attention():
    with pytest.raises(ValueError, match="mixer is 'rglru' in full attention"):
        LatteForCausalLM(make_config("softmax", mixer="rglru"))


def test_a_language_model_is_causal():
    with pytest.raises(ValueError, match="causal is False"):
        LatteForCausalLM(make_config("latte", causal=False))
