"""Long Range Arena (Tay et al. 2021): five tasks with a class for a long sequence."""

from latte.tasks.lra.image import ImageClassification, ImageSettings
from latte.tasks.lra.listops import ListOps, ListOpsSettings
from latte.tasks.lra.pathfinder import Pathfinder, PathfinderSettings
from latte.tasks.lra.retrieval import Retrieval, RetrievalSettings
from latte.tasks.lra.text import TextClassification, TextSettings

__all__ = [
    "ImageClassification",
    "ImageSettings",
    "ListOps",
    "ListOpsSettings",
    "Pathfinder",
    "PathfinderSettings",
    "Retrieval",
    "RetrievalSettings",
    "TextClassification",
    "TextSettings",
]
