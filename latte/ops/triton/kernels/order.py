"""Launches of which one begins while the one before it ends (EARLY, from compute capability 9 on).

A kernel lets the next begin when all its own programs have, or else when they end; what is then left to save is the
time a launch takes. Until it has waited for the one before it, it may read what was there before both, and write
nothing: memory that a finished call has given back may still be in use, unless a launch between has waited for it, as
for the second round of `output_kernel`. A kernel that waits first may follow any other.
"""

import triton
import triton.language as tl


@triton.jit
def let_next_begin(EARLY: tl.constexpr):
    if EARLY:
        tl.inline_asm_elementwise(
            "griddepcontrol.launch_dependents; // $0", "=r", [], dtype=tl.int32, is_pure=False, pack=1
        )


@triton.jit
def wait_for_last(EARLY: tl.constexpr):
    if EARLY:
        tl.inline_asm_elementwise("griddepcontrol.wait; // $0", "=r", [], dtype=tl.int32, is_pure=False, pack=1)
