"""`latte bench`: finds the benchmarks of the checkout and hands their options on."""

import json

import pytest
import torch

from latte.cli import bench, main

RECORDER = """
import json

def main(argv):
    print(json.dumps(argv))
    return 7
"""


@pytest.fixture
def recorder(tmp_path, monkeypatch):
    """Benchmarks that print their arguments and exit with 7."""
    for name in ("ops", "decode", "model"):
        (tmp_path / f"{name}.py").write_text(RECORDER, encoding="utf-8")
    monkeypatch.setattr(bench, "BENCHMARKS", tmp_path)


@pytest.mark.usefixtures("recorder")
@pytest.mark.parametrize(
    ("given", "handed_on"),
    [
        ([], ["--device", "cpu"]),
        (["--quick", "--json"], ["--device", "cpu", "--json", "--quick"]),
        (["--output", "result.json"], ["--device", "cpu", "--output", "result.json"]),
    ],
)
def test_options_and_exit_code_pass_through(given, handed_on, capsys):
    assert main(["bench", "ops", *given]) == 7
    assert json.loads(capsys.readouterr().out) == handed_on


@pytest.mark.usefixtures("recorder")
@pytest.mark.parametrize(
    ("given", "handed_on"),
    [
        (["decode"], []),
        (
            ["decode", "--contexts", "1K,64K", "--batches", "1", "--quick"],
            ["--contexts", "1K,64K", "--batches", "1", "--quick"],
        ),
        (["model", "--model", "latte++", "--seconds", "60"], ["--model", "latte++", "--seconds", "60.0"]),
        (["model", "--parts", "training", "--tokens", "32K"], ["--tokens", "32K", "--parts", "training"]),
        (["model", "--parts", "figure", "--shapes", "400M"], ["--parts", "figure", "--shapes", "400M"]),
    ],
)
def test_options_of_model_benchmarks_pass_through(given, handed_on, capsys):
    assert main(["bench", *given]) == 7
    assert json.loads(capsys.readouterr().out) == ["--device", "cpu", *handed_on]


@pytest.mark.parametrize("name", ["ops", "decode", "model"])
def test_the_checkout_has_the_benchmark(name):
    assert callable(bench.load_benchmark(name).main)


def test_without_a_checkout_the_error_says_what_to_do(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(bench, "BENCHMARKS", tmp_path)
    assert main(["bench", "ops"]) == 2
    error = capsys.readouterr().err
    assert str(tmp_path) in error
    assert "clone the repository" in error


@pytest.mark.usefixtures("recorder")
def test_cuda_without_a_device_is_refused(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["bench", "ops", "--device", "cuda"]) == 2
    assert "--device cpu" in capsys.readouterr().err
