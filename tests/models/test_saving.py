"""Saved models come back, whole or in shards, on other devices and in other dtypes, and by name alone."""

import json
import logging
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from latte.models import LatteConfig, LatteForCausalLM, LatteModel
from tests.models.forms import FORMS, make_config, make_model, make_tokens


def run(script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """A fresh process without the network."""
    return subprocess.run([sys.executable, "-c", script, *arguments], capture_output=True, text=True, check=False)


@pytest.mark.parametrize("form", FORMS)
def test_saved_and_loaded(form, tmp_path):
    model, tokens = make_model(form), make_tokens(1, 13)
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(loaded) is LatteForCausalLM
    assert loaded.config.to_dict() == AutoConfig.from_pretrained(tmp_path).to_dict()
    torch.testing.assert_close(loaded(tokens).logits, model(tokens).logits, rtol=0, atol=0)
    backbone = AutoModel.from_pretrained(tmp_path)
    assert type(backbone) is LatteModel
    expected = model.model(tokens).last_hidden_state
    torch.testing.assert_close(backbone(tokens).last_hidden_state, expected, rtol=0, atol=0)


def test_shards_and_devices(tmp_path):
    model, tokens = make_model("macchiato"), make_tokens(1, 13)
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    for options in ({}, {"device_map": "cpu"}, {"device_map": "auto"}):
        loaded = LatteForCausalLM.from_pretrained(tmp_path, **options)
        torch.testing.assert_close(loaded(tokens).logits, model(tokens).logits, rtol=0, atol=0)


@pytest.mark.parametrize("form", ["latte conv", "macchiato"])
def test_layers_on_a_disk(form, tmp_path):
    """Weights come when they are needed, those of mixers too, whose forward is not called."""
    model, tokens = make_model(form), make_tokens(1, 13)
    model.save_pretrained(tmp_path)
    places = {f"model.{name}": "cpu" for name, _ in model.model.named_children() if name != "layers"}
    places |= {"lm_head": "cpu", "model.layers.0": "cpu", "model.layers.1": "disk"}
    loaded = LatteForCausalLM.from_pretrained(tmp_path, device_map=places, offload_folder=tmp_path / "away")
    assert all(parameter.is_meta for parameter in loaded.model.layers[1].attention.mixer.parameters())
    with torch.no_grad():
        torch.testing.assert_close(loaded(tokens).logits, model(tokens).logits, rtol=0, atol=0)
        torch.testing.assert_close(loaded(tokens, use_cache=False).logits, model(tokens).logits, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype, tmp_path):
    """All but the decays, which are near 1."""
    model, tokens = make_model("macchiato", initializer_range=0.02), make_tokens(1, 13)
    model.save_pretrained(tmp_path)
    loaded = LatteForCausalLM.from_pretrained(tmp_path, dtype=dtype)
    kept = {name.rpartition(".")[2] for name, p in loaded.named_parameters() if p.dtype == torch.float32}
    assert kept == {"a_param"}
    assert loaded(tokens).logits.dtype == dtype
    torch.testing.assert_close(loaded(tokens).logits.float(), model(tokens).logits, rtol=0.05, atol=0.02)


def test_tied_embeddings_are_saved_once(tmp_path):
    model = make_model("macchiato", tie_word_embeddings=True)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    model.save_pretrained(tmp_path)
    assert "lm_head.weight" not in load_file(tmp_path / "model.safetensors")
    loaded = LatteForCausalLM.from_pretrained(tmp_path)
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight


def test_missing_and_unexpected_weights_are_listed(tmp_path, caplog):
    make_model("macchiato").save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    weights["model.layers.0.attention.espresso"] = weights.pop("model.layers.1.attention.value.weight")
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    logger = logging.getLogger("transformers")
    logger.addHandler(caplog.handler)
    try:
        model, report = LatteForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    finally:
        logger.removeHandler(caplog.handler)
    assert set(report["missing_keys"]) == {"model.layers.1.attention.value.weight"}
    assert set(report["unexpected_keys"]) == {"model.layers.0.attention.espresso"}
    assert "attention.espresso" in caplog.text
    assert "layers.1.attention.value.weight" in caplog.text
    assert model.model.layers[1].attention.value.weight.isfinite().all()


def test_weights_of_another_shape_are_refused(tmp_path):
    make_model("macchiato").save_pretrained(tmp_path)
    with pytest.raises(RuntimeError, match="mismatch"):
        LatteForCausalLM.from_pretrained(tmp_path, num_latents=3)


def test_embeddings_can_be_resized():
    model = make_model("macchiato", tie_word_embeddings=True)
    model.resize_token_embeddings(131)
    assert model(make_tokens(1, 5)).logits.shape[-1] == model.config.vocab_size == 131


def test_every_weight_begins_as_it_should():
    """From settings alone and from a checkpoint that lacks everything alike."""
    torch.manual_seed(0)
    model = LatteForCausalLM.from_pretrained(None, config=make_config("macchiato"), state_dict={})
    for name, parameter in model.named_parameters():
        assert not parameter.is_meta, name
        assert parameter.isfinite().all(), name
    mixer = model.model.layers[0].attention.mixer
    decay = torch.exp(-8 * torch.nn.functional.softplus(mixer.a_param))
    assert decay.min() >= 0.9
    assert decay.max() <= 0.999
    assert model.model.norm.weight.eq(1).all()
    assert model.model.layers[0].attention.value.weight.std().item() == pytest.approx(0.3, rel=0.2)


def test_saved_models_carry_a_file_that_finds_this_package(tmp_path):
    make_model("macchiato").save_pretrained(tmp_path)
    settings = json.loads((tmp_path / "config.json").read_text())
    assert settings["auto_map"]["AutoModelForCausalLM"] == "modeling_latte.LatteForCausalLM"
    assert (tmp_path / "modeling_latte.py").read_text().count("\n") < 10
    loaded = LatteForCausalLM.from_pretrained(tmp_path)
    assert not hasattr(loaded.config, "auto_map")
    loaded.save_pretrained(tmp_path / "again")
    assert {path.name for path in (tmp_path / "again").iterdir()} == {path.name for path in tmp_path.glob("*.*")}


LOAD = """
import sys
{before}
from transformers import AutoModelForCausalLM
try:
    model = AutoModelForCausalLM.from_pretrained(sys.argv[1], trust_remote_code={trust})
    print(type(model).__module__)
except (ImportError, ValueError) as error:
    print(type(error).__name__, str(error).strip().splitlines()[-1])
"""


def test_loading_by_remote_code_where_the_package_is_installed(tmp_path):
    make_model("macchiato").save_pretrained(tmp_path)
    result = run(LOAD.format(before="", trust=True), str(tmp_path))
    assert result.stdout.strip() == "latte.models.causal_lm", result.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("trust", "expected"),
    [
        (True, "ImportError the code of Latte models is not installed: pip install 'latte-attention[models]'"),
        (False, "ValueError Please pass the argument `trust_remote_code=True` to allow custom code to be run."),
    ],
)
def test_loading_where_the_package_is_missing(trust, expected, tmp_path):
    make_model("macchiato").save_pretrained(tmp_path)
    result = run(LOAD.format(before="sys.modules['latte'] = None", trust=trust), str(tmp_path))
    assert result.stdout.strip().endswith(expected), result.stdout + result.stderr


def test_settings_alone_can_be_loaded(tmp_path):
    LatteConfig.from_preset("macchiato-tiny").save_pretrained(tmp_path)
    assert AutoConfig.from_pretrained(tmp_path).window == 128
    assert not (Path(tmp_path) / "modeling_latte.py").exists()
