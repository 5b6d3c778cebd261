"""A headless Chromium, and a tab of it that notices what must not be."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from playwright.sync_api import Browser as Chromium
from playwright.sync_api import Locator, Page, sync_playwright

NAMES = ("chromium", "chromium-browser", "google-chrome-stable", "google-chrome")
INSTALL = "no Chromium is installed: apt-get install chromium, or name one in CHROMIUM"
WIDE, NARROW = 1280, 360
_WAIT_MILLISECONDS = 20_000
_PUSH_SECONDS = 45.0


def wait_for(what: Callable[[], object]) -> None:
    """Wait until something is so: of what pushes bring, which come every few seconds."""
    deadline = time.monotonic() + _PUSH_SECONDS
    while not what():
        assert time.monotonic() < deadline, "it did not come to be"
        time.sleep(0.1)


class Tab:
    """A page that is open, and what it has asked for and complained of."""

    def __init__(self, page: Page, origin: str) -> None:
        self.page = page
        self.origin = origin
        self.asked: list[str] = []
        self.complaints: list[str] = []
        page.set_default_timeout(_WAIT_MILLISECONDS)
        page.on("request", lambda request: self.asked.append(request.url))
        page.on("console", self._note)
        page.on("pageerror", lambda error: self.complaints.append(str(error)))

    def _note(self, message: Any) -> None:
        if message.type in ("error", "warning"):
            self.complaints.append(message.text)

    def wait(self, selector: str) -> Locator:
        """Those that a selector finds, once the first is to be seen."""
        found = self.page.locator(selector)
        found.first.wait_for(state="visible")
        return found

    def all(self, selector: str, script: str) -> list[Any]:
        """What a function of an element says of each that a selector finds."""
        found: list[Any] = self.page.locator(selector).evaluate_all(f"all => all.map({script})")
        return found

    def check(self) -> None:
        """Nobody else was asked for anything, and nothing was complained of."""
        strange = [url for url in self.asked if not url.startswith(self.origin)]
        assert not strange, strange
        assert not self.complaints, self.complaints


class Browser:
    """Opens tabs."""

    def __init__(self, chromium: Chromium) -> None:
        self._chromium = chromium

    @contextmanager
    def tab(
        self,
        url: str,
        *,
        width: int = WIDE,
        scheme: str = "light",
        checks: bool = True,
        **more: Any,
    ) -> Iterator[Tab]:
        """A tab of its own, with nothing from others; at the end it is ``check``ed."""
        context = self._chromium.new_context(
            viewport={"width": width, "height": 900},
            color_scheme=scheme,
            timezone_id="UTC",
            locale="en-GB",
            **more,
        )
        try:
            tab = Tab(context.new_page(), url)
            tab.page.goto(url)
            yield tab
            if checks:
                tab.check()
        finally:
            context.close()


@contextmanager
def opened() -> Iterator[Browser]:
    """The Chromium of this machine."""
    path = os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)
    assert path, INSTALL
    with sync_playwright() as playwright:
        # Root has no sandbox.
        flags = ["--no-sandbox"] if os.geteuid() == 0 else []
        chromium = playwright.chromium.launch(executable_path=path, args=flags)
        try:
            yield Browser(chromium)
        finally:
            chromium.close()
