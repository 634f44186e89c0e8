"""Settings: where they come from, how they are written down, and what a resumed run may change."""

import json
from dataclasses import fields, replace
from pathlib import Path

import pytest

from latte.models import LatteConfig
from latte.tasks import TASKS, task_class
from latte.train import RunPlan, RunSettings, make_plan
from latte.train.settings import CHANGEABLE, differences
from tests.train.tiny import CountingTask


def plan(**given) -> RunPlan:
    return make_plan(CountingTask, run=given, settings={})


@pytest.mark.parametrize("name", TASKS)
def test_every_task_has_settings_of_its_own(name):
    """Options of one command must have different names, and each needs its help."""
    kind = task_class(name)
    own = fields(kind.settings_class)
    taken = {field.name for field in fields(RunSettings)} | {"budget", "set", "config", "resume", "overwrite", "show"}
    assert not taken & {field.name for field in own}
    assert all(field.metadata["help"] for field in (*own, *fields(RunSettings)))
    for budget in kind.plans:
        made = make_plan(kind, budget=budget, run={}, settings={})
        assert RunPlan.from_document(json.loads(json.dumps(made.document())), kind, "it") == made


def test_a_plan_gives_model_budget_and_settings():
    made = make_plan(CountingTask, budget="paper", run={"steps": 5}, settings={"held_out": 3})
    assert (made.run.preset, made.run.steps, made.run.learning_rate) == ("latte-tiny", 5, 1e-3)
    assert (made.settings.examples, made.settings.held_out) == (31, 3)
    assert made.run.output == Path("runs/counting")


def test_a_preset_alone_is_that_model_and_beside_a_budget_has_its_size():
    kind = task_class("mqar")
    alone = make_plan(kind, run={"preset": "transformer++"}, settings={})
    sized = make_plan(kind, budget="paper", run={"preset": "transformer++"}, settings={})
    assert alone.run.words == {}
    assert sized.run.words["hidden_size"] == kind.plans["paper"].model["hidden_size"]
    assert "num_latents" in kind.plans["paper"].model
    assert "num_latents" not in sized.run.words
    chosen = make_plan(kind, budget="paper", run={"preset": "latte", "words": {"hidden_size": 96}}, settings={})
    assert chosen.run.words["hidden_size"] == 96


@pytest.mark.parametrize("task", ["lm", "mqar"])
def test_beside_a_budget_a_preset_has_the_size_that_the_budgets_own_preset_has(task):
    """The plan's own words need not name it: its preset does."""
    kind = task_class(task)
    for preset in ("latte-r-swa++", "transformer-2.6b"):
        own = make_plan(kind, budget="default", run={}, settings={}).run
        sized = make_plan(kind, budget="default", run={"preset": preset}, settings={}).run
        expected, made = (LatteConfig.from_preset(run.preset, **run.words) for run in (own, sized))
        for word in ("hidden_size", "intermediate_size", "num_hidden_layers", "num_heads", "num_value_heads"):
            assert getattr(made, word) == getattr(expected, word)
        assert made.head_dim == expected.head_dim
        given = LatteConfig.from_preset(preset)
        assert (made.num_latents, made.mixer) == (given.num_latents, given.mixer)


def test_what_may_change():
    old = plan()
    changed = {
        field.name: replace(old.run, **{field.name: other(field.name, getattr(old.run, field.name))})
        for field in fields(RunSettings)
    }
    for name, run in changed.items():
        found = differences(old, replace(old, run=run))
        assert bool(found) == (name not in CHANGEABLE)
        assert all(line.startswith(f"{name} was ") for line in found)
    assert differences(old, replace(old, settings=replace(old.settings, examples=3))) == ["examples was 29, is 3"]


def other(name: str, value: object) -> object:
    """Another value that is allowed."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int) or value is None:
        return 1 + (value or 0)
    if isinstance(value, float):
        return value / 2 if value else 0.5
    texts = {"trainable": "norms", "schedule": "linear", "precision": "bf16", "device": "cpu", "parallel": "fsdp"}
    texts |= {"frozen_dtype": "fp32", "teacher": "source", "distill_inputs": "student"}
    rest = {"on_nan": "rollback", "words": {"window": 3}, "track": ("none",), "preset": "latte", "output": Path("a")}
    return (texts | rest)[name]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"steps": 0}, "steps is 0; it must be at least 1"),
        ({"learning_rate": 0.0}, "learning_rate is 0.0"),
        ({"learning_rate": float("nan")}, "learning_rate is nan"),
        ({"beta2": 1.0}, "beta2 is 1.0"),
        ({"schedule": "square"}, "schedule is 'square'; it must be one of constant, linear, cosine"),
        ({"track": ("paper",)}, "track is paper"),
        ({"micro_batch_size": 0}, "micro_batch_size is 0"),
        ({"learning_rate": float("inf")}, "learning_rate is inf; it must be above 0 and finite"),
        ({"weight_decay": float("inf")}, "weight_decay is inf; it must be finite"),
        ({"seed": -1}, "seed is -1; it must be from 0 to 4294967295"),
        ({"data_seed": 2**32}, "data_seed is 4294967296; it must be from 0 to 4294967295"),
    ],
)
def test_values_that_make_no_run(given, words):
    with pytest.raises(ValueError, match=words):
        RunSettings(**given)


@pytest.mark.parametrize(
    ("document", "words"),
    [
        ({"task": "mqar"}, "it is of the task 'mqar'; the command says 'counting'"),
        ({"task": "counting", "run": {"stepz": 3}}, "it has stepz: no such setting"),
        ({"task": "counting", "settings": {"exmples": 3}}, "it has exmples: no such setting"),
        ({"task": "counting", "settings": {"examples": "3"}}, "it has examples = '3'; it must be a whole number"),
        ({"task": "counting", "settings": [3]}, "it has settings that are no JSON object"),
        ({"task": "counting", "run": {"steps": 2.5}}, r"it has steps = 2\.5; it must be a whole number"),
        ({"task": "counting", "run": {"steps": None}}, "it has steps = None; it must be a whole number"),
        ({"task": "counting", "run": {"learning_rate": "fast"}}, "learning_rate = 'fast'; it must be a number"),
        ({"task": "counting", "run": {"compile": 1}}, "it has compile = 1; it must be true or false"),
        ({"task": "counting", "run": {"output": 5}}, "it has output = 5; it must be a path"),
        ({"task": "counting", "run": {"words": 3}}, "it has words = 3; it must be an object"),
        ({"task": "counting", "run": {"track": "none"}}, "track = 'none'; it must be a list, each part text"),
        ({"task": "counting", "run": {"device": 3}}, "device = 3; it must be one of 'auto', 'cpu', 'cuda'"),
        ({"task": "counting", "run": {"eval_every": "a"}}, "eval_every = 'a'; it must be a whole number or null"),
    ],
)
def test_documents_that_are_not_understood(document, words):
    with pytest.raises(ValueError, match=words):
        RunPlan.from_document(document, CountingTask, "it")


def test_an_unknown_budget():
    with pytest.raises(ValueError, match="budget is 'papr'; counting has 'default', 'paper'"):
        make_plan(CountingTask, budget="papr", run={}, settings={})


def test_a_models_own_tokenizer_is_used(tmp_path):
    kind = task_class("lm")
    assert make_plan(kind, run={"model": tmp_path}, settings={}).settings.tokenizer == "bytes"
    (tmp_path / "tokenizer_config.json").write_text("{}")
    assert make_plan(kind, run={"model": tmp_path}, settings={}).settings.tokenizer == str(tmp_path)
    assert make_plan(kind, run={"model": tmp_path}, settings={"tokenizer": "bpe:99"}).settings.tokenizer == "bpe:99"
