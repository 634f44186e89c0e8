"""What the tests of conversion share."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers.utils import logging

from tests.convert.sources import save_source


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> Iterator[None]:
    """Tensors here are small, and the threads of several workers would fight over the same cores."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    logging.disable_progress_bar()
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    return save_source(tmp_path_factory.mktemp("source"))
