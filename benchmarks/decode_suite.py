"""Time per generated token and memory, at every context and batch size, with what is to be reached."""

import gc
import warnings
from collections.abc import Callable
from statistics import median

import torch

from benchmarks import decoding
from benchmarks.models import FLASH, Entry, Model, parameters
from benchmarks.program import Run
from benchmarks.rows import Cell, Row, Target, judged_row
from benchmarks.timing import interleave, reason, replay_times

CHECKS, TIMES, TARGETS = "Correctness", "One more token", "Targets"
FLAT = Target(1.1, unit="×")
FASTER = Target(1.0, at_least=True, unit="×")
TOLERANCE = {"cpu": Target(1e-4), "cuda": Target(3e-2)}  # float32, bfloat16
DTYPES = {"cpu": torch.float32, "cuda": torch.bfloat16}
ROUNDS = 30  # on a CPU, turns of every context
ROOM = 0.9  # of a GPU's memory may be taken

Key = tuple[Entry, int, int]  # model, batch, context


def measure(run: Run) -> None:
    options, device = run.options, run.options.device
    entries = [Entry(options.model), Entry(options.peer, FLASH)]
    run.facts |= {
        "dtype": str(DTYPES[device]).removeprefix("torch."),
        "step": "CUDA graph" if device == "cuda" else "eager",
        "compiled": device == "cuda" and not options.no_compile,
        "context": "ours read, the transformer's random",
    }
    if device == "cpu":
        run.facts["threads"] = torch.get_num_threads()
    models = {entry: entry.build(device, DTYPES[device]).eval().requires_grad_(False) for entry in entries}
    for entry, model in models.items():
        run.facts[f"parameters of {entry.name}"] = parameters(model)
        run.add(check(run, entry, model))
    found = (on_cpu if device == "cpu" else on_gpu)(run, models)
    run.add(*targets(run, entries, found))
    run.report.rows.sort(key=lambda row: (CHECKS, TIMES, TARGETS).index(row.table))


def check(run: Run, entry: Entry, model: Model) -> Row:
    run.progress(f"checking {entry.name}")
    device = run.options.device
    error = decoding.decoding_error(entry, model, device)
    right = error <= TOLERANCE[device].bound
    return Row(CHECKS, {"model": entry.name, "error": error}, TOLERANCE[device].text(), "ok" if right else "wrong")


def on_cpu(run: Run, models: dict[Entry, Model]) -> dict[Key, float]:
    """All contexts of a batch size take turns, so that a busy moment of the machine hits all alike."""
    found: dict[Key, float] = {}
    for batch in run.options.batches:
        steps, sizes = {}, {}
        for entry, model in models.items():
            for context, cache in contexts(run, entry, model, batch):
                steps[entry, batch, context] = decoding.make_step(model, cache, batch, "cpu")
                sizes[entry, batch, context] = decoding.cache_bytes(cache)
        if not steps:
            break
        run.progress(f"steps of {len(steps)} caches in turns, batch {batch}")
        rounds = 2 if run.options.quick else ROUNDS
        for key, taken in interleave(steps, rounds).items():
            found[key] = median(taken)
            run.add(Row(TIMES, times(key, 1e3 * found[key], sizes[key])))
        del steps
    return found


def contexts(run: Run, entry: Entry, model: Model, batch: int):
    """The caches after every context, each one of its own; ours goes on from the one before."""
    reader = decoding.Reader(model, batch, "cpu")
    for context in run.options.contexts:
        if run.late():
            return
        run.progress(f"a context of {context:,} for {entry.name}, batch {batch}")
        if entry.is_ours:
            reader.read(context)
            yield context, reader.copy()
        else:
            yield context, decoding.random_context(model, batch, context, "cpu", DTYPES["cpu"])


def on_gpu(run: Run, models: dict[Entry, Model]) -> dict[Key, float]:
    found: dict[Key, float] = {}
    for batch in run.options.batches:
        for entry, model in models.items():
            torch._dynamo.reset()
            forward = model if run.options.no_compile else torch.compile(model, fullgraph=True, dynamic=False)
            reader = decoding.Reader(model, batch, "cuda") if entry.is_ours else None
            for context in run.options.contexts:
                cells: dict[str, Cell] = {"model": entry.name, "by": entry.by, "batch": batch, "context": context}
                row, taken = on_gpu_at(run, entry, model, forward, reader, cells)
                run.add(row)
                if taken is not None:
                    found[entry, batch, context] = taken
                clean()
    return found


def on_gpu_at(
    run: Run,
    entry: Entry,
    model: Model,
    forward: Callable,
    reader: "decoding.Reader | None",
    cells: dict[str, Cell],
) -> tuple[Row, float | None]:
    """One row, and the seconds of a step if it was taken."""
    batch, context = int(cells["batch"] or 0), int(cells["context"] or 0)
    run.progress(f"{entry.name}, batch {batch}, context {context:,}")
    if run.late(10.0):
        return Row(TIMES, cells, status="skipped", note="out of time"), None
    needed = 0 if entry.is_ours else decoding.context_bytes(model, batch, context)
    if needed > ROOM * torch.cuda.mem_get_info()[0]:
        return Row(TIMES, cells, status="skipped", note=f"its cache would take {needed / 2**30:,.0f} GiB"), None
    try:
        if reader is not None:
            reader.read(context)
            cache = reader.cache
        else:
            cache = decoding.random_context(model, batch, context, "cuda", DTYPES["cuda"])
        with entry.kernel("cuda"), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of compilers, which have much to say
            torch.cuda.reset_peak_memory_stats()
            graph = decoding.capture(decoding.make_step(model, cache, batch, "cuda", forward))
            taken = replay_times(graph)
    except Exception as error:  # the other contexts are still worth measuring
        return Row(TIMES, cells, status="wrong" if entry.is_ours else "skipped", note=reason(error)), None
    row = times((entry, batch, context), 1e3 * taken, decoding.cache_bytes(cache))
    return Row(TIMES, row | {"peak_mib": torch.cuda.max_memory_allocated() / 2**20}), taken


def clean() -> None:
    gc.collect()
    torch.cuda.empty_cache()


def times(key: Key, milliseconds: float, size: int) -> dict[str, Cell]:
    entry, batch, context = key
    return {
        "model": entry.name, "by": entry.by, "batch": batch, "context": context, "ms_per_step": milliseconds,
        "tokens_per_s": 1e3 * batch / milliseconds, "cache_mib": size / 2**20,
    }  # fmt: skip


def targets(run: Run, entries: list[Entry], found: dict[Key, float]) -> list[Row]:
    """Flat in the context, and no slower than the transformer at the shortest one."""
    ours, peer = entries
    options = run.options
    batch, short, long = options.batches[0], options.contexts[0], options.contexts[-1]
    far = 65536 if options.device == "cpu" else 262144
    usual = not options.quick and (batch, short) == (1, 1024)
    rows = [
        ratio(
            f"{ours.name}: time of a step at a context of {long:,} over that at {short:,}, batch {batch}",
            found.get((ours, batch, long)), found.get((ours, batch, short)), FLAT, judged=usual and long >= far,
        ),
        ratio(
            f"{ours.name}: times as fast as {peer.name} at a context of {short:,}, batch {batch}",
            found.get((peer, batch, short)), found.get((ours, batch, short)), FASTER,
            judged=usual and options.device == "cuda",
        ),
    ]  # fmt: skip
    both = [context for context in options.contexts if {(ours, batch, context), (peer, batch, context)} <= set(found)]
    if both and both[-1] != short:
        taken = found[peer, batch, both[-1]], found[ours, batch, both[-1]]
        what = f"{ours.name}: times as fast as {peer.name} at a context of {both[-1]:,}, batch {batch}"
        rows.append(Row(TARGETS, {"what": what, "value": taken[0] / taken[1]}))
    return rows


def ratio(what: str, above: float | None, below: float | None, target: Target, *, judged: bool) -> Row:
    target = Target(target.bound, target.at_least, target.unit, judged)
    if above is None or below is None:
        return Row(TARGETS, {"what": what, "value": None}, target.text(), "skipped", "not measured")
    note = f"{1e3 * above:.3g} ms / {1e3 * below:.3g} ms"
    return judged_row(TARGETS, {"what": what, "value": above / below}, above / below, target, note)
