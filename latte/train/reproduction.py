"""The paper's experiments as lists of runs: which models learn which tasks, and what the paper measured."""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args, get_origin, get_type_hints

from latte.tasks import task_class
from latte.train.settings import RunPlan, RunSettings, described, fits, make_plan, options_of, restore

if TYPE_CHECKING:
    from latte.train.progress import Display
    from latte.train.runs import Result

# Words of a plan's model that the experiment's other models share, where they have latents or a window at all.
LATENT_WORDS = ("num_latents", "window")

DEFAULT, PAPER = "default", "paper"
BOTH = {DEFAULT: DEFAULT, PAPER: PAPER}  # plans by budget, where they are called alike


@dataclass(frozen=True)
class Model:
    """A model as the paper calls it, and what it is here."""

    name: str
    preset: str
    scores: Mapping[str, float]  # the paper's own, by part; empty where it has them in a figure alone
    words: Mapping[str, Any] | None = None  # of LatteConfig


@dataclass(frozen=True)
class Part:
    """What the models are trained on for one column of a table: a task, and the name of its plan by budget."""

    name: str
    task: str
    plans: Mapping[str, str]


@dataclass(frozen=True)
class Experiment:
    """A table or a figure of the paper."""

    title: str
    metric: str
    parts: Sequence[Part]
    models: Sequence[Model]

    def parts_of(self, budget: str) -> list[Part]:
        return [part for part in self.parts if budget in part.plans]


@dataclass(frozen=True)
class Trial:
    """One model on one part, with all settings of its run."""

    model: Model
    part: Part
    plan: RunPlan

    @property
    def paper(self) -> float | None:
        return self.model.scores.get(self.part.name)


def perplexities(**scores: float) -> list[Model]:
    return [Model(preset, preset, {"lm": score}) for preset, score in scores.items()]


def lra_scores(*percents: float) -> dict[str, float]:
    return {part.name: percent / 100 for part, percent in zip(LRA, percents, strict=True)}


LM = Part("lm", "lm", BOTH)
LRA = [
    Part(task, task, {DEFAULT: DEFAULT, PAPER: PAPER})
    for task in ("listops", "text", "retrieval", "image", "pathfinder")
]
RECALL = [
    Part("64", "mqar", {DEFAULT: DEFAULT}),
    *(Part(name, "mqar", {PAPER: f"paper-{name}"}) for name in ("128x8", "256x16", "512x32", "512x64")),
]
LINEAR = {"feature_map": "elu+1", "positions": "learned", "norm": "rmsnorm", "feedforward": "glu"}

EXPERIMENTS = {
    "table-1": Experiment(
        "Table 1: the parts of Latte, by perplexity",
        "perplexity",
        [LM],
        perplexities(
            **{
                "latte": 21.88, "latte++": 21.56, "latte-conv++": 20.26, "latte-conv-swa++": 18.52, "latte-r++": 19.99,
                "latte-r-swa++": 17.64, "transformer++": 17.19,
            }
        ),
    ),
    "table-2": Experiment(
        "Table 2: with and without latents, by perplexity (those of its models that are here)",
        "perplexity",
        [LM],
        perplexities(**{"r-swa++": 18.25, "latte-r-swa++": 17.64}),
    ),
    "table-3": Experiment(
        "Table 3: Long Range Arena, by accuracy (Latte's own rows, and linear attention)",
        "accuracy",
        LRA,
        [
            Model("linear attention", "latte", lra_scores(16.13, 65.90, 53.09, 42.34, 75.30), {"feature_map": "elu+1"}),
            Model("latte", "latte", lra_scores(40.18, 64.51, 73.39, 47.55, 75.61)),
            Model("latte-r++", "latte-r++", lra_scores(56.7, 83.85, 81.07, 57.61, 72.13)),
            Model("latte-r-swa++", "latte-r-swa++", lra_scores(61.39, 85.8, 87.67, 70.19, 73.69)),
        ],
    ),
    "figure-5": Experiment(
        "Figure 5: recall (MQAR) by length and pairs, by accuracy",
        "accuracy",
        RECALL,
        [
            Model("macchiato", "latte-conv-swa++", {}),
            Model("transformer++", "transformer++", {}),
            Model("linear attention", "latte", {}, LINEAR),
        ],
    ),
}  # fmt: skip


def trials(
    name: str,
    *,
    budget: str = DEFAULT,
    output: Path,
    models: Sequence[str] | None = None,
    parts: Sequence[str] | None = None,
    given: Mapping[str, str] | None = None,
) -> list[Trial]:
    """An experiment's runs, part after part; all of its models and parts unless some are named.

    `given` are settings of `latte train` for all runs, or, as `task.setting`, for those of one task.
    """
    experiment = EXPERIMENTS[name]
    columns = chosen("part", experiment.parts_of(budget), parts)
    rows = chosen("model", experiment.models, models)
    check_given(given or {}, {part.task for part in columns})
    return [Trial(row, column, plan_of(row, column, budget, output, given or {})) for column in columns for row in rows]


def chosen(what: str, known: Sequence[Any], names: Sequence[str] | None) -> list[Any]:
    by_name = {one.name: one for one in known}
    if unknown := [name for name in names or () if name not in by_name]:
        raise ValueError(f"{what} is {unknown[0]!r}; it must be of {', '.join(map(repr, by_name))}")
    return list(known) if names is None else [by_name[name] for name in names]


def plan_of(model: Model, part: Part, budget: str, output: Path, given: Mapping[str, str]) -> RunPlan:
    """The part's plan, with the model in place of its own, and settings that were given."""
    from latte.models.presets import preset_settings

    kind = task_class(part.task)
    plan = kind.plans[part.plans[budget]]
    own = {**preset_settings(str(plan.preset)), **plan.model}
    has = preset_settings(model.preset)
    shared = {word: own[word] for word in LATENT_WORDS if has.get(word) is not None and own.get(word) is not None}
    settings = settings_given(kind.settings_class, part.task, given)
    words = {**shared, **(model.words or {})}
    made = make_plan(
        kind,
        budget=part.plans[budget],
        run={
            "preset": model.preset,
            "output": output / slug(model.name) / slug(part.name),
            "words": words,
            **settings_given(RunSettings, part.task, given),
        },
        settings=settings,
    )
    if words.get("positions") == "learned":
        longest = {"max_position_embeddings": made.settings.length}
        made = replace(made, run=replace(made.run, words={**made.run.words, **longest}))
    return made


def slug(name: str) -> str:
    return re.sub(r"[^\w+]+", "-", name)


def check_given(given: Mapping[str, str], tasks: set[str]) -> None:
    """Raise ValueError for a setting that no run would have."""
    known = {task: {field.name for field in fields(task_class(task).settings_class)} for task in sorted(tasks)}
    common = {field.name for field in fields(RunSettings)} - {"output", "preset", "model", "words"}
    for name in given:
        task, dot, setting = name.rpartition(".")
        if dot and task not in known:
            raise ValueError(f"--with {name}: no run is of the task {task!r}, but of {', '.join(known)}")
        names = common.union(known[task]) if dot else common.union(*known.values())
        if setting not in names:
            raise ValueError(f"--with {name}: there is no setting {setting!r}; there are {', '.join(sorted(names))}")


def settings_given(owner: type, task: str, given: Mapping[str, str]) -> dict[str, Any]:
    """Of what was given, the values of `owner`'s settings; those for one task count more."""
    hints = get_type_hints(owner)
    known = {field.name for field in fields(owner)}
    found = {}
    for prefix in ("", f"{task}."):
        for name, text in given.items():
            setting = name.removeprefix(prefix) if name.startswith(prefix) else ""
            if setting in known:
                found[setting] = read_value(name, text, hints[setting])
    return found


def read_value(name: str, text: str, kind: Any) -> Any:
    """A setting's value from text; raises ValueError where it is of another type."""
    value = restore(parse(text, options_of(kind)[0]), kind)
    if not fits(value, kind):
        raise ValueError(f"--with {name}={text}: it must be {described(kind)}")
    return value


def parse(text: str, kind: Any) -> Any:
    """JSON, or else the text itself; of a list, with commas between."""
    if get_origin(kind) is tuple:
        return tuple(parse(word.strip(), get_args(kind)[0]) for word in text.split(",") if word.strip())
    try:
        return text if kind is str and text != "null" else json.loads(text)
    except ValueError:
        return text


def perform(trial: Trial, *, overwrite: bool, display: "Display") -> "Result":
    """The trial's run from where it is: begun, gone on with, or, where it has ended, its result alone."""
    from latte.train.runs import RUN_FILE, ended, run

    settings = trial.plan.run
    task = task_class(trial.plan.task)(trial.plan.settings, seed=settings.data_seed)
    before = None if overwrite else ended(task, settings)
    begun = not overwrite and (settings.output / RUN_FILE).is_file()
    return before or run(task, settings, resume=begun, overwrite=overwrite, display=display)


def record(trial: Trial, result: "Result", metric: str) -> dict[str, Any]:
    """What came of a trial, as JSON has it: the metric on the test split, where the task has one."""
    measured = result.test or result.validation
    return {
        "model": trial.model.name,
        "part": trial.part.name,
        "task": trial.part.task,
        "preset": trial.model.preset,
        "metric": metric,
        "value": measured[metric],
        "paper": trial.paper,
        "split": "test" if result.test else "validation",
        "steps": result.step,
        "tokens": result.tokens,
        "seconds": result.seconds,
        "parameters": result.parameters,
        "folder": str(result.output),
    }


def reproduce(
    name: str,
    chosen: Sequence[Trial],
    *,
    overwrite: bool = False,
    display: "Display",
    done: Callable[[list[dict[str, Any]]], None] = lambda _: None,
) -> tuple[list[dict[str, Any]], int | None]:
    """Perform an experiment's trials, and the signal that ended it; `done` is told what there is after each."""
    records: list[dict[str, Any]] = []
    for number, trial in enumerate(chosen, 1):
        display.note(f"{name}, run {number} of {len(chosen)}: {trial.model.name} on {trial.part.name}")
        result = perform(trial, overwrite=overwrite, display=display)
        if result.signal is not None:
            return records, result.signal
        records.append(record(trial, result, EXPERIMENTS[name].metric))
        done(records)
    return records, None
