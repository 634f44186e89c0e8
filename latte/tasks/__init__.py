"""What models are trained on: examples with a seed, metrics, and a model and budget that suit them."""

from importlib import import_module

from latte.tasks.base import Budget, Plan, Task, TaskData

__all__ = ["TASKS", "Budget", "Plan", "Task", "TaskData", "task_class"]

TASKS = {
    "lm": "latte.tasks.text:LanguageModelling",
    "mqar": "latte.tasks.mqar:MQAR",
    "chains": "latte.tasks.chains:CausalChains",
    "listops": "latte.tasks.lra:ListOps",
    "pathfinder": "latte.tasks.lra:Pathfinder",
    "text": "latte.tasks.lra:TextClassification",
    "retrieval": "latte.tasks.lra:Retrieval",
    "image": "latte.tasks.lra:ImageClassification",
}


def task_class(name: str) -> type[Task]:
    """The task called `name`; its module is imported here, not before."""
    if name not in TASKS:
        raise ValueError(f"task is {name!r}; it must be one of {', '.join(map(repr, TASKS))}")
    module, _, attribute = TASKS[name].partition(":")
    return getattr(import_module(module), attribute)
