"""Who is shown a page that is protected, by how and from where the request comes."""

from __future__ import annotations

import base64
import hashlib
from pathlib import Path

import pytest

from tests.doubles.http import request
from weft_rl.rpc.security.guard import AccessFile
from weft_rl.rpc.server import Security
from weft_rl.telemetry.site import refuse

TOKEN = "a-token-of-32-characters-or-more"
ACCESS = f"""
[[identity]]
name = "viewer"
token_sha256 = "{hashlib.sha256(TOKEN.encode()).hexdigest()}"
roles = ["operator"]
"""
PASSWORD = {"authorization": "Basic " + base64.b64encode(f":{TOKEN}".encode()).decode()}
NEAR, V6, MAPPED, FAR = "127.0.0.1", "::1", "::ffff:127.0.0.1", "10.0.0.7"


def _status(security: Security, peer: str = NEAR, *, is_tls: bool = False, **headers: str) -> int:
    response = refuse(request(peer, is_tls=is_tls, **headers), security)
    return response.status_code if response else 200


@pytest.fixture
def asking(tmp_path: Path) -> Security:
    (tmp_path / "access.toml").write_text(ACCESS)
    return Security(access=AccessFile(tmp_path / "access.toml"))


@pytest.mark.parametrize("peer", [NEAR, V6, MAPPED, FAR])
def test_a_password_is_taken_over_tls_and_over_loopback_alone(asking: Security, peer: str) -> None:
    assert _status(asking, peer, is_tls=True, **PASSWORD) == 200
    assert _status(asking, peer, is_tls=True) == 401
    assert _status(asking, peer, **PASSWORD) == (403 if peer is FAR else 200)


@pytest.mark.parametrize("value", ["", "Basic", "Basic =", "Basic /w==", "Digest x", "Bearer "])
def test_what_is_no_password_is_none(asking: Security, value: str) -> None:
    assert _status(asking, authorization=value) == 401


@pytest.mark.parametrize("peer", [NEAR, FAR])
@pytest.mark.parametrize("insecure", [False, True])
@pytest.mark.parametrize("is_tls", [False, True])
def test_where_nobody_is_asked_it_is_shown_on_this_machine_unless_all_is_open(
    peer: str, insecure: bool, is_tls: bool
) -> None:
    assert _status(Security(insecure=insecure), peer, is_tls=is_tls) == (
        200 if insecure or peer is NEAR else 403
    )


@pytest.mark.parametrize("host", ["localhost", "localhost:9090", "127.0.0.1:80", "[::1]:9090"])
def test_a_name_that_was_made_to_lead_here_shows_nothing_to_a_page_from_elsewhere(
    host: str,
) -> None:
    assert _status(Security(), NEAR, host=host) == 200
    for elsewhere in ("evil.example", "evil.example:9090", "localhost.evil.example", "10.0.0.7:80"):
        assert _status(Security(), NEAR, host=elsewhere) == 403
        assert _status(Security(insecure=True), NEAR, host=elsewhere) == 200
