"""What of a model learns, and in how many bits the rest waits."""

import re

import torch
from torch import nn

PATTERNS = {"all": r"", "latents": r"latent_query|latent_key|mixer", "norms": r"norm"}
"""Names of sets of parameters, as regular expressions of parameters' names."""

LORA = "lora"


def words_of(trainable: str) -> list[str]:
    return [word.strip() for word in trainable.split(",") if word.strip()]


def wants_lora(trainable: str) -> bool:
    return LORA in words_of(trainable)


def choose_trainable(model: nn.Module, trainable: str) -> None:
    """Freeze all parameters but those that a word of `trainable` finds; LoRA's are added later, and learn.

    Raises ValueError where a word finds none.
    """
    names = [name for name, _ in model.named_parameters()]
    chosen: set[str] = set()
    words = words_of(trainable)
    for word in words:
        found = set() if word == LORA else {name for name in names if pattern_of(word).search(name)}
        if not found and word != LORA:
            raise ValueError(
                f"trainable has {word!r}, and no parameter is called so; it must be of {', '.join(PATTERNS)} and "
                f"{LORA}, or a regular expression of names such as {', '.join(names[:3])} …"
            )
        chosen |= found
    if not words:
        raise ValueError(f"trainable is {trainable!r}; it must be of {', '.join(PATTERNS)} and {LORA}")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in chosen)


def pattern_of(word: str) -> re.Pattern[str]:
    try:
        return re.compile(PATTERNS.get(word, word))
    except re.error as error:
        raise ValueError(f"trainable has {word!r}, which is no regular expression: {error}") from error


@torch.no_grad()
def narrow_frozen(model: nn.Module, frozen_dtype: str) -> None:
    """Put weights of linear layers that do not learn into bfloat16; with "auto", those whose values stay the same.

    Computing in bfloat16 uses them so in any case. Norms and embeddings stay: sums over layers begin with them.
    """
    if frozen_dtype == "fp32":
        return
    embeddings = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    for module in model.modules():
        for weight in module.parameters(recurse=False) if isinstance(module, nn.Linear) else ():
            narrow = weight.to(torch.bfloat16)
            same = frozen_dtype == "bf16" or torch.equal(narrow.to(weight.dtype), weight)
            if same and not weight.requires_grad and id(weight) not in embeddings:
                weight.data = narrow
