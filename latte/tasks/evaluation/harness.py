"""Tasks of EleutherAI's lm-evaluation-harness, with a model that is loaded already."""

import contextlib
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from types import SimpleNamespace
from typing import Any

REMEDY = "pip install 'lm_eval[hf]'"


@dataclass(frozen=True)
class TaskScore:
    task: str
    metric: str  # with the filter it was computed after, if there is one: "exact_match,strict"
    value: float
    error: float | None
    samples: int | None


def harness(
    model: Any,
    tokenizer: Any,
    tasks: Sequence[str],
    *,
    include_path: Path | None = None,
    num_fewshot: int | None = None,
    batch_size: int = 8,
    limit: int | None = None,
    seed: int = 0,
) -> list[TaskScore]:
    """Every metric of the tasks. `include_path` is a folder of tasks of one's own, as YAML files."""
    package = require_harness()
    if not hasattr(tokenizer, "bos_token_id"):
        raise ValueError("lm_eval's tasks need a tokenizer, and the model has none; save one in its folder")
    if include_path is not None and not include_path.is_dir():
        raise ValueError(f"--include-path {include_path}: there is no such folder")
    with contextlib.redirect_stdout(sys.stderr):  # it prints, and stdout is for results
        manager = package.TaskManager(include_path=None if include_path is None else str(include_path))
        check_tasks(tasks, manager.all_tasks)
        wrapped = package.HFLM(pretrained=model, tokenizer=tokenizer, batch_size=batch_size, device=str(model.device))
        results = package.simple_evaluate(
            model=wrapped, tasks=list(tasks), num_fewshot=num_fewshot, limit=limit, task_manager=manager,
            log_samples=False, random_seed=seed, numpy_random_seed=seed, torch_random_seed=seed,
            fewshot_random_seed=seed,
        )  # fmt: skip
    return scores(results["results"], results.get("n-samples", {}))


def require_harness() -> SimpleNamespace:
    """What is used of the package."""
    try:
        from lm_eval import simple_evaluate  # pyright: ignore[reportMissingImports]
        from lm_eval.models.huggingface import HFLM  # pyright: ignore[reportMissingImports]
        from lm_eval.tasks import TaskManager  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise ValueError(f"tasks of lm-evaluation-harness need lm_eval ({error}); {REMEDY}") from error
    return SimpleNamespace(simple_evaluate=simple_evaluate, HFLM=HFLM, TaskManager=TaskManager)


def check_tasks(tasks: Sequence[str], known: Sequence[str]) -> None:
    for task in tasks:
        if task not in known:
            near = get_close_matches(task, known, n=3)
            hint = f"did you mean {' or '.join(map(repr, near))}?" if near else "name local ones with --include-path"
            raise ValueError(f"lm_eval has no task {task!r}; {hint}")


def scores(results: Mapping[str, Mapping[str, Any]], samples: Mapping[str, Mapping[str, int]]) -> list[TaskScore]:
    """lm_eval names a metric "acc,none" and its error "acc_stderr,none"."""
    found = []
    for task, metrics in results.items():
        count = samples.get(task, {}).get("effective")
        for name, value in metrics.items():
            metric, comma, after = name.partition(",")
            if not comma or metric.endswith("_stderr") or not isinstance(value, (int, float)):
                continue
            error = metrics.get(f"{metric}_stderr,{after}")
            shown = metric if after == "none" else name
            found.append(TaskScore(task, shown, float(value), error if isinstance(error, float) else None, count))
    return found
