"""What is drawn beside the braid: pushes in proportion, policies, replicas, events as they come."""

from __future__ import annotations

from typing import Any

import pytest

from tests.page.browser import Tab, wait_for
from tests.page.processes import Served, seconds

EVIL = "<img src=x onerror=alert(1)> & <b>maintenance</b>"


def test_bars_are_as_wide_as_phases_took_long(tab: Tab, demo: Served) -> None:
    rows = tab.page.evaluate(
        """() => [...document.querySelectorAll('#push-rows tr')].map(row => ({
            id: row.dataset.transfer,
            bar: row.querySelector('.bar').getBoundingClientRect().width,
            parts: Object.fromEntries([...row.querySelectorAll('.bar rect')].map(rect =>
                [rect.dataset.phase, rect.getBoundingClientRect().width])),
            share: +row.querySelector('.share')?.dataset.share,
            meter: row.querySelector('.meter')?.getBoundingClientRect().width,
            shown: row.querySelector('.share')?.getBoundingClientRect().width,
        }))"""
    )
    pushes = demo.ended()
    rows = [row for row in rows if row["id"] in pushes]
    assert len(rows) >= 3

    def rate(push: dict[str, Any]) -> float:
        is_committed = "committing" in push and "staging" in push
        return int(push["total_bytes"]) / seconds(push, "staging") if is_committed else 0.0

    phases = ("forming", "staging", "committing")
    longest = max(sum(seconds(pushes[row["id"]], phase) for phase in phases) for row in rows)
    for row in rows:
        past = pushes[row["id"]]
        for phase in (*phases, "pause"):
            wanted = row["bar"] * seconds(past, phase) / longest
            assert row["parts"].get(phase, 0.0) == pytest.approx(wanted, abs=1.0), (row, phase)
        best = max(rate(one) for one in pushes.values() if one["backend"] == past["backend"])
        assert row["share"] == pytest.approx(min(1.0, rate(past) / best), rel=0.01)
        assert row["shown"] == pytest.approx(row["meter"] * row["share"], abs=1.0)
    if any(pushes[row["id"]]["version"]["policy"] == "base" for row in rows):
        assert any(row["parts"].get("pause", 0) > 0 for row in rows)


def test_policies_say_owners_versions_pins_and_what_they_were_trained_on(
    tab: Tab, demo: Served
) -> None:
    def row(policy: str) -> str:
        return tab.wait(f"#policy-rows tr[data-policy={policy}]").inner_text()

    assert "lora-trainer" in row("math")
    assert "base-trainer" in row("base")
    (told,) = [p for p in demo.listed("policies") if p["policy"] == "math"]
    assert f"base@{told.get('trained_on_base_version', 0)}" in row("math")
    pinned = f"math@{told['served_version']}"
    demo.weft("pin", pinned)
    tab.wait("#policy-rows tr[data-policy=math] .pinned")
    assert tab.page.locator(".pinned").inner_text() == f"{told['served_version']} pinned"
    demo.weft("pin", pinned, "--off")
    wait_for(lambda: tab.page.locator(".pinned").count() == 0)


def test_replicas_say_why_they_are_not_ready_and_names_stay_text(tab: Tab, demo: Served) -> None:
    assert tab.all("#replica-rows .state", "node => node.textContent") == ["ready", "ready"]
    demo.weft("cordon", "replica-1", "--reason", EVIL)
    try:
        tab.wait("#replica-rows .state.out_of_service")
        first = tab.page.locator("#replica-rows tr").first
        assert first.get_attribute("data-replica") == "replica-1", "those not ready come first"
        assert EVIL in first.inner_text()
        assert tab.page.locator("main img, #replica-rows b").count() == 0, "it was taken as markup"
        wait_for(lambda: "1 of 2" in tab.page.locator("#served").inner_text())
        wait_for(lambda: tab.page.locator("#braid .strand.out_of_service").count() > 0)
        assert EVIL in tab.page.locator("#braid .strand.out_of_service title").first.text_content()
    finally:
        demo.weft("uncordon", "replica-1")
    wait_for(lambda: tab.page.locator("#replica-rows .state.ready").count() == 2)


def test_events_and_pushes_come_without_loading_the_page_again(tab: Tab, demo: Served) -> None:
    tab.page.evaluate("() => { window.loadedOnce = true; }")
    newest = max(tab.all("#events li", "node => +node.dataset.revision"))
    version = tab.page.locator("#push-rows tr").first.get_attribute("data-transfer")
    committed = "#events li[data-revision]:has(b:text-is('transfer committed'))"
    wait_for(lambda: max(tab.all(committed, "node => +node.dataset.revision")) > newest)
    first = tab.page.locator("#push-rows tr").first
    wait_for(lambda: first.get_attribute("data-transfer") != version)
    assert tab.page.evaluate("() => window.loadedOnce")
    told = {str(event["revision"]): event for event in demo.listed("events")}
    for revision, text in tab.all(
        "#events > li", "node => [node.dataset.revision, node.innerText]"
    )[:10]:
        event = told[revision]
        named = f"{event['policy']}@{event['version']}" if event.get("story") else event["subject"]
        assert named in text
        if not event.get("story"):
            assert event.get("message", "") in text


def test_pushes_of_one_policy_are_chosen(tab: Tab) -> None:
    tab.page.select_option("#pushes-of", "base")
    names = tab.all("#push-rows th .chip", "node => node.textContent")
    assert names
    assert all(name.startswith("base@") for name in names)


def test_times_are_relative_and_absolute_on_hover(tab: Tab) -> None:
    moments = tab.all("time[data-time]", "node => [node.textContent, node.title, node.dateTime]")
    assert moments
    for text, title, machine in moments:
        assert text == "now" or text.endswith("\u00a0ago")
        assert machine[:4] in title
        assert ":" in title
