"""Models that read a row as one sequence."""

from typing import Any


def check_unpacked(arguments: dict[str, Any]) -> None:
    """Raise ValueError if `arguments` say that sequences are packed into a row."""
    for name in ("cu_seq_lens_q", "seq_idx"):
        if arguments.get(name) is not None:
            raise ValueError(f"{name} is given; this model takes one sequence per row: pad, and give attention_mask")
