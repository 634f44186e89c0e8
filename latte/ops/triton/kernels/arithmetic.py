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
def approximate(x, INSTRUCTION: tl.constexpr):
    """One instruction of the GPU on float32."""
    return tl.inline_asm_elementwise(INSTRUCTION, "=f,f", [x], tl.float32, is_pure=True, pack=1)


@triton.jit
def exp2(x):
    """2 ** x, denormals to 0: one instruction where tl.exp2 takes four."""
    return tl.exp2(x) if INTERPRETED else approximate(x, "ex2.approx.ftz.f32 $0, $1;")


@triton.jit
def exp(x):
    return exp2(x * LOG2_E)


@triton.jit
def log2(x):
    """For x that is normal; one instruction where tl.log2 takes some twenty."""
    return tl.log2(x) if INTERPRETED else approximate(x, "lg2.approx.ftz.f32 $0, $1;")


@triton.jit
def log(x):
    return LN_2 * log2(x)


@triton.jit
def inverse(x):
    """1 / x in one instruction."""
    return 1.0 / x if INTERPRETED else approximate(x, "rcp.approx.ftz.f32 $0, $1;")


@triton.jit
def inverse_or_zero(x):
    """1 / x, 0 at 0, for x ≥ 0 that is normal or 0."""
    found = inverse(tl.where(x > 0, x, 1.0)) if INTERPRETED else inverse(x)
    return tl.where(x > 0, found, 0.0)


@triton.jit
def inverse_root(u):
    """1 / sqrt(u) in one instruction; u · inverse_root(u) is sqrt(u), at 0 too."""
    u = tl.maximum(u, 1e-30)
    return tl.rsqrt(u) if INTERPRETED else approximate(u, "rsqrt.approx.ftz.f32 $0, $1;")


@triton.jit
def root_of(u):
    """sqrt(u) in one instruction."""
    return tl.sqrt(u) if INTERPRETED else approximate(u, "sqrt.approx.ftz.f32 $0, $1;")


@triton.jit
def dot(a, b, PRECISION: tl.constexpr):
    """a @ b in float32 (the interpreter takes bfloat16 factors for integers)."""
    if INTERPRETED:
        product = tl.dot(a.to(tl.float32), b.to(tl.float32))
    else:
        product = tl.dot(a, b, input_precision=PRECISION)
    return product
