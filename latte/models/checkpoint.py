"""What a saved model carries besides its weights: a file by which `trust_remote_code=True` finds this package.

Where this package is imported, the Auto classes know its models, and the file is not read. Where it is installed but
not imported, `from_pretrained(path, trust_remote_code=True)` runs the file; where it is missing, the file says so.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from transformers import PreTrainedConfig

MODULE = "modeling_latte"
LOADER = '''"""Finds the classes of this model, which are in the package latte-attention."""

try:
    from latte.models import *  # noqa: F403
except ImportError as error:
    raise ImportError("the code of Latte models is not installed: pip install 'latte-attention[models]'") from error
'''


@contextmanager
def loader_beside(directory: str | Path, config: PreTrainedConfig, classes: dict[str, str]) -> Iterator[None]:
    """Put the file into `directory`, and while the body runs, say in `config` which Auto class means which of ours."""
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    (directory / f"{MODULE}.py").write_text(LOADER, encoding="utf-8")
    config.auto_map = {auto: f"{MODULE}.{name}" for auto, name in classes.items()}
    try:
        yield
    finally:
        del config.__dict__["auto_map"]
