"""Small models of several families and small tokenizers, with losses computed the slow way."""

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import (
    CohereConfig,
    CohereForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

from latte.convert import convert
from latte.models import LatteConfig, LatteForCausalLM

VOCABULARY = 263  # bytes and a few special tokens
SIZES = {"vocab_size": VOCABULARY, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
NAMES = ("macchiato", "latte", "llama", "gemma2", "gemma3", "cohere", "converted")


def make_model(name: str, **overrides):
    """A model whose weights are large enough for its predictions, softcaps and positions to matter."""
    torch.manual_seed(0)
    if name == "converted":
        return convert(make_model("gemma2"), window=5, num_latents=3, **overrides).eval()
    match name:
        case "macchiato":
            config = {"num_heads": 2, "num_latents": 3, "window": 5, "logits_softcap": 2.0}
            model = LatteForCausalLM(LatteConfig(**SIZES, **config | overrides))
        case "latte":
            model = LatteForCausalLM(LatteConfig(**SIZES, num_heads=2, num_latents=3, **overrides))
        case "llama":
            model = LlamaForCausalLM(LlamaConfig(**SIZES, **HEADS, **overrides))
        case "gemma2":
            config = {"sliding_window": 7, "final_logit_softcapping": 2.0, "attn_logit_softcapping": 1.5}
            model = Gemma2ForCausalLM(Gemma2Config(**SIZES, **HEADS, **config | overrides))
        case "gemma3":
            layers = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 7}
            model = Gemma3ForCausalLM(Gemma3TextConfig(**SIZES, **HEADS, **layers, **overrides))
        case "cohere":  # scales its logits, which only the model itself knows
            heads = {name: value for name, value in HEADS.items() if name != "head_dim"}
            model = CohereForCausalLM(CohereConfig(**SIZES, **heads, logit_scale=0.25, **overrides))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3)
    return model.eval()


def random_tokens(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randint(VOCABULARY, shape, generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def slow_losses(model, tokens: torch.Tensor) -> torch.Tensor:
    """−log p of all tokens [B T] but the first, from all logits."""
    logits = model(input_ids=tokens, use_cache=False).logits.float()
    each = F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten(), reduction="none")
    return each.view(tokens.shape[0], -1)


def byte_tokenizer(begins: bool = True, special: bool = True) -> PreTrainedTokenizerFast:
    """A token for each byte; it puts `<bos>` first if it `begins`."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = {letter: number for number, letter in enumerate(alphabet)}
    words |= {"<bos>": 256, "<eos>": 257} if special else {}
    tokenizer = Tokenizer(models.BPE(words, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    if begins:
        tokenizer.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 256)])
    names = {"bos_token": "<bos>", "eos_token": "<eos>"} if special else {}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names)
