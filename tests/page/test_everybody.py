"""The page for everybody: narrow and wide, light and dark, by keyboard, for a screen reader; what
it says when contact is lost; and pictures of it."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tests.page.browser import IMAGES, NARROW, WIDE, Browser, Tab, contrast, luminance, overlaps
from tests.page.processes import Served

_MAX_IMAGE_BYTES = 300_000


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [WIDE, NARROW])
def test_it_fits_is_readable_and_is_pictured(
    browser: Browser, demo: Served, width: int, scheme: str
) -> None:
    with browser.tab(demo.page, width=width, scheme=scheme) as tab:
        tab.wait("#push-rows tr")
        tab.page.select_option("#policy", "math")
        tab.page.check("#window input[value='60']")
        tab.wait("#braid .seam")
        assert tab.page.evaluate("() => document.documentElement.scrollWidth") == width
        wide = (
            "node => node.getBoundingClientRect().right > innerWidth + 0.5 && "
            "!node.closest('details:not([open])')"
        )
        assert not any(tab.all("main :is(section, dl, table, svg, td, th, pre, li)", wide))
        assert overlaps(tab) == []
        paper = tab.page.evaluate("() => getComputedStyle(document.body).backgroundColor")
        assert (luminance(paper) > 0.8) == (scheme == "light")
        card = tab.all("main .card", "node => getComputedStyle(node).backgroundColor")[0]
        for selector in ("h2", "small", ".hint", "td", ".tile .note", ".events .message", "time"):
            for colour in set(tab.all(f"main {selector}", "node => getComputedStyle(node).color")):
                assert contrast(colour, card) >= 4.5, f"{selector} is {colour} on {card}"
        for key in tab.all("#legend .key", "node => getComputedStyle(node).backgroundColor"):
            assert contrast(key, card) >= 1.4 or "0, 0, 0, 0" in key, key
        IMAGES.mkdir(parents=True, exist_ok=True)
        path = IMAGES / f"page-{width}-{scheme}.png"
        tab.page.set_viewport_size({"width": width, "height": 1500})
        tab.page.evaluate("() => scrollTo(0, 0)")
        tab.page.wait_for_timeout(1200)
        tab.page.screenshot(path=path)
        assert path.stat().st_size < _MAX_IMAGE_BYTES


def test_everything_is_reached_by_keyboard_and_seen_to_be(tab: Tab) -> None:
    focus: dict[str, Any]
    reached, outlines = [], []
    for _ in range(60):
        tab.page.keyboard.press("Tab")
        focus = tab.page.evaluate(
            """() => {
                const node = document.activeElement;
                const outline = getComputedStyle(node.matches('fieldset input')
                    ? node.nextElementSibling : node);
                return { what: node.id || node.name || node.className || node.tagName
                    || '', seen: outline.outlineStyle !== 'none' && outline.outlineWidth !== '0px',
                    body: node === document.body };
            }"""
        )
        if focus["body"]:
            break
        reached.append(focus["what"])
        outlines.append(focus["seen"])
    assert reached[0] == "skip"
    order = ["skip", "policy", "window", "braid", "pushes-of", "topic", "events-of"]
    assert [what for what in reached if what in order] == order
    assert all(outlines), [what for what, seen in zip(reached, outlines, strict=True) if not seen]
    tab.page.focus("#window input:checked")
    tab.page.keyboard.press("ArrowRight")
    assert tab.page.locator("#window input:checked").get_attribute("value") == "900"


def test_a_screen_reader_has_names_for_all(tab: Tab) -> None:
    headings = "node => node.querySelectorAll('thead th[scope=col]').length"
    assert all(tab.all("main table", headings))
    assert all(tab.all("main tbody tr", "node => !!node.querySelector('th[scope=row]')"))
    assert all(tab.all("main svg[role=img]", "node => node.getAttribute('aria-label')"))
    assert tab.page.locator("main svg:not([role=img])").count() == 0
    label = tab.page.locator("#braid svg").get_attribute("aria-label")
    assert re.match(r"2 replicas, the last .*, policy base: \d+ commit", label)
    assert all(tab.all("select, input", "node => node.labels.length"))
    assert tab.page.locator("h1").count() == 1
    assert len(tab.all("main section", "node => node.getAttribute('aria-labelledby')")) == 6


def test_nothing_moves_for_who_wants_no_motion(browser: Browser, demo: Served) -> None:
    names = "node => getComputedStyle(node).animationName"
    for motion, moves in (("no-preference", True), ("reduce", False)):
        with browser.tab(demo.page, reduced_motion=motion) as tab:
            arrived = tab.wait("#events .new")
            assert (arrived.first.evaluate(names) != "none") == moves


def test_a_contact_that_is_lost_is_said_and_that_what_is_seen_is_old(
    browser: Browser, demo: Served
) -> None:
    with browser.tab(demo.page, checks=False) as tab:
        tab.wait("#push-rows tr")
        assert tab.page.locator("#contact").inner_text() == "Page connected"
        assert tab.page.locator("#notice").is_hidden()
        tab.page.route("**/v1/pool.json*", lambda route: route.abort())
        notice = tab.wait("#notice")
        assert re.search(r"it cannot be reached\. What you see is from \d\d:", notice.inner_text())
        assert tab.page.locator("#contact").inner_text() == "Page has no contact"
        assert "stale" in (tab.page.locator("body").get_attribute("class") or "")
        assert tab.page.locator("#push-rows tr").count() > 0, "what was known stays"
        tab.page.unroute("**/v1/pool.json*")
        tab.page.locator("#notice").wait_for(state="hidden")
        assert tab.page.locator("#contact").inner_text() == "Page connected"


def test_the_history_says_when_it_began(tab: Tab, demo: Served) -> None:
    text = tab.page.locator("#history").inner_text()
    assert re.search(r"History since \d\d:\d\d:\d\d, when this coordinator started", text)
    shown = tab.all("#history time", "node => Date.parse(node.dateTime) / 1000")
    assert shown == [pytest.approx(demo.began(), abs=0.01)]
