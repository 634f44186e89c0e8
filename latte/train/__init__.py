"""Training: a run from settings to a trained model, that nothing stops for good."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from latte.train.guards import Diverged
    from latte.train.objective import Objective
    from latte.train.progress import Display
    from latte.train.records import read_metrics
    from latte.train.runs import Result, run
    from latte.train.settings import RunPlan, RunSettings, make_plan

__all__ = ["Display", "Diverged", "Objective", "Result", "RunPlan", "RunSettings", "make_plan", "read_metrics", "run"]

_HOMES = {
    "Display": "progress",
    "Diverged": "guards",
    "Objective": "objective",
    "Result": "runs",
    "RunPlan": "settings",
    "RunSettings": "settings",
    "make_plan": "settings",
    "read_metrics": "records",
    "run": "runs",
}


def __getattr__(name: str) -> Any:
    """Load a name from its home when it is asked for: `latte train --help` need not wait for torch."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
