"""Arithmetic that the kernels share: approximations of one instruction, and matrix products.

Each function has two ways: the instruction, for a GPU, and what it approximates, for Triton's interpreter.
"""

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))
LN_2 = tl.constexpr(0.6931471805599453)
LOG2_E = tl.constexpr(1.4426950408889634)
MINUS_INF = tl.constexpr(float("-inf"))


@triton.jit
def exp2(x):
    """2 ** x, denormals to 0: one instruction where tl.exp2 takes four."""
    if INTERPRETED:
        power = tl.exp2(x)
    else:
        power = tl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, is_pure=True, pack=1)
    return power


@triton.jit
def exp(x):
    return exp2(x * LOG2_E)


@triton.jit
def log2(x):
    """For x that is normal; one instruction where tl.log2 takes some twenty."""
    if INTERPRETED:
        power = tl.log2(x)
    else:
        power = tl.inline_asm_elementwise("lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, is_pure=True, pack=1)
    return power


@triton.jit
def log(x):
    return LN_2 * log2(x)


@triton.jit
def inverse(x):
    """1 / x in one instruction."""
    if INTERPRETED:
        found = 1.0 / x
    else:
        found = tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, is_pure=True, pack=1)
    return found


@triton.jit
def inverse_or_zero(x):
    """1 / x, 0 at 0, for x ≥ 0 that is normal or 0."""
    if INTERPRETED:
        found = inverse(tl.where(x > 0, x, 1.0))
    else:
        found = inverse(x)
    return tl.where(x > 0, found, 0.0)


@triton.jit
def inverse_root(u):
    """1 / sqrt(u) in one instruction; u · inverse_root(u) is sqrt(u), at 0 too."""
    u = tl.maximum(u, 1e-30)
    if INTERPRETED:
        root = tl.rsqrt(u)
    else:
        root = tl.inline_asm_elementwise("rsqrt.approx.ftz.f32 $0, $1;", "=f,f", [u], tl.float32, is_pure=True, pack=1)
    return root


@triton.jit
def root_of(u):
    """sqrt(u) in one instruction."""
    if INTERPRETED:
        root = tl.sqrt(u)
    else:
        root = tl.inline_asm_elementwise("sqrt.approx.ftz.f32 $0, $1;", "=f,f", [u], tl.float32, is_pure=True, pack=1)
    return root


@triton.jit
def dot(a, b, PRECISION: tl.constexpr):
    """a @ b in float32 (the interpreter takes bfloat16 factors for integers)."""
    if INTERPRETED:
        product = tl.dot(a.to(tl.float32), b.to(tl.float32))
    else:
        product = tl.dot(a, b, input_precision=PRECISION)
    return product
