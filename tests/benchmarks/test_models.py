"""`benchmarks/decode.py` and `benchmarks/model.py`: quick runs, what they compare, and bad arguments."""

import json
import subprocess
import sys
from argparse import ArgumentTypeError, Namespace
from pathlib import Path

import pytest
import torch

from benchmarks import decode_suite, decoding, model_suite, program
from benchmarks.models import FLASH, Entry, LlamaEntry, parameters
from benchmarks.rows import Row
from latte.cli import bench

ROOT = Path(__file__).parents[2]
OURS, PEER = Entry("macchiato-tiny"), Entry("transformer-tiny", FLASH)


def document_of(name: str, printed: str, path: Path) -> dict:
    """What a quick run has written: its last line and its file hold the same."""
    document = json.loads(path.read_text(encoding="utf-8"))
    assert json.loads(printed.splitlines()[-1])["rows"] == document["rows"]
    assert (document["benchmark"], document["quick"]) == (name, True)
    assert {"torch", "transformers"} <= set(document["versions"])
    return document


def rows_of(document: dict, table: str) -> list[dict]:
    return [row for row in document["rows"] if row["table"] == table]


def test_decode(tmp_path):
    """Started as a file, from another folder."""
    command = [sys.executable, str(ROOT / "benchmarks" / "decode.py"), "--quick", "--contexts", "32,150"]
    completed = subprocess.run(
        [*command, "--output", "result.json"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert completed.returncode == 0, completed.stderr
    document = document_of("decode", completed.stdout, tmp_path / "result.json")
    assert document["command"] == (
        "python benchmarks/decode.py --device cpu --quick --output result.json --contexts 32,150"
    )
    assert [row["status"] for row in rows_of(document, decode_suite.CHECKS)] == ["ok", "ok"]
    steps = rows_of(document, decode_suite.TIMES)
    assert [(row["model"], row["context"]) for row in steps] == [
        ("macchiato-tiny", 32), ("macchiato-tiny", 150), ("transformer-tiny", 32), ("transformer-tiny", 150)
    ]  # fmt: skip
    ours, ours_later, peer, peer_later = (row["cache_mib"] for row in steps)
    assert ours == ours_later
    assert peer_later == pytest.approx(peer * 150 / 32, rel=1e-3)
    assert {row["status"] for row in rows_of(document, decode_suite.TARGETS)} == {"measured"}


def test_model(tmp_path, capsys):
    path = tmp_path / "result.json"
    arguments = ["--quick", "--contexts", "16,32", "--tokens", "32", "--peers", "--output", str(path)]
    assert bench.load_benchmark("model").main(arguments) == 0
    document = document_of("model", capsys.readouterr().out, path)
    for table, models in (
        (model_suite.TRAINING, {"macchiato-tiny", "transformer-tiny", "Llama by Transformers"}),
        (model_suite.FORWARD, {"macchiato-tiny", "transformer-tiny"}),
        (model_suite.FIGURE, {"Latte-R-SWA++ tiny", "Latte-Conv-SWA++ tiny", "Transformer++ tiny"}),
    ):
        found = rows_of(document, table)
        assert {row["model"] for row in found} == models
        assert {(row["context"], row["batch"]) for row in found} == {(16, 2), (32, 1)}
        assert all(row["status"] == "measured" and row["tokens_per_s"] > 0 for row in found), found
    assert len(rows_of(document, model_suite.TARGETS)) == 6


def test_what_is_measured_survives_the_end_of_time(tmp_path, capsys):
    path = tmp_path / "result.json"
    arguments = ["--quick", "--parts", "training", "--seconds", "0.001", "--output", str(path)]
    assert bench.load_benchmark("model").main(arguments) == 0
    rows = json.loads(path.read_text(encoding="utf-8"))["rows"]
    assert {row["status"] for row in rows} == {"skipped"}
    assert {row["note"] for row in rows} == {"out of time", "not measured"}
    capsys.readouterr()


def test_rows_are_written_as_they_come(tmp_path):
    options = Namespace(device="cpu", quick=True, seconds=9.0, output=tmp_path / "rows.json")
    run = program.Run("model", options, "the command")
    run.add(Row("times", {"a": 1}))
    run.add(Row("times", {"a": 2}))
    assert [row["a"] for row in json.loads(options.output.read_text(encoding="utf-8"))["rows"]] == [1, 2]


@pytest.mark.parametrize("name", ["decode", "model"])
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--device", "tpu"], "--device"),
        (["--fast"], "--fast"),
        (["--contexts", "1K,x"], "'x' is no number from 1"),
        (["--contexts", "0"], "'0' is no number from 1"),
        (["--seconds", "0"], "--seconds 0"),
        (["--output", "/nowhere/at/all.json"], "/nowhere/at/all.json"),
        (["--quick", "--model", "espresso"], "'espresso'"),
        (["--quick", "--peer", "espresso"], "'espresso'"),
    ],
)
def test_bad_arguments_are_one_line_and_exit_2(name, arguments, words, capsys):
    assert bench.load_benchmark(name).main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert words in captured.err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--parts", "figure"], "need a GPU"),
        (["--parts", "training,latte"], "'latte' is none of"),
        (["--shapes", "400M,7B"], "'7B' is none of"),
    ],
)
def test_parts_that_cannot_be(arguments, words, capsys):
    assert bench.load_benchmark("model").main(arguments) == 2
    assert words in capsys.readouterr().err


def test_cuda_without_a_device_is_refused(monkeypatch, capsys):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert bench.load_benchmark("decode").main(["--device", "cuda"]) == 2
    assert "--device cpu" in capsys.readouterr().err


@pytest.mark.parametrize(("text", "numbers"), [("1K,16k, 65536", [1024, 16384, 65536]), ("7", [7])])
def test_numbers(text, numbers):
    assert program.whole_numbers(text) == numbers


@pytest.mark.parametrize("text", ["", "1,,2", "-1", "1.5K", "K"])
def test_no_numbers(text):
    with pytest.raises(ArgumentTypeError, match="no number from 1"):
        program.whole_numbers(text)


@pytest.mark.parametrize("entry", [OURS, PEER], ids=lambda entry: entry.name)
def test_steps_by_the_measured_caches_are_right(entry):
    model = entry.build("cpu", torch.float32).eval()
    assert decoding.decoding_error(entry, model, "cpu", length=71) < 1e-5


def test_a_wrong_cache_is_seen(monkeypatch):
    right = decoding.exact_cache
    monkeypatch.setattr(decoding, "exact_cache", lambda model, states: right(model, [(k, 2 * v) for k, v in states]))
    model = PEER.build("cpu", torch.float32).eval()
    assert decoding.decoding_error(PEER, model, "cpu", length=71) > 1e-2


def test_a_reader_reads_as_far_as_asked_and_goes_on(monkeypatch):
    monkeypatch.setattr(decoding, "CHUNK", 17)
    model = OURS.build("cpu", torch.float32).eval()
    reader = decoding.Reader(model, 2, "cpu")
    reader.read(40)
    copy = reader.copy()
    reader.read(61)
    assert (reader.seen, int(copy.get_seq_length())) == (61, 40)
    assert decoding.cache_bytes(copy) == decoding.cache_bytes(reader.cache)


def test_the_bytes_of_a_context():
    model = PEER.build("cpu", torch.float32)
    cache = decoding.random_context(model, 3, 50, "cpu", torch.float32)
    held = decoding.cache_bytes(cache) - 3 * 8 * 4  # less the positions, one number a sequence and layer
    assert decoding.context_bytes(model, 3, 50, element=4) == held


def test_the_transformers_have_the_same_size():
    sizes = {parameters(entry.build("cpu", torch.float32)) for entry in (PEER, LlamaEntry("Llama", FLASH, PEER.name))}
    assert len(sizes) == 1


def options(**changes) -> Namespace:
    usual = bench.load_benchmark("model").USUAL["cuda"]
    return Namespace(**(usual | {"device": "cuda", "quick": False, "peers": True, "one_operation": False} | changes))


def test_what_is_judged_is_measured_first():
    cases = list(model_suite.Plan(options()).cases())
    assert [(case.table, case.entry.name, case.context) for case in cases[:10]] == [
        *((model_suite.TRAINING, name, context) for context in (1024, 16384, 65536)
          for name in ("latte-r-swa++", "transformer++")),
        *((model_suite.FIGURE, name, context) for context in (16384, 65536)
          for name in ("Latte-R-SWA++ 2.6B", "Transformer++ 2.6B")),
    ]  # fmt: skip
    assert [case.entry.name for case in cases[-2:]] == ["transformer++", "Llama by Transformers"]


def test_one_operation_is_a_contender():
    plan = model_suite.Plan(
        options(model="macchiato-tiny", contexts=[64, 1024], parts=["training"], one_operation=True)
    )
    cases = list(plan.cases())
    names = [(case.entry.name, case.context) for case in cases if "one operation" in case.entry.name]
    assert names == [("macchiato-tiny, one operation", 64), ("macchiato-tiny, one operation", 1024)]
    entry = next(case.entry for case in cases if "one operation" in case.entry.name)
    for built, expected in ((entry.build("cpu", torch.float32), True), (OURS.build("cpu", torch.float32), False)):
        assert [layer.attention.one_operation for layer in built.model.layers] == [expected] * len(built.model.layers)


def test_one_operation_needs_a_gpu(capsys):
    assert bench.load_benchmark("model").main(["--quick", "--one-operation"]) == program.BAD_INPUT
    assert "--one-operation: it is of GPU kernels" in capsys.readouterr().err


def test_targets_of_models():
    plan = model_suite.Plan(options(contexts=[1024, 65536], parts=["training", "figure"]))
    ours, peer = plan.pair
    found = {
        model_suite.Case(model_suite.TRAINING, ours, 1024): 90.0,
        model_suite.Case(model_suite.TRAINING, peer, 1024): 100.0,
        model_suite.Case(model_suite.TRAINING, ours, 65536): 50.0,
        model_suite.Case(model_suite.TRAINING, peer, 65536): 10.0,
    }
    run = Namespace(options=plan.options)
    rows = {row.cells["what"]: row for row in model_suite.targets(run, plan, found)}
    judged = [(row.cells["value"], row.target, row.status) for row in rows.values() if row.target]
    assert judged == [(0.9, "≥ 1×", "missed"), (5.0, "≥ 4×", "ok"), (None, "≥ 2×", "skipped")]


def test_the_share_of_matrix_products():
    options = Namespace(
        model="latte-r-swa++", peer="transformer++", parts=["training"], contexts=[1024], device="cuda", quick=False,
        shapes=["2.6B"], output=None,
    )  # fmt: skip
    run = program.Run("model", options, "", {"matrix_tflops": 600.0})
    plan = model_suite.Plan(options)
    found = {model_suite.Case(model_suite.TRAINING, plan.pair[0], 1024): 4e5}
    assert not list(model_suite.matrix_targets(run, plan, found))  # nobody knows how large the model is
    run.add(Row(model_suite.TRAINING, {"model": "latte-r-swa++", "by": "latte", "parameters_m": 150.0}))
    (row,) = model_suite.matrix_targets(run, plan, found)
    assert (row.cells["value"], row.target, row.status) == (pytest.approx(0.6), "≥ 0.45", "ok")


def test_the_demonstrations_model_has_a_goal_on_a_cpu():
    options = Namespace(
        model="macchiato-tiny", peer="transformer-tiny", parts=["training"], contexts=[1024, 4096], device="cpu",
        shapes=["2.6B"], quick=False,
    )  # fmt: skip
    plan = model_suite.Plan(options)
    found = {
        model_suite.Case(model_suite.TRAINING, entry, 4096): speed
        for entry, speed in zip(plan.pair, (3.2, 2.0), strict=True)
    }
    run = Namespace(options=options)
    judged = [
        (row.cells["value"], row.target, row.status) for row in model_suite.targets(run, plan, found) if row.target
    ]
    assert judged == [(1.6, "≥ 1.5×", "ok")]


def test_targets_of_steps():
    run = Namespace(options=Namespace(device="cuda", quick=False, batches=[1, 8], contexts=[1024, 65536, 262144]))
    found = {(OURS, 1, 1024): 1.0, (OURS, 1, 65536): 1.02, (OURS, 1, 262144): 1.2}
    found |= {(PEER, 1, 1024): 1.1, (PEER, 1, 65536): 5.1}
    flat, faster, beyond = decode_suite.targets(run, [OURS, PEER], found)
    assert (flat.status, flat.cells["value"]) == ("missed", 1.2)
    assert (faster.status, faster.cells["value"]) == ("ok", pytest.approx(1.1))
    assert (beyond.status, beyond.cells["value"]) == ("measured", pytest.approx(5.0))
    run.options.contexts = [1024, 65536]  # not as far as was asked for
    unjudged, *_ = decode_suite.targets(run, [OURS, PEER], found)
    assert unjudged.status == "measured"


def test_a_model_that_breaks_is_a_wrong_row(monkeypatch):
    def fail(model, tokens):
        raise RuntimeError("no")

    monkeypatch.setattr(model_suite, "training_step", fail)
    run = Namespace(options=Namespace(device="cpu", tokens=8, quick=True, compile="none"), late=lambda needed: False)
    for entry, status in ((OURS, "wrong"), (PEER, "skipped")):
        row, speed = model_suite.measure_case(run, model_suite.Case(model_suite.TRAINING, entry, 8))
        assert (row.status, row.note, speed) == (status, "RuntimeError: no", None)
