"""What the page's tests need is in an environment of its own: `make page`."""

from __future__ import annotations

import importlib.util
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.page.browser import Browser, Tab
    from tests.page.processes import Served

# Where that is not installed they are not collected; nothing runs half of them.
IS_INSTALLED = importlib.util.find_spec("playwright") is not None
collect_ignore_glob = [] if IS_INSTALLED else ["test_*.py"]


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    from tests.page.browser import opened

    with opened() as browser:
        yield browser


@pytest.fixture(scope="session")
def demo() -> Iterator[Served]:
    """``weft demo --keep``: real replicas, and trainers that push on."""
    from tests.page.processes import demo

    with tempfile.TemporaryDirectory() as folder, demo(Path(folder)) as served:
        yield served


@pytest.fixture
def tab(browser: Browser, demo: Served) -> Iterator[Tab]:
    """The demo's page; at the end it has asked nobody else and complained of nothing."""
    with browser.tab(demo.page) as tab:
        tab.wait("#push-rows tr")
        yield tab
