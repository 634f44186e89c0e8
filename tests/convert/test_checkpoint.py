"""From one folder to another: what is written, what is held in memory, which sources are refused."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from huggingface_hub import constants
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from latte.convert import Settings, convert, convert_checkpoint, new_parameters, streaming
from latte.convert.checkpoint import failures_explained, parse_size
from latte.convert.folder import check_space
from latte.models import LatteConvertedForCausalLM
from tests.convert.sources import LATENTS, SETTINGS, TEMPLATE, load, make_source, make_tokens, save_source


def test_a_folder_is_converted_with_all_that_belongs_to_it(source, tmp_path):
    out = tmp_path / "deep" / "out"
    made = convert_checkpoint(str(source), out, SETTINGS, seed=3)
    model, original = load(out), AutoModelForCausalLM.from_pretrained(source)
    assert type(model) is LatteConvertedForCausalLM
    torch.manual_seed(3)
    expected = convert(original, **vars(SETTINGS)).state_dict()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in model.state_dict().items())
    assert model.generation_config.temperature == 0.7
    old, new = AutoTokenizer.from_pretrained(source), AutoTokenizer.from_pretrained(out)
    assert new("w5 w77")["input_ids"] == old("w5 w77")["input_ids"] == [5, 77]
    assert new.chat_template == TEMPLATE
    assert (out / "LICENSE").read_text() == "free"
    assert (made.family, made.layers, made.dtype) == ("Gemma 3 (text)", [0, 1, 2], "float32")
    assert made.parameters == sum(weight.numel() for weight in model.parameters())
    assert made.new_parameters == sum(weight.numel() for weight in new_parameters(model).values())
    assert made.bytes == sum(path.stat().st_size for path in out.glob("*.safetensors"))
    assert not list(out.parent.glob(".*"))


def test_a_converted_model_saved_again_is_the_same(source, tmp_path):
    model = convert(AutoModelForCausalLM.from_pretrained(source), window=7, layers="global", mixer="conv").eval()
    model.save_pretrained(tmp_path, max_shard_size="40KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 2
    again = load(tmp_path)
    saving = dict.fromkeys(("_name_or_path", "architectures", "auto_map", "dtype"))
    assert again.config.to_dict() | saving == model.config.to_dict() | saving
    tokens = make_tokens(2, 19)
    assert torch.equal(again(tokens).logits, model(tokens).logits)


def test_missing_new_weights_begin_as_in_conversion(source, tmp_path):
    """A source's folder may be read with the settings of a converted model."""
    config = convert(AutoModelForCausalLM.from_pretrained(source), window=7, initial_window_share=0.8).config
    model, report = LatteConvertedForCausalLM.from_pretrained(source, config=config, output_loading_info=True)
    assert set(report["missing_keys"]) == set(new_parameters(model))
    attention = model.model.layers[0].self_attn
    shares = attention.latent_query.bias.unflatten(0, (6, -1)).softmax(-1)[:, 0]
    torch.testing.assert_close(shares, torch.full((6,), 0.8))
    assert attention.latent_query.weight.abs().max() == 0
    assert attention.latent_key.weight.std() > 0
    decay = torch.exp(-8 * torch.nn.functional.softplus(attention.mixer.a_param))
    assert decay.min() > 0.89
    assert decay.max() < 1


@pytest.mark.parametrize("shard", [None, "30KB"])
def test_low_memory_gives_the_same(tmp_path, shard):
    source = save_source(tmp_path / "source", "qwen2", max_shard_size="20KB")
    options = {"dtype": "bfloat16", "seed": 5, "max_shard_size": shard}
    convert_checkpoint(str(source), tmp_path / "loaded", SETTINGS, **options)
    made = convert_checkpoint(str(source), tmp_path / "streamed", SETTINGS, low_memory=True, **options)
    loaded, streamed = load(tmp_path / "loaded"), load(tmp_path / "streamed")
    assert loaded.state_dict().keys() == streamed.state_dict().keys()
    for name, tensor in loaded.state_dict().items():
        assert torch.equal(streamed.state_dict()[name], tensor), name
        assert tensor.dtype == (torch.float32 if name.endswith("a_param") else torch.bfloat16)
    for file in ("config.json", "generation_config.json", "tokenizer.json", "chat_template.jinja"):
        assert (tmp_path / "loaded" / file).read_text() == (tmp_path / "streamed" / file).read_text(), file
    limit = (
        30_000
        if shard
        else streaming.largest_layer(  # and headers, and a tensor that is larger alone
            streaming.StreamedConversion(source, streamed.config, torch.bfloat16)
        )
    )
    assert all(path.stat().st_size < limit + 5000 for path in (tmp_path / "streamed").glob("*.safetensors"))
    assert made.dtype == "bfloat16"


@pytest.mark.parametrize("low_memory", [False, True])
@pytest.mark.parametrize("same", [False, True])
def test_a_head_beside_the_embeddings_that_config_json_ties(tmp_path, same, low_memory):
    """As in Transformers, it is the embeddings only if it has their values."""
    source = save_source(tmp_path / "source", "qwen2")
    tensors = load_file(source / "model.safetensors")
    embeddings = tensors["model.embed_tokens.weight"]
    tensors["lm_head.weight"] = embeddings.clone() if same else embeddings.flip(0)
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    convert_checkpoint(str(source), tmp_path / "out", SETTINGS, low_memory=low_memory)
    model = load(tmp_path / "out")
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == same == model.config.tie_word_embeddings
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        assert torch.equal(model.state_dict()[name], tensors[name])


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="memory is read from /proc")
def test_low_memory_never_holds_the_model(tmp_path, monkeypatch):
    sizes = {"hidden_size": 384, "intermediate_size": 1536, "num_hidden_layers": 12, "head_dim": 64}
    source = make_source("llama", **sizes)
    whole = sum(weight.nbytes for weight in source.parameters())
    source.save_pretrained(tmp_path / "source")
    del source
    held = []

    def memory() -> int:
        status = Path("/proc/self/status").read_text()
        return 1024 * int(re.search(r"RssAnon:\s+(\d+)", status)[1])

    def save_and_look(tensors, path, metadata):
        held.append(memory())
        save(tensors, path, metadata=metadata)

    save = streaming.save_file
    monkeypatch.setattr(streaming, "save_file", save_and_look)
    before = memory()
    convert_checkpoint(str(tmp_path / "source"), tmp_path / "out", Settings(num_latents=LATENTS), low_memory=True)
    assert len(held) >= 12
    assert max(held) - before < whole / 3


def test_a_name_of_the_hub(source, tmp_path, monkeypatch):
    """A model that the hub's cache on this machine holds."""
    cache = tmp_path / "hub" / "models--some--model"
    shutil.copytree(source, cache / "snapshots" / ("0" * 40))
    (cache / "refs").mkdir()
    (cache / "refs" / "main").write_text("0" * 40)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    notes = []
    convert_checkpoint("some/model", tmp_path / "out", SETTINGS, note=notes.append)
    assert load(tmp_path / "out").config.window == 7
    assert "some/model is no folder here: looking for it on the hub" in notes
    with pytest.raises(ValueError, match="SOURCE some/other: no folder, file or model that the hub gives"):
        convert_checkpoint("some/other", tmp_path / "other", SETTINGS)


@pytest.mark.parametrize("num_latents", [256, 257])
def test_latents_beyond_the_kernels_are_told_of(source, tmp_path, num_latents):
    """Such a model computes on any device, but by itself not on a GPU; with what the note says it does there, too."""
    out, notes = tmp_path / "out", []
    convert_checkpoint(str(source), out, Settings(window=7, num_latents=num_latents), note=notes.append)
    told = [line for line in notes if line.startswith("num_latents")]
    if num_latents == 256:
        assert not told
        return
    (line,) = told
    assert line.startswith("num_latents is 257, and the kernels for GPUs take up to 256: to use it there, write")
    assert f'"backend": "torch" into {out}/config.json' in line
    config = json.loads((out / "config.json").read_text())
    (out / "config.json").write_text(json.dumps(config | {"backend": "torch"}))
    tokens = make_tokens(1, 20)
    with torch.no_grad():
        assert load(out)(tokens).logits.isfinite().all()


LOAD = """
import sys
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], trust_remote_code=True)
print(type(model).__module__, model.config.window)
"""


def test_loading_by_remote_code(source, tmp_path):
    convert_checkpoint(str(source), tmp_path / "out", SETTINGS)
    environment = os.environ | {"HF_HOME": str(tmp_path / "home"), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", LOAD, str(tmp_path / "out")]
    result = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
    assert result.stdout.split() == ["latte.models.converted", "7"], result.stderr


def test_full_disks_and_memories(tmp_path):
    with pytest.raises(ValueError, match=r"takes 1000000000\.00 GB, and the disk has"):
        check_space(tmp_path / "no" / "such" / "folder", 10**18)
    with pytest.raises(ValueError, match="memory is full; use --low-memory"), failures_explained(False):
        torch.empty(1 << 60, dtype=torch.uint8)
    with pytest.raises(ValueError, match="memory is full; free some"), failures_explained(True):
        raise MemoryError
    with pytest.raises(RuntimeError, match="else"), failures_explained(False):
        raise RuntimeError("something else")


def test_sizes():
    assert [parse_size(text) for text in ("500MB", "1.5 gb", "20K", "7")] == [500_000_000, 1_500_000_000, 20_000, 7]
    for text in ("", "0GB", "many", "-1GB"):
        with pytest.raises(ValueError, match="it must be a size"):
            parse_size(text)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda folder: (folder / "model.safetensors").unlink(), "no model.safetensors and no"),
        (lambda folder: (folder / "config.json").write_text("{"), "its config.json is no JSON"),
        (lambda folder: (folder / "config.json").unlink(), "neither config.json nor a GGUF file"),
        (
            lambda folder: edit_config(folder, model_type="nonsense"),
            "'nonsense' model, which cannot be converted",
        ),
        (
            lambda folder: edit_weights(folder, lambda name, x: {name.removeprefix("model."): x}),
            "has other names, such as embed_tokens.weight, than --low-memory knows",
        ),
    ],
)
def test_broken_sources(source, tmp_path, change, message):
    folder = tmp_path / "source"
    shutil.copytree(source, folder)
    change(folder)
    with pytest.raises(ValueError, match=message):
        convert_checkpoint(str(folder), tmp_path / "out", SETTINGS, low_memory=True)
    assert not (tmp_path / "out").exists()


def cut_weights(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:5000])


@pytest.mark.parametrize("low_memory", [False, True])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (cut_weights, "a file of the source's weights is broken"),
        (lambda folder: edit_config(folder, num_hidden_layers=4), r"no tensor model\.layers\.3\."),
        (
            lambda folder: edit_config(folder, num_hidden_layers=2),
            r"config\.json has no place for its model\.layers\.2\..* of different models",
        ),
        (
            lambda folder: edit_weights(folder, lambda name, x: {name: x, name.replace("down", "side"): x}),
            r"no place for its model\.layers\.0\.mlp\.side_proj\.weight, .* copy both again, or leave these",
        ),
        (
            lambda folder: edit_config(folder, intermediate_size=36),
            r"model\.layers\.0\.mlp\..* in the weights, .* by config.json",
        ),
        (lambda folder: edit_config(folder, hidden_size="big"), "config.json is none .*'hidden_size'"),
        (lambda folder: (folder / "config.json").write_text("[1]"), "its config.json is no JSON object"),
        (
            lambda folder: (folder / "model.safetensors.index.json").write_text("{"),
            "index.json does not say where tensors are",
        ),
    ],
)
def test_broken_weights(source, tmp_path, change, message, low_memory):
    folder = tmp_path / "source"
    shutil.copytree(source, folder)
    change(folder)
    with pytest.raises(ValueError, match=message):
        convert_checkpoint(str(folder), tmp_path / "out", SETTINGS, low_memory=low_memory)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("low_memory", [False, True])
def test_tensors_that_are_no_weights_are_left_out(source, tmp_path, low_memory):
    """Angles, which old checkpoints hold, and a head that is the embeddings once more."""
    folder = tmp_path / "source"
    shutil.copytree(source, folder)

    def edit(name: str, x: torch.Tensor) -> dict[str, torch.Tensor]:
        more = {"lm_head.weight": x.clone()} if name == "model.embed_tokens.weight" else {}
        if name.endswith("q_proj.weight"):
            more[name.replace("q_proj.weight", "rotary_emb.inv_freq")] = torch.ones(5)
        return {name: x, **more}

    edit_weights(folder, edit)
    made = [
        convert_checkpoint(str(path), tmp_path / f"out-{path.name}", SETTINGS, low_memory=low_memory)
        for path in (source, folder)
    ]
    plain, edited = (load(Path(conversion.out)).state_dict() for conversion in made)
    assert all(torch.equal(x, edited[name]) for name, x in plain.items())


def edit_weights(folder: Path, change) -> None:
    path = folder / "model.safetensors"
    weights = {}
    for name, x in load_file(path).items():
        weights |= {name: x.clone() for name, x in change(name, x).items()}
    save_file(weights, path, metadata={"format": "pt"})


def edit_config(folder: Path, **settings) -> None:
    config = json.loads((folder / "config.json").read_text())
    layers = settings.get("num_hidden_layers", 3)
    config["layer_types"] = (config["layer_types"] * 2)[:layers]
    (folder / "config.json").write_text(json.dumps(config | settings))
