"""`latte reproduce`: the runs of the paper's experiments, the table they end in, and going on."""

import json
import signal
from dataclasses import replace
from pathlib import Path
from typing import get_args

import pytest

from latte.cli import main
from latte.cli.reproduce import Name
from latte.models import PRESETS, LatteConfig
from latte.tasks import task_class
from latte.train import read_metrics, reproduction
from latte.train.reproduction import EXPERIMENTS, trials
from tests.cli.test_command import error_line

QUICK = [
    "--with", "steps=2", "--with", "batch-size=2", "--with", "eval_examples=2", "--with", "track=none", "--with",
    "mqar.examples=8", "--with", "validation_examples=3", "--with", "test_examples=3", "--with", "length=16", "--with",
    "pairs=2,4", "--with", "device=cpu",
]  # fmt: skip


def quick(output: Path, *more: str, models: str = "macchiato,linear attention") -> list[str]:
    return ["reproduce", "figure-5", "--models", models, "--output", str(output), *QUICK, *more]


def test_names_are_those_of_the_experiments():
    assert get_args(Name) == tuple(EXPERIMENTS)


@pytest.mark.parametrize("name", EXPERIMENTS)
@pytest.mark.parametrize("budget", ["default", "paper"])
def test_every_run_is_one_that_can_be_made(name, budget):
    """Models of one part have the same size, steps and data, and the same latents and window if they have any."""
    found = trials(name, budget=budget, output=Path("runs"))
    parts = {trial.part.name for trial in found}
    assert len(found) == len(parts) * len(EXPERIMENTS[name].models)
    assert len({trial.plan.run.output for trial in found}) == len(found)
    for part in parts:
        own = [trial for trial in found if trial.part.name == part]
        assert len({(trial.plan.run.steps, trial.plan.run.learning_rate, trial.plan.settings) for trial in own}) == 1
        configs = [LatteConfig.from_preset(trial.plan.run.preset, **trial.plan.run.words) for trial in own]
        for words in (
            ["hidden_size", "intermediate_size", "num_hidden_layers", "num_heads"],
            ["num_latents"],
            ["window"],
        ):
            shapes = {tuple(getattr(config, word) for word in words) for config in configs}
            assert len({shape for shape in shapes if shape != (None,)}) <= 1
    if budget == "paper":
        assert all(trial.paper is not None for trial in found) == (name != "figure-5")


def test_the_papers_sizes():
    table = {trial.model.name: trial.plan.run for trial in trials("table-1", budget="paper", output=Path("runs"))}
    assert {run.steps * run.batch_size * 1024 for run in table.values()} == {122_070 * 64 * 1024}  # 8 B tokens
    for name, run in table.items():
        config, preset = LatteConfig.from_preset(run.preset, **run.words), LatteConfig.from_preset(name)
        assert config.to_dict() == preset.to_dict()
    recall = {(trial.model.name, trial.part.name): trial for trial in trials("figure-5", budget="paper", output=Path())}
    linear = recall["linear attention", "512x64"].plan
    assert linear.run.words["max_position_embeddings"] == linear.settings.length == 512
    assert (recall["macchiato", "256x16"].plan.settings.pairs, linear.settings.examples) == ((16,), 100_000)


def test_every_model_is_a_preset():
    assert {model.preset for experiment in EXPERIMENTS.values() for model in experiment.models} <= set(PRESETS)


def test_a_table_and_going_on(tmp_path, capsys):
    output = tmp_path / "figure"
    assert main(quick(output)) == 0
    printed = capsys.readouterr()
    assert all(word in printed.out for word in ("Figure 5", "macchiato", "linear attention", "64", "%"))
    assert "run 2 of 2: linear attention on 64" in printed.err
    written = [path.stat().st_mtime_ns for path in sorted(output.rglob("model.safetensors"))]
    assert main(quick(output, "--json", models="macchiato,transformer++,linear attention")) == 0
    document = json.loads(capsys.readouterr().out)
    assert document == json.loads((output / "results.json").read_text())
    assert [run["model"] for run in document["runs"]] == ["macchiato", "transformer++", "linear attention"]
    for run in document["runs"]:
        result = json.loads((Path(run["folder"]) / "result.json").read_text())
        assert (run["value"], run["split"], run["steps"]) == (result["test"]["accuracy"], "test", 2)
    again = [path.stat().st_mtime_ns for path in sorted(output.rglob("model.safetensors"))]
    assert set(written) <= set(again)  # what had ended was not run again


def test_more_steps_go_on_and_other_settings_are_refused(tmp_path, capsys):
    output = tmp_path / "figure"
    assert main(quick(output, models="macchiato")) == 0
    assert main(quick(output, "--with", "steps=3", "--with", "log_every=1", "--json", models="macchiato")) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["runs"][0]["steps"] == 3
    steps = [r["step"] for r in read_metrics(output / "macchiato" / "64" / "metrics.jsonl") if r["split"] == "train"]
    assert steps == [2, 3]
    assert main(quick(output, "--with", "steps=3", "--with", "seed=5", models="macchiato")) == 2
    assert "seed was 0, is 5" in capsys.readouterr().err.splitlines()[-1]
    assert main(quick(output, "--with", "seed=5", "--overwrite", models="macchiato")) == 0


def test_an_interruption_keeps_what_has_ended(tmp_path, monkeypatch, capsys):
    original = reproduction.perform

    def interrupt(trial, **words):
        result = original(trial, **words)
        return replace(result, signal=signal.SIGINT) if trial.model.name == "linear attention" else result

    monkeypatch.setattr("latte.train.reproduction.perform", interrupt)
    assert main(quick(tmp_path / "figure")) == 130
    assert "the same command goes on" in capsys.readouterr().err
    document = json.loads((tmp_path / "figure" / "results.json").read_text())
    assert [run["model"] for run in document["runs"]] == ["macchiato"]


def test_divergence_ends_with_one_line(tmp_path, capsys):
    assert main(quick(tmp_path / "figure", "--with", "learning_rate=1e30", "--with", "steps=6")) == 1
    assert capsys.readouterr().err.splitlines()[-1].startswith("latte: error: the ")


def test_settings_of_one_task_count_more():
    given = {"steps": "7", "text.steps": "9", "data": "all", "text.data": "reviews", "gradient_clip": "0"}
    found = trials("table-3", output=Path(), parts=["listops", "text"], given=given)
    assert {(t.part.name, t.plan.run.steps, t.plan.settings.data) for t in found} == {
        ("listops", 7, "all"), ("text", 9, "reviews"),
    }  # fmt: skip
    assert all(trial.plan.run.gradient_clip == 0.0 for trial in found)
    files = trials("table-2", output=Path(), given={"data": "a.txt,b.txt", "held_out": "0.5"})[0].plan.settings
    assert (files.data, files.held_out) == (("a.txt", "b.txt"), 0.5)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["table-9"], ["table-9", "table-1", "figure-5"]),
        (["table-1", "--models", "gpt"], ["'gpt'", "'latte-r-swa++'"]),
        (["table-3", "--parts", "maze"], ["'maze'", "'listops'"]),
        (["table-1", "--with", "steps"], ["--with steps", "NAME=VALUE"]),
        (["table-1", "--with", "speed=3"], ["--with speed", "steps"]),
        (["table-1", "--with", "text.data=x"], ["'text'", "lm"]),
        (["table-1", "--with", "steps=many"], ["--with steps=many", "a whole number"]),
        (["table-1", "--with", "steps=0"], ["steps is 0"]),
        (["table-1", "--with", "data=/nowhere/x.txt"], ["/nowhere/x.txt"]),
        (["figure-5", "--with", "pairs=2,x"], ["--with pairs=2,x", "a whole number"]),
        (["table-1", "--budget", "huge"], ["--budget", "huge", "paper"]),
    ],
)
def test_bad_input_is_one_line(arguments, named, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["reproduce", *arguments]) == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.startswith("latte: error: ")
    assert all(word in line for word in named), line
    assert not list(tmp_path.iterdir())


def test_help_without_an_experiment_and_settings_without_a_run(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["reproduce"]) == 0
    assert "table-1" in capsys.readouterr().out
    assert main(["reproduce", "table-1", "--show"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown[0]["run"]["output"] == "runs/table-1-default/latte/lm"
    assert not list(tmp_path.iterdir())


def test_without_accelerate_the_error_says_what_to_install(monkeypatch, capsys):
    monkeypatch.setattr("latte.cli.training.find_spec", lambda name: None)
    assert main(["reproduce", "table-1"]) == 2
    assert "pip install 'latte-attention[train]'" in error_line(capsys)


def test_plans_are_those_of_the_tasks():
    for experiment in EXPERIMENTS.values():
        for part in experiment.parts:
            assert set(part.plans.values()) <= set(task_class(part.task).plans)
