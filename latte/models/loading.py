"""Saved models read back whole, or one line that says which file or tensor is wrong."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel
from transformers.utils import logging

INDEX = "model.safetensors.index.json"
NAMED = 3  # tensors that a message lists


def load_config(folder: str | Path, whose: str) -> PreTrainedConfig:
    """The settings of a saved model; raises ValueError, which begins with `whose`, where they make no model."""
    try:
        return AutoConfig.from_pretrained(folder)
    except (OSError, ValueError, StrictDataclassError) as error:
        why = error.__cause__ if isinstance(error, StrictDataclassError) else error  # whose own words say it twice
        raise ValueError(f"{whose}: its config.json is none that a model can be made of: {why}") from error


def load_model(
    kind: Any,
    folder: str | Path,
    whose: str,
    *,
    new: Sequence[str] = (),
    note: Callable[[str], None] | None = None,
    **options: Any,
) -> PreTrainedModel:
    """A saved model as `kind.from_pretrained` reads it; raises ValueError, which begins with `whose`, where it cannot.

    Every tensor must be there in the model's own shape, but for those whose names begin with one of `new`.
    `note` is told of tensors that the model has no use for.
    """
    if (Path(folder) / INDEX).is_file():
        read_weight_map(Path(folder) / INDEX)
    try:
        with quiet():
            # Mismatches are taken here, to be named below: Transformers' own error leaves the names to its log.
            model, loading = kind.from_pretrained(
                folder, output_loading_info=True, ignore_mismatched_sizes=True, **options
            )
    except (SafetensorError, StrictDataclassError, OSError, ValueError, RuntimeError) as error:
        why = error.__cause__ if isinstance(error, StrictDataclassError) else error
        remedy = "; a file of weights is broken, copy it again" if isinstance(error, SafetensorError) else ""
        raise ValueError(f"{whose}: it cannot be loaded: {why}{remedy}") from error
    check_whole(loading, whose, new)
    if note is not None and (strangers := sorted(loading["unexpected_keys"])):
        note(f"{whose}: the model has no use for {listed(strangers)}")
    return model


def check_whole(loading: Mapping[str, Any], whose: str, new: Sequence[str] = ()) -> None:
    """Raise ValueError unless the tensors that were read fit the settings: Transformers draws the others at random."""
    if others := sorted(loading["mismatched_keys"]):
        name, saved, wanted = others[0]
        more = f", and {len(others) - 1} more do not fit" if len(others) > 1 else ""
        raise ValueError(
            f"{whose}: {name} is {list(saved)} in the weights, {list(wanted)} by config.json{more}; weights and "
            "config.json are of different models, copy both again"
        )
    if missing := sorted(name for name in loading["missing_keys"] if not name.startswith(tuple(new))):
        raise ValueError(
            f"{whose}: it has no tensor {listed(missing)}; weights and config.json are of different models, or a file "
            "is missing: copy the model again"
        )


def read_weight_map(index: Path) -> dict[str, str]:
    """The file that each tensor is in, by a checkpoint's index."""
    try:
        return dict(json.loads(index.read_text(encoding="utf-8"))["weight_map"])
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{index} does not say where tensors are ({error}); copy the model again") from error


def listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return ", ".join(names[:NAMED]) + more


@contextmanager
def quiet() -> Iterator[None]:
    """Transformers without its remarks, of which there is a page on tensors that do not fit; bars stay."""
    level = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(level)
