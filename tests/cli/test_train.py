"""`latte train` as a person or a script meets it."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from latte.cli import main
from latte.cli.train import TASKS
from latte.cli.training import report
from latte.models import LatteConfig, LatteForCausalLM
from latte.tasks import TASKS as TASK_CLASSES
from latte.train import read_metrics
from latte.train.runs import Result
from tests.cli.test_command import error_line

SMALL = [
    "--set", "hidden_size=8", "--set", "intermediate_size=12", "--set", "num_hidden_layers=1", "--set", "num_heads=2",
    "--set", "num_latents=3", "--set", "window=4", "--set", "mixer_blocks=2",
]  # fmt: skip
QUICK = [
    "--length", "16", "--pairs", "2,4", "--vocab-size", "32", "--examples", "40", "--validation-examples", "9",
    "--test-examples", "5", "--steps", "6", "--batch-size", "4", "--log-every", "1", "--eval-every", "3",
    "--track", "none", "--device", "cpu", *SMALL,
]  # fmt: skip


def show(capsys, *arguments: str) -> dict:
    assert main(["train", *arguments, "--show"]) == 0
    return json.loads(capsys.readouterr().out)


def losses(output: Path) -> dict[int, float]:
    return {r["step"]: r["loss"] for r in read_metrics(output / "metrics.jsonl") if r["split"] == "train"}


def test_the_tasks_are_those_there_are():
    assert TASKS.keys() == TASK_CLASSES.keys()


def test_help_lists_the_tasks(capsys):
    for arguments in (["train"], ["train", "--help"]):
        assert main(arguments) == 0
        printed = capsys.readouterr().out
        assert all(name in printed for name in TASKS)


@pytest.mark.parametrize("task", TASKS)
def test_help_of_a_task_has_every_setting(task, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    assert main(["train", task, "--help"]) == 0
    printed = capsys.readouterr().out
    document = show(capsys, task)
    for name in [*document["settings"], *document["run"]]:
        assert name == "words" or f"--{name.replace('_', '-')}" in printed


def test_help_does_not_wait_for_torch():
    script = "import sys; from latte.cli import main; main(['train', '--help']); sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", script], capture_output=True, check=True)


def test_training(tmp_path, capsys):
    output = tmp_path / "run"
    assert main(["train", "mqar", *QUICK, "--output", str(output)]) == 0
    printed = capsys.readouterr()
    assert "step 6 of 6" in printed.err
    assert all(word in printed.out for word in ("6 of 6", "validation accuracy", "test accuracy_4_pairs", "model"))
    assert main(["train", "mqar", *QUICK, "--output", str(output), "--overwrite", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["step"], document["model"]) == (6, str(output / "model"))
    assert 0 <= document["test"]["accuracy"] <= 1


def test_how_to_go_on_is_one_line_to_copy(capsys):
    """However long the path is, and where nobody says how wide the lines are."""
    output = Path("/") / ("long " * 40) / "[red]" / "run"
    result = Result(
        task="mqar", output=output, model=None, step=3, steps=6, tokens=192, seconds=0.1, parameters=5, validation={},
        test={}, best=None, rollbacks=0, signal=2,
    )  # fmt: skip
    report(result, json=False)
    first, *_, last = capsys.readouterr().out.splitlines()
    assert first.split() == ["task", "mqar"]
    model, words = last.split(maxsplit=1)
    assert (model, words) == ("model", f"interrupted; go on with --resume --output '{output}'")


def test_settings_are_shown_and_taken_back(tmp_path, capsys):
    shown = show(capsys, "mqar", *QUICK, "--seed", "5", "--schedule", "linear", "--no-tf32")
    assert shown["settings"]["pairs"] == [2, 4]
    assert shown["run"]["words"]["window"] == 4
    assert (shown["run"]["seed"], shown["run"]["schedule"]) == (5, "linear")
    path = tmp_path / "settings.json"
    path.write_text(json.dumps(shown))
    again = show(capsys, "mqar", "--config", str(path), "--seed", "6", "--set", "mixer=none")
    assert again["run"]["words"] == shown["run"]["words"] | {"mixer": "none"}
    assert again["run"] == shown["run"] | {"seed": 6, "words": again["run"]["words"]}
    assert again["settings"] == shown["settings"]


def test_resuming_needs_nothing_but_the_folder(tmp_path, capsys):
    """Settings come from the run; those that are given are compared."""
    output = tmp_path / "run"
    assert main(["train", "mqar", *QUICK, "--output", str(output)]) == 0
    capsys.readouterr()
    resume = ["train", "mqar", "--resume", "--output", str(output)]
    assert main([*resume, "--learning-rate", "0.5"]) == 2
    assert "learning_rate was 0.003, is 0.5" in error_line(capsys)
    assert main([*resume, "--steps", "8", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["step"] == 8
    assert list(losses(output)) == list(range(1, 9))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["mqra"], ["mqra", "'mqar'"]),
        (["espresso"], ["task is 'espresso'", "'lm'", "'image'"]),
        (["mqar", "--preset", "espresso"], ["preset is 'espresso'", "'macchiato-tiny'"]),
        (["mqar", "--budget", "papr"], ["papr", "paper"]),
        (["mqar", "--pairs", "2,x"], ["--pairs", "'2,x'", "int"]),
        (["mqar", "--length", "7"], ["length is 7"]),
        (["mqar", "--steps", "none"], ["--steps", "integer"]),
        (["mqar", "--set", "window"], ["--set window", "WORD=VALUE"]),
        (["mqar", "--set", "windw=3"], ["windw", "no such setting"]),
        (["mqar", "--set", "window=wide"], ["window", "wide"]),
        (["mqar", "--set", "dtype=wide"], ["dtype='wide'", "words of the model"]),
        (["mqar", "--set", "pad_token_id=9999"], ["pad_token_id is 9999", "below vocab_size"]),
        (["lm", "--tokenizer", "bpe:999999999"], ["bpe:999999999", "at most 16,777,216"]),
        (["mqar", "--set", "id2label=3"], ["id2label=3", "words of the model"]),
        (["mqar", "--resume"], ["nothing to resume", "run.json"]),
        (["mqar", "--resume", "--overwrite"], ["--resume", "--overwrite"]),
        (["mqar", "--config", "none.json"], ["none.json", "no such file"]),
        (["mqar", "--model", "nowhere", "--preset", "latte"], ["--model", "--preset"]),
        (["mqar", "--model", "nowhere"], ["nowhere", "config.json"]),
        (["mqar", "--stepz", "3"], ["--stepz", "--steps"]),
        (["mqar", "--power", "inf"], ["power is inf"]),
        (["lm", "--data", "nowhere.txt"], ["nowhere.txt"]),
    ],
    ids=" ".join,
)
def test_bad_input_is_one_line(arguments, words, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["train", *arguments]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert lines[-1].startswith("latte: error: ")
    assert not any(line.startswith("Traceback") for line in lines)
    assert all(word in lines[-1] for word in words), lines[-1]


def test_bad_files(capsys, tmp_path):
    path = tmp_path / "settings.json"
    for content, words in (("{", "no JSON"), ("[1]", "no JSON object"), ('{"task": "lm"}', "of the task 'lm'")):
        path.write_text(content)
        assert main(["train", "mqar", "--config", str(path)]) == 2
        assert words in error_line(capsys)


def test_weights_that_do_not_fit_are_named(capsys, tmp_path):
    assert main(["train", "mqar", *QUICK, "--output", str(tmp_path / "first")]) == 0
    settings = tmp_path / "first" / "model" / "config.json"
    settings.write_text(json.dumps(json.loads(settings.read_text()) | {"intermediate_size": 20}))
    quick = QUICK[: -len(SMALL)]
    capsys.readouterr()
    assert main(["train", "mqar", *quick, "--model", str(settings.parent), "--output", str(tmp_path / "second")]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert "model.layers.0.feedforward.down.weight is [8, 12] in the weights, [8, 20] by config.json" in error
    assert not (tmp_path / "second").exists()


def test_a_classifier_goes_on_from_a_language_model(capsys, tmp_path):
    """Its own part is new; what the data is made of must be what the model reads."""
    torch.manual_seed(0)
    words = {word: json.loads(value) for word, _, value in (text.partition("=") for text in SMALL[1::2])}
    for name, vocabulary in (("small", 8), ("model", 40)):
        LatteForCausalLM(LatteConfig(vocab_size=vocabulary, **words)).save_pretrained(tmp_path / name)
    listops = [
        "train", "listops", "--min-length", "5", "--length", "40", "--examples", "20", "--validation-examples", "6",
        "--test-examples", "6", "--workers", "1", "--cache", str(tmp_path / "cache"), "--steps", "2", "--batch-size",
        "4", "--track", "none", "--device", "cpu",
    ]  # fmt: skip
    assert main([*listops, "--model", str(tmp_path / "model"), "--output", str(tmp_path / "run")]) == 0
    assert json.loads((tmp_path / "run" / "model" / "config.json").read_text())["id2label"].keys() == set("0123456789")
    capsys.readouterr()
    assert main([*listops, "--model", str(tmp_path / "small"), "--output", str(tmp_path / "other")]) == 2
    assert "small, which knows 8 tokens, but the data has" in capsys.readouterr().err


def test_a_folder_in_use(capsys, tmp_path):
    (tmp_path / "run.json").write_text("{}")
    assert main(["train", "mqar", *QUICK, "--output", str(tmp_path)]) == 2
    assert "--resume" in error_line(capsys)


def test_a_text_model_writes_and_is_generated_from(tmp_path, capsys):
    text = tmp_path / "text.txt"
    text.write_text("\n\n".join("the cup is on the table, and the table is in the room " * 20 for _ in range(8)))
    output = tmp_path / "run"
    arguments = [
        "--data", str(text), "--context", "32", "--cache", str(tmp_path / "cache"), "--prompts", "the cup, ",
        "--held-out", "0.3", "--workers", "0", "--steps", "4", "--batch-size", "2", "--eval-every", "2",
        "--eval-examples", "4", "--sample-tokens", "5", "--track", "none", "--device", "cpu", *SMALL,
    ]  # fmt: skip
    assert main(["train", "lm", *arguments, "--output", str(output)]) == 0
    (first, _) = [record for record in read_metrics(output / "metrics.jsonl") if record["split"] == "samples"]
    assert first["texts"][0]["prompt"] == "the cup, "
    capsys.readouterr()
    assert main(["generate", str(output / "model"), "--prompt", "the", "--max-new-tokens", "3"]) == 0
    assert "random" not in capsys.readouterr().err
    without_sizes = arguments[: -len(SMALL)]
    more = ["train", "lm", *without_sizes, "--model", str(output / "model"), "--output", str(tmp_path / "more")]
    assert main(more) == 0
    assert (tmp_path / "more" / "model" / "tokenizer.json").is_file()


def test_processes_part_when_the_run_is_done(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meeting", rank=0, world_size=1)
    assert main(["train", "mqar", *QUICK, "--output", str(tmp_path / "run")]) == 0
    assert not dist.is_initialized()


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
@pytest.mark.slow
def test_launched_by_torchrun(parallel, tmp_path):
    one, two = tmp_path / "one", tmp_path / "two"
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    alone = [sys.executable, "-m", "latte.cli"]
    torchrun = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
    launched = [sys.executable, *torchrun, "-m", "latte.cli"]
    for launcher, output in ((alone, one), (launched, two)):
        command = [*launcher, "train", "mqar", *QUICK, "--output", str(output), "--parallel", parallel, "--json"]
        result = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
        assert json.loads(result.stdout)["step"] == 6
    assert losses(one) == pytest.approx(losses(two), rel=1e-4)


@pytest.mark.slow
def test_killed_from_outside_at_any_time(tmp_path):
    """Until it is done: start or resume the command, and kill it after a random while."""
    straight, killed = tmp_path / "straight", tmp_path / "killed"
    settings = [*QUICK, "--steps", "60", "--save-every", "7"]
    command = [sys.executable, "-m", "latte.cli", "train", "mqar"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    subprocess.run([*command, *settings, "--output", str(straight)], capture_output=True, check=True, env=environment)
    rng, kills = random.Random(0), 0
    while not (killed / "result.json").exists():
        resume = ["--resume"] if (killed / "run.json").exists() else settings
        begun = time.time()
        arguments = [*command, *resume, "--output", str(killed)]
        process = subprocess.Popen(arguments, stderr=subprocess.PIPE, env=environment)
        while process.poll() is None and not written_since(begun, killed / "metrics.jsonl"):
            time.sleep(0.02)
        time.sleep(rng.random() * 2)
        if process.poll() is None:
            process.send_signal(signal.SIGKILL)
            kills += 1
        process.communicate()
        assert kills < 60
    assert kills
    assert losses(killed) == losses(straight)


def written_since(begun: float, path: Path) -> bool:
    return path.exists() and path.stat().st_mtime > begun
