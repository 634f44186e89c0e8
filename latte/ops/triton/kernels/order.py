"""Launches of which one begins while the one before it ends (EARLY, from compute capability 9 on).

A kernel lets the next begin when all its own programs have. Until it has waited for the one before it, it may read what
was there before both, and write nothing: memory that a finished call has given back may still be in use.
"""

import triton
from triton import language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def let_next_begin(EARLY: tl.constexpr):
    if EARLY:
        gdc_launch_dependents()


@triton.jit
def wait_for_last(EARLY: tl.constexpr):
    if EARLY:
        gdc_wait()
