"""A Chromium for the tests of pages. Where there is none they are skipped, unless LATTE_REQUIRE_BROWSER is 1."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.browser.devtools import Browser, find_chromium, launch


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> Iterator[None]:
    """Tensors here are small, and the browser wants a core too."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    chromium = find_chromium()
    if chromium is None:
        message = "no Chromium or Chrome is installed; the report cannot be looked at"
        if os.environ.get("LATTE_REQUIRE_BROWSER") == "1":
            pytest.fail(message)
        pytest.skip(message)
    profile: Path = tmp_path_factory.mktemp("profile")
    with launch(chromium, profile) as browser:
        yield browser
