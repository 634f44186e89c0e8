"""What the tests of training share."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from latte.train import run
from tests.train import tiny


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> Iterator[None]:
    """Tensors here are small, and the threads of several workers would fight over the same cores."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that nothing happened to."""
    output = tmp_path_factory.mktemp("undisturbed") / "run"
    run(tiny.task(), tiny.settings(output))
    return output
