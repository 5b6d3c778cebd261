"""The page of a coordinator that has no replicas yet, and of one that asks who looks."""

from __future__ import annotations

import hashlib
import time
import urllib.error
import urllib.request
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Error, Route

from tests.page.browser import NARROW, WIDE, Browser, wait_for
from tests.page.processes import coordinator

TOKEN = "a-token-of-32-characters-or-more"
ACCESS = f"""
[[identity]]
name = "people"
token_sha256 = "{hashlib.sha256(TOKEN.encode()).hexdigest()}"
roles = ["inspect"]
"""


def test_an_empty_pool_says_what_to_do_next(browser: Browser, tmp_path: Path) -> None:
    with (
        coordinator(tmp_path) as served,
        browser.tab(served.page, width=NARROW, scheme="dark") as tab,
    ):
        start = tab.wait("#braid-empty pre").inner_text()
        assert start.startswith(f"weft rollout --coordinator {served.coordinator} -- ")
        assert tab.page.locator("#events > li").inner_text().startswith("coordinator started")
        assert tab.page.locator("#verdict-title").inner_text() == "No replica yet"
        for part in ("pushes", "policies", "replicas"):
            assert tab.page.locator(f"#{part}-empty").is_visible()
            assert tab.page.locator(f"#{part}").is_hidden()
        assert served.coordinator in tab.page.locator("#pushes-empty").inner_text()
        assert tab.page.evaluate("() => document.documentElement.scrollWidth") == NARROW


def test_who_is_nobody_sees_nothing_and_a_password_lets_in(
    browser: Browser, tmp_path: Path
) -> None:
    (tmp_path / "access.toml").write_text(ACCESS)
    with coordinator(tmp_path, "--access", str(tmp_path / "access.toml")) as served:
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(served.page)
        assert refused.value.code == 401
        refused.value.close()
        with (
            pytest.raises(Error, match="INVALID_AUTH_CREDENTIALS"),
            browser.tab(served.page, checks=False),
        ):
            pass
        guess = {"username": "people", "password": "guess"}
        with browser.tab(served.page, checks=False, http_credentials=guess) as tab:
            assert tab.page.locator("body").inner_text().strip() == "who are you?"
        right = {"username": "people", "password": TOKEN}
        with browser.tab(served.page, checks=False, http_credentials=right) as tab:
            tab.wait("#braid-empty")
            assert tab.page.locator("#contact").inner_text() == "Page connected"
            # A browser has a line for each time that it is asked for the password.
            assert not [line for line in tab.complaints if "status of 401" not in line]


@pytest.mark.parametrize("width", [WIDE, NARROW])
def test_an_adapter_over_another_base_is_marked_on_the_first_screen(
    browser: Browser, tmp_path: Path, width: int
) -> None:
    """What a pool that serves base@2 and two adapters would tell is put into the answers."""
    said = "math@3 was trained on base@1, served over base@2: its answers are of policies that ..."
    policies: list[dict[str, Any]] = [
        {"policy": "base", "served_version": "2"},
        {"policy": "code", "served_version": "3", "trained_on_base_version": "2"},
        {"policy": "math", "served_version": "3", "trained_on_base_version": "1",
         "over_another_base": True},
    ]  # fmt: skip
    problem = {"severity": "PROBLEM_SEVERITY_ERROR", "policy": "math", "message": said}

    def change(route: Route) -> None:
        response = route.fetch()
        told = response.json()
        told |= {"problems": [problem], "num_errors": 1, "policies": policies}
        route.fulfill(response=response, json={**told, "replica_counts": [{"num_replicas": 1}]})

    with coordinator(tmp_path) as served, browser.tab(served.page, width=width) as tab:
        tab.page.route("**/v1/pool.json*", change)
        tab.page.reload()
        first = tab.wait("#policy-rows tr").first
        assert first.get_attribute("data-policy") == "math", "what is wrong comes first"
        assert said in tab.wait("#problems li").inner_text()
        box = tab.page.locator("#problems").bounding_box()
        assert box["y"] + box["height"] < tab.page.viewport_size["height"]
        wait_for(lambda: tab.page.title() == "⚠ 1 wrong · Weft")
        for policy in ("math", "code", "base"):
            row = tab.page.locator(f"#policy-rows tr[data-policy={policy}]").inner_text()
            assert ("served over base@2" in row) == (policy == "math")


def test_many_problems_are_folded_and_counted(browser: Browser, tmp_path: Path) -> None:
    problems = [
        {"severity": "PROBLEM_SEVERITY_ERROR", "replica_id": f"r{i}", "message": f"r{i} is lost"}
        for i in range(50)
    ]
    # Two of those that are not told are errors, too.

    def change(route: Route) -> None:
        response = route.fetch()
        told = response.json()
        told |= {"problems": problems, "num_more_problems": 7, "num_errors": 52}
        route.fulfill(response=response, json=told)

    with coordinator(tmp_path) as served, browser.tab(served.page) as tab:
        tab.page.route("**/v1/pool.json*", change)
        tab.page.reload()
        tab.wait("#verdict.error")
        assert tab.wait("#verdict-title").inner_text() == "52 things are wrong"
        assert tab.page.locator("#problems > li").count() == 6
        tab.page.locator("#problems summary", has_text="and 52 more").click()
        assert tab.page.locator("#problems li[data-replica=r49]").is_visible()
        assert tab.page.locator("#problems", has_text="7 problems beside these").is_visible()


def test_what_is_not_told_is_not_shown_as_none_and_names_are_told_apart(
    browser: Browser, tmp_path: Path
) -> None:
    """A replica with mixed weights, one that differs in more policies than are told, and a replica
    that has the name of a policy."""
    lags = [
        {"policy": "a1", "version": "2", "pool_version": "9", "num_behind": "4",
         "num_behind_is_minimum": True}
    ]  # fmt: skip
    replicas: list[dict[str, Any]] = [
        {"replica_id": "a1", "state": "REPLICA_STATE_QUARANTINED",
         "report": {"dirty_reason": "a load failed"},
         "differences": [{"policy": "base", "version": "-1", "pool_version": "2"}]},
        {"replica_id": "r1", "state": "REPLICA_STATE_PENDING_WEIGHTS", "differences": lags,
         "num_more_differences": 1},
    ]  # fmt: skip
    policies = [{"policy": name, "served_version": "2"} for name in ("base", "a0", "a1", "a2")]
    problems = [
        {"severity": "PROBLEM_SEVERITY_ERROR", "message": "a1 is quarantined", "replica_id": "a1"},
        {"severity": "PROBLEM_SEVERITY_ERROR", "message": "a1@2 is lost", "policy": "a1"},
    ]

    def change(route: Route) -> None:
        response = route.fetch()
        told = response.json()
        told |= {"problems": problems, "num_errors": 2, "replica_counts": [{"num_replicas": 2}]}
        route.fulfill(response=response, json={**told, "policies": policies, "replicas": replicas})

    with coordinator(tmp_path) as served, browser.tab(served.page) as tab:
        tab.page.route("**/v1/pool.json*", change)
        tab.page.reload()
        tab.wait("#policy-rows tr")
        behind = {
            name: tab.page.locator(f"#policy-rows tr[data-policy={name}] td").nth(2).inner_text()
            for name in ("base", "a0", "a1", "a2")
        }
        assert behind == {
            "base": "a1: mixed weights",
            "a0": "none",
            "a1": "r1: a1@2, at least 4 behind",
            "a2": "not told of 1 replica",
        }
        row = tab.page.locator("#replica-rows tr[data-replica=a1]").inner_text()
        assert "mixed weights" in row
        for kind, said in (("replica", "a1 is quarantined"), ("policy", "a1@2 is lost")):
            (line,) = tab.all(f"#problems li[data-{kind}=a1]", "node => node.textContent")
            assert said in line


def test_what_replicas_served_is_told_by_events_and_transfers(
    browser: Browser, tmp_path: Path
) -> None:
    """r1 was lost and is back with the weights that it was started with; r2 got a clone."""
    began = time.time() - 100.0

    def at(seconds: float) -> str:
        return datetime.fromtimestamp(began + seconds, UTC).isoformat()

    told = [
        (0, "COORDINATOR_STARTED", "generation 1"), (10, "REPLICA_READY", "r0"),
        (10, "REPLICA_READY", "r1"), (50, "REPLICA_PENDING_WEIGHTS", "r2"),
        (60, "REPLICA_LOST", "r1"), (71, "REPLICA_READY", "r2"),
        (80, "REPLICA_PENDING_WEIGHTS", "r1"),
    ]  # fmt: skip
    events = [
        {"revision": str(i + 1), "time": at(seconds), "kind": f"EVENT_KIND_{kind}", "subject": name,
         "topic": "replicas"}
        for i, (seconds, kind, name) in enumerate(told)
    ]  # fmt: skip
    ended = {"state": "TRANSFER_STATE_COMMITTED", "version": {"policy": "base", "version": "1"},
             "forming": "1s", "staging": "1s", "committing": "0.5s", "trainer_id": "t"}  # fmt: skip
    transfers: list[dict[str, Any]] = [
        {**ended, "transfer_id": "clone", "purpose": "TRANSFER_PURPOSE_CLONE",
         "replica_ids": ["r2"], "serving_replica_ids": ["r2"], "begin_time": at(67.5)},
        {**ended, "transfer_id": "push", "purpose": "TRANSFER_PURPOSE_PUSH", "begin_time": at(38),
         "replica_ids": ["r0", "r1"], "serving_replica_ids": ["r0", "r1"]},
    ]  # fmt: skip
    replicas = [
        {"replica_id": f"r{i}", "state": f"REPLICA_STATE_{state}", "version_vector_index": place}
        for i, (state, place) in enumerate([("READY", 0), ("PENDING_WEIGHTS", 1), ("READY", 0)])
    ]
    lists: dict[str, dict[str, Any]] = {
        "pool": {"replicas": replicas, "version_vectors": [{"base": "1"}, {}],
                 "policies": [{"policy": "base", "served_version": "1"}],
                 "last_transfer": transfers[0], "replica_counts": [{"num_replicas": 3}]},
        "transfers": {"transfers": transfers},
        "events": {"events": events[::-1]},
    }  # fmt: skip

    def change(route: Route) -> None:
        response = route.fetch()
        (name,) = (name for name in lists if f"/v1/{name}.json" in route.request.url)
        route.fulfill(response=response, json={**response.json(), **lists[name]})

    with coordinator(tmp_path) as served, browser.tab(served.page) as tab:
        tab.page.route("**/v1/*.json*", change)
        tab.page.reload()
        tab.wait("#braid .seam")
        drawn = tab.all(
            "#braid .strand", "node => [node.parentNode.dataset.replica, +node.dataset.version, "
            "node.classList[2], +node.dataset.from, +node.dataset.to]",
        )  # fmt: skip
        found = [
            (name, version, state, round(start - began)) for name, version, state, start, _ in drawn
        ]
        assert found == [
            ("r0", 0, "ready", 10), ("r0", 1, "ready", 40),
            ("r1", 0, "ready", 10), ("r1", 1, "ready", 40), ("r1", 0, "pending_weights", 80),
            ("r2", 1, "pending_weights", 70), ("r2", 1, "ready", 71),
        ]  # fmt: skip
        assert round(drawn[3][4] - began) == 60, "it was lost"
