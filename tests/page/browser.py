"""A headless Chromium, and a tab of it that notices what must not be."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from playwright.sync_api import Browser as Chromium
from playwright.sync_api import Locator, Page, sync_playwright

from tests.page.processes import ROOT
from tests.waits import until

NAMES = ("chromium", "chromium-browser", "google-chrome-stable", "google-chrome")
INSTALL = "no Chromium is installed: apt-get install chromium, or name one in CHROMIUM"
WIDE, NARROW = 1280, 360
#: Pictures; those of the manual go elsewhere when they are taken anew.
BUILT = ROOT / "build" / "page"
IMAGES = Path(os.environ.get("IMAGES") or BUILT)
_WAIT_MILLISECONDS = 20_000
_PUSH_SECONDS = 45.0


def wait_for(what: Callable[[], object]) -> None:
    """Wait until something is so: of what pushes bring, which come every few seconds."""
    until(what, _PUSH_SECONDS, every_seconds=0.1)


def luminance(colour: str) -> float:
    parts = [float(part) / 255 for part in re.findall(r"[\d.]+", colour)[:3]]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    dark, light = sorted((luminance(one), luminance(other)))
    return (light + 0.05) / (dark + 0.05)


#: Texts of the page that cover each other by more than a pixel, or leave their card. What lies
#: outside of a region that scrolls, and in what is closed or only for screen readers, is not seen.
_OVERLAPS = """() => {
    const seen = [];
    const walker = document.createTreeWalker(document.querySelector('main'), NodeFilter.SHOW_TEXT);
    for (let node = walker.nextNode(); node; node = walker.nextNode()) {
        const parent = node.parentElement;
        if (!node.data.trim() || parent.closest('.hidden, title, option, noscript')) continue;
        const head = parent.closest('thead');
        if (head && getComputedStyle(head).clipPath !== 'none') continue;
        if (!parent.checkVisibility({ visibilityProperty: true })) continue;
        const range = document.createRange();
        range.selectNodeContents(node);
        const card = parent.closest('.card, .tile, .verdict').getBoundingClientRect();
        const scrolls = parent.closest('.scroll')?.getBoundingClientRect();
        for (const box of range.getClientRects()) {
            if (box.width < 2) continue;
            if (scrolls && (box.bottom > scrolls.bottom || box.top < scrolls.top)) continue;
            seen.push({ text: node.data.trim(), box, card });
        }
    }
    const found = seen.filter(({ box, card }) => box.right > card.right || box.left < card.left)
        .map(({ text }) => `${text} leaves its card`);
    seen.forEach((a, i) => seen.slice(i + 1).forEach((b) => {
        const across = Math.min(a.box.right, b.box.right) - Math.max(a.box.left, b.box.left);
        const down = Math.min(a.box.bottom, b.box.bottom) - Math.max(a.box.top, b.box.top);
        if (across > 1 && down > 4) found.push(`${a.text} covers ${b.text}`);
    }));
    return found;
}"""


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


def overlaps(tab: Tab) -> list[str]:
    """Texts of the page that cover each other, or leave their card."""
    found: list[str] = tab.page.evaluate(_OVERLAPS)
    return found


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
