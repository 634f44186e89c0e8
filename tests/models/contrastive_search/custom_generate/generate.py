"""Contrastive search (arXiv 2202.06417) as a function for `generate(custom_generate=…)`, reading with a cache."""

import torch
from torch import Tensor
from transformers import DynamicCache


@torch.no_grad()
def generate(
    model, inputs: Tensor, *, penalty_alpha: float, top_k: int, max_new_tokens: int, roll_back: bool = False, **_
) -> Tensor:
    """Of the `top_k` likeliest tokens the one with the best (1 − α) · p − α · likeness to a token before.

    All candidates are read at once, in rows of a cache that are repeated and chosen from, or with `roll_back` one after
    another, each taken back.
    """
    read = read_in_turn if roll_back else read_at_once
    cache, text = DynamicCache(config=model.config), inputs
    if roll_back:
        cache.activate_past_recording()
    output = model(text, past_key_values=cache, output_hidden_states=True)
    states, logits = output.hidden_states[-1], output.logits[:, -1]
    for _step in range(max_new_tokens):
        p, candidates = logits.softmax(dim=-1).topk(top_k, dim=-1)
        logits_of, state_of = read(model, candidates, cache)  # [B K V], [B K C]
        likeness = torch.cosine_similarity(state_of[:, :, None], states[:, None], dim=-1).amax(dim=-1)
        chosen = ((1 - penalty_alpha) * p - penalty_alpha * likeness).argmax(dim=-1)
        rows = torch.arange(len(text))
        token = candidates[rows, chosen]
        if roll_back:
            model(token[:, None], past_key_values=cache)
        else:
            cache.batch_select_indices(rows * top_k + chosen)
        text = torch.cat([text, token[:, None]], dim=1)
        states = torch.cat([states, state_of[rows, chosen][:, None]], dim=1)
        logits = logits_of[rows, chosen]
    return text


def read_at_once(model, candidates: Tensor, cache: DynamicCache) -> tuple[Tensor, Tensor]:
    rows, count = candidates.shape
    cache.batch_repeat_interleave(count)
    output = model(candidates.view(-1, 1), past_key_values=cache, output_hidden_states=True)
    return output.logits.view(rows, count, -1), output.hidden_states[-1].view(rows, count, -1)


def read_in_turn(model, candidates: Tensor, cache: DynamicCache) -> tuple[Tensor, Tensor]:
    outputs = []
    for token in candidates.unbind(dim=1):
        outputs.append(model(token[:, None], past_key_values=cache, output_hidden_states=True))
        cache.crop(-1)
    return torch.cat([o.logits for o in outputs], dim=1), torch.cat([o.hidden_states[-1] for o in outputs], dim=1)
