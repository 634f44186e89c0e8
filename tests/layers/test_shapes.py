"""The shapes in the signatures are true: every layer runs with them checked, in a fresh process."""

import subprocess
import sys
from pathlib import Path


def test_annotations_hold() -> None:
    script = Path(__file__).with_name("call_everything.py")
    run = subprocess.run([sys.executable, "-W", "error", script], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
