"""The RG-LRU: a gated linear recurrence that mixes tokens before the logits (eqs. 18-19)."""

from jaxtyping import Bool, Float, Int
from torch import Tensor

from latte.ops import checks
from latte.ops.known import run_known, sign_call
from latte.ops.states import RGLRUOutput, accumulation_dtype


def rglru(
    x: Float[Tensor, "B T W"],
    a_gate: Float[Tensor, "B T W"],
    x_gate: Float[Tensor, "B T W"],
    a_param: Float[Tensor, " W"],
    *,
    mask: Bool[Tensor, "B T"] | None = None,
    state: Float[Tensor, "N W"] | None = None,
    cu_seqlens: Int[Tensor, " bounds"] | None = None,
    backend: str = "auto",
) -> RGLRUOutput:
    """h_t = a_t h_{t−1} + sqrt(1 − a_t²) σ(x_gate_t) x_t, with log a_t = −8 softplus(a_param) σ(a_gate_t)  (Griffin).

    The first token of a sequence has no decay: h = σ(x_gate) x. At masked positions (`mask` False) h is carried on
    and y = 0. The state is h after the last token, −inf where no token was seen yet; packed sequences (`cu_seqlens`,
    B = 1) have one each. The derivative of sqrt at 1 − a² is clipped to 1000. y has x's dtype; float16 saturates.
    """
    signature = None
    tensors = (x, a_gate, x_gate, a_param)
    if mask is None and state is None and cu_seqlens is None and checks.may_replay(backend, x):
        signature = sign_call("rglru", tensors, ())
        known = run_known(signature, tensors)
        if known is not None:
            return known
    checks.check_shape("x", x, "B T W", (None,) * 3)
    checks.check_positive("x", x.shape[2], "W")
    checks.check_shape("a_gate", a_gate, "B T W", x.shape)
    checks.check_shape("x_gate", x_gate, "B T W", x.shape)
    checks.check_shape("a_param", a_param, "W", (x.shape[2],))
    checks.check_mask(mask, x.shape[0], x.shape[1])
    sequences = checks.check_cu_seqlens(cu_seqlens, x.shape[0])
    if state is not None:
        checks.check_shape("state", state, "B W" if cu_seqlens is None else "N W", (sequences, x.shape[2]))
    checks.check_same_device(
        x=x, a_gate=a_gate, x_gate=x_gate, a_param=a_param, mask=mask, state=state, cu_seqlens=cu_seqlens
    )
    name = checks.backend_for(backend, x.device)
    checks.refuse_tangents(name, x, a_gate, x_gate, a_param, state)
    match name:
        case "reference":
            from latte.ops.reference.recurrence import recur
        case "torch":
            from latte.ops.torch.recurrence import recur
        case _:
            from latte.ops.triton.recurrence import recur
    with checks.no_autocast(x.device):
        y, state = recur(
            x, a_gate, x_gate, a_param, mask=mask, state=state, cu_seqlens=cu_seqlens,
            dtype=accumulation_dtype(x, a_gate, x_gate, a_param),
        )  # fmt: skip
    if signature is not None:
        from latte.ops.triton.recurrence import remember_call

        remember_call(signature, tensors)
    return RGLRUOutput(y, state)
