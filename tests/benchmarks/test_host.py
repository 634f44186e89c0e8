"""`benchmarks/host.py`: a quick run on the CPU."""

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_host(tmp_path):
    command = [sys.executable, str(ROOT / "benchmarks" / "host.py"), "--quick", "--output", "result.json"]
    completed = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert completed.returncode == 0, completed.stderr
    document = json.loads((tmp_path / "result.json").read_text(encoding="utf-8"))
    assert json.loads(completed.stdout.splitlines()[-1])["rows"] == document["rows"]
    *ours, alone = document["rows"]
    assert {"Latte", "Macchiato", "window", "RG-LRU", "short conv", "RG-LRU with its gates"} == {x["op"] for x in ours}
    assert all(row["launches"] > 0 for row in ours), "calls that are not replayed"
    assert all(row["forward+backward_us"] > row["forward_us"] > 0 for row in document["rows"])
    # A plain call costs thousands in the interpreter: its launches are left out, so it is replayed.
    assert all(row["forward+backward_us"] < 100 * alone["forward+backward_us"] for row in ours)
