"""Every setting of a run, and how defaults, a task's plan, a file and the command line come together."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from math import inf
from pathlib import Path
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Any, Literal, Union, get_args, get_origin, get_type_hints

if TYPE_CHECKING:
    from latte.tasks import Plan, Task

ATTENTION_WORDS = ("num_latents", "window", "window_head_dim", "mixer", "conv_size", "mixer_blocks")
"""Words of a model that say what kind of attention it has, in place of how large it is."""

SIZE_WORDS = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_heads", "num_value_heads", "head_dim")
"""Words of a model that say how large it is; what a preset leaves out is None."""

SEEDS = 2**32  # as many as NumPy takes

TRACKERS = ("tensorboard", "wandb", "trackio")


KINDS = {
    int: "a whole number", float: "a number", bool: "true or false", str: "text", Path: "a path", NoneType: "null",
    Mapping: "an object",
}  # fmt: skip
"""Types of settings, as a message calls them."""


def setting(default: Any, help_: str) -> Any:
    return field(default=default, metadata={"help": help_})


@dataclass(frozen=True)
class RunSettings:
    """How a model is made and trained. Which of them a resumed run may change: CHANGEABLE."""

    # ruff: noqa: RUF009 - `setting` is `field` with a help text

    output: Path = setting(Path("run"), "Folder for everything that the run writes.")
    preset: str | None = setting("macchiato-tiny", "A named model to train from random weights.")
    model: Path | None = setting(None, "A folder with a model to go on from, in place of a preset.")
    words: Mapping[str, Any] = field(default_factory=dict, metadata={"help": "Words of LatteConfig to replace."})
    trainable: str = setting(
        "all",
        "What learns, with commas between: all, latents (latent_query, latent_key, mixer), norms, lora (beside the "
        "source's projections in a converted model), or regular expressions of names.",
    )
    lora_rank: int = setting(8, "Rank of LoRA; its alpha is twice as much.")
    frozen_dtype: Literal["auto", "fp32", "bf16"] = setting(
        "auto", "Of matrices that do not learn, computing in bf16; auto is bf16 for those that lose nothing by it."
    )

    teacher: str = setting(
        "none",
        "Whom to learn from: source (what the model was converted from), a folder with a language model, or none.",
    )
    loss_weight: float = setting(1.0, "Weight of the loss of the next token, beside a teacher.")
    distill_logits: float = setting(0.0, "Weight of the divergence of the teacher's next tokens from the model's.")
    distill_temperature: float = setting(1.0, "What logits are divided by for that divergence.")
    distill_layers: float = setting(0.0, "Weight of the error of converted layers' outputs, relative to the teacher's.")
    distill_inputs: Literal["teacher", "student"] = setting(
        "teacher", "What layers read when they are compared: what the teacher's do, or what comes to them."
    )

    steps: int = setting(1000, "Steps of the optimiser.")
    batch_size: int = setting(32, "Examples in a step, over all processes.")
    micro_batch_size: int | None = setting(
        None, "Examples that a process takes at once; gradients are accumulated over the batch. All at once if not set."
    )
    learning_rate: float = setting(1e-3, "The highest learning rate.")
    schedule: Literal["constant", "linear", "cosine"] = setting("cosine", "How the rate falls after the warm-up.")
    warmup_steps: int = setting(0, "Steps in which the rate rises from 0.")
    final_rate: float = setting(0.0, "The rate at the end, as a share of the highest.")
    weight_decay: float = setting(0.1, "Of AdamW, for matrices; norms, biases and decays have none.")
    beta1: float = setting(0.9, "Of AdamW: memory of gradients.")
    beta2: float = setting(0.95, "Of AdamW: memory of squared gradients.")
    gradient_clip: float = setting(1.0, "Longest gradient; longer ones are scaled down. 0 clips nothing.")

    precision: Literal["auto", "fp32", "bf16", "fp16"] = setting(
        "auto", "Of the computation; weights and optimiser are fp32. auto is bf16 with CUDA, fp32 on a CPU."
    )
    tf32: bool = setting(False, "Let fp32 matrix products round to TF32 on GPUs.")
    compile: bool = setting(False, "Compile the model's layers with torch.compile.")
    checkpoint_layers: bool = setting(False, "Compute a layer's activations again in the backward pass: less memory.")
    device: Literal["auto", "cpu", "cuda"] = setting("auto", "Where to run; auto is CUDA where there is one.")
    parallel: Literal["ddp", "fsdp"] = setting("ddp", "With several processes: whole models, or shards of one (FSDP2).")
    readers: int | None = setting(None, "Processes that read examples; 4 with CUDA and none on a CPU if not set.")
    seed: int = setting(0, "Of the weights and of the order of examples.")
    data_seed: int = setting(0, "Of the examples, where a task makes them.")

    log_every: int = setting(10, "Steps between records of the loss.")
    eval_every: int | None = setting(None, "Steps between evaluations; a twentieth of all, at least 10, if not set.")
    eval_examples: int = setting(1024, "Examples of an evaluation; 0 takes all there are.")
    eval_batch_size: int | None = setting(None, "Examples at once in evaluation; as many as in training if not set.")
    sample_tokens: int = setting(64, "Length of the texts that a language model writes at evaluations; 0 for none.")
    track: tuple[str, ...] = setting(("tensorboard",), "Where curves go: tensorboard, wandb, trackio, or none.")

    save_every: int | None = setting(None, "Steps between checkpoints; as eval_every if not set.")
    keep: int = setting(2, "Checkpoints to keep besides the best one.")
    on_nan: Literal["stop", "rollback"] = setting(
        "stop",
        "When the loss is NaN or explodes: stop, or go back to the last checkpoint and leave the batch out.",
    )
    explosion: float = setting(10.0, "A loss this many times the recent mean, or 1, has exploded. 0: only NaN.")
    max_rollbacks: int = setting(3, "How often to go back before giving up.")

    def __post_init__(self) -> None:
        for name in ("steps", "batch_size", "log_every", "keep", "lora_rank"):
            check(name, getattr(self, name), least=1)
        for name in ("micro_batch_size", "eval_every", "eval_batch_size", "save_every"):
            if getattr(self, name) is not None:
                check(name, getattr(self, name), least=1)
        for name in ("warmup_steps", "readers", "eval_examples", "sample_tokens", "max_rollbacks", "weight_decay"):
            check(name, getattr(self, name) or 0, least=0)
        for name in ("gradient_clip", "explosion", "final_rate", "loss_weight", "distill_logits", "distill_layers"):
            check(name, getattr(self, name), least=0)
        for name in ("learning_rate", "distill_temperature"):
            if not 0 < getattr(self, name) < inf:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be above 0 and finite")
        for name in ("seed", "data_seed"):
            if not 0 <= getattr(self, name) < SEEDS:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be from 0 to {SEEDS - 1}")
        for name in ("beta1", "beta2"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 0 and below 1")
        for name, kind in get_type_hints(RunSettings).items():
            if get_origin(kind) is Literal and getattr(self, name) not in get_args(kind):
                raise ValueError(f"{name} is {getattr(self, name)!r}; it must be one of {', '.join(get_args(kind))}")
        if unknown := set(self.track) - {*TRACKERS, "none"}:
            raise ValueError(f"track is {', '.join(sorted(unknown))}; it must be of {', '.join(TRACKERS)}, or none")

    @property
    def evaluation_interval(self) -> int:
        return self.eval_every or max(10, self.steps // 20)

    @property
    def save_interval(self) -> int:
        return self.save_every or self.evaluation_interval

    @classmethod
    def for_plan(cls, plan: "Plan", **given: Any) -> "RunSettings":
        """A plan's model and budget, with some settings replaced.

        Of another preset, and of a model in a folder, nothing but the budget is the plan's.
        """
        budget = asdict(plan.budget)
        budget["gradient_clip"] = budget["gradient_clip"] or 0.0
        own_model = given.get("preset", plan.preset) == plan.preset and given.get("model") is None
        words = {**(plan.model if own_model else {}), **given.get("words", {})}
        chosen: dict[str, Any] = {"preset": plan.preset, **budget, **plan.run, **given, "words": words}
        return cls(**chosen)


CHANGEABLE = frozenset({
    "output", "steps", "micro_batch_size", "compile", "checkpoint_layers", "device", "parallel", "readers", "log_every",
    "eval_every", "eval_examples", "eval_batch_size", "sample_tokens", "track", "save_every", "keep", "on_nan",
    "explosion", "max_rollbacks",
    "cache", "workers", "verify", "prompts",
})  # fmt: skip
"""What a resumed run may do otherwise than it began: nothing that changes what is computed, but for rounding, and the
number of steps. The last four are tasks' settings, of how data is made ready and looked at."""


def check(name: str, value: float, *, least: float) -> None:
    if not least <= value < inf:
        raise ValueError(f"{name} is {value}; it must be {'finite' if value == inf else f'at least {least}'}")


@dataclass(frozen=True)
class RunPlan:
    """A task with its settings, and a run's: all that `latte train` is told."""

    task: str
    settings: Any  # the task's own dataclass
    run: RunSettings

    def document(self) -> dict[str, Any]:
        """As JSON has it, and as `from_document` takes it back."""
        return {"task": self.task, "settings": plain(asdict(self.settings)), "run": plain(asdict(self.run))}

    @classmethod
    def from_document(cls, document: Mapping[str, Any], kind: "type[Task]", source: str) -> "RunPlan":
        """Raises ValueError that names `source` where it is of another task or has words that nobody knows."""
        if document.get("task") != kind.name:
            raise ValueError(f"{source} is of the task {document.get('task')!r}; the command says {kind.name!r}")
        for name in ("settings", "run"):
            if not isinstance(document.get(name, {}), Mapping):
                raise ValueError(f"{source} has {name} that are no JSON object; take one that --show has printed")
        return cls(
            kind.name,
            from_words(kind.settings_class, document.get("settings", {}), source),
            from_words(RunSettings, document.get("run", {}), source),
        )

    def with_given(self, run: Mapping[str, Any], settings: Mapping[str, Any]) -> "RunPlan":
        """With some settings replaced; words of the model are added to those there are."""
        words = {**self.run.words, **run.get("words", {})}
        return RunPlan(
            self.task, replace(self.settings, **settings), replace(self.run, **(dict(run) | {"words": words}))
        )


def make_plan(
    kind: "type[Task]", *, budget: str | None = None, run: Mapping[str, Any], settings: Mapping[str, Any]
) -> RunPlan:
    """A task's plan called `budget` ("default" if None), with what was given in place of what it says.

    A preset given beside a budget takes the size of the plan's model and keeps its own attention; given alone, it is
    that model and no other.
    """
    plan = find_plan(kind, budget)
    given = {"output": Path("runs") / kind.name, **run}
    other = given.get("preset", plan.preset) != plan.preset
    if budget is not None and other and given.get("preset") is not None:
        given["words"] = {**size_of(plan, given["preset"]), **given.get("words", {})}
    own = {**plan.settings, **tokenizer_of(given.get("model"), kind), **settings}
    made = from_words(kind.settings_class, own, "the settings")
    return RunPlan(kind.name, made, RunSettings.for_plan(plan, **given))


def size_of(plan: "Plan", preset: str) -> dict[str, Any]:
    """The words that give another preset the size of the plan's model, and all else that is not its attention."""
    from latte.models.presets import preset_settings  # Transformers takes a while to load

    theirs, own = preset_settings(preset), {} if plan.preset is None else preset_settings(plan.preset)
    size = {word: own.get(word) for word in SIZE_WORDS if own and own.get(word) != theirs.get(word)}
    return {**size, **{word: value for word, value in plan.model.items() if word not in ATTENTION_WORDS}}


def tokenizer_of(model: Path | None, kind: "type[Task]") -> dict[str, str]:
    """A model that is trained further reads text with its own tokenizer, where it has one and the task wants one."""
    wanted = "tokenizer" in get_type_hints(kind.settings_class)
    if model is None or not wanted or not (model / "tokenizer_config.json").is_file():
        return {}
    return {"tokenizer": str(model)}


def find_plan(kind: "type[Task]", budget: str | None) -> "Plan":
    name = budget or "default"
    if name not in kind.plans:
        raise ValueError(f"budget is {name!r}; {kind.name} has {', '.join(map(repr, kind.plans))}")
    return kind.plans[name]


def differences(old: RunPlan, new: RunPlan) -> list[str]:
    """What a run may not change when it is resumed, as `name was …, is …`."""
    return [
        f"{field.name} was {plain(getattr(before, field.name))}, is {plain(getattr(after, field.name))}"
        for before, after in ((old.settings, new.settings), (old.run, new.run))
        for field in fields(before)
        if field.name not in CHANGEABLE and getattr(before, field.name) != getattr(after, field.name)
    ]


def from_words(kind: type, words: Mapping[str, Any], source: str) -> Any:
    """A dataclass of settings from plain values, such as JSON has."""
    hints = get_type_hints(kind)
    if unknown := sorted(set(words) - set(hints)):
        raise ValueError(f"{source} has {', '.join(unknown)}: no such setting; there are {', '.join(hints)}")
    restored = {name: restore(value, hints[name]) for name, value in words.items()}
    for name, value in restored.items():
        if not fits(value, hints[name]):
            raise ValueError(f"{source} has {name} = {plain(value)!r}; it must be {described(hints[name])}")
    return kind(**restored)


def fits(value: Any, kind: Any) -> bool:
    """Whether a value has a type, as far as JSON tells types apart."""
    origin, parts = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        return any(fits(value, part) for part in parts)
    if origin is Literal:
        return value in parts
    if origin is tuple:
        return isinstance(value, tuple) and all(fits(part, parts[0]) for part in value)
    if kind in (int, float):
        return isinstance(value, (int, kind)) and not isinstance(value, bool)
    return kind is Any or isinstance(value, origin or kind)


def described(kind: Any) -> str:
    """A type in words."""
    origin, parts = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        return " or ".join(map(described, parts))
    if origin is Literal:
        return f"one of {', '.join(map(repr, parts))}"
    if origin is tuple:
        return f"a list, each part {described(parts[0])}"
    return KINDS.get(origin or kind, f"a {getattr(kind, '__name__', kind)}")


def restore(value: Any, kind: Any) -> Any:
    """A value of type `kind` from what `plain` made of it."""
    for option in options_of(kind):
        if option is Path and isinstance(value, str):
            return Path(value)
        if get_origin(option) is tuple and isinstance(value, (list, tuple)):
            return tuple(restore(part, get_args(option)[0]) for part in value)
        if option is float and isinstance(value, int) and not isinstance(value, bool):
            return float(value)
    return value


def options_of(kind: Any) -> tuple[Any, ...]:
    """The types that a value may have, None aside."""
    if get_origin(kind) in (Union, UnionType):
        return tuple(option for option in get_args(kind) if option is not NoneType)
    return (kind,)


def plain(value: Any) -> Any:
    """A setting as JSON has it."""
    if isinstance(value, Mapping):
        return {str(key): plain(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(part) for part in value]
    return str(value) if isinstance(value, Path) else value
