"""Language modelling: text from files, datasets or the standard library, tokenised once, in windows of one length."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from latte.tasks.text.preparation import prepare_text
    from latte.tasks.text.settings import LanguageModellingSettings
    from latte.tasks.text.shards import PreparedText
    from latte.tasks.text.task import LanguageModelling
    from latte.tasks.text.vocabulary import byte_tokenizer

__all__ = ["LanguageModelling", "LanguageModellingSettings", "PreparedText", "byte_tokenizer", "prepare_text"]

_HOMES = {
    "LanguageModelling": "latte.tasks.text.task",
    "LanguageModellingSettings": "latte.tasks.text.settings",
    "PreparedText": "latte.tasks.text.shards",
    "byte_tokenizer": "latte.tasks.text.vocabulary",
    "prepare_text": "latte.tasks.text.preparation",
}


def __getattr__(name: str) -> Any:
    """Load a name when it is asked for: processes that only tokenise need not wait for models."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_HOMES[name]), name)
    return value
