"""Latte models for Hugging Face Transformers. Importing this package registers them with its Auto classes."""

from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
)

from latte.models.backbone import LatteModel, LattePreTrainedModel
from latte.models.cache import load_cache, save_cache
from latte.models.causal_lm import LatteForCausalLM
from latte.models.classification import LatteForPairClassification, LatteForSequenceClassification
from latte.models.configuration import LatteConfig
from latte.models.presets import PRESETS
from latte.models.seq2seq import LatteForSeq2SeqLM

__all__ = [
    "PRESETS",
    "LatteConfig",
    "LatteForCausalLM",
    "LatteForPairClassification",
    "LatteForSeq2SeqLM",
    "LatteForSequenceClassification",
    "LatteModel",
    "LattePreTrainedModel",
    "load_cache",
    "save_cache",
]

AutoConfig.register(LatteConfig.model_type, LatteConfig)
AutoModel.register(LatteConfig, LatteModel)
AutoModelForCausalLM.register(LatteConfig, LatteForCausalLM)
AutoModelForSequenceClassification.register(LatteConfig, LatteForSequenceClassification)
AutoModelForSeq2SeqLM.register(LatteConfig, LatteForSeq2SeqLM)
