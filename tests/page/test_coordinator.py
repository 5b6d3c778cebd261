"""The page of a coordinator that has no replicas yet, and of one that asks who looks."""

from __future__ import annotations

import hashlib
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Error, Route

from tests.page.browser import NARROW, Browser
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
        for part in ("pushes", "events", "policies", "replicas"):
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
            assert tab.page.locator("#contact").inner_text() == "Live"
            # A browser has a line for each time that it is asked for the password.
            assert not [line for line in tab.complaints if "status of 401" not in line]


@pytest.mark.parametrize(
    ("trained_on", "note", "is_strange"),
    [
        ({"math": "1", "code": "2"}, "math@3 was trained on base@1", True),
        ({"math": "0", "code": "1"}, "was trained on base@", True),  # both, one of them named
        ({"math": "2", "code": "2"}, "2 adapters", False),
        ({"math": None, "code": "2"}, "2 adapters", False),  # not told
    ],
)
def test_an_adapter_over_another_base_is_marked_on_the_first_screen(
    browser: Browser,
    tmp_path: Path,
    trained_on: dict[str, str | None],
    note: str,
    is_strange: bool,
) -> None:
    """What a pool that serves base@2 and two adapters would tell is put into the answers."""
    policies: list[dict[str, Any]] = [{"policy": "base", "served_version": "2"}]
    for policy, base in trained_on.items():
        told: dict[str, Any] = {} if base is None else {"trained_on_base_version": base}
        if base not in (None, "2"):  # which of them are others, the coordinator decides
            told["over_another_base"] = True
        policies.append({"policy": policy, "served_version": "3", **told})

    def change(route: Route) -> None:
        response = route.fetch()
        told = response.json()
        whole = {"policies": policies, "num_replicas": 1} if told["is_new"] else {}
        route.fulfill(response=response, json={**told, **whole})

    with coordinator(tmp_path) as served, browser.tab(served.page) as tab:
        tab.page.route("**/v1/pool.json?*", change)
        tab.page.reload()
        tab.wait("#policy-rows tr[data-policy=math]")
        tile = tab.page.locator("#summary .tile", has_text="Served")
        assert note in tile.inner_text()
        assert ("warn" in tile.get_attribute("class").split()) == is_strange
        box = tile.bounding_box()
        assert box["y"] + box["height"] < tab.page.viewport_size["height"]
        strange = [name for name, base in trained_on.items() if base not in (None, "2")]
        assert ("and 1 adapter more" in tile.inner_text()) == (len(strange) == 2)
        for policy in trained_on:
            row = tab.page.locator(f"#policy-rows tr[data-policy={policy}]").inner_text()
            assert ("served over base@2" in row) == (policy in strange)
