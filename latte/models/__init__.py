"""Latte models for Hugging Face Transformers. Importing this package registers them with its Auto classes."""

from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
)

from latte.models.backbone import LatteModel, LattePreTrainedModel
from latte.models.causal_lm import LatteForCausalLM
from latte.models.classification import LatteForPairClassification, LatteForSequenceClassification
from latte.models.configuration import LatteConfig
from latte.models.converted import LatteConvertedForCausalLM
from latte.models.converted_configuration import LatteConvertedConfig
from latte.models.prefix import load_cache, save_cache
from latte.models.presets import PRESETS
from latte.models.seq2seq import LatteForSeq2SeqLM

__all__ = [
    "PRESETS",
    "LatteConfig",
    "LatteConvertedConfig",
    "LatteConvertedForCausalLM",
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
AutoConfig.register(LatteConvertedConfig.model_type, LatteConvertedConfig)
AutoModel.register(LatteConfig, LatteModel)
AutoModelForCausalLM.register(LatteConfig, LatteForCausalLM)
AutoModelForCausalLM.register(LatteConvertedConfig, LatteConvertedForCausalLM)
AutoModelForSequenceClassification.register(LatteConfig, LatteForSequenceClassification)
AutoModelForSeq2SeqLM.register(LatteConfig, LatteForSeq2SeqLM)
