"""Float64 oracles that share no code with the package: formulas written out, and everything as T×T matrices."""

import torch
from torch import Tensor

from latte.ops import attention_weights
from tests.ops.cases import FEATURE_MAPS, Case


def direct_weights(case: Case) -> Tensor:
    """a_ts of eqs. 3, 5, 8-9 and 15-17, one row at a time: [B H T T] in float64."""
    x = {name: tensor.double() for name, tensor in case.inputs.items()}
    b, tokens, heads = x["q"].shape[:3]
    weights = torch.zeros((b, heads, tokens, tokens), dtype=torch.float64)
    for row in range(b):
        for head in range(heads):
            for t in range(tokens):
                seen = visible(case, row, t)
                if seen:
                    weights[row, head, t, seen] = row_weights(case, x, row, head, t, seen)
    return weights


def row_weights(case: Case, x: dict[str, Tensor], row: int, head: int, t: int, seen: list[int]) -> Tensor:
    q, k = x["q"][row, t, head], x["k"][row, seen]
    if case.form == "window":
        return local_weights(case, q, k[:, head * k.shape[1] // x["q"].shape[2]], t, seen)
    k = k[:, head]
    if case.form in FEATURE_MAPS:
        products = features(case.form, k) @ features(case.form, q)
        return products / products.sum() if products.sum() > 0 else torch.zeros_like(products)
    choice = torch.softmax(q, dim=0)
    alike = torch.softmax(k, dim=0)
    alike = torch.where(k.amax(dim=0) == -torch.inf, 0.0, alike)
    if case.form == "latte":
        return alike @ choice
    window_k = x["window_k"][row, seen, head * x["window_k"].shape[2] // x["q"].shape[2]]
    return choice[0] * local_weights(case, x["window_q"][row, t, head], window_k, t, seen) + alike @ choice[1:]


def local_weights(case: Case, q: Tensor, k: Tensor, t: int, seen: list[int]) -> Tensor:
    scale, softcap = case.options.get("scale"), case.options.get("softcap")
    scores = (k @ q) * (q.shape[0] ** -0.5 if scale is None else scale)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    near = torch.tensor([abs(s - t) < case.options["window"] for s in seen])
    return torch.softmax(torch.where(near, scores, -torch.inf), dim=0)


def features(form: str, x: Tensor) -> Tensor:
    match form:
        case "linear exp":
            return torch.exp(x)
        case "linear relu":
            return torch.relu(x)
        case "linear elu+1":
            return torch.nn.functional.elu(x) + 1
    return FEATURE_MAPS[form](x)


def visible(case: Case, row: int, t: int) -> list[int]:
    """The tokens that token t of a batch row sees, by the rules of causality, mask and packing."""
    mask, bounds = case.options.get("mask"), case.options.get("cu_seqlens")
    if mask is not None and not mask[row, t]:
        return []
    last = t + 1 if case.options.get("causal", True) else case.tokens
    seen = [s for s in range(last) if mask is None or mask[row, s]]
    if bounds is None:
        return seen
    sequence = [int((bounds[1:] <= s).sum()) for s in range(case.tokens)]
    return [s for s in seen if sequence[s] == sequence[t]]


def weights_of(case: Case) -> Tensor:
    """`attention_weights` with a case's arguments."""
    options = {name: x for name, x in case.options.items() if name != "cu_seqlens" or x is not None}
    if case.form == "window":
        return attention_weights(window_q=case.inputs["q"], window_k=case.inputs["k"], **options)
    inputs = {name: x for name, x in case.inputs.items() if name != "v"}
    return attention_weights(**inputs, feature_map=FEATURE_MAPS.get(case.form), **options)


def brute_force(case: Case) -> dict[str, Tensor]:
    """y as the T×T matrix times the values, and the latents' state as one softmax over all tokens."""
    v = case.inputs["v"].repeat_interleave(case.inputs["q"].shape[2] // case.inputs["v"].shape[2], dim=2)
    result = {"y": torch.einsum("bhts,bshd->bthd", weights_of(case), v)}
    if case.form == "window":
        return result
    k = case.inputs["k"]
    if case.form in FEATURE_MAPS:
        k = torch.log(features(case.form, k)) if case.form != "linear exp" else k
    nothing = (k == -torch.inf).all(dim=1)
    k = k.masked_fill(nothing.unsqueeze(1), 0.0)
    log_norm, share = torch.logsumexp(k, dim=1), torch.softmax(k, dim=1)
    mean = torch.einsum("bshl,bshd->bhld", share, v)
    result["state.log_norm"] = log_norm.masked_fill(nothing, -torch.inf)
    return result | {"state.mean": mean.masked_fill(nothing.unsqueeze(-1), 0.0)}
