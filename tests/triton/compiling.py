"""Run as a program: compile every kernel that some calls launch, for an H100 or H200, on a machine without one.

Prints a JSON object per kernel. Nothing is launched, so results are whatever memory holds; their shapes are right, and
more is not needed to come to the next launch. TRITON_INTERPRET must not be set.
"""

import importlib
import json
import pkgutil
import sys

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

import latte.ops.triton
from latte.ops import (
    LatteState,
    MacchiatoState,
    latte_attention,
    linear_cross_entropy,
    macchiato_attention,
    rglru,
    short_conv,
    window_attention,
)
from latte.ops.arguments import HeadSizes
from latte.ops.gated_recurrence import gated_rglru
from latte.ops.projected import MacchiatoWeights, projected_macchiato
from latte.ops.steps import (
    LinearWeights,
    Place,
    RGLRUWeights,
    input_step_,
    mixture_step_,
    rglru_step_,
    short_conv_step_,
)
from latte.ops.triton import attention, attention_call, call, plan
from latte.ops.triton.window_tail import copy_tail

TARGET = GPUTarget("cuda", 90, 32)
TYPES = {torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.int32: "*i32", torch.int64: "*i64", torch.bool: "*i1"}
WAYS = ("WILD", "FOLD", "TAIL", "SHORT", "RING")  # constants by which a kernel is another one
OPTIONS = ("num_warps", "num_stages", "maxnreg", "launch_pdl")


def compile_kernel(kernel, arguments, given):
    """As a launch on the device would, with the same specialisation of numbers and the same options."""
    options = {name: value for name, value in given.items() if name in OPTIONS}
    signature, constants, attributes = {}, {}, {}
    values = dict(zip(kernel.arg_names, arguments, strict=False)) | given
    for i, name in enumerate(kernel.arg_names):
        value, is_constant = values[name], kernel.params[i].is_constexpr
        if is_constant or value is None or (isinstance(value, int) and value == 1):
            signature[name], constants[(i,)] = "constexpr", value
        elif isinstance(value, torch.Tensor):
            signature[name], attributes[(i,)] = TYPES[value.dtype], [["tt.divisibility", 16]]
        elif isinstance(value, int):
            signature[name] = "i32" if abs(value) < 2**31 else "i64"
            if value % 16 == 0:
                attributes[(i,)] = [["tt.divisibility", 16]]
        else:
            signature[name] = "fp32"
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attributes)
    made = triton.compile(source, target=TARGET, options=options)
    facts = {"kernel": kernel.__name__, "shared": made.metadata.shared, "bytes": len(made.asm["cubin"])}
    facts["ways"] = [name for name in WAYS if values.get(name)]
    sys.stdout.write(json.dumps(facts) + "\n")


def compile_launch(_, name, kernel, grid, tensors, numbers, constants, is_aligned):
    compile_kernel(kernel, (*tensors, *numbers), constants)


def compile_call(kernel, programs, *arguments, **options):
    compile_kernel(kernel, arguments, options)


def without_a_device() -> None:
    plan.Plan.launch = compile_launch
    attention_call.launches_overlap = lambda device: True
    attention.prepare = lambda *_: None
    launched = call.launch
    for found in pkgutil.walk_packages(latte.ops.triton.__path__, "latte.ops.triton."):
        module = importlib.import_module(found.name)
        if getattr(module, "launch", None) is launched:
            module.launch = compile_call
        if hasattr(module, "check_device"):
            module.check_device = lambda *_: None


def tensor(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype, requires_grad=True)


def attention_calls(tokens: int) -> None:
    """With projections and gradients, without, when the window's state is kept, in a long row, and in float32."""
    shape, long, latents = (1, tokens, 2), (1, 8 * tokens, 2), 16
    q, k, v, *pair = (tensor(*shape, width) for width in (latents + 1, latents, 64, 64, 64))
    x, angles = tensor(1, tokens, 32), torch.zeros(1, tokens, 32)
    weights = MacchiatoWeights(*(tensor(rows, 32) for rows in (128, 128, 128, 2 * (latents + 1), 2 * latents)))
    sizes = HeadSizes(2, 2, latents, 64, 64)
    projected_macchiato(x, x, weights, (angles, angles), sizes, window=128, backend="triton").sum().backward()
    with torch.no_grad():
        macchiato_attention(q, k, v, *pair, window=128, backend="triton")
    copy_tail(v, v)
    keys = tensor(*long, latents)
    latte_attention(keys, keys, tensor(*long, 96), backend="triton")
    exact = [tensor(*shape, 64, dtype=torch.float32) for _ in range(3)]
    window_attention(*exact, window=128, backend="triton").y.sum().backward()


def mixer_calls(tokens: int) -> None:
    x, width, blocks = tensor(1, tokens, 96), 96, 2
    gates = [tensor(1, tokens, width) for _ in range(2)]
    vector = tensor(width, dtype=torch.float32)
    rglru(x, *gates, vector, backend="triton").y.sum().backward()
    weight = tensor(blocks, width // blocks, width // blocks, dtype=torch.float32)
    for rows in (x, tensor(29, 64, width)):  # in pieces, and as rows that nearly fill the device
        gated_rglru(rows, weight, vector, weight, vector, vector, backend="triton").y.sum().backward()
    short_conv(x, tensor(width, 4, dtype=torch.float32), None, backend="triton").y.sum().backward()


@torch.no_grad()
def step_calls(heads: int) -> None:
    """One more token with a ring and with a moving window, its mixers, and the rows of a cross entropy."""
    width, latents, slots, hidden = 96, 16, 127, 96 * heads

    def one(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.zeros(1, *shape, dtype=dtype)

    number, exact = torch.zeros(1, dtype=torch.int32), torch.float32
    window = (*(one(slots, heads, width) for _ in range(2)), one(slots, dtype=torch.bool))
    state = MacchiatoState(
        LatteState(one(heads, latents, dtype=exact), one(heads, latents, width, dtype=exact)), *window
    )
    logits = [one(16, heads, size, dtype=exact) for size in (latents + 1, latents)]
    values = [one(1, heads, width) for _ in range(3)]
    angles = (one(1, width // 2, dtype=exact),) * 2
    for turn in (None, number):
        place = Place(number.long(), number, torch.zeros((), dtype=torch.long), turn)
        mixture_step_(*logits, *values, state, place, rotary=angles, backend="triton")
    x, vector = one(1, hidden), torch.zeros(hidden)
    gates = RGLRUWeights(
        *(part for _ in range(2) for part in (torch.zeros(2, hidden // 2, hidden // 2), vector)), vector
    )
    layers = [LinearWeights(torch.zeros(16, hidden, dtype=torch.bfloat16), None) for _ in range(2)]
    memory = one(hidden, dtype=exact)
    input_step_(x, gates, memory, layers, layers, backend="triton")
    rglru_step_(x, *gates, memory, backend="triton")
    short_conv_step_(x, torch.zeros(hidden, 4), None, one(3, hidden), backend="triton")
    targets = torch.zeros(7, dtype=torch.long)
    linear_cross_entropy(torch.zeros(7, 5), torch.zeros(11, 5), targets, backend="triton")


if __name__ == "__main__":
    without_a_device()
    {"attention": attention_calls, "mixers": mixer_calls, "steps": step_calls}[sys.argv[1]](int(sys.argv[2]))
