"""What is drawn in the braid: a row a replica, seams at their times, colours, red pauses."""

from __future__ import annotations

import itertools
import re
from datetime import UTC, datetime
from typing import Any

import pytest

from tests.page.browser import Browser, Tab, wait_for
from tests.page.processes import Served, seconds

BOX = "node => { const box = node.getBoundingClientRect(); return [box.x, box.right]; }"
FILL = "node => getComputedStyle(node).fill"


def _numbers(colour: str) -> tuple[float, ...]:
    return tuple(map(float, re.findall(r"[\d.]+", colour)))[:3]


def _show(tab: Tab, policy: str, seconds: int = 60) -> None:
    tab.page.select_option("#policy", policy)
    tab.page.check(f"#window input[value='{seconds}']")
    tab.wait("#braid svg")


def test_a_row_a_replica(tab: Tab, demo: Served) -> None:
    names = sorted(replica["replica_id"] for replica in demo.listed("replicas"))
    assert len(names) == 2
    assert tab.all("#braid .row", "node => node.dataset.replica") == names
    assert tab.all("#braid .name", "node => node.lastChild.textContent") == names
    assert tab.page.locator("#replica-rows tr").count() == len(names)


@pytest.mark.parametrize("policy", ["math", "base"])
def test_seams_are_at_the_times_of_the_commits(tab: Tab, demo: Served, policy: str) -> None:
    _show(tab, policy, 300)
    tab.wait("#braid .seam .hit")
    # One look, so that all places are of one drawing.
    drawn: dict[str, Any] = tab.page.evaluate(
        """() => ({
            ticks: [...document.querySelectorAll('#braid .grid')].map(l => l.x1.baseVal.value),
            clocks: [...document.querySelectorAll('#braid .tick')].map(text => text.textContent),
            seams: [...document.querySelectorAll('#braid .seam')].map(seam => ({
                id: seam.dataset.transfer,
                x: seam.querySelector('line').x1.baseVal.value,
                rows: [...seam.querySelectorAll('line')].reduce((n, l) => n + +l.dataset.rows, 0),
            })),
        })"""
    )
    commits = demo.ended()
    today = datetime.fromtimestamp(demo.began(), UTC).date()
    clocks = [
        datetime.strptime(f"{today} {text}", "%Y-%m-%d %H:%M:%S").replace(tzinfo=UTC).timestamp()
        for text in drawn["clocks"]
    ]
    assert len(clocks) >= 3
    pixels = (drawn["ticks"][-1] - drawn["ticks"][0]) / (clocks[-1] - clocks[0])
    assert drawn["seams"]
    for seam in drawn["seams"]:
        past = commits[seam["id"]]
        assert past["version"]["policy"] == policy
        expected = drawn["ticks"][0] + (past["commit_time"] - clocks[0]) * pixels
        assert seam["x"] == pytest.approx(expected, abs=1.0)
        assert seam["rows"] == len(past["serving_replica_ids"])


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_neighbouring_versions_differ_in_colour_and_bear_their_numbers(
    browser: Browser, demo: Served, scheme: str
) -> None:
    with browser.tab(demo.page, scheme=scheme) as tab:
        tab.wait("#push-rows tr")
        _show(tab, "math")
        wait_for(lambda: tab.page.locator(".row:first-of-type .strand").count() >= 3)
        strands = tab.all(
            "#braid .row:first-of-type .strand", "node => [+node.dataset.version, "
            "getComputedStyle(node).fill]",
        )  # fmt: skip
        for (older, first), (newer, second) in itertools.pairwise(strands):
            assert newer == older + 1
            parts = zip(_numbers(first), _numbers(second), strict=True)
            distance = sum(abs(a - b) for a, b in parts)
            assert distance > 120, f"math@{older} {first} beside math@{newer} {second}"
        labels = set(tab.all("#braid .version", "node => node.textContent"))
        assert {f"@{version}" for version, _ in strands[1:-1]} <= labels
        legend = tab.page.locator("#legend").inner_text()
        assert f"math@{strands[-1][0]}" in legend


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_push_of_the_base_pauses_generation_and_that_is_red(
    browser: Browser, demo: Served, scheme: str
) -> None:
    with browser.tab(demo.page, scheme=scheme) as tab:
        tab.wait("#push-rows tr")
        _show(tab, "base", 300)
        tab.wait("#braid .pause")
        paused = {
            (pause["replica_id"], past["transfer_id"]): seconds(pause, "pause")
            for past in demo.ended().values()
            for pause in past.get("pauses", [])
        }
        drawn = tab.all("#braid .pause", "node => [node.parentNode.dataset.replica, "
                        "node.dataset.transfer, +node.dataset.seconds]")  # fmt: skip
        assert {replica for replica, *_ in drawn} == {"replica-0", "replica-1"}
        for replica, transfer, length in drawn:
            assert length == paused[replica, transfer] > 0
        for colour in set(tab.all("#braid .pause", FILL)):
            red, green, blue = _numbers(colour)
            assert red > 180, colour
            assert max(green, blue) < 100, colour
        assert all(right - left >= 3 for left, right in tab.all("#braid .pause", BOX))


def test_a_seam_is_chosen_by_mouse_and_by_keyboard_and_told_in_words(tab: Tab) -> None:
    _show(tab, "math")
    tab.wait("#braid .seam")
    tab.page.locator("#braid .seam .hit").last.click()
    first = tab.wait("#chosen p").first.inner_text()
    assert re.match(r"math@\d+ committed at \d\d:\d\d:\d\d: 2 of 2 replicas switched", first)
    tab.page.focus("#braid")
    tab.page.keyboard.press("ArrowLeft")
    before = tab.wait("#chosen p").first.inner_text()
    number = re.compile(r"math@(\d+)")
    assert int(number.match(before)[1]) == int(number.match(first)[1]) - 1
    assert tab.page.locator("#braid .seam.chosen").count() == 1
    tab.page.keyboard.press("Escape")
    assert tab.page.locator("#chosen p").count() == 0
    tab.page.locator("#commits summary").click()
    rows = tab.wait("#commit-rows tr")
    assert rows.first.locator("td").nth(2).inner_text() == "2 of 2 replicas"
