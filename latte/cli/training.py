"""The command of one task: its options, made of the settings there are, and what it does with them."""

import inspect
import json as jsonlib
import os
import shlex
from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args, get_origin, get_type_hints

import typer

from latte.tasks import Task, task_class
from latte.train.settings import RunPlan, RunSettings, make_plan, options_of, plain

if TYPE_CHECKING:
    from latte.train.runs import Result

FAILED = 1
RUN_FILE = "run.json"
RUN_PANEL, TASK_PANEL, COMMAND_PANEL = "The run", "The task", "The command"


def task_command(name: str, help_: str) -> Any:
    """The command that trains on the task called `name`."""
    require_training()
    kind = task_class(name)

    def train(**given: Any) -> int:
        return perform(kind, given)

    parameters = [*command_options(kind), *run_options(kind), *task_options(kind)]
    train.__signature__ = inspect.Signature(parameters, return_annotation=int)  # pyright: ignore
    train.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    train.__doc__ = help_
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command(name, help=help_)(train)
    return typer.main.get_command(app)


def require_training() -> None:
    """Raise a ValueError where there is nothing to train with."""
    if find_spec("transformers") is None or find_spec("accelerate") is None:
        raise ValueError("training needs Transformers and Accelerate; pip install 'latte-attention[train]'")


def option(name: str, kind: Any, default: Any = None, **words: Any) -> inspect.Parameter:
    annotation = Annotated[kind, typer.Option(**words)]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def flag(name: str, help_: str) -> inspect.Parameter:
    annotation = Annotated[bool, typer.Option(f"--{name}", help=help_, rich_help_panel=COMMAND_PANEL)]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=False, annotation=annotation)


def command_options(kind: type[Task]) -> list[inspect.Parameter]:
    budgets: Any = Literal[tuple(kind.plans)]  # pyright: ignore[reportInvalidTypeForm]
    panel = {"rich_help_panel": COMMAND_PANEL}
    return [
        option(
            "budget", budgets | None, help="Which model, size of the task and length of training to begin from.",
            show_default="default", **panel,
        ),
        option("set", list[str] | None, metavar="WORD=VALUE", help="Replace a word of the model; repeatable.", **panel),
        option("config", Path | None, metavar="FILE", help="Settings to begin from: a run.json, or --show's.", **panel),
        flag("resume", "Go on with the run in the output folder."),
        flag("overwrite", "Remove the run in the output folder first."),
        flag("show", "Print all settings as JSON and do nothing."),
        flag("json", "Print one JSON document at the end."),
    ]  # fmt: skip


def run_options(kind: type[Task]) -> list[inspect.Parameter]:
    plans = {name: make_plan(kind, budget=name, run={}, settings={}).run for name in kind.plans}
    defaults = {name: {field.name: getattr(run, field.name) for field in fields(run)} for name, run in plans.items()}
    return [
        settings_option(field, RunSettings, RUN_PANEL, described(field.name, field_default(field), defaults))
        for field in fields(RunSettings)
        if field.name != "words"
    ]


def task_options(kind: type[Task]) -> list[inspect.Parameter]:
    plans = {name: plan.settings for name, plan in kind.plans.items()}
    return [
        settings_option(field, kind.settings_class, TASK_PANEL, described(field.name, field_default(field), plans))
        for field in fields(kind.settings_class)
    ]


def field_default(field: Any) -> Any:
    return field.default_factory() if field.default is MISSING else field.default


def described(name: str, default: Any, plans: Mapping[str, Mapping[str, Any]]) -> str | bool:
    """A setting's default, and that of the paper's plan where it is another; False where there is none to show."""
    usual = plans["default"].get(name, default)
    paper = plans["paper"].get(name, default) if "paper" in plans else usual
    if paper != usual:
        return f"{shown(usual)}; paper: {shown(paper)}"
    return False if usual is None or usual == () else shown(usual)


def shown(value: Any) -> str:
    if isinstance(value, tuple):
        return ",".join(map(str, value)) or "none"
    return "none" if value is None else str(plain(value))


def settings_option(field: Any, owner: type, panel: str, default: str | bool) -> inspect.Parameter:
    """An option that is None unless it is given."""
    kind = get_type_hints(owner)[field.name]
    words: dict[str, Any] = {"help": field.metadata["help"], "show_default": default, "rich_help_panel": panel}
    chosen = options_of(kind)[0]
    if get_origin(chosen) is tuple and get_args(chosen)[0] is str:  # a text may have commas in it
        words["help"] += " Repeatable."
        chosen = list[str]
    elif get_origin(chosen) is tuple:
        words |= {"parser": list_parser(get_args(chosen)[0]), "metavar": "LIST"}
        chosen = str
    return option(field.name, chosen | None, **words)


def list_parser(kind: Callable[[str], Any]) -> Callable[[str], tuple[Any, ...]]:
    """Reads values with commas between them."""

    def parse(text: Any) -> tuple[Any, ...]:
        if isinstance(text, tuple):
            return text
        try:
            return tuple(kind(part.strip()) for part in str(text).split(",") if part.strip())
        except ValueError as error:
            raise typer.BadParameter(f"{text!r} is not a list of {kind.__name__} with commas between them") from error

    return parse


def perform(kind: type[Task], given: dict[str, Any]) -> int:
    """Resolve the settings, train, and print what came of it."""
    plan = resolve(kind, given)
    if given["show"]:
        typer.echo(jsonlib.dumps(plan.document(), indent=1, ensure_ascii=False))
        return 0
    from latte.train.distributed import leave
    from latte.train.guards import Diverged
    from latte.train.progress import make_display
    from latte.train.runs import run

    task = kind(plan.settings, seed=plan.run.data_seed)
    first = os.environ.get("RANK", "0") == "0"
    try:
        result = run(task, plan.run, resume=given["resume"], overwrite=given["overwrite"], display=make_display())
    except ValueError:
        if first:
            raise
        return 2  # the first process says it
    except Diverged as error:
        if first:
            typer.echo(f"latte: error: {error}", err=True)
        return FAILED
    leave()
    if first:
        report(result, json=given["json"])
    return 0 if result.signal is None else 128 + result.signal


def resolve(kind: type[Task], given: Mapping[str, Any]) -> RunPlan:
    """Defaults, then the plan or a file or the run to go on with, then what was given."""
    run, own = given_settings(RunSettings, given), given_settings(kind.settings_class, given)
    if given["set"]:
        run["words"] = dict(parse_word(text) for text in given["set"])
    if given["resume"] and given["overwrite"]:
        raise ValueError("--resume goes on with a run and --overwrite removes it; leave one of them out")
    if given["model"] is not None and given["preset"] is not None:
        raise ValueError("--model goes on from weights and --preset begins with random ones; leave one of them out")
    source = given["config"]
    if given["resume"]:
        output = run.get("output") or make_plan(kind, run={}, settings={}).run.output
        source = source or output / RUN_FILE
        if not source.is_file():
            raise ValueError(f"there is nothing to resume in {output}: it has no {RUN_FILE}")
        run.setdefault("output", output)
    if source is None:
        return make_plan(kind, budget=given["budget"], run=run, settings=own)
    if given["budget"] is not None:
        raise ValueError(f"--budget is given, but settings come from {source}; leave one of them out")
    return RunPlan.from_document(read_document(source), kind, str(source)).with_given(run, own)


def given_settings(owner: type, given: Mapping[str, Any]) -> dict[str, Any]:
    """Options that were given, of those that are fields of `owner`."""
    found = {field.name: given.get(field.name) for field in fields(owner)}
    return {
        name: tuple(value) if isinstance(value, list) else value for name, value in found.items() if value is not None
    }


def read_document(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise ValueError(f"{path}: there is no such file")
    try:
        document = jsonlib.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: it is no JSON ({error})") from error
    if not isinstance(document, dict):
        raise ValueError(f"{path}: it is no JSON object, as --show prints it")
    return document


def parse_word(text: str) -> tuple[str, Any]:
    """`window=64`, `mixer=conv` or `num_latents=null`: JSON, or else text."""
    word, equals, value = text.partition("=")
    if not equals or not word:
        raise ValueError(f"--set {text}: it must be WORD=VALUE, such as window=64")
    try:
        return word, jsonlib.loads(value)
    except ValueError:
        return word, value


def report(result: "Result", *, json: bool) -> None:
    """What came of the run, on stdout."""
    if json:
        typer.echo(jsonlib.dumps(result.document(), ensure_ascii=False))
        return
    rows = {
        "task": result.task,
        "steps": f"{result.step:,} of {result.steps:,}",
        "tokens": f"{result.tokens:,}",
        "training": f"{result.seconds:,.1f} s, {result.tokens / max(result.seconds, 1e-9):,.0f} tokens/s",
        "parameters": f"{result.parameters:,}",
    }
    rows |= {f"validation {name}": f"{value:.4f}" for name, value in result.validation.items()}
    rows |= {f"test {name}": f"{value:.4f}" for name, value in result.test.items()}
    if result.best is not None:
        rows["best"] = f"{result.best['metric']} {result.best['value']:.4f} at step {result.best['step']:,}"
    if result.rollbacks:
        rows["rollbacks"] = str(result.rollbacks)
    again = f"interrupted; go on with --resume --output {shlex.quote(str(result.output))}"
    rows["model"] = str(result.model) if result.model else again
    width = max(map(len, rows))
    for name, value in rows.items():
        typer.echo(f" {name:<{width}}  {value}")  # in one line, however long: it is there to be copied
