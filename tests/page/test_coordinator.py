"""The page of a coordinator that has no replicas yet, and of one that asks who looks."""

from __future__ import annotations

import hashlib
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from playwright.sync_api import Error

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
