"""Kernel of the cross entropy: a row of logits to its loss and its gradient."""

import triton
import triton.language as tl

BLOCK = 4096


@triton.jit
def load_logits(row, columns, vocabulary, softcap, CAPPED: tl.constexpr):
    """A block of a row, −inf beyond the vocabulary; softcap · tanh(z / softcap) by way of exp."""
    z = tl.load(row + columns, mask=columns < vocabulary, other=float("-inf"))
    if CAPPED:
        z = tl.where(columns < vocabulary, softcap * (1.0 - 2.0 / (tl.exp(2.0 * z / softcap) + 1.0)), z)
    return z


@triton.jit
def rows_kernel(
    logits, targets, dlosses, losses, dlogits,
    vocabulary, width, ignore_index, softcap, smoothing,
    GIVEN: tl.constexpr, GRADIENTS: tl.constexpr, CAPPED: tl.constexpr, SMOOTHED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One row: log Σ exp(z) by a running maximum, then the gradients."""
    program = tl.program_id(0).to(tl.int64)
    target = tl.load(targets + program).to(tl.int32)
    real = target != ignore_index
    row = logits + program * width
    place = tl.arange(0, BLOCK)
    peak = tl.full([], float("-inf"), tl.float32)
    norm = tl.full([], 0.0, tl.float32)
    sums = tl.full([], 0.0, tl.float32)
    for start in range(0, vocabulary, BLOCK):
        z = load_logits(row, start + place, vocabulary, softcap, CAPPED)
        highest = tl.maximum(peak, tl.max(z, axis=0))
        norm = norm * tl.exp(peak - highest) + tl.sum(tl.exp(z - highest), axis=0)
        peak = highest
        if SMOOTHED:
            sums += tl.sum(tl.where(start + place < vocabulary, z, 0.0), axis=0)
    log_norm = peak + tl.log(norm)
    known = (target >= 0) & (target < vocabulary)
    picked = tl.load(row + target, mask=known, other=float("nan"))
    if CAPPED:
        picked = softcap * (1.0 - 2.0 / (tl.exp(2.0 * picked / softcap) + 1.0))
    if SMOOTHED:
        picked = (1.0 - smoothing) * picked + smoothing * sums / vocabulary
    tl.store(losses + program, tl.where(real, log_norm - picked, 0.0))
    if GRADIENTS:
        factor = tl.where(real, 1.0, 0.0)
        if GIVEN:
            factor = tl.where(real, tl.load(dlosses + program), 0.0)
        for start in range(0, width, BLOCK):
            columns = start + place
            z = load_logits(row, columns, vocabulary, softcap, CAPPED)
            d = tl.exp(z - log_norm) - tl.where(columns == target, 1.0 - smoothing, 0.0)
            if SMOOTHED:
                d -= smoothing / vocabulary
            if CAPPED:
                bent = tl.where(columns < vocabulary, z / softcap, 0.0)
                d *= 1.0 - bent * bent
            d = tl.where(columns < vocabulary, factor * d, 0.0)
            tl.store(dlogits + program * width + columns, d.to(dlogits.dtype.element_ty), mask=columns < width)
