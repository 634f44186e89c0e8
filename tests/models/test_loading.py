"""Saved models that are broken, or whose weights and settings do not belong together, are refused in one line."""

import json
import shutil
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from transformers.utils import logging

from latte.models import LatteConfig, LatteForCausalLM, LatteForSeq2SeqLM
from latte.models.loading import load_config, load_model

SIZES: dict[str, Any] = {
    "vocab_size": 260, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_heads": 2,
    "num_latents": 3,
}  # fmt: skip


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    path = tmp_path_factory.mktemp("saved")
    torch.manual_seed(0)
    LatteForCausalLM(LatteConfig(**SIZES)).save_pretrained(path)
    return path


@pytest.fixture
def folder(saved, tmp_path):
    return shutil.copytree(saved, tmp_path / "model")


def change_settings(folder, **words):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | words))


def message(folder):
    with pytest.raises(ValueError, match=r"^MODEL m: ") as caught:
        load(folder)
    return str(caught.value)


def load(folder):
    load_config(folder, "MODEL m")
    return load_model(AutoModelForCausalLM, folder, "MODEL m")


def test_a_whole_model_is_what_was_saved(folder, saved):
    loaded = load(folder).state_dict()
    assert all(torch.equal(loaded[name], x) for name, x in load_file(saved / "model.safetensors").items())


def test_tensors_of_another_size_are_named_with_both_sizes(folder):
    change_settings(folder, intermediate_size=40)
    said = message(folder)
    assert "model.layers.0.feedforward.down.weight is [16, 24] in the weights, [16, 40] by config.json" in said
    assert "and 5 more do not fit" in said


def test_missing_tensors_are_named_and_never_drawn_at_random(folder):
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.1.attention.value.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    assert "it has no tensor model.layers.1.attention.value.weight;" in message(folder)


def test_a_model_of_another_kind_is_refused(tmp_path):
    config = LatteConfig(**SIZES, num_encoder_layers=1, decoder_start_token_id=0, pad_token_id=0)
    LatteForSeq2SeqLM(config).save_pretrained(tmp_path)
    assert "it has no tensor" in message(tmp_path)


def test_tensors_without_use_are_told(folder):
    change_settings(folder, num_hidden_layers=1)
    notes = []
    load_model(AutoModelForCausalLM, folder, "MODEL m", note=notes.append)
    assert len(notes) == 1
    assert "no use for model.layers.1." in notes[0]


@pytest.mark.parametrize("content", [b"", b"no tensors " * 40, None], ids=["empty", "other", "cut"])
def test_broken_weights(content, folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-9] if content is None else content)
    assert "a file of weights is broken, copy it again" in message(folder)


def test_a_broken_index_is_named(folder):
    index = folder / "model.safetensors.index.json"
    index.write_text('{"weight_map"')
    with pytest.raises(ValueError, match=r"index\.json does not say where tensors are"):
        load(folder)


@pytest.mark.parametrize(("words", "said"), [({"hidden_size": "big"}, "hidden_size"), ({"hidden_size": -1}, "is -1")])
def test_broken_settings(words, said, folder):
    change_settings(folder, **words)
    assert "config.json is none that a model can be made of" in message(folder)
    assert said in message(folder)


def test_transformers_talks_as_before(folder):
    before = logging.get_verbosity()
    change_settings(folder, intermediate_size=40)
    message(folder)
    assert logging.get_verbosity() == before
