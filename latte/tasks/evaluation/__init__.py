"""What a trained or converted model can do: perplexity by length and position, retrieval, LAMBADA, BLiMP, speed."""

from latte.tasks.evaluation.blimp import BlimpReport, Pair, blimp, choose_pairs, read_pairs
from latte.tasks.evaluation.documents import read_documents
from latte.tasks.evaluation.encoding import Encoder
from latte.tasks.evaluation.harness import TaskScore, harness
from latte.tasks.evaluation.lambada import LambadaReport, lambada, read_passages
from latte.tasks.evaluation.passkey import PasskeyReport, passkey
from latte.tasks.evaluation.perplexity import PerplexityReport, perplexity, take_texts
from latte.tasks.evaluation.scoring import Scorer
from latte.tasks.evaluation.speed import SpeedResult, decode_speed
from latte.tasks.evaluation.statistics import Estimate, choose

__all__ = [
    "BlimpReport",
    "Encoder",
    "Estimate",
    "LambadaReport",
    "Pair",
    "PasskeyReport",
    "PerplexityReport",
    "Scorer",
    "SpeedResult",
    "TaskScore",
    "blimp",
    "choose",
    "choose_pairs",
    "decode_speed",
    "harness",
    "lambada",
    "passkey",
    "perplexity",
    "read_documents",
    "read_pairs",
    "read_passages",
    "take_texts",
]
