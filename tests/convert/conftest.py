"""What the tests of conversion share."""

from collections.abc import Iterator

import pytest
import torch
from transformers.utils import logging


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> Iterator[None]:
    """Tensors here are small, and the threads of several workers would fight over the same cores."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    logging.disable_progress_bar()
    yield
    torch.set_num_threads(threads)
