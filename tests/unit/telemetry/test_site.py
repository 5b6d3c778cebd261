"""Who is shown a page that is protected, by how and from where the request comes."""

from __future__ import annotations

import base64
import hashlib
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, Counter

from weft_rl.contract.errors import InvalidRequestError
from weft_rl.rpc.security.guard import AccessFile
from weft_rl.rpc.server import Security
from weft_rl.telemetry.config import TelemetryConfig
from weft_rl.telemetry.http_server import Request, Response
from weft_rl.telemetry.process import process_registry, refusal_counter
from weft_rl.telemetry.site import SAME_TEXT_SECONDS, MetricsText, Page, Site

TOKEN = "a-token-of-32-characters-or-more"
ACCESS = f"""
[[identity]]
name = "viewer"
token_sha256 = "{hashlib.sha256(TOKEN.encode()).hexdigest()}"
roles = ["operator"]
"""
PASSWORD = {"authorization": "Basic " + base64.b64encode(f":{TOKEN}".encode()).decode()}
NEAR, V6, MAPPED, FAR = "127.0.0.1", "::1", "::ffff:127.0.0.1", "10.0.0.7"


def _site(security: Security) -> Site:
    return Site({"/secret": Page(answer=lambda _: Response.of_text("yes"))}, security)


def _status(site: Site, peer: str = NEAR, *, is_tls: bool = False, **headers: str) -> int:
    request = Request(method="GET", path="/secret", headers=headers, peer=peer, is_tls=is_tls)
    return site(request).status


@pytest.fixture
def asking(tmp_path: Path) -> Site:
    (tmp_path / "access.toml").write_text(ACCESS)
    return _site(Security(access=AccessFile(tmp_path / "access.toml")))


@pytest.mark.parametrize("peer", [NEAR, V6, MAPPED, FAR])
def test_a_password_is_taken_over_tls_and_over_loopback_alone(asking: Site, peer: str) -> None:
    assert _status(asking, peer, is_tls=True, **PASSWORD) == 200
    assert _status(asking, peer, is_tls=True) == 401
    assert _status(asking, peer, **PASSWORD) == (403 if peer is FAR else 200)


@pytest.mark.parametrize("value", ["", "Basic", "Basic =", "Basic /w==", "Digest x", "Bearer "])
def test_what_is_no_password_is_none(asking: Site, value: str) -> None:
    assert _status(asking, authorization=value) == 401


@pytest.mark.parametrize("peer", [NEAR, FAR])
@pytest.mark.parametrize("insecure", [False, True])
@pytest.mark.parametrize("is_tls", [False, True])
def test_where_nobody_is_asked_it_is_shown_on_this_machine_unless_all_is_open(
    peer: str, insecure: bool, is_tls: bool
) -> None:
    site = _site(Security(insecure=insecure))
    assert _status(site, peer, is_tls=is_tls) == (200 if insecure or peer is NEAR else 403)


@pytest.mark.parametrize("host", ["localhost", "localhost:9090", "127.0.0.1:80", "[::1]:9090"])
def test_a_name_that_was_made_to_lead_here_shows_nothing_to_a_page_from_elsewhere(
    host: str,
) -> None:
    site = _site(Security())
    assert _status(site, NEAR, host=host) == 200
    for elsewhere in ("evil.example", "evil.example:9090", "localhost.evil.example", "10.0.0.7:80"):
        assert _status(site, NEAR, host=elsewhere) == 403
        assert _status(_site(Security(insecure=True)), NEAR, host=elsewhere) == 200


def test_scrapes_at_once_get_one_text() -> None:
    registry, now = CollectorRegistry(), [0.0]
    counter = Counter("weft_x", "x", registry=registry)
    text = MetricsText(registry, lambda: now[0])
    request = Request(method="GET", path="/metrics", headers={}, peer=NEAR)
    first = text(request)
    counter.inc()
    assert text(request) == first
    now[0] += SAME_TEXT_SECONDS
    assert b"weft_x_total 1.0" in text(request).body
    for version in range(20):
        strange = {"accept": f"application/openmetrics-text; version=1.0.{version}"}
        text(Request(method="GET", path="/metrics", headers=strange, peer=NEAR))
    assert len(text._made) <= 8


def test_refusals_with_reasons_of_another_version_are_one_series() -> None:
    registry = process_registry()
    count = refusal_counter(registry)
    for reason in ("ROLE_MISSING", "MADE_UP", "MADE_UP_TOO"):
        count(reason)
    assert registry.get_sample_value("weft_refusals_total", {"reason": "ROLE_MISSING"}) == 1
    assert registry.get_sample_value("weft_refusals_total", {"reason": "OTHER"}) == 2


@pytest.mark.parametrize("address", ["9090", ":9090", "host:", "host:http", "host:70000"])
def test_addresses_that_are_none(address: str) -> None:
    for option in ("metrics", "health"):
        with pytest.raises(InvalidRequestError, match=f"--{option} is"):
            TelemetryConfig(**{option: address})


def test_auth_of_no_port() -> None:
    with pytest.raises(InvalidRequestError, match="--metrics opens"):
        TelemetryConfig(metrics_auth=True)
