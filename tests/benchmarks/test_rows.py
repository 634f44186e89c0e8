"""Rows, targets and tables: what a run prints and keeps."""

import pytest

from benchmarks.rows import Report, Row, Target, columns, cpu_name, judged_row, show, tables, text_table


@pytest.mark.parametrize(
    ("target", "value", "text", "status"),
    [
        (Target(15.0, at_least=True, unit="×"), 15.0, "≥ 15×", "ok"),
        (Target(15.0, at_least=True, unit="×"), 14.9, "≥ 15×", "missed"),
        (Target(0.09, unit=" ms"), 0.09, "≤ 0.09 ms", "ok"),
        (Target(0.09, unit=" ms"), 0.1, "≤ 0.09 ms", "missed"),
        (Target(3.0, judged=False), 100.0, "≤ 3", "measured"),
        (Target(3.0), None, "≤ 3", "measured"),
        (Target(3.0), float("nan"), "≤ 3", "missed"),
    ],
)
def test_targets(target, value, text, status):
    assert (target.text(), target.status(value)) == (text, status)


@pytest.mark.parametrize(
    ("cell", "text"),
    [
        (None, "–"),
        ("", "–"),
        (True, "yes"),
        (False, "no"),
        (65536, "65,536"),
        (0.0, "0"),
        (12345.6, "12,346"),
        (17.26, "17.3"),
        (0.0912, "0.0912"),
        (2.9e-7, "2.9e-07"),
        ("Latte", "Latte"),
    ],
)
def test_cells_as_text(cell, text):
    assert show(cell) == text


def test_tables_keep_the_order_and_leave_out_empty_columns():
    rows = [
        Row("times", {"op": "Latte", "wall_ms": 1.5}).as_dict(),
        judged_row("targets", {"what": "faster", "value": 20.0}, 20.0, Target(15.0, at_least=True)).as_dict(),
        Row("times", {"op": "window", "wall_ms": None}, status="skipped", note="no compiler").as_dict(),
    ]
    assert list(tables(rows)) == ["times", "targets"]
    assert columns(tables(rows)["times"]) == ["op", "wall_ms", "status", "note"]
    assert text_table("times", tables(rows)["times"]).splitlines() == [
        "times",
        "op      wall ms  status    note",
        "-------------------------------",
        "Latte       1.5  measured  –",
        "window        –  skipped   no compiler",
    ]


def test_a_wrong_row_makes_the_report_wrong():
    report = Report(rows=[Row("times", {}, status="missed"), Row("times", {}, status="skipped")])
    assert report.right
    report.rows.append(Row("times", {}, status="wrong"))
    assert not report.right


def test_document_says_where_when_and_how():
    document = Report({"threads": 2}).document("python benchmarks/ops.py", "cpu", quick=True)
    assert set(document) == {
        "benchmark", "device", "quick", "date", "command", "machine", "versions", "facts", "rows"
    }  # fmt: skip
    assert document["machine"]["cpu"]
    assert {"python", "torch", "latte"} <= set(document["versions"])


def test_cpu_name(tmp_path):
    information = tmp_path / "cpuinfo"
    information.write_text("processor : 0\nmodel name\t: Some CPU @ 2 GHz\n", encoding="utf-8")
    assert cpu_name(information) == "Some CPU @ 2 GHz"
    assert cpu_name(tmp_path / "none")
