"""Learning from a teacher: every term is what its formula says, and runs with a teacher are runs like others."""

import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import CohereConfig, CohereForCausalLM, GPT2Config, GPT2LMHeadModel

from latte.convert import convert, restore
from latte.models import LatteConvertedForCausalLM
from latte.models.padding import Layout
from latte.models.recomputation import recompute_layers
from latte.train import RunSettings, run
from latte.train.distillation import Distillation
from latte.train.teachers import make_teacher
from latte.train.trainable import choose_trainable
from tests.train import converted, tiny
from tests.train.test_distributed import launch
from tests.train.test_survival import Interrupter, assert_same_tensors

CPU = torch.device("cpu")
LAYERS = [0, 2]
ALL = {"teacher": "source", "distill_logits": 0.5, "distill_layers": 2.0, "distill_temperature": 1.5}
TRANSFER = {"teacher": "source", "distill_layers": 1.0, "loss_weight": 0.0}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return converted.save(tmp_path_factory.mktemp("distilled") / "model", layers=LAYERS)


def make(folder: Path, **given: Any) -> tuple[LatteConvertedForCausalLM, Distillation]:
    settings = RunSettings(**({"model": folder, "trainable": "latents", "precision": "fp32"} | ALL | given))
    model = LatteConvertedForCausalLM.from_pretrained(folder).train()
    choose_trainable(model, settings.trainable)
    teacher = make_teacher(settings, model, tiny.task().prepare(), CPU)
    return model, Distillation(settings, model, teacher, CPU)


def make_batch(rows: int = 3, length: int = 9) -> dict[str, Tensor]:
    tokens = torch.randint(0, 11, (rows, length), generator=torch.Generator().manual_seed(5))
    labels = tokens.clone()
    labels[0, 4:7] = -100
    return {"input_ids": tokens, "labels": labels}


def watch(model: Any, layers: list[int], **given: Any) -> tuple[list[Tensor], list[Tensor], Any]:
    """Inputs and outputs of attention layers, and the model's own output."""
    seen: dict[int, tuple[Tensor, Tensor]] = {}

    def hook(layer: int):
        return lambda _, __, kwargs, output: seen.update({layer: (kwargs["hidden_states"], output[0])})

    hooks = [
        model.model.layers[layer].self_attn.register_forward_hook(hook(layer), with_kwargs=True) for layer in layers
    ]
    output = model(**given, use_cache=False)
    for handle in hooks:
        handle.remove()
    return [seen[layer][0] for layer in layers], [seen[layer][1] for layer in layers], output


def plain_terms(
    folder: Path, batch: dict[str, Tensor], inputs: str, temperature: float
) -> tuple[Any, dict[str, Tensor]]:
    """The three terms with whole logits, and layers called one by one, as means over what this batch has."""
    model = LatteConvertedForCausalLM.from_pretrained(folder).eval()
    source = restore(model)
    ids = batch["input_ids"]
    with torch.no_grad():
        xs, targets, expected = watch(source, LAYERS, input_ids=ids)
    _, ys, output = watch(model, LAYERS, input_ids=ids, labels=batch["labels"])
    if inputs == "teacher":
        ys = [one_layer(model, layer, x) for layer, x in zip(LAYERS, xs, strict=True)]
    counts = F.pad(batch["labels"], (0, 1), value=-100)[:, 1:] != -100
    errors = [
        ((y - target) ** 2).mean((1, 2)) / (target**2).mean((1, 2)) for y, target in zip(ys, targets, strict=True)
    ]
    q, p = (F.log_softmax(x.logits / temperature, -1) for x in (output, expected))
    divergence = ((p.exp() * (p - q)).sum(-1) * counts).sum() / counts.sum() * temperature**2
    layers = (torch.stack(errors).mean(0) * counts.sum(1)).sum() / counts.sum()
    return model, {"next_token": output.loss, "logits": divergence, "layers": layers}


def one_layer(model: LatteConvertedForCausalLM, layer: int, x: Tensor) -> Tensor:
    positions = torch.arange(x.shape[1])[None]
    angles = model.model.rotary_emb(x, positions)
    return model.model.layers[layer].self_attn(x, angles, Layout(None, None, None, False))[0]


@pytest.mark.parametrize("inputs", ["teacher", "student"])
def test_terms_and_gradients_are_those_of_the_formulas(inputs, folder):
    batch = make_batch()
    model, objective = make(folder, distill_inputs=inputs)
    loss = objective.loss(model, batch, objective.items(batch))
    loss.backward()
    other, terms = plain_terms(folder, batch, inputs, 1.5)
    for name, term in terms.items():
        torch.testing.assert_close(objective.parts[name], term.detach(), rtol=1e-4, atol=1e-6)
    expected = terms["next_token"] + 0.5 * terms["logits"] + 2.0 * terms["layers"]
    torch.testing.assert_close(loss, expected, rtol=1e-4, atol=1e-6)
    expected.backward()
    for name, weight in model.named_parameters():
        if weight.requires_grad:
            torch.testing.assert_close(weight.grad, other.get_parameter(name).grad, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("inputs", ["teacher", "student"])
def test_layers_alone(inputs, folder):
    """Nothing else needs the model's own states; errors are the same, and latents have the same gradients."""
    batch = make_batch()
    model, objective = make(folder, loss_weight=0.0, distill_logits=0.0, distill_layers=1.0, distill_inputs=inputs)
    objective.loss(model, batch, objective.items(batch)).backward()
    other, terms = plain_terms(folder, batch, inputs, 1.0)
    torch.testing.assert_close(objective.parts["layers"], terms["layers"].detach(), rtol=1e-4, atol=1e-6)
    terms["layers"].backward()
    for name, weight in model.named_parameters():
        assert (weight.grad is not None) == weight.requires_grad
        if weight.requires_grad:
            torch.testing.assert_close(weight.grad, other.get_parameter(name).grad, rtol=1e-3, atol=1e-6)


def test_logits_alone_hold_no_logits_of_the_model(folder, monkeypatch):
    batch = make_batch()
    model, objective = make(folder, loss_weight=0.0, distill_layers=0.0, distill_temperature=1.0)
    monkeypatch.setattr(type(model), "_logits", lambda *_: pytest.fail("logits were made"))
    loss = objective.loss(model, batch, objective.items(batch))
    monkeypatch.undo()
    torch.testing.assert_close(
        loss, 0.5 * plain_terms(folder, batch, "student", 1.0)[1]["logits"], rtol=1e-4, atol=1e-6
    )


@pytest.mark.parametrize("inputs", ["teacher", "student"])
def test_parts_of_a_step_add_up(inputs, folder):
    batch = make_batch()
    model, objective = make(folder, distill_inputs=inputs)
    items = objective.items(batch)
    whole = objective.loss(model, batch, items)
    pieces = [{name: x[rows] for name, x in batch.items()} for rows in (slice(0, 1), slice(1, 3))]
    parts = sum(objective.loss(model, piece, items) for piece in pieces)
    torch.testing.assert_close(whole, parts, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "given", [ALL, TRANSFER | {"distill_logits": 0.0}, ALL | {"distill_inputs": "student"}], ids=str
)
def test_layers_that_are_computed_again(given, folder):
    """Gradients with checkpointed layers are those without, and nothing is noted twice."""
    batch, grads = make_batch(), []
    for again in (False, True):
        model, objective = make(folder, **given)
        if again:
            recompute_layers(model)
        objective.loss(model, batch, objective.items(batch)).backward()
        assert not objective.student._errors
        grads.append({name: weight.grad for name, weight in model.named_parameters() if weight.requires_grad})
    for name, grad in grads[0].items():
        torch.testing.assert_close(grads[1][name], grad)


def test_packed_texts(folder):
    """Positions that begin anew: the teacher's attention ends with a text, as the model's does."""
    batch = make_batch(rows=2, length=8)
    batch["position_ids"] = torch.arange(4).repeat(2, 2)
    apart = {name: x.reshape(4, 4) for name, x in batch.items() if name != "position_ids"}
    apart["labels"][1::2, 0] = batch["labels"][:, 4] = -100
    model, objective = make(folder, distill_layers=0.0)
    packed = objective.loss(model, batch, objective.items(batch))
    torch.testing.assert_close(packed, objective.loss(model, apart, objective.items(apart)), rtol=1e-4, atol=1e-5)
    model, objective = make(folder)
    assert objective.loss(model, batch, objective.items(batch)).isfinite()


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("given", [ALL, ALL | {"distill_inputs": "student"}, TRANSFER], ids=str)
def test_padding_does_not_count(given, side, folder):
    """Loss and gradients of padded rows are those of the rows by themselves."""
    whole = make_batch(rows=2, length=9)
    whole["labels"][:, 0] = -100  # which nothing foretells where the row is by itself
    short = {name: x[1:, :5] for name, x in whole.items()}
    rows = [{name: x[:1] for name, x in whole.items()}, short]
    padding = (4, 0) if side == "left" else (0, 4)
    fill = {"input_ids": 7, "labels": -100}
    batch = {name: torch.cat([x[:1], F.pad(short[name], padding, value=fill[name])]) for name, x in whole.items()}
    batch["attention_mask"] = torch.stack([torch.ones(9), F.pad(torch.ones(5), padding)]).long()
    model, objective = make(folder, **({"distill_logits": 0.0} | given))
    items = objective.items(batch)
    results = []
    for parts in ([batch], rows):
        model.zero_grad()
        loss = torch.stack([objective.loss(model, part, items) for part in parts]).sum()
        loss.backward()
        grads = {name: weight.grad.clone() for name, weight in model.named_parameters() if weight.requires_grad}
        results.append((loss.detach(), grads))
    torch.testing.assert_close(results[0], results[1], rtol=1e-4, atol=1e-6)


# Teachers


def test_a_source_takes_no_memory_and_stays_as_it_was(folder):
    settings = RunSettings(model=folder, **ALL)
    model = LatteConvertedForCausalLM.from_pretrained(folder)
    choose_trainable(model, "latents,norms")
    with torch.no_grad():
        for layer in model.model.layers:  # as after some training
            layer.input_layernorm.weight.add_(1.0)
    teacher = make_teacher(settings, model, tiny.task().prepare(), CPU)
    for name, weight in teacher.named_parameters():
        shared = weight.data_ptr() == model.get_parameter(name).data_ptr()
        assert shared != ("norm" in name), name
        assert not weight.requires_grad
    assert not teacher.training
    tokens = make_batch()["input_ids"]
    with torch.no_grad():
        torch.testing.assert_close(teacher(tokens).logits, converted.make_source()(tokens).logits)


def test_a_folder_as_teacher(folder, tmp_path):
    """Another model: its next tokens are learnt, its layers are not compared unless they are as many and as wide."""
    converted.make_source(seed=3, hidden_size=16).save_pretrained(tmp_path / "wide")
    output = tmp_path / "run"
    settings = converted.settings(output, folder, teacher=str(tmp_path / "wide"), distill_logits=1.0, loss_weight=0.0)
    run(tiny.task(), settings)
    losses = tiny.losses(output)
    assert losses[12] < losses[1]
    converted.make_source(seed=3).save_pretrained(tmp_path / "alike")
    run(tiny.task(), converted.settings(tmp_path / "b", folder, teacher=str(tmp_path / "alike"), distill_layers=1.0))


def test_a_model_that_is_not_converted_can_have_a_teacher(tmp_path):
    for name, seed in (("student", 0), ("teacher", 1)):
        converted.make_source(seed).save_pretrained(tmp_path / name)

    class LlamaTask(tiny.CountingTask):
        def measure(self, model, batch):
            return {"loss": (float(model(**batch).loss), 1.0)}

    words = {"teacher": str(tmp_path / "teacher"), "distill_logits": 1.0, "loss_weight": 0.0, "trainable": "all"}
    run(LlamaTask(tiny.CountingSettings()), converted.settings(tmp_path / "run", tmp_path / "student", **words))
    losses = tiny.losses(tmp_path / "run")
    assert losses[12] < losses[1]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"distill_logits": 1.0}, "there is no teacher; add --teacher source"),
        ({"distill_layers": 1.0}, "there is no teacher; add --teacher source"),
        ({"loss_weight": 0.5}, "loss_weight is 0.5, and without a teacher there is no other loss"),
        ({"loss_weight": 0.0}, "leave it out, or add --teacher source"),
        ({"teacher": "source"}, "nothing is learnt from it; add --distill-logits or --distill-layers"),
        (ALL | {"teacher": "nowhere"}, "teacher is nowhere, which has no config.json; it must be source, a folder"),
        (ALL | {"parallel": "fsdp"}, "use --parallel ddp"),
        (ALL | {"distill_temperature": 0.0}, "distill_temperature is 0.0; it must be above 0"),
        (ALL | {"distill_logits": -1.0}, "distill_logits is -1.0; it must be at least 0"),
        (TRANSFER | {"trainable": "latents,norms"}, "norm.weight has no part in converted attention"),
    ],
    ids=str,
)
def test_settings_that_make_no_lesson(given, words, folder, tmp_path):
    with pytest.raises(ValueError, match=words):
        run(tiny.task(), converted.settings(tmp_path / "run", folder, **given))
    assert not (tmp_path / "run").exists()


def test_teachers_that_do_not_fit(folder, tmp_path):
    def refused(words: str, model: Path = folder, **given: Any) -> None:
        with pytest.raises(ValueError, match=words):
            run(tiny.task(), converted.settings(tmp_path / "run", model, **given))

    converted.make_source(vocab_size=14).save_pretrained(tmp_path / "other")
    refused("other with 14 tokens, the model has 13", teacher=str(tmp_path / "other"), distill_logits=1.0)
    converted.make_source(num_hidden_layers=2).save_pretrained(tmp_path / "short")
    refused("teacher has 2 layers of width 12", teacher=str(tmp_path / "short"), distill_layers=1.0)
    GPT2LMHeadModel(GPT2Config(vocab_size=13, n_embd=12, n_layer=3, n_head=2)).save_pretrained(tmp_path / "gpt")
    refused("'gpt2' model has its attention elsewhere", teacher=str(tmp_path / "gpt"), distill_layers=1.0)
    converted.make_source().save_pretrained(tmp_path / "plain")
    refused("the model is not a converted one", tmp_path / "plain", trainable="all", **ALL)
    teacher = {"teacher": str(tmp_path / "plain"), "distill_layers": 1.0}
    refused("the model is not a converted one", tmp_path / "plain", trainable="all", **teacher)
    with pytest.raises(ValueError, match="the model is not a converted one"):
        run(tiny.task(), tiny.settings(tmp_path / "run", **ALL))
    with pytest.raises(ValueError, match="leave one of them out"):
        run(tiny.task(), converted.settings(tmp_path / "run", folder, **ALL), objective=object())


def test_logits_that_are_not_a_heads(folder, tmp_path):
    """A bias, a scale: what `prediction` does not know is refused, not ignored."""
    sizes = converted.SIZES | {"logit_scale": 0.1, "pad_token_id": 0}
    CohereForCausalLM(CohereConfig(**sizes)).save_pretrained(tmp_path / "scaled")
    with pytest.raises(ValueError, match="logits of the teacher, a 'cohere' model, are not its head's alone"):
        run(
            tiny.task(),
            converted.settings(tmp_path / "run", folder, teacher=str(tmp_path / "scaled"), distill_logits=1.0),
        )


# Runs


@pytest.mark.parametrize("given", [ALL, TRANSFER], ids=["all", "transfer"])
def test_a_run_learns_and_resumes_bit_by_bit(given, folder, tmp_path):
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    words = given | {"log_every": 4, "micro_batch_size": 2}
    run(tiny.task(), converted.settings(whole, folder, **words))
    run(tiny.task(), converted.settings(cut, folder, **words), display=Interrupter(6, signal.SIGINT))
    run(tiny.task(), converted.settings(cut, folder, **words), resume=True)
    losses = tiny.losses(whole)
    assert tiny.losses(cut) == losses
    assert losses[12] < losses[4]
    assert_same_tensors(cut / "model" / "model.safetensors", whole / "model" / "model.safetensors")


def test_norms_learn_beside_a_source_that_does_not(folder, tmp_path):
    """Resumed, the teacher is still the one that the run began with."""
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    words = ALL | {"trainable": "latents,norms,lora", "steps": 6}
    run(tiny.task(), converted.settings(whole, folder, **words))
    run(tiny.task(), converted.settings(cut, folder, **words), display=Interrupter(4, signal.SIGINT))
    run(tiny.task(), converted.settings(cut, folder, **words), resume=True)
    assert tiny.losses(cut) == tiny.losses(whole)


def test_narrow_products(folder, tmp_path):
    run(tiny.task(), converted.settings(tmp_path / "wide", folder, **ALL))
    words = ALL | {"precision": "bf16", "frozen_dtype": "bf16", "checkpoint_layers": True}
    run(tiny.task(), converted.settings(tmp_path / "narrow", folder, **words))
    assert tiny.losses(tmp_path / "narrow") == pytest.approx(tiny.losses(tmp_path / "wide"), rel=0.1)


def train(output: Path, folder: Path, given: dict[str, Any]) -> None:
    run(tiny.task(), converted.settings(output, folder, **given))


@pytest.mark.parametrize(
    "given",
    [ALL, TRANSFER, pytest.param(ALL | {"trainable": "latents,lora"}, marks=pytest.mark.slow)],
    ids=["all", "transfer", "lora"],
)
def test_two_processes(given, folder, tmp_path):
    """The whole batch by one; by two, half each, in micro batches of one."""
    run(tiny.task(), converted.settings(tmp_path / "one", folder, **given))
    given = given | {"micro_batch_size": 1}
    assert launch(train, tmp_path / "two", folder, given) == [0, 0]
    assert tiny.losses(tmp_path / "two") == pytest.approx(tiny.losses(tmp_path / "one"), rel=1e-3)
    first, second = (
        LatteConvertedForCausalLM.from_pretrained(tmp_path / name / "model").state_dict() for name in ("one", "two")
    )
    for name, weight in first.items():
        torch.testing.assert_close(second[name], weight, rtol=1e-2, atol=2e-3)


@pytest.mark.slow
@pytest.mark.parametrize("given", [ALL, TRANSFER], ids=["all", "transfer"])
def test_compiled_layers(given, folder, tmp_path):
    """In a process of its own: torch.compile warns of parts of itself."""
    run(tiny.task(), converted.settings(tmp_path / "plain", folder, **given))
    words = given | {"compile": True}
    assert tiny.in_process(train, tmp_path / "run", folder, words) == 0
    assert tiny.losses(tmp_path / "run") == pytest.approx(tiny.losses(tmp_path / "plain"), rel=1e-3)


def test_matching_layers_finds_what_the_window_has_lost(tmp_path):
    """A source that looks at all tokens alike, of which a window sees two: latents can bring the others."""
    source = converted.make_source()
    with torch.no_grad():
        for layer in source.model.layers:
            layer.self_attn.k_proj.weight.zero_()
    torch.manual_seed(1)
    convert(source, window=2, num_latents=4).save_pretrained(tmp_path / "model")
    settings = converted.settings(
        tmp_path / "run", tmp_path / "model", **TRANSFER, steps=60, eval_every=60, save_every=60
    )
    run(tiny.task(), replace(settings, learning_rate=3e-2))
    losses = tiny.losses(tmp_path / "run")
    assert losses[60] < 0.5 * losses[1]
