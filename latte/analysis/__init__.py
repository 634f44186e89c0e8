"""Looking at Latte: usage of latents, implied attention, figures and HTML reports."""

from latte.analysis.inspection import Inspection, inspect_tokens
from latte.analysis.measures import LayerMeasures, measure
from latte.analysis.reach import Reach
from latte.analysis.rows import Attended, AttentionRow, LayerTrace, attention_matrix, attention_row, trace
from latte.analysis.usage import LayerUsage, UsageMeter, latent_layers, merge_usage

__all__ = [
    "Attended",
    "AttentionRow",
    "Inspection",
    "LayerMeasures",
    "LayerTrace",
    "LayerUsage",
    "Reach",
    "UsageMeter",
    "attention_matrix",
    "attention_row",
    "inspect_tokens",
    "latent_layers",
    "measure",
    "merge_usage",
    "trace",
]
