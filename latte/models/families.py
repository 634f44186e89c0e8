"""What tells one family of pretrained transformers from another, as far as conversion has to know.

A family is an entry in `FAMILIES`. Everything that is not said here, from norms to the scale of embeddings, stays the
source's own code in Transformers.
"""

from dataclasses import dataclass

from transformers import PreTrainedConfig

SLIDING, FULL = "sliding_attention", "full_attention"  # the layer types of Transformers that can be converted


@dataclass(frozen=True)
class Family:
    """Where a family's attention is, what its parts are called, and which settings say how it scores."""

    name: str
    attention: str = "self_attn"  # in each of the model's `layers`
    attention_norm: str = "input_layernorm"  # what attention reads
    query: str = "q_proj"
    key: str = "k_proj"
    value: str = "v_proj"
    output: str = "o_proj"
    query_norm: str | None = None  # over the width of a head, before rotary positions
    key_norm: str | None = None
    query_scalar: str | None = None  # the setting s where scores are divided by its root, in place of head_dim's
    softcap: str | None = None  # the setting that bounds scores
    logits_softcap: str | None = None  # the setting that bounds the output's logits
    sliding_window: str | None = "sliding_window"  # the setting of how far local layers see; None: there are none
    layer_types: str | None = "layer_types"  # the setting that says which layers are local; None: all are


FAMILIES = {
    "gemma2": Family(
        "Gemma 2",
        query_scalar="query_pre_attn_scalar",
        softcap="attn_logit_softcapping",
        logits_softcap="final_logit_softcapping",
    ),
    "gemma3_text": Family(
        "Gemma 3 (text)",
        query_norm="q_norm",
        key_norm="k_norm",
        query_scalar="query_pre_attn_scalar",
        logits_softcap="final_logit_softcapping",
    ),
    "llama": Family("Llama", sliding_window=None),
    "mistral": Family("Mistral", layer_types=None),
    "qwen2": Family("Qwen2"),
    "qwen3": Family("Qwen3", query_norm="q_norm", key_norm="k_norm"),
}


def find_family(config: PreTrainedConfig) -> Family:
    """The family of a source with these settings; raises ValueError for one that cannot be converted."""
    check_model_type(config.model_type)
    if getattr(config, "use_bidirectional_attention", None) or not getattr(config, "is_causal", True):
        raise ValueError(f"the source, a {config.model_type!r} model, is not causal; only causal ones can be converted")
    if dropout := getattr(config, "attention_dropout", None):
        raise ValueError(f"the source's attention_dropout is {dropout}; converted layers have none: set it to 0")
    others = {*(getattr(config, "layer_types", None) or [])} - {SLIDING, FULL}
    if others:
        raise ValueError(f"the source has {', '.join(sorted(others))} layers; only {SLIDING} and {FULL} are known")
    return FAMILIES[config.model_type]


def check_model_type(model_type: object) -> None:
    if model_type not in FAMILIES:
        known = ", ".join(f"{family.name} ({name!r})" for name, family in FAMILIES.items())
        raise ValueError(f"the source is a {model_type!r} model, which cannot be converted; those can: {known}")


def own_window(config: PreTrainedConfig, layer: int) -> int | None:
    """How many tokens a layer of the source sees, itself included; None where it sees all.

    A config.json may have settings that the family's code does not read; they are not read here either.
    """
    family = FAMILIES[config.model_type]
    layer_types = getattr(config, family.layer_types, None) if family.layer_types else None
    if layer_types is not None and layer_types[layer] != SLIDING:
        return None
    return getattr(config, family.sliding_window, None) if family.sliding_window else None


def score_scale(family: Family, config: PreTrainedConfig) -> float:
    """What scores of queries and keys are multiplied by."""
    return (head_dim(config) if family.query_scalar is None else getattr(config, family.query_scalar)) ** -0.5


def head_dim(config: PreTrainedConfig) -> int:
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
