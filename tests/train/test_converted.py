"""Converted models are trained further: what learns, in which precision, with LoRA, killed and resumed."""

import json
import signal
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, LlamaForCausalLM

from latte.cli import main
from latte.convert import convert, new_parameters, restore
from latte.models import LatteConvertedForCausalLM
from latte.tasks import task_class
from latte.tasks.text import byte_tokenizer
from latte.train import make_plan, read_metrics, run
from latte.train.lora import SCALE, add_lora, merge
from latte.train.trainable import choose_trainable, narrow_frozen
from tests.convert.sources import make_source
from tests.train import converted, tiny
from tests.train.test_survival import Interrupter, assert_same_tensors

STATES = "checkpoints/step-00000012/optimizer.safetensors"
PARTS = ("q_proj", "k_proj", "v_proj", "o_proj")


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return converted.save(tmp_path_factory.mktemp("converted") / "model", layers=[0, 2])


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def validation_loss(folder: Path) -> float:
    model, data = LatteConvertedForCausalLM.from_pretrained(folder).eval(), tiny.task().prepare()
    with torch.no_grad():
        return model(**data.collate([data.validation[index] for index in range(7)])).loss.item()


def test_only_the_new_weights_learn(model, tmp_path):
    output = tmp_path / "run"
    result = run(tiny.task(), converted.settings(output, model, steps=12))
    before, after = weights(model), weights(output / "model")
    new = new_parameters(LatteConvertedForCausalLM.from_pretrained(model))
    changed = {name for name in after if not torch.equal(after[name], before[name])}
    assert changed == new.keys()
    assert {name.rpartition("/")[0] for name in load_file(output / STATES)} == new.keys()
    assert isinstance(AutoModelForCausalLM.from_pretrained(result.model), LatteConvertedForCausalLM)
    assert tiny.losses(output, "validation")[12] < validation_loss(model)
    usage = [record for record in read_metrics(output / "metrics.jsonl") if record["split"] == "usage"]
    assert [layer["layer"] for layer in usage[0]["layers"]] == [f"model.layers.{i}.self_attn" for i in (0, 2)]


@pytest.mark.parametrize(
    ("trainable", "words"),
    [
        ("latents", ("latent_", "mixer")),
        ("latents,norms", ("latent_", "mixer", "norm")),
        (" norms , ^lm_head ", ("norm", "lm_head")),
        (r"latents,mlp\.(up|down)_proj", ("latent_", "mixer", "up_proj", "down_proj")),
    ],
)
def test_words_with_commas_between(trainable, words):
    model = converted.make_converted()
    choose_trainable(model, trainable)
    expected = {name for name, _ in model.named_parameters() if any(word in name for word in words)}
    assert converted.learning(model) == expected


@pytest.mark.parametrize("trainable", ["latens,norms", "latents,nroms", "latents,(", "", ","])
def test_words_that_nobody_knows(trainable, model, tmp_path):
    with pytest.raises(ValueError, match=r"trainable (has|is) '.*(all, latents, norms|regular expression)"):
        run(tiny.task(), converted.settings(tmp_path / "run", model, trainable=trainable))
    assert not (tmp_path / "run").exists()


# Precision


def test_what_does_not_learn_is_narrow_where_that_changes_nothing():
    model = converted.make_converted()
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight.copy_(model.model.layers[0].mlp.up_proj.weight.bfloat16())
    choose_trainable(model, "latents")
    narrow_frozen(model, "auto")
    assert {name for name, x in model.named_parameters() if x.dtype != torch.float32} == {
        "model.layers.0.mlp.up_proj.weight"
    }
    narrow_frozen(model, "bf16")
    for name, weight in model.named_parameters():
        matrix = name.endswith("_proj.weight") or name == "lm_head.weight"
        assert weight.dtype == (torch.bfloat16 if matrix else torch.float32), name


def test_tied_embeddings_stay_wide():
    model = converted.make_converted()
    model.lm_head.weight = model.model.embed_tokens.weight
    choose_trainable(model, "latents")
    narrow_frozen(model, "bf16")
    assert model.lm_head.weight.dtype == torch.float32


def test_narrow_weights_compute_the_same(tmp_path):
    """A model in bfloat16, as most are: training in bf16 is the same, bit for bit, whatever the frozen ones are in."""
    model = tmp_path / "model"
    converted.make_converted().to(torch.bfloat16).save_pretrained(model)
    for frozen in ("auto", "fp32"):
        run(tiny.task(), converted.settings(tmp_path / frozen, model, steps=6, precision="bf16", frozen_dtype=frozen))
    assert tiny.losses(tmp_path / "auto") == tiny.losses(tmp_path / "fp32")
    narrow, wide = (weights(tmp_path / name / "model") for name in ("auto", "fp32"))
    assert narrow["model.layers.0.mlp.up_proj.weight"].dtype == torch.bfloat16
    assert narrow["model.embed_tokens.weight"].dtype == torch.float32
    assert {weight.dtype for weight in wide.values()} == {torch.float32}
    for name in ("auto", "fp32"):
        assert AutoConfig.from_pretrained(tmp_path / name / "model").dtype == torch.float32
    assert all(torch.equal(narrow[name].float(), wide[name]) for name in wide)
    assert all(narrow[name].dtype == torch.float32 for name in new_parameters(converted.make_converted()))


def test_narrow_weights_need_narrow_products(model, tmp_path):
    with pytest.raises(ValueError, match="frozen_dtype is bf16 and precision fp32; it needs --precision bf16"):
        run(tiny.task(), converted.settings(tmp_path / "run", model, frozen_dtype="bf16", precision="fp32"))


# LoRA


def test_lora_begins_as_nothing_and_merges_to_what_it_computes():
    plain, model = converted.make_converted(layers=[0, 2]).eval(), converted.make_converted(layers=[0, 2]).eval()
    choose_trainable(model, "latents,lora")
    add_lora(model, 3, seed=0, checkpoint=None)
    tokens = torch.arange(11)[None] % 11
    with torch.no_grad():
        torch.testing.assert_close(model(tokens).logits, plain(tokens).logits)
    beside = {name for name in converted.learning(model) if "lora" in name}
    expected = {
        f"model.layers.{layer}.self_attn.{part}.lora_{side}.default.weight"
        for layer in (0, 2) for part in PARTS for side in "AB"
    }  # fmt: skip
    assert beside == expected
    assert converted.learning(model) - beside == new_parameters(plain).keys()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "lora_B" in name:
                weight.normal_()
        merged = merge(model.state_dict())
        a, b = (model.get_parameter(f"model.layers.0.self_attn.q_proj.lora_{x}.default.weight") for x in "AB")
        before = plain.model.layers[0].self_attn.q_proj.weight
        torch.testing.assert_close(merged["model.layers.0.self_attn.q_proj.weight"], before + SCALE * b @ a)
        plain.load_state_dict(merged)
        torch.testing.assert_close(model(tokens).logits, plain(tokens).logits)


def test_lora_is_saved_merged_and_resumes_bit_by_bit(model, tmp_path):
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    words = {"trainable": "latents,lora", "lora_rank": 2}
    run(tiny.task(), converted.settings(whole, model, **words))
    run(tiny.task(), converted.settings(cut, model, **words), display=Interrupter(5, signal.SIGINT))
    run(tiny.task(), converted.settings(cut, model, **words), resume=True)
    assert tiny.losses(cut) == tiny.losses(whole)
    for file in ("model/model.safetensors", STATES, "checkpoints/step-00000012/lora.safetensors"):
        assert_same_tensors(cut / file, whole / file)
    before, after = weights(model), weights(whole / "model")
    assert after.keys() == before.keys()
    changed = {name for name in after if not torch.equal(after[name], before[name])}
    assert {name for name in changed if "_proj" in name} == {
        f"model.layers.{layer}.self_attn.{part}.weight" for layer in (0, 2) for part in PARTS
    }
    assert tiny.losses(whole, "validation")[12] == pytest.approx(validation_loss(whole / "model"), rel=1e-5)


def test_lora_without_peft(model, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(ValueError, match="trainable has lora, which needs PEFT: pip install peft"):
        run(tiny.task(), converted.settings(tmp_path / "run", model, trainable="latents,lora"))


@pytest.mark.parametrize(
    ("trainable", "words"), [("all,lora", "lm_head|q_proj.weight itself learns too"), ("lora", "not; leave it out")]
)
def test_lora_where_it_has_no_place(trainable, words, tmp_path):
    model = converted.make_converted() if "all" in trainable else converted.make_source()
    model.save_pretrained(tmp_path / "model")
    with pytest.raises(ValueError, match=words):
        run(tiny.task(), converted.settings(tmp_path / "run", tmp_path / "model", trainable=trainable))


# The plan


def test_the_papers_schedule_begins_from_a_model(model, tmp_path):
    kind = task_class("lm")
    plan = make_plan(kind, budget="convert", run={"model": model, "steps": 7}, settings={})
    assert (plan.run.preset, plan.run.trainable, plan.run.steps, plan.settings.context) == (None, "latents", 7, 4096)
    whole = make_plan(
        kind, budget="convert", run={"trainable": "latents,norms", "output": tmp_path / "run"}, settings={}
    )
    assert whole.run.steps * whole.run.batch_size * whole.settings.context == pytest.approx(1.6e9, rel=0.03)
    assert whole.run.trainable == "latents,norms"
    own = make_plan(kind, budget="convert", run={}, settings={"data": ("books",)})
    assert (own.settings.data, own.settings.validation) == (("books",), ())  # nothing is fetched from the hub
    with pytest.raises(ValueError, match="name its folder with --model"):
        run(kind(whole.settings), whole.run)
    assert not (tmp_path / "run").exists()


def test_the_command(model, tmp_path, capsys):
    """From a converted folder with a tokenizer to a trained one that generates."""
    source = make_source("gemma3_text", vocab_size=257)
    folder, output = tmp_path / "model", tmp_path / "run"
    convert(source, window=8, num_latents=3).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    (tmp_path / "text.txt").write_text("one two three four five " * 60)
    small = ["--data", str(tmp_path / "text.txt"), "--validation", str(tmp_path / "text.txt"), "--context", "32"]
    small += ["--cache", str(tmp_path / "cache"), "--sample-tokens", "4", "--prompts", "one"]
    quick = ["--steps", "4", "--log-every", "1", "--warmup-steps", "0", "--track", "none", "--device", "cpu", "--json"]
    learn = ["--teacher", "source", "--distill-logits", "0.5", "--distill-layers", "1"]
    arguments = ["train", "lm", "--budget", "convert", "--model", str(folder), "--output", str(output)]
    assert main([*arguments, *small, *quick, *learn]) == 0
    document = json.loads(capsys.readouterr().out)
    trained = LatteConvertedForCausalLM.from_pretrained(document["model"])
    assert isinstance(restore(trained), type(source))
    records = [record for record in read_metrics(output / "metrics.jsonl") if record["split"] == "train"]
    assert all({"next_token_loss", "logits_loss", "layers_loss"} <= record.keys() for record in records)
    assert main(["generate", document["model"], "--prompt", "one ", "--max-new-tokens", "3"]) == 0
    assert main(["train", "lm", "--budget", "convert"]) == 2
    assert "name its folder with --model" in capsys.readouterr().err.splitlines()[-1]


def test_any_model_may_be_the_source(tmp_path):
    """A folder that is no converted model is trained as it is."""
    folder = tmp_path / "llama"
    converted.make_source().save_pretrained(folder)
    settings = converted.settings(tmp_path / "run", folder, trainable="norms", steps=3)

    class LlamaTask(tiny.CountingTask):
        def measure(self, model, batch):
            return {"loss": (float(model(**batch).loss), 1.0)}

    run(LlamaTask(tiny.CountingSettings()), replace(settings, eval_every=3))
    assert isinstance(AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "model"), LlamaForCausalLM)
