"""`latte bench ops`: finds the benchmark of the checkout and hands its options on."""

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
    """A benchmark that prints its arguments and exits with 7."""
    (tmp_path / "ops.py").write_text(RECORDER, encoding="utf-8")
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


def test_the_checkout_has_the_benchmark():
    assert callable(bench.load_benchmark("ops").main)


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
