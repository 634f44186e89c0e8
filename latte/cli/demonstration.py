"""What `latte demo` does: train a small language model, let it write, time it beside softmax attention, look inside."""

import json
import platform
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from latte.analysis.inspection import inspect_tokens
from latte.analysis.page import render_page
from latte.analysis.report import Costs, Lesson, Story, Writing
from latte.analysis.token_texts import token_texts
from latte.cli import generation
from latte.models import LatteConfig, LatteForCausalLM
from latte.tasks import TaskData, task_class
from latte.tasks.evaluation.speed import decode_speed
from latte.train import Display, make_plan, read_metrics, run
from latte.train.quiet import quiet_transformers
from latte.train.runs import RUN_FILE
from latte.train.settings import RunPlan, differences

PEER = "transformer-tiny"
TOKENIZER = "bpe:1024"  # a token is about three bytes, so that more text is read in the same time
PROMPT = "def read_lines(path):\n"
SHOWN = 2048  # tokens on the page of latents
FULL = {"contexts": [1024, 2048, 4096, 8192, 16384], "written": 400, "shown": SHOWN}
QUICK = {"contexts": [128, 256, 512], "written": 40, "shown": 200}
FULL_RUN = {"steps": 220, "batch_size": 8, "eval_every": 44, "eval_examples": 64, "sample_tokens": 48}  # minutes
QUICK_RUN = {"steps": 12, "batch_size": 4, "eval_every": 6, "eval_examples": 4, "sample_tokens": 0}

Note = Callable[[str], None]


def demonstrate(folder: Path, *, quick: bool, display: Display, note: Note) -> tuple[Story, str]:
    """The story of a model trained in `folder`, and the page of its latents."""
    sizes = QUICK if quick else FULL
    lesson, text = learn(folder, quick=quick, display=display)
    with quiet_transformers():
        return look(folder, lesson, text, sizes, note)


def look(folder: Path, lesson: Lesson, text: str, sizes: dict[str, Any], note: Note) -> tuple[Story, str]:
    """Let the trained model write, time it and look inside."""
    loaded = generation.load(str(folder / "model"), "auto", "auto", 0, note)
    note("writing")
    writing = write(loaded, sizes["written"])
    note(f"timing one more token after up to {sizes['contexts'][-1]:,}, beside {PEER}")
    costs = [
        cost("Macchiato", loaded.model, sizes["contexts"]),
        cost("Transformer", peer_of(loaded.model), sizes["contexts"]),
    ]
    note("looking at the latents")
    page = latents(loaded, text, sizes["shown"])
    return Story(lesson, writing, sizes["contexts"], costs, setting(loaded.model)), page


def plan_of(folder: Path, *, quick: bool) -> RunPlan:
    run = {"output": folder, "track": ()} | (QUICK_RUN if quick else FULL_RUN)
    return make_plan(task_class("lm"), run=run, settings={"tokenizer": TOKENIZER})


def check_folder(folder: Path) -> None:
    """Raise ValueError where the folder holds a run that is not an earlier demonstration's: it would be replaced."""
    begun = folder / RUN_FILE
    if not begun.is_file():
        return
    try:
        before = RunPlan.from_document(json.loads(begun.read_text(encoding="utf-8")), task_class("lm"), str(begun))
    except ValueError:  # of another task, or of another version
        ours = False
    else:
        plans = [plan_of(folder, quick=quick) for quick in (True, False)]
        known = [replace(plan, run=replace(plan.run, precision=before.run.precision)) for plan in plans]
        ours = any(not differences(before, plan) for plan in known)
    if not ours:
        raise ValueError(f"--output: {folder} holds a run that is no demonstration's; name another file")


def learn(folder: Path, *, quick: bool, display: Display) -> tuple[Lesson, str]:
    """Train the language-modelling task's own default in `folder`; also some text that was held out."""
    check_folder(folder)
    kind, plan = task_class("lm"), plan_of(folder, quick=quick)
    task = kind(plan.settings, seed=plan.run.data_seed)
    result = run(task, plan.run, overwrite=True, display=display)
    if result.signal is not None:
        raise KeyboardInterrupt
    records = read_metrics(folder / "metrics.jsonl")
    curves = {
        split: [(record["tokens"], record["loss"]) for record in records if record["split"] == split]
        for split in ("train", "validation")
    }
    lesson = Lesson(
        str(plan.run.preset), result.parameters, "the Python standard library's source", result.step, result.tokens,
        result.seconds, curves["train"], curves["validation"], result.validation["bits_per_byte"],
    )  # fmt: skip
    return lesson, unread_text(task.prepare())


def unread_text(data: TaskData) -> str:
    """The beginning of what was held out."""
    tokens = torch.cat([data.validation[index]["input_ids"] for index in range(min(4, len(data.validation)))])
    return str(data.tokenizer.decode(tokens, skip_special_tokens=True)) if data.tokenizer is not None else ""


def write(loaded: generation.Loaded, count: int) -> Writing:
    """Let the model go on after the prompt."""
    tokens = generation.encode(loaded, PROMPT.encode())
    reading = generation.read(loaded, tokens, chunk=8192, progress=None)
    choice = {"do_sample": True, "temperature": 0.7, "pad_token_id": 0}
    written = generation.continue_text(loaded, reading, count, choice, seed=0, show=None)
    return Writing(PROMPT, written.text, len(written.tokens), written.rate, reading.state_bytes, written.state_bytes)


def peer_of(model: LatteForCausalLM) -> LatteForCausalLM:
    """A transformer of the same size, with random weights: its time does not depend on them."""
    torch.manual_seed(0)
    config = LatteConfig.from_preset(PEER, vocab_size=model.config.vocab_size)
    return LatteForCausalLM(config).to(model.device).eval()  # pyright: ignore[reportArgumentType]


def cost(name: str, model: LatteForCausalLM, contexts: list[int]) -> Costs:
    results = decode_speed(model, contexts)
    return Costs(
        name,
        [1e3 * result.step_seconds for result in results],
        [result.cache_bytes for result in results],
        [result.prefill_tokens_per_s for result in results],
    )


def latents(loaded: generation.Loaded, text: str, shown: int) -> str:
    """The page of `latte inspect` for the beginning of a text."""
    tokens = generation.encode(loaded, text.encode())[0][:shown]
    inspection = inspect_tokens(loaded.model, tokens, shown=shown)
    return render_page(inspection, token_texts(tokens.tolist(), loaded.tokenizer.decode), title="Latents")


def setting(model: LatteForCausalLM) -> str:
    threads = torch.get_num_threads()
    return f"{platform.machine()}, {model.device.type}, {threads} threads, torch {torch.__version__}"
