"""The run for GPUs, with a clock that makes times up: every row is there, and what fails is marked."""

import os
import time
from dataclasses import replace

import pytest
import torch

from benchmarks import fresh, gpu, gpu_targets
from benchmarks.contenders import LATTE, OURS, SOFTMAX, Contender, Sizes
from benchmarks.gpu_suite import FULL, OPS, QUICK, TARGETS, TIMES, Plan, Suite
from benchmarks.rows import Row
from benchmarks.timing import Times

PLAN = Plan(
    shapes=(Sizes(2, 64, 2, 8, 4, 16), Sizes(1, 128, 2, 8, 4, 16)),
    more_shapes=(Sizes(2, 64, 1, 12, 4, 16),),
    flex=False,
    lengths=(32, 64, 128),
    tokens=64,
    softmax_up_to=64,
    check_tokens=70,
)


class Clock:
    """Runs a step once and says that it took a millisecond, half of it on the device."""

    def time(self, step, *, one_thread=False) -> Times:
        step()
        return Times(1.0, 0.5, one_thread=0.75 if one_thread else None)


def make_suite(**changes) -> Suite:
    return Suite(replace(PLAN, **changes), lambda step: None, Clock(), Clock(), bandwidth=1e12, device="cpu")


@pytest.fixture(scope="module")
def report():
    return gpu.measure_all(make_suite())


def cells(report, table: str) -> list[dict]:
    return [row.as_dict() for row in report.rows if row.table == table]


def test_every_op_is_timed_against_its_limit(report):
    rows = [row for row in cells(report, OPS) if row["by"] == "latte" and row["head_dim"] == 8]
    kinds = {(row["op"], row["pass"], row["tokens"]) for row in rows}
    assert len(kinds) == len(rows) == len(OURS) * 2 * 2
    (row,) = [r for r in rows if (r["op"], r["pass"], r["tokens"]) == ("Latte", "forward", 64)]
    moved = 2 * 64 * 2 * (4 + 4 + 8 + 8) * 2  # two sequences, two heads, bfloat16
    assert row["limit_ms"] == pytest.approx(1e3 * moved / 1e12)
    assert row["times_limit"] == pytest.approx(0.5 / row["limit_ms"])
    assert (row["wall_ms"], row["device_ms"], row["status"]) == (1.0, 0.5, "measured")
    assert all(row["one_thread_ms"] == (0.75 if row["pass"] == "forward+backward" else None) for row in rows)


def test_attention_is_timed_in_the_other_head_width_too(report):
    other = {row["op"] for row in cells(report, OPS) if row["head_dim"] == 12}
    assert other == {"Latte", "Macchiato", "window", "softmax attention"}


def test_peers_that_are_not_there_are_skipped(report):
    rows = [row for row in cells(report, OPS) if row["by"].startswith("FLA")]
    assert len(rows) == 4
    assert {row["status"] for row in rows} == {"skipped"}
    assert all("fla" in row["note"] for row in rows)


def test_lengths_and_flatness(report):
    rows = cells(report, TIMES)
    assert {(row["batch"], row["tokens"]) for row in rows} == {(2, 32), (1, 64), (1, 128)}
    assert max(row["tokens"] for row in rows if row["by"] == SOFTMAX.by) == 64
    assert rows[0]["ns_per_token"] == pytest.approx(1e6 * 0.5 / 64)
    flat = [row for row in cells(report, TARGETS) if "slowest" in row["what"]]
    assert len(flat) == 4 * 2
    assert all(row["value"] == pytest.approx(2.0) and row["status"] == "missed" for row in flat)


def test_memory_has_a_row_for_every_op(report):
    rows = [row for row in cells(report, TARGETS) if "kept for backward" in row["what"]]
    assert len(rows) == len(OURS)


def test_goals_are_judged_by_the_wall_clock_in_their_own_sizes():
    row = gpu.op_row(make_suite(), LATTE, Sizes(8, 4096), "forward", Times(0.08, 0.05), {})
    assert (row.target, row.status) == ("≤ 0.09 ms wall (aim 0.06)", "ok")
    assert gpu.op_row(make_suite(), LATTE, Sizes(8, 4096), "forward", Times(0.1, 0.05), {}).status == "missed"
    assert gpu.op_row(make_suite(), LATTE, Sizes(8, 4096, 8, 96), "forward", Times(0.1, 0.05), {}).target == ""
    assert gpu.op_row(make_suite(), SOFTMAX, Sizes(8, 4096), "forward", Times(0.1, 0.05), {}).target == ""


def test_wrong_results_mark_every_row_of_the_op():
    def blurred(inputs, sizes, **options):
        y, state = LATTE.run(inputs, sizes, **options)
        return (y * 1.1 if not options else y), state

    wrong = gpu.measure_all(make_suite(ours=(Contender("Latte", "latte", LATTE.draw, blurred),), more_shapes=()))
    assert not wrong.right
    assert {row["status"] for row in cells(wrong, OPS) if row["by"] == "latte"} == {"wrong"}


def test_an_op_that_raises_does_not_end_the_run():
    def broken(inputs, sizes, **options):
        raise RuntimeError("no such kernel")

    report = gpu.measure_all(make_suite(ours=(Contender("Latte", "latte", LATTE.draw, broken),), more_shapes=()))
    assert not report.right
    assert any(row["by"] == SOFTMAX.by and row["status"] == "measured" for row in cells(report, OPS))
    assert all("no such kernel" in row["note"] for row in cells(report, OPS) if row["by"] == "latte")


def test_what_does_not_fit_into_the_time_is_skipped():
    suite = make_suite(ours=(LATTE,), seconds=5.0)
    suite.started = time.perf_counter() - 4.0
    report = gpu.measure_all(suite)
    assert {row["note"] for row in cells(report, TIMES)} == {"out of time"}
    assert report.right


def test_flatness_needs_two_lengths():
    one = Row(TIMES, {"op": "Latte", "by": "latte", "pass": "forward", "tokens": 64, "ns_per_token": 2.0})
    two = Row(TIMES, {"op": "Latte", "by": "latte", "pass": "forward", "tokens": 128, "ns_per_token": 2.2})
    assert list(gpu_targets.flatness([one])) == []
    (row,) = gpu_targets.flatness([one, two])
    assert (row.status, row.cells["value"]) == ("ok", pytest.approx(1.1))


def test_first_calls_are_judged(monkeypatch):
    waits = {"Latte": {"forward": 3.0, "backward": 4.0}, "window": {"forward": 9.0, "backward": 4.0}}
    monkeypatch.setattr(fresh, "ask", lambda *arguments, environment: waits)
    rows = list(gpu_targets.first_calls(lambda step: None, "/tmp"))
    assert [row.status for row in rows] == ["ok", "missed"]


def test_first_calls_that_fail_say_why(monkeypatch):
    def fail(*arguments, environment):
        raise RuntimeError("no GPU")

    monkeypatch.setattr(fresh, "ask", fail)
    (row,) = gpu_targets.first_calls(lambda step: None, "/tmp")
    assert (row.status, row.note) == ("skipped", "RuntimeError: no GPU")


def test_warming_up_asks_for_both_and_minds_no_failure(monkeypatch):
    asked = []

    def fail(*arguments, environment):
        asked.append((*arguments, environment["TRITON_CACHE_DIR"]))
        raise RuntimeError("no GPU")

    monkeypatch.setattr(fresh, "ask", fail)
    gpu_targets.warm_up(lambda step: None, "/tmp")
    assert sorted(asked) == [("warm", "flex", "/tmp"), ("warm", "ours", "/tmp")]


def test_a_fresh_process_that_fails_says_why():
    with pytest.raises(RuntimeError, match="not understood: nothing"):
        fresh.ask("nothing")


def test_triton_gets_an_empty_cache_for_the_run(monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", "/before")
    with gpu.empty_cache() as folder:
        assert os.environ["TRITON_CACHE_DIR"] == folder
        assert os.listdir(folder) == []  # noqa: PTH208
    assert os.environ["TRITON_CACHE_DIR"] == "/before"


def test_plans_hold_what_was_promised():
    assert [(s.batch, s.tokens, s.heads, s.head_dim) for s in (*FULL.shapes, *FULL.more_shapes)] == [
        (8, 4096, 12, 64), (2, 16384, 12, 64), (8, 4096, 8, 96), (2, 16384, 8, 96)
    ]  # fmt: skip
    assert (FULL.lengths[0], FULL.lengths[-1]) == (1024, 1048576)
    assert len({(s.heads, s.head_dim) for s in FULL.more_shapes}) == 1  # checked once for all of them
    assert FULL.check_tokens % 64 == 0  # the kernels for whole tiles, which are the ones that are timed
    assert QUICK.seconds < FULL.seconds < 200
    assert torch.bfloat16 == gpu.DTYPE
