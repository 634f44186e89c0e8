"""Tokens per second and memory of training and forward passes, with what is to be reached."""

import gc
import itertools
import warnings
from collections.abc import Callable, Iterator
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks.models import CUDNN, FLASH, Entry, LlamaEntry, Model, OneOperationEntry, parameters, random_tokens
from benchmarks.program import Run
from benchmarks.rows import Cell, Row, Target, judged_row
from benchmarks.timing import interleave, reason, step_times

TRAINING, FORWARD, FIGURE, TARGETS = "Training", "Forward", "Forward, larger shapes", "Targets"
TABLES = {"training": TRAINING, "forward": FORWARD, "figure": FIGURE}
DTYPES = {"cpu": torch.float32, "cuda": torch.bfloat16}
ROUNDS = 11  # of contenders that take turns on a CPU
CASE = 12.0  # seconds that one case needs at least: without them, none is begun

CONV = (("mixer", "conv"),)


def shape(size: str) -> tuple[Entry, Entry, Entry]:
    """The models of the paper's figure 7 in one size, the two that are compared first."""
    return (
        Entry(f"Latte-R-SWA++ {size}", preset=f"macchiato-{size.lower()}"),
        Entry(f"Transformer++ {size}", FLASH, f"transformer-{size.lower()}"),
        Entry(f"Latte-Conv-SWA++ {size}", preset=f"macchiato-{size.lower()}", overrides=CONV),
    )


Goals = dict[str, dict[int, float]]
GOALS: Goals = {  # times the transformer's tokens per second, on a GPU
    TRAINING: {1024: 1.0, 16384: 1.5, 65536: 4.0},
    FIGURE: {16384: 1.2, 65536: 2.0},
}
CPU_GOALS: dict[str, Goals] = {"macchiato-tiny": {TRAINING: {4096: 1.5}}}  # of the demonstration's model
JUDGED = "2.6B"  # of the figure's shapes
MATRIX_SHARE, MATRIX_CONTEXT = 0.45, 1024  # of the GPU's matrix products, at this context
MATRIX = 8192  # rows and columns of a large product


class Case(NamedTuple):
    """One row to be."""

    table: str
    entry: Entry
    context: int


class Plan:
    """What is measured: a pair of models, and the figure's shapes."""

    def __init__(self, options: Any) -> None:
        self.options = options
        self.pair = Entry(options.model), Entry(options.peer, FLASH)
        self.shapes = [shape(size) for size in options.shapes]
        self.tables = [TABLES[part] for part in options.parts]
        self.goals = GOALS if options.device == "cuda" else CPU_GOALS.get(options.model, {})
        for entry in self.pair:
            entry.config()  # raises for a preset that does not exist, before any work

    def cases(self) -> dict[Case, None]:
        """What is judged first, then the rest, then second opinions: what comes last may find no time."""
        return dict.fromkeys(
            itertools.chain(self._judged(), self._one_operation(), self._rest(), self._second_opinions())
        )

    def compared(self) -> Iterator[tuple[str, Entry, Entry]]:
        """Ours and the transformer of every table."""
        for table in self.tables:
            for ours, peer, *_ in self.shapes if table == FIGURE else [self.pair]:
                yield table, ours, peer

    def goal(self, table: str, ours: Entry, context: int) -> float | None:
        judged = table == TRAINING or ours == shape(JUDGED)[0]
        return self.goals.get(table, {}).get(context) if judged else None

    def _judged(self) -> Iterator[Case]:
        for table, ours, peer in self.compared():
            for context in self.options.contexts:
                if self.goal(table, ours, context) is not None:
                    yield from (Case(table, entry, context) for entry in (ours, peer))

    def _one_operation(self) -> Iterator[Case]:
        name = self.options.model
        if self.options.one_operation and TRAINING in self.tables:
            entry = OneOperationEntry(f"{name}, one operation", preset=name)
            yield from (Case(TRAINING, entry, context) for context in self.options.contexts)

    def _rest(self) -> Iterator[Case]:
        for table in sorted(self.tables, key=(FIGURE, TRAINING, FORWARD).index):
            for entries in self.shapes if table == FIGURE else [self.pair]:
                for context, entry in itertools.product(self.options.contexts, entries[:2]):
                    yield Case(table, entry, context)

    def _second_opinions(self) -> Iterator[Case]:
        """The figure's third models; the transformer with another kernel, and another transformer."""
        for _, _, third in self.shapes if FIGURE in self.tables else ():
            yield from (Case(FIGURE, third, context) for context in self.options.contexts)
        name = self.options.peer
        others = Entry(name, CUDNN), LlamaEntry("Llama by Transformers", FLASH, name)
        if self.options.peers and TRAINING in self.tables:
            for context, entry in itertools.product(self.options.contexts, others):
                yield Case(TRAINING, entry, context)


def measure(run: Run) -> None:
    options, plan = run.options, Plan(run.options)
    run.facts |= {
        "dtype": str(DTYPES[options.device]).removeprefix("torch."), "tokens_of_a_step": options.tokens,
        "compiled": options.compile, "optimizer": "AdamW", "forward_logits": "of the last token",
    }  # fmt: skip
    if options.device == "cpu":
        run.facts["threads"] = torch.get_num_threads()
    else:
        run.facts["matrix_tflops"] = matrix_rate() / 1e12
    found: dict[Case, float] = {}
    places = {(case.table, case.entry.name, case.entry.by): place for place, case in enumerate(plan.cases())}
    for case in plan.cases():
        run.progress(f"{case.table}: {case.entry.name} by {case.entry.by}, {case.context:,} tokens a sequence")
        row, speed = measure_case(run, case)
        run.add(row)
        if speed is not None:
            found[case] = speed
    if options.device == "cpu" and not options.quick:
        found |= take_turns(run, plan, found)
    tables = list(TABLES.values())
    run.report.rows.sort(
        key=lambda row: (
            tables.index(row.table),
            places[row.table, str(row.cells["model"]), str(row.cells["by"])],
            row.cells["context"],
        )
    )
    run.add(*targets(run, plan, found), *matrix_targets(run, plan, found))


def measure_case(run: Run, case: Case) -> tuple[Row, float | None]:
    """One row, and its tokens per second if it was measured."""
    device = run.options.device
    batch = max(1, run.options.tokens // case.context)
    cells: dict[str, Cell] = {
        "model": case.entry.name, "by": case.entry.by, "context": case.context, "batch": batch
    }  # fmt: skip
    if run.late(0.0 if run.options.quick else CASE):
        return Row(case.table, cells, status="skipped", note="out of time"), None
    try:
        with case.entry.kernel(device), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of compilers, which have much to say
            model, step = make_step(run, case, batch)
            first, taken, peak = step_times(step, device, least=2 if run.options.quick else 5)
            finite = bool(step().isfinite().all())
            cells |= {"parameters_m": parameters(model) / 1e6}
    except Exception as error:  # the other cases are still worth measuring
        return Row(case.table, cells, status="wrong" if case.entry.is_ours else "skipped", note=reason(error)), None
    finally:
        model = step = None
        clean(device)
    speed = tokens_of(cells) / taken
    cells |= {"ms_per_step": 1e3 * taken, "tokens_per_s": speed, "peak_gib": peak, "first_step_s": first}
    if not finite:
        return Row(case.table, cells, status="wrong", note="its loss or logits are not finite"), None
    return Row(case.table, cells), speed


def take_turns(run: Run, plan: Plan, found: dict[Case, float]) -> dict[Case, float]:
    """Tokens per second of pairs that are compared, measured once more in turns: a busy moment then hits both alike."""
    better: dict[Case, float] = {}
    for table, ours, peer in plan.compared():
        for context in run.options.contexts:
            cases = [Case(table, entry, context) for entry in (ours, peer)]
            if table == FIGURE or not all(case in found for case in cases):
                continue
            run.progress(f"{table}: {ours.name} and {peer.name} in turns, {context:,} tokens a sequence")
            batch = max(1, run.options.tokens // context)
            times = interleave({case: make_step(run, case, batch)[1] for case in cases}, ROUNDS)
            better |= {case: batch * context / median(taken) for case, taken in times.items()}
    return better


def make_step(run: Run, case: Case, batch: int) -> tuple[Model, Callable[[], Tensor]]:
    """A model with random weights, and one step of what is measured."""
    device = run.options.device
    model = case.entry.build(device, DTYPES[device])
    compile_parts(model, run.options.compile)
    tokens = random_tokens(model, batch, case.context, device)
    return model, training_step(model, tokens) if case.table == TRAINING else forward_step(model, tokens)


def tokens_of(cells: dict[str, Any]) -> int:
    return cells["batch"] * cells["context"]


def compile_parts(model: Model, what: str) -> None:
    """Compile in place; layers of a model are alike, so that one compilation serves them all."""
    if what == "none":
        return
    torch._dynamo.reset()
    parts = [model] if what == "model" else [*model.model.layers, model.model.norm]
    for part in parts:
        part.compile(dynamic=False, fullgraph=True)


def training_step(model: Model, tokens: Tensor) -> Callable[[], Tensor]:
    """Forward, backward and the optimizer's step."""
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def step() -> Tensor:
        loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return step


def forward_step(model: Model, tokens: Tensor) -> Callable[[], Tensor]:
    """All hidden states, and the logits of the last token as a prompt needs them."""
    model.eval()

    @torch.no_grad()
    def step() -> Tensor:
        return model(input_ids=tokens, use_cache=False, logits_to_keep=1).logits

    return step


def clean(device: str) -> None:
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()


def targets(run: Run, plan: Plan, found: dict[Case, float]) -> Iterator[Row]:
    """Times the transformer's tokens per second, at every context."""
    judged = not run.options.quick
    for table, ours, peer in plan.compared():
        for context in run.options.contexts:
            what = f"{table}: {ours.name}, times the tokens per second of {peer.name}, {context:,} tokens a sequence"
            goal = plan.goal(table, ours, context)
            target = None if goal is None else Target(goal, at_least=True, unit="×", judged=judged)
            yield target_row(what, ratio_of(found, table, ours, peer, context), target)


def matrix_rate() -> float:
    """Operations per second of a large product in bfloat16: what a model could do at most."""
    left, right = (torch.randn(MATRIX, MATRIX, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    _, taken, _ = step_times(lambda: left @ right, "cuda", least=50)
    return 2 * MATRIX**3 / taken


def matrix_targets(run: Run, plan: Plan, found: dict[Case, float]) -> Iterator[Row]:
    """6 · parameters · tokens per second, as a share of the rate of large products that was measured beside it."""
    ours, rate = plan.pair[0], run.facts.get("matrix_tflops")
    speed = found.get(Case(TRAINING, ours, MATRIX_CONTEXT))
    rows = (row.cells for row in run.report.rows if row.table == TRAINING and row.cells["model"] == ours.name)
    size = next((cells["parameters_m"] for cells in rows if cells.get("parameters_m")), None)
    if isinstance(rate, float) and isinstance(size, float) and speed is not None:
        what = f"{TRAINING}: {ours.name}, 6 × parameters × tokens/s over the matrix rate, {MATRIX_CONTEXT:,} tokens"
        target = Target(MATRIX_SHARE, at_least=True, judged=not run.options.quick)
        yield target_row(what, 6e6 * size * speed / (1e12 * rate), target)


def target_row(what: str, ratio: float | None, target: Target | None) -> Row:
    cells: dict[str, Cell] = {"what": what, "value": ratio}
    if ratio is None:
        return Row(TARGETS, cells, "" if target is None else target.text(), "skipped", "not measured")
    return Row(TARGETS, cells) if target is None else judged_row(TARGETS, cells, ratio, target)


def ratio_of(found: dict[Case, float], table: str, ours: Entry, peer: Entry, context: int) -> float | None:
    above, below = found.get(Case(table, ours, context)), found.get(Case(table, peer, context))
    return None if above is None or below is None else above / below
