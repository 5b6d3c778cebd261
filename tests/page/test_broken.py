"""The page of a pool in which something is wrong: a replica that is killed, one that is stopped,
one that hangs, one that lags; and what it still says once the coordinator was restarted."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.page.browser import (
    BUILT,
    IMAGES,
    NARROW,
    WIDE,
    Browser,
    Tab,
    contrast,
    overlaps,
    wait_for,
)
from tests.page.processes import REPLICAS, Pool, running_pool

FIRST, SECOND, LONG = REPLICAS


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    """A pool that each test leaves whole."""
    with running_pool(tmp_path_factory.mktemp("pool")) as pool:
        pool.push("base")
        pool.push("math")
        yield pool


@pytest.fixture
def tab(browser: Browser, pool: Pool) -> Iterator[Tab]:
    with browser.tab(pool.served.page) as tab:
        tab.wait("#verdict.fine")
        assert tab.page.title() == "double · Weft"
        assert _icon(tab) == "page/icon.svg"
        yield tab
        tab.wait("#verdict.fine")
        wait_for(lambda: tab.page.title() == "double · Weft")
        assert _icon(tab) == "page/icon.svg"


def _icon(tab: Tab) -> str | None:
    return tab.page.locator("#icon").get_attribute("href")


def _problem(tab: Tab, replica: str) -> str:
    return tab.wait(f"#problems li[data-replica='{replica}']").first.text_content() or ""


def _is_on_first_screen(tab: Tab, selector: str) -> bool:
    box = tab.page.locator(selector).first.bounding_box()
    height = tab.page.viewport_size["height"]
    return box is not None and box["y"] >= 0 and box["y"] + box["height"] <= height


def _assert_marked(tab: Tab) -> None:
    """There is a banner, and the tab of the browser has a red mark."""
    tab.wait("#verdict.error")
    assert tab.wait("#verdict-title").inner_text() == "1 thing is wrong"
    wait_for(lambda: tab.page.title() == "⚠ 1 wrong · double · Weft")
    assert _icon(tab) == "page/icon-wrong.svg"
    assert tab.page.locator("#contact").inner_text() == "Page connected", "that is no matter of it"


def test_a_replica_that_is_killed_is_named_in_a_banner_until_it_is_back(
    tab: Tab, pool: Pool
) -> None:
    pool.replicas[LONG].signal(signal.SIGKILL)
    _assert_marked(tab)
    assert _problem(tab, LONG) == (
        f"error: {LONG} is lost: no heartbeat. Look at its log; it comes back as soon as it "
        "registers again"
    )
    for what in ("#problems", f"#replica-rows tr[data-replica={LONG}]", "#policy-rows tr"):
        assert _is_on_first_screen(tab, what), what
    row = tab.page.locator("#replica-rows tr").first
    assert row.get_attribute("data-replica") == LONG, "it comes first"
    assert "no heartbeat" in row.inner_text()
    assert "2 of 3 replicas ready; base@1 and 1 adapter served" in tab.wait("#served").inner_text()
    name = tab.wait("#braid .name.lost").first
    assert name.text_content() == f"{LONG}: lost{LONG} (lost)", "whole, and in words"
    style = name.evaluate("n => [getComputedStyle(n).textDecorationLine, getComputedStyle(n).fill]")
    card = tab.all("main .card", "node => getComputedStyle(node).backgroundColor")[0]
    assert style[0] == "none", "a name that is struck through is not read"
    assert contrast(style[1], card) >= 4.5
    pool.start_replica(LONG).next("ready", 60)


def test_a_replica_that_is_stopped_is_lost_and_back_when_it_goes_on(tab: Tab, pool: Pool) -> None:
    pool.replicas[SECOND].signal(signal.SIGSTOP)
    try:
        _assert_marked(tab)
        assert f"{SECOND} is lost: no heartbeat" in _problem(tab, SECOND)
    finally:
        pool.replicas[SECOND].signal(signal.SIGCONT)


def test_a_replica_that_beats_and_does_not_answer_is_suspect(
    tab: Tab, pool: Pool, tmp_path: Path
) -> None:
    """The thread that receives hangs in a push, which goes on without the replica."""
    pool.replicas[SECOND].signal(signal.SIGKILL)
    _assert_marked(tab)
    pool.start_replica(SECOND, f"replica worker|at a bucket|HANG|{tmp_path}").next("ready", 60)
    tab.wait("#verdict.fine")
    (tmp_path / "arm").touch()
    pool.push("base")
    _assert_marked(tab)
    said = _problem(tab, SECOND)
    assert said.startswith(f"error: {SECOND} is suspect: ")
    wait_for(lambda: "It serves base@1, 1 behind" in _problem(tab, SECOND))
    assert said.endswith("It takes part again once it answers; restart it if it does not")
    assert tab.wait(f"#replica-rows tr[data-replica={SECOND}] .state.suspect")
    failure = tab.wait("#events > li.bad:has(b:text-is('transfer reformed'))").first.inner_text()
    assert f"without {SECOND}" in failure, "it is not folded into the line of its push"
    pool.replicas[SECOND].signal(signal.SIGKILL)
    pool.start_replica(SECOND).next("ready", 60)


def test_a_replica_that_lags_says_how_many_versions_it_is_behind(tab: Tab, pool: Pool) -> None:
    served = pool.push("math")
    pool.served.weft("cordon", FIRST, "--no-pushes", "--reason", "new disk")
    try:
        pool.push("math")
        pool.push("math")
        tab.wait("#verdict.warning")
        assert tab.wait("#verdict-title").inner_text() == "Nothing is wrong, but"
        wait_for(lambda: _problem(tab, FIRST).endswith(f"It serves math@{served}, 2 behind"))
        assert "by an operator: new disk" in _problem(tab, FIRST)
        assert "⚠" not in tab.page.title(), "somebody ordered it"
        stale = f"math@{served}, 2 behind"
        policy = tab.wait("#policy-rows tr[data-policy=math]").inner_text()
        assert f"math@{served + 2}" in policy
        assert f"{FIRST}: {stale}" in policy
        assert stale in tab.wait(f"#replica-rows tr[data-replica={FIRST}]").inner_text()
        assert _is_on_first_screen(tab, "#policy-rows tr[data-policy=math]")
        assert stale in pool.served.weft("status"), "the command says the same"
        _picture(tab, IMAGES / "page-behind.png")
    finally:
        pool.served.weft("uncordon", FIRST)


def test_a_push_is_one_line_that_opens_and_failures_stay(tab: Tab, pool: Pool) -> None:
    pool.replicas[SECOND].signal(signal.SIGKILL)
    _assert_marked(tab)
    version = pool.push("math")
    line = tab.wait(f"#events > li[data-story='math@{version}']")
    assert line.count() == 1
    shown = line.locator("summary").inner_text()
    assert re.search(rf"transfer committed math@{version} in [\d.]+\s(ms|s)", shown)
    steps = line.locator("ol li b")
    assert steps.count() == 3
    assert not steps.first.is_visible()
    line.locator("summary").focus()
    tab.page.keyboard.press("Enter")
    assert steps.all_inner_texts() == ["transfer begun", "transfer staged", "transfer committed"]
    pool.push("base")
    tab.wait("#events > li[data-story^='base@']")
    assert steps.first.is_visible(), "what is open stays open"
    focus = "() => document.activeElement.closest('li')?.dataset.story"
    assert tab.page.evaluate(focus) == f"math@{version}", "and keeps the focus"

    def kinds() -> set[str]:
        return set(tab.page.locator("#events > li b").all_inner_texts())

    lost = {"replica lost"}
    tab.page.select_option("#topic", "pushes")
    wait_for(lambda: "lease acquired" not in kinds())
    assert lost < kinds(), "a failure is shown whatever the kind"
    tab.page.select_option("#topic", "failures")
    wait_for(lambda: "transfer committed" not in kinds())
    assert lost <= kinds()
    tab.page.select_option("#topic", "pushes")
    tab.page.select_option("#events-of", "base")
    wait_for(lambda: tab.page.locator("#events > li[data-story^='math@']").count() == 0)
    assert tab.page.locator("#events > li[data-story^='base@']").count() > 0
    assert lost <= kinds()
    pool.start_replica(SECOND).next("ready", 60)


@pytest.mark.parametrize("width", [WIDE, 1000, 700, NARROW])
def test_no_text_is_cut_or_covered_while_something_is_wrong(
    browser: Browser, pool: Pool, width: int
) -> None:
    pool.served.weft(
        "cordon", LONG, "--no-pushes", "--reason", "a reason that is longer than its column is"
    )
    try:
        pool.push("math")
        for scheme in ("light", "dark"):
            with browser.tab(pool.served.page, width=width, scheme=scheme) as tab:
                tab.wait("#verdict.warning")
                tab.page.select_option("#policy", "math")
                tab.wait("#push-rows tr")
                assert tab.page.evaluate("() => document.documentElement.scrollWidth") == width
                assert overlaps(tab) == []
                paper = tab.all("#verdict", "node => getComputedStyle(node).backgroundColor")[0]
                for colour in tab.all("#verdict *", "node => getComputedStyle(node).color"):
                    assert contrast(colour, paper) >= 4.5
                if width in (WIDE, NARROW):
                    _picture(tab, BUILT / f"page-wrong-{width}-{scheme}.png")
    finally:
        pool.served.weft("uncordon", LONG)


def test_numbers_of_one_column_end_at_one_place(tab: Tab) -> None:
    ends = """node => {
        const range = document.createRange();
        range.selectNodeContents(node.lastChild ?? node);
        return Math.round(range.getBoundingClientRect().right);
    }"""
    for column in (
        "#push-rows td.number",
        "#push-rows .phases li:nth-child(2)",
        "#replica-rows time",
    ):
        side = ends if "time" not in column else ends.replace(".right", ".left")
        assert len(set(tab.all(column, side))) == 1, column


def test_events_outlive_the_coordinator_and_details_do_not(browser: Browser, pool: Pool) -> None:
    with browser.tab(pool.served.page, checks=False) as tab:  # it complains while nobody listens
        pool.replicas[SECOND].signal(signal.SIGKILL)
        lost = tab.wait("#events > li.bad:has(b:text-is('replica lost'))").first.inner_text()
        pool.start_replica(SECOND).next("ready", 60)
        tab.wait("#verdict.fine")
        version = pool.push("math")
        line = tab.page.locator(f"#events > li[data-story='math@{version}']")
        wait_for(lambda: line.locator("ol li").count() == 3)
        pool.restart_coordinator()
        started = tab.page.locator("#events > li:has(b:text-is('coordinator started'))")
        wait_for(lambda: started.count() == 2)
        assert "generation 2" in started.first.inner_text()
        assert f"math@{version} served by 3 of 3 replicas" in line.inner_text()
        assert lost.splitlines()[0] in tab.page.locator("#events").inner_text()
        assert tab.page.locator("#events b:text-is('transfer staged')").count() == 0
        assert lost.splitlines()[0].strip() in pool.served.weft("events").replace("  ", " ")
        tab.wait("#verdict.fine")


def _picture(tab: Tab, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    tab.page.screenshot(path=path)
