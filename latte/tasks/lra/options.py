"""Settings that several tasks have."""

from dataclasses import field
from typing import Any


def cache_option() -> Any:
    """Where made or read data is kept."""
    return field(default=None, metadata={"help": "Folder to keep prepared data in; the user's cache if left out."})


def workers_option() -> Any:
    """How many processes make data."""
    return field(default=0, metadata={"help": "Processes that make the data; 0 is one for each core."})


def padding_option() -> Any:
    """How long the texts of a batch are made."""
    return field(default="batch", metadata={"help": "Pad to the longest of a batch, or always to the length."})
