"""`benchmarks/ops.py`: a quick run on the CPU, and bad arguments."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from latte.cli import bench

ROOT = Path(__file__).parents[2]
OPS = ROOT / "benchmarks" / "ops.py"


@pytest.fixture(scope="module")
def quick_run(tmp_path_factory):
    """One quick run, started as a file from another folder; its output and the file it wrote."""
    folder = tmp_path_factory.mktemp("quick")
    command = [sys.executable, str(OPS), "--quick", "--output", "result.json"]
    completed = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert completed.returncode == 0, completed.stderr
    return completed, json.loads((folder / "result.json").read_text(encoding="utf-8"))


def test_last_line_is_the_document(quick_run):
    completed, document = quick_run
    *printed, last = completed.stdout.splitlines()
    assert json.loads(last) == document
    assert {"Correctness", "Time per token", "Targets"} <= set(printed)
    assert "forward, 1,024 tokens …" in completed.stderr


def test_document_of_a_quick_run(quick_run):
    _, document = quick_run
    assert (document["benchmark"], document["device"], document["quick"]) == ("ops", "cpu", True)
    assert document["command"] == "python benchmarks/ops.py --device cpu --quick --output result.json"
    rows = document["rows"]
    assert all({"table", "target", "status", "note"} <= set(row) for row in rows)
    checks = [row for row in rows if row["table"] == "Correctness"]
    assert {row["op"] for row in checks} == {"Latte", "Macchiato", "window", "RG-LRU"}
    assert all(row["status"] == "ok" for row in checks)


def test_rows_of_a_quick_run(quick_run):
    _, document = quick_run
    times = [row for row in document["rows"] if row["table"] == "Time per token"]
    for op in ("Latte", "Macchiato", "window", "softmax attention"):
        for what in ("forward", "forward+backward"):
            found = [row for row in times if (row["op"], row["pass"]) == (op, what) and row["status"] == "measured"]
            assert [row["tokens"] for row in found] == [256, 1024, 2048][: 2 if op == "softmax attention" else 3]
            assert all(row["ns_per_token"] > 0 for row in found)
    flex = [row for row in times if row["by"].startswith("FlexAttention")]
    assert [row["status"] for row in flex] == ["skipped", "skipped"]
    assert all(row["note"] for row in flex)


def test_targets_of_a_quick_run_are_not_judged(quick_run):
    _, document = quick_run
    targets = [row for row in document["rows"] if row["table"] == "Targets"]
    assert {row["status"] for row in targets} <= {"measured", "skipped"}
    assert all(row["target"] for row in targets)
    for words in ("faster than SDPA", "growth of time", "a Python loop", "one-token step", "peak memory"):
        assert any(words in row["what"] for row in targets), words


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--device", "tpu"], "--device"),
        (["--fast"], "--fast"),
        (["--output"], "--output"),
        (["--output", "/nowhere/at/all.json"], "/nowhere/at/all.json"),
        (["--output", "/"], "--output /"),
    ],
)
def test_bad_arguments_are_one_line_and_exit_2(arguments, words, capsys):
    assert bench.load_benchmark("ops").main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert words in captured.err


def test_cuda_without_a_device_is_refused(monkeypatch, capsys):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert bench.load_benchmark("ops").main(["--device", "cuda"]) == 2
    assert "--device cpu" in capsys.readouterr().err
