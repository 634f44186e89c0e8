"""What a benchmark gives: rows, each judged against its target, and the document that holds them."""

import os
import platform
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal

Cell = str | int | float | bool | None
Status = Literal["ok", "missed", "wrong", "measured", "skipped"]


@dataclass(frozen=True)
class Row:
    """One measurement. Cells have their unit in their name; rows of one table have cells of the same names."""

    table: str
    cells: dict[str, Cell]
    target: str = ""
    status: Status = "measured"
    note: str = ""

    def as_dict(self) -> dict[str, Cell]:
        return {"table": self.table, **self.cells, "target": self.target, "status": self.status, "note": self.note}


@dataclass(frozen=True)
class Target:
    """A number to reach. With `judged` False it is shown and not held against anything: sizes were not its own."""

    bound: float
    at_least: bool = False
    unit: str = ""
    judged: bool = True

    def text(self) -> str:
        return f"{'≥' if self.at_least else '≤'} {self.bound:g}{self.unit}"

    def status(self, value: float | None) -> Status:
        if value is None or not self.judged:
            return "measured"
        return "ok" if (value >= self.bound if self.at_least else value <= self.bound) else "missed"


def judged_row(table: str, cells: dict[str, Cell], value: float, target: Target, note: str = "") -> Row:
    return Row(table, cells, target.text(), target.status(value), note)


@dataclass
class Report:
    """All rows of one run, and what they were measured on."""

    facts: dict[str, Cell] = field(default_factory=dict)
    rows: list[Row] = field(default_factory=list)

    @property
    def right(self) -> bool:
        return all(row.status != "wrong" for row in self.rows)

    def document(self, command: str, device: str, quick: bool, benchmark: str = "ops") -> dict[str, Any]:
        return {
            "benchmark": benchmark,
            "device": device,
            "quick": quick,
            "date": datetime.now(UTC).date().isoformat(),
            "command": command,
            "machine": machine(device),
            "versions": versions(),
            "facts": self.facts,
            "rows": [row.as_dict() for row in self.rows],
        }


def machine(device: str) -> dict[str, Cell]:
    import torch

    names: dict[str, Cell] = {"system": platform.platform(), "cpu": cpu_name(), "cores": os.cpu_count()}
    if device == "cuda":
        names["gpu"] = torch.cuda.get_device_name()
    return names


def cpu_name(information: Path = Path("/proc/cpuinfo")) -> str:
    if information.is_file():
        for line in information.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def versions() -> dict[str, Cell]:
    import torch

    import latte

    found: dict[str, Cell] = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "latte": latte.__version__,
    }
    for name in ("triton", "transformers"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def tables(rows: Iterable[dict[str, Cell]]) -> dict[str, list[dict[str, Cell]]]:
    """The rows of a document by table, in the order they were measured."""
    found: dict[str, list[dict[str, Cell]]] = {}
    for row in rows:
        found.setdefault(str(row["table"]), []).append(row)
    return found


def columns(rows: Sequence[dict[str, Cell]]) -> list[str]:
    """The columns worth showing: all but the table's name, and those in which no row has anything."""
    names = list(dict.fromkeys(name for row in rows for name in row if name != "table"))
    return [name for name in names if any(row.get(name) not in ("", None) for row in rows)]


def show(cell: Cell) -> str:
    """A cell as text: three digits, thousands with commas."""
    match cell:
        case None | "":
            return "–"
        case bool():
            return "yes" if cell else "no"
        case int():
            return f"{cell:,}"
        case float():
            if abs(cell) >= 100:
                return f"{cell:,.0f}"
            return f"{cell:.3g}" if abs(cell) >= 1e-3 or cell == 0 else f"{cell:.1e}"
    return str(cell)


def heading(name: str) -> str:
    return name.replace("_", " ")


def text_table(name: str, rows: Sequence[dict[str, Cell]]) -> str:
    """A table for a terminal; numbers to the right, words to the left."""
    lines = [[heading(column) for column in columns(rows)]]
    lines += [[show(row.get(column)) for column in columns(rows)] for row in rows]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    numeric = [all(not isinstance(row.get(column), str) for row in rows) for column in columns(rows)]
    text = [
        "  ".join(
            cell.rjust(width) if number else cell.ljust(width)
            for cell, width, number in zip(line, widths, numeric, strict=True)
        ).rstrip()
        for line in lines
    ]
    return "\n".join([name, text[0], "-" * len(text[0]), *text[1:]])
