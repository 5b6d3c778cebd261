"""What a real coordinator shows of itself over HTTP, to whom, and what its readers can cost."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import ssl
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from prometheus_client.parser import text_string_to_metric_families

from tests.contract.conftest import Pool
from tests.doubles.certificates import Authority
from tests.doubles.http import ask
from weft_rl.contract.errors import InvalidRequestError, NotReadyError
from weft_rl.coordinator.config import CoordinatorConfig
from weft_rl.coordinator.server import Coordinator
from weft_rl.rpc.security.credentials import Credentials
from weft_rl.rpc.server import bind, make_server, serve_health
from weft_rl.telemetry import http_server, metrics
from weft_rl.telemetry.config import TelemetryConfig
from weft_rl.v1 import inspect_pb2, inspect_pb2_grpc, publish_pb2

ON_LOOPBACK = TelemetryConfig(metrics="127.0.0.1:0", health="127.0.0.1:0")
TOKEN, TRAINERS = "a-token-of-32-characters-or-more", "another-token-of-32-characters"
ACCESS = f"""
[[identity]]
name = "prometheus"
token_sha256 = "{hashlib.sha256(TOKEN.encode()).hexdigest()}"
roles = ["inspect"]

[[identity]]
name = "trainer"
token_sha256 = "{hashlib.sha256(TRAINERS.encode()).hexdigest()}"
roles = ["publish"]
policies = ["*"]
"""
BY_CERTIFICATE = """
[[identity]]
san = "prometheus.test"
roles = ["inspect"]
"""


@pytest.fixture(autouse=True)
def _no_old_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every scrape sees what is so now."""
    monkeypatch.setattr(metrics, "SAME_TEXT_SECONDS", 0.0)


@asynccontextmanager
async def watched(folder: Path, **options: Any) -> AsyncIterator[Pool]:
    """A pool whose coordinator has both ports."""
    pool = Pool(folder / "catalog.db")
    await pool.start(**{"telemetry": ON_LOOPBACK, **options})
    try:
        yield pool
    finally:
        await pool.stop()


def port_of(pool: Pool) -> int:
    assert pool.coordinator is not None
    return pool.coordinator.ports.metrics_port


async def _values(pool: Pool) -> dict[str, float]:
    """By name and values of labels."""
    answer = await ask(port_of(pool))
    assert answer.status == 200
    return {
        "/".join([sample.name, *sample.labels.values()]): sample.value
        for family in text_string_to_metric_families(answer.body.decode())
        for sample in family.samples
        if not sample.name.endswith(("_bucket", "_created"))
    }


def basic(password: str) -> dict[str, str]:
    return {"Authorization": "Basic " + base64.b64encode(f"x:{password}".encode()).decode()}


# -- what is shown -------------------------------------------------------------------


async def test_a_push_is_counted(tmp_path: Path) -> None:
    async with watched(tmp_path) as pool:
        await pool.replica("r0")
        trainer = await pool.trainer()
        assert (await trainer.push()).state == publish_pb2.TRANSFER_STATE_COMMITTED
        stub, request = trainer.stub, publish_pb2.AwaitTransferRequest(transfer_id="t-none")
        with pytest.raises(grpc.RpcError):
            await stub.AwaitTransfer(request, timeout=5)
        seen = await _values(pool)
    assert seen["weft_pushes_started_total/adapter"] == 1
    assert seen["weft_pushes_finished_total/adapter/committed"] == 1
    assert seen["weft_bytes_staged_total/adapter"] == trainer.manifest.total_bytes
    assert seen["weft_stage_seconds_count/adapter"] == 1
    assert seen["weft_replicas//ready"] == 1
    assert seen["weft_versions_served/adapter"] == 1
    assert seen["weft_leases_held"] == 1
    assert seen["weft_refusals_total/TRANSFER_UNKNOWN"] == 1
    assert seen["weft_pushes_started_total/base"] == 0


async def test_pages_and_what_is_none(tmp_path: Path) -> None:
    async with watched(tmp_path) as pool:
        port = port_of(pool)
        assert (await ask(port, "/healthz")).body == b"ok\n"
        head = await ask(port, method="HEAD")
        assert (head.status, head.body) == (200, b"")
        assert int(head.headers["content-length"]) > 1000
        assert (await ask(port, "/metrics?name=up")).status == 200
        openmetrics = await ask(port, headers={"Accept": "application/openmetrics-text"})
        assert openmetrics.body.endswith(b"# EOF\n")
        assert (await ask(port, "/none")).status == 404
        assert (await ask(port, "/../etc/passwd")).status == 404
        post = await ask(port, method="POST")
        assert post.status == 405
        assert {*post.headers["allow"].split(", ")} == {"GET", "HEAD"}
        assert (await ask(port, raw=b"hello\r\n\r\n")).status == 400
        assert (await ask(port, raw=b"GET / HTTP/1.1\r\nX: " + b"x" * 20_000)).status == 400


async def test_nothing_is_open_by_default_and_a_port_that_is_taken_is_said(tmp_path: Path) -> None:
    async with watched(tmp_path, telemetry=TelemetryConfig()) as pool:
        assert pool.coordinator is not None
        ports = pool.coordinator.ports
        assert (ports.metrics_port, ports.health_port) == (0, 0)
    async with watched(tmp_path) as pool:
        for taken in ("metrics", "health"):
            assert pool.coordinator is not None
            port = getattr(pool.coordinator.ports, f"{taken}_port")
            other = CoordinatorConfig(
                catalog=tmp_path / f"{taken}.db",
                listen="127.0.0.1:0",
                telemetry=TelemetryConfig(**{taken: f"127.0.0.1:{port}"}),
            )
            with pytest.raises(NotReadyError) as caught:
                await Coordinator(other).start()
            assert caught.value.reason == "ADDRESS_IN_USE"


async def test_the_health_port_serves_health_alone_without_tls(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    (tmp_path / "access.toml").write_text(ACCESS)
    async with watched(
        tmp_path,
        credentials=authority.credentials("localhost", "127.0.0.1"),
        access=tmp_path / "access.toml",
    ) as pool:
        assert pool.coordinator is not None
        address = f"127.0.0.1:{pool.coordinator.ports.health_port}"
        async with grpc.aio.insecure_channel(address) as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            for service in ("", "weft.v1.RegistryService"):
                request = health_pb2.HealthCheckRequest(service=service)
                assert (await stub.Check(request, timeout=5)).status == 1
            large = health_pb2.HealthCheckRequest(service="x" * 5000)
            with pytest.raises(grpc.RpcError) as caught:
                await stub.Check(large, timeout=5)
            assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            inspect = inspect_pb2_grpc.InspectServiceStub(channel)
            with pytest.raises(grpc.RpcError) as caught:
                await inspect.GetPool(inspect_pb2.GetPoolRequest(), timeout=5)
            assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


async def test_a_change_of_health_is_seen_on_both_ports() -> None:
    made = await make_server([])
    port = bind(made.server, "127.0.0.1:0")
    await made.server.start()
    alone, health_port = await serve_health(made, "127.0.0.1:0")
    for serving in (False, True):
        await made.set_health("weft.ready", serving=serving)
        for where in (port, health_port):
            async with grpc.aio.insecure_channel(f"127.0.0.1:{where}") as channel:
                request = health_pb2.HealthCheckRequest(service="weft.ready")
                answer = await health_pb2_grpc.HealthStub(channel).Check(request, timeout=5)
            assert answer.status == (1 if serving else 2)
    await alone.stop(0)
    await made.server.stop(0)


# -- who may read it -------------------------------------------------------------------


async def test_metrics_auth_asks_for_the_token_of_who_may_inspect(
    tmp_path: Path, audited: list[dict[str, str]]
) -> None:
    (tmp_path / "access.toml").write_text(ACCESS)
    asking = TelemetryConfig(metrics="127.0.0.1:0", metrics_auth=True)
    pool = Pool(tmp_path / "catalog.db")
    await pool.start(telemetry=asking, access=tmp_path / "access.toml")
    try:
        port = port_of(pool)
        for headers in ({}, basic("guess"), basic(""), {"Authorization": "Basic %%%"}):
            refused = await ask(port, headers=headers)
            assert refused.status == 401
            assert refused.headers["www-authenticate"].startswith("Basic ")
            assert b"weft_" not in refused.body
        assert (await ask(port, headers=basic(TRAINERS))).status == 403
        assert (await ask(port, headers=basic(TOKEN))).status == 200
        assert (await ask(port, headers={"Authorization": f"Bearer {TOKEN}"})).status == 200
        assert (await ask(port, "/healthz")).status == 200, "a probe has no password"
    finally:
        await pool.stop()
    assert [line["result"] for line in audited] == ["UNAUTHENTICATED"] * 4 + ["ROLE_MISSING"]
    assert audited[-1]["who"] == "trainer"
    assert {line["call"] for line in audited} == {"GET /metrics"}
    assert TOKEN not in json.dumps(audited)


async def test_metrics_auth_takes_certificates_where_the_pool_does(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    (tmp_path / "access.toml").write_text(BY_CERTIFICATE)
    async with watched(
        tmp_path,
        credentials=authority.credentials("localhost", "127.0.0.1"),
        access=tmp_path / "access.toml",
        telemetry=TelemetryConfig(metrics="127.0.0.1:0", metrics_auth=True),
    ) as pool:
        port = port_of(pool)
        known = _client(authority, authority.credentials("prometheus.test"))
        assert (await ask(port, tls=known)).status == 200
        other = _client(authority, authority.credentials("other.test"))
        refused = await ask(port, tls=other)
        assert refused.status == 403
        assert "www-authenticate" not in refused.headers, "no password would help"
        assert (await ask(port, tls=_client(authority))).status == 403
        assert (await ask(port, "/healthz", tls=_client(authority))).status == 200
        assert (await ask(port, "/healthz")).status == 200, "and in plaintext"
        folder = tmp_path / "strange"
        folder.mkdir()
        strange = _client(authority, Authority(folder).credentials("prometheus.test"))
        with pytest.raises((OSError, ConnectionError)):
            await ask(port, tls=strange)


async def test_https_uses_certificates_as_they_are_rotated(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    own = authority.credentials("localhost", "127.0.0.1")
    async with watched(tmp_path, credentials=own) as pool:
        port, client = port_of(pool), _client(authority)
        assert (await ask(port, tls=client)).status == 200
        yesterday = datetime.now(UTC) - timedelta(days=1)
        authority.issue(own.tls_cert, own.tls_key, "localhost", not_after=yesterday)
        with pytest.raises(ssl.SSLCertVerificationError):
            await ask(port, tls=client)
        Path(own.tls_cert).write_text("half written")
        with pytest.raises(ssl.SSLCertVerificationError):
            await ask(port, tls=client)
        authority.issue(own.tls_cert, own.tls_key, "localhost")
        assert (await ask(port, tls=client)).status == 200
        assert (await ask(port)).status == 200, "plain HTTP is beside it"


def _client(authority: Authority, shown: Credentials | None = None) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=authority.path)
    if shown:
        context.load_cert_chain(shown.tls_cert, shown.tls_key)
    return context


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"telemetry": TelemetryConfig(metrics="127.0.0.1:0", metrics_auth=True)}, "--access"),
        (
            {
                "telemetry": TelemetryConfig(metrics="0.0.0.0:0", metrics_auth=True),
                "access": ACCESS,
            },
            "over TLS only",
        ),
    ],
)
async def test_what_nobody_could_read_is_refused_at_the_start(
    tmp_path: Path, options: dict[str, Any], says: str
) -> None:
    if access := options.pop("access", ""):
        options["access"] = tmp_path / "access.toml"
        options["access"].write_text(access)
    config = CoordinatorConfig(catalog=tmp_path / "weft.db", listen="127.0.0.1:0", **options)
    with pytest.raises(InvalidRequestError, match=says):
        await Coordinator(config).start()


# -- what readers can cost ---------------------------------------------------------------


async def test_scrapes_pages_and_some_that_never_read_hold_up_no_push(
    tmp_path: Path,
) -> None:
    async with watched(tmp_path, lost_after_seconds=60.0) as pool:
        await pool.replica("r0")
        trainer = await pool.trainer()
        await trainer.push()
        port, threads = port_of(pool), threading.active_count()
        silent = []
        for _ in range(40):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            reader._transport.pause_reading()  # type: ignore[attr-defined]
            writer.write(b"GET /metrics HTTP/1.1\r\n\r\n")
            silent.append(writer)
        polls = ["/v1/pool.json", "/v1/transfers.json"] * 40  # by pages that are open
        scrapes = [asyncio.ensure_future(ask(port, path)) for path in ["/metrics"] * 200 + polls]
        for _ in range(3):
            transfer = await trainer.push(timeout=None)
            assert transfer.state == publish_pb2.TRANSFER_STATE_COMMITTED
        assert threading.active_count() == threads, "no thread for a connection"
        answers = await asyncio.gather(*scrapes)
        assert {answer.status for answer in answers} == {200}
        assert all(b"TRANSFER_STATE_COMMITTED" in answer.body for answer in answers[200:])
        seen = await _values(pool)
        assert seen["weft_pushes_finished_total/adapter/committed"] == 4
        for writer in silent:
            writer.close()


async def test_of_too_many_connections_the_oldest_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_server, "MAX_CONNECTIONS", 8)
    async with watched(tmp_path) as pool:
        port = port_of(pool)
        idle = [await asyncio.open_connection("127.0.0.1", port) for _ in range(20)]
        idle[0][1].write(b"GET /met")  # it will never say the rest
        assert (await ask(port, "/healthz")).status == 200
        ended = [asyncio.ensure_future(_rest(reader)) for reader, _ in idle]
        await asyncio.wait(ended[:12], timeout=5)
        assert all(task.done() for task in ended[:12])
        assert not any(task.done() for task in ended[14:])
        for _, writer in idle:
            writer.close()
        await asyncio.gather(*ended, return_exceptions=True)


async def test_a_connection_that_asks_nothing_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_server, "CONNECTION_SECONDS", 0.1)
    async with watched(tmp_path) as pool:
        for first in (b"", b"GET /metr", b"\x16\x03\x01"):
            reader, writer = await asyncio.open_connection("127.0.0.1", port_of(pool))
            writer.write(first)
            async with asyncio.timeout(5):
                assert not await _rest(reader)
            writer.close()


async def _rest(reader: asyncio.StreamReader) -> bytes:
    """What comes until the connection is ended, in whatever way."""
    try:
        return await reader.read()
    except ConnectionError:
        return b""
