"""Who is answered over real sockets, and who is not: certificates, tokens, roles, bounds."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_reflection.v1alpha import reflection_pb2
from rich.console import Console

from rollout_side.agent.registration import check_contact
from rollout_side.config import AgentConfig
from tests.doubles.attacks import identities
from tests.doubles.certificates import Authority
from trainer_side import RolloutClient, Tls
from weft_rl.cli.status import render
from weft_rl.contract.errors import InvalidRequestError, WeftError
from weft_rl.coordinator.config import CoordinatorConfig
from weft_rl.coordinator.server import Coordinator
from weft_rl.rpc import server
from weft_rl.rpc.channel import open_aio_channel
from weft_rl.rpc.security import guard
from weft_rl.rpc.security.credentials import UNUSED_FILES, Credentials
from weft_rl.rpc.status import error_from_rpc
from weft_rl.v1 import (
    admin_pb2,
    admin_pb2_grpc,
    inspect_pb2,
    inspect_pb2_grpc,
    publish_pb2,
    publish_pb2_grpc,
    types_pb2,
)

_SECONDS = 5.0
ACCESS = """
[[identity]]
san = "trainer.test"
roles = ["publish"]
policies = ["math", "code-*"]

[[identity]]
san = "*.ops.test"
roles = ["operator"]

[[identity]]
san = "viewer.test"
roles = ["inspect"]
"""
TOKEN = "a-token-of-32-characters-or-more"
TOKEN_ACCESS = f"""
[[identity]]
name = "viewer"
token_sha256 = "{hashlib.sha256(TOKEN.encode()).hexdigest()}"
roles = ["inspect"]
"""


class Secured:
    """A coordinator that asks who calls."""

    def __init__(self, folder: Path, access: str = ACCESS) -> None:
        self.folder = folder
        self.authority = Authority(folder)
        self.access = folder / "access.toml"
        self.access.write_text(access)
        self.credentials = self.authority.credentials("localhost", "127.0.0.1", file="server")
        self.coordinator: Coordinator | None = None
        self.target = ""
        self._channels: list[grpc.aio.Channel] = []

    async def start(self, **config: Any) -> None:
        given = {"credentials": self.credentials, "access": self.access, **config}
        self.coordinator = Coordinator(
            CoordinatorConfig(catalog=self.folder / "weft.db", listen="127.0.0.1:0", **given)
        )
        self.target = f"127.0.0.1:{await self.coordinator.start()}"

    def channel(self, credentials: Credentials) -> grpc.aio.Channel:
        channel = open_aio_channel(self.target, credentials)
        self._channels.append(channel)
        return channel

    async def get_pool(self, credentials: Credentials) -> inspect_pb2.GetPoolResponse:
        stub = inspect_pb2_grpc.InspectServiceStub(self.channel(credentials))
        return await _typed(stub.GetPool(inspect_pb2.GetPoolRequest(), timeout=_SECONDS))

    async def acquire(self, credentials: Credentials, policy: str) -> Any:
        stub = publish_pb2_grpc.PublishServiceStub(self.channel(credentials))
        request = publish_pb2.AcquirePolicyRequest(
            policy=policy, kind=types_pb2.POLICY_KIND_ADAPTER, trainer_id="t", session_id="s"
        )
        return await _typed(stub.AcquirePolicy(request, timeout=_SECONDS))

    async def stop(self) -> None:
        for channel in self._channels:
            await channel.close()
        if self.coordinator:
            await self.coordinator.stop()


async def _typed(call: Any) -> Any:
    try:
        return await call
    except grpc.RpcError as error:
        raise error_from_rpc(error) from error


@pytest.fixture
async def secured(tmp_path: Path, request: pytest.FixtureRequest) -> AsyncIterator[Secured]:
    """Under ``ACCESS``, or the rules that a test names."""
    pool = Secured(tmp_path, getattr(request, "param", ACCESS))
    await pool.start()
    yield pool
    await pool.stop()


async def _reason(call: Any) -> str:
    with pytest.raises(WeftError) as caught:
        await call
    return caught.value.reason


async def test_a_replica_with_a_certificate_asks_before_it_loads_its_model(
    secured: Secured, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    shown = secured.authority.credentials("viewer.test")
    for name, path in (("CERT", shown.tls_cert), ("KEY", shown.tls_key), ("CA", shown.tls_ca)):
        monkeypatch.setenv(f"WEFT_TLS_{name}", path)
    await check_contact(AgentConfig(coordinator=secured.target, replica_id="r0"))
    assert "ROLE_MISSING" in caplog.text, "it was answered, and told the role that it lacks"


async def test_a_rollout_client_with_a_certificate_follows_the_routes(secured: Secured) -> None:
    shown = secured.authority.credentials("viewer.test")
    tls = Tls(ca=shown.tls_ca, cert=shown.tls_cert, key=shown.tls_key)
    with RolloutClient(secured.target, tls=tls) as rollouts:
        call = asyncio.to_thread(rollouts.generate, [[1]], timeout_seconds=0.5)
        assert await _reason(call) == "DEADLINE", "no replica is there"


async def test_who_has_no_certificate_or_another_authoritys_is_not_connected(
    secured: Secured, tmp_path: Path
) -> None:
    known = identities(secured.authority, tmp_path, "viewer.test")
    assert (await secured.get_pool(known["mallory"])).coordinator_generation == 1
    for nobody in (known["nobody"], known["strange"], known["expired"], Credentials()):
        assert await _reason(secured.get_pool(nobody)) == "COORDINATOR_AWAY"
    wrong_ca = Authority(tmp_path)
    misled = replace(secured.authority.credentials("viewer.test"), tls_ca=wrong_ca.path)
    assert await _reason(secured.get_pool(misled)) == "COORDINATOR_AWAY", (
        "a server that is not ours"
    )


async def test_the_right_certificate_with_the_wrong_role(
    secured: Secured, audited: list[dict[str, str]]
) -> None:
    viewer = secured.authority.credentials("viewer.test")
    trainer = secured.authority.credentials("trainer.test")
    unknown = secured.authority.credentials("somebody.test")
    assert await _reason(secured.acquire(viewer, "math")) == "ROLE_MISSING"
    assert await _reason(secured.get_pool(trainer)) == "ROLE_MISSING"
    assert await _reason(secured.acquire(trainer, "chess")) == "POLICY_NOT_ALLOWED"
    stub = publish_pb2_grpc.PublishServiceStub(secured.channel(trainer))
    wake = stub.WakeRollouts(publish_pb2.WakeRolloutsRequest(), timeout=_SECONDS)
    assert await _reason(_typed(wake)) == "POLICY_NOT_ALLOWED"  # a part of the base's lease
    assert await _reason(secured.get_pool(unknown)) == "UNAUTHENTICATED"
    shown = [(line["who"], line["call"].rpartition("/")[2], line["result"]) for line in audited]
    assert ("trainer.test", "AcquirePolicy", "POLICY_NOT_ALLOWED") in shown
    assert all(line["from"].startswith("ipv4:127.0.0.1:") for line in audited)


async def test_every_mutating_call_leaves_a_line(
    secured: Secured, audited: list[dict[str, str]]
) -> None:
    trainer = secured.authority.credentials("trainer.test")
    await secured.acquire(trainer, "math")
    operator = secured.authority.credentials("anna.ops.test")
    stub = admin_pb2_grpc.AdminServiceStub(secured.channel(operator))
    request = admin_pb2.CordonRequest(replica_id="r7", reason="disk")
    assert await _reason(_typed(stub.Cordon(request, timeout=_SECONDS))) == "REPLICA_UNKNOWN"
    forget = admin_pb2.ForgetPolicyRequest(policy="math")
    assert await _reason(_typed(stub.ForgetPolicy(forget, timeout=_SECONDS))) == "POLICY_OWNED"
    third = audited.pop()
    assert (third["who"], third["policy"]) == ("anna.ops.test", "math")
    assert third["call"].endswith("/ForgetPolicy")
    first, second = audited
    assert (first["who"], first["policy"], first["result"]) == ("trainer.test", "math", "OK")
    assert (second["who"], second["replica_id"]) == ("anna.ops.test", "r7")
    assert second["result"] == "REPLICA_UNKNOWN"


async def test_who_lives_on_leaves_no_line_and_who_is_refused_does(
    secured: Secured, audited: list[dict[str, str]]
) -> None:
    trainer = secured.authority.credentials("trainer.test")
    lease = (await secured.acquire(trainer, "math")).lease
    stub = publish_pb2_grpc.PublishServiceStub(secured.channel(trainer))
    request = publish_pb2.RenewLeaseRequest(policy="math", fencing_token=lease.fencing_token)
    await _typed(stub.RenewLease(request, timeout=_SECONDS))
    request.fencing_token += 1
    assert await _reason(_typed(stub.RenewLease(request, timeout=_SECONDS))) == "LEASE_FENCED"
    shown = [(line["call"].rpartition("/")[2], line["result"]) for line in audited]
    assert shown == [("AcquirePolicy", "OK"), ("RenewLease", "LEASE_FENCED")]


@pytest.mark.parametrize("secured", [TOKEN_ACCESS], indirect=True)
async def test_tokens(secured: Secured) -> None:
    tls = Credentials(tls_ca=secured.authority.path)
    viewer = replace(tls, token=TOKEN)
    assert (await secured.get_pool(viewer)).coordinator_generation == 1
    assert await _reason(secured.get_pool(tls)) == "UNAUTHENTICATED"
    assert await _reason(secured.get_pool(replace(tls, token="guess"))) == "UNAUTHENTICATED"
    assert await _reason(secured.acquire(viewer, "math")) == "ROLE_MISSING"


@pytest.mark.parametrize("secured", [TOKEN_ACCESS], indirect=True)
async def test_a_token_file_is_read_again(secured: Secured) -> None:
    file = secured.folder / "token"
    file.write_text("an-old-one\n")
    viewer = Credentials(tls_ca=secured.authority.path, token_file=str(file))
    stub = inspect_pb2_grpc.InspectServiceStub(secured.channel(viewer))
    call = lambda: _typed(stub.GetPool(inspect_pb2.GetPoolRequest(), timeout=_SECONDS))  # noqa: E731
    assert await _reason(call()) == "UNAUTHENTICATED"
    file.write_text(f"{TOKEN}\n")
    assert (await call()).coordinator_generation == 1


def test_a_token_is_not_sent_where_others_read_it() -> None:
    shown = Credentials(token=TOKEN)
    assert shown.metadata("127.0.0.1:50051") == (("authorization", f"Bearer {TOKEN}"),)
    with pytest.raises(InvalidRequestError, match="over TLS only"):
        shown.metadata("10.0.0.7:50051")
    assert TOKEN not in repr(shown)


async def test_rules_that_change_are_used_at_the_next_call_and_end_streams(
    secured: Secured, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("weft_rl.rpc.inbound.STREAM_LOOK_SECONDS", 0.2)
    monkeypatch.setattr(guard, "LOOK_SECONDS", 0.05)
    viewer = secured.authority.credentials("viewer.test")
    stub = inspect_pb2_grpc.InspectServiceStub(secured.channel(viewer))
    stream = stub.WatchEvents(inspect_pb2.WatchEventsRequest(), timeout=_SECONDS)
    await secured.get_pool(viewer)
    await secured.acquire(secured.authority.credentials("trainer.test"), "math")
    secured.access.write_text("no toml [")
    await asyncio.sleep(0.1)
    await secured.get_pool(viewer)  # a bad file changes nothing
    secured.access.write_text(ACCESS.replace('san = "viewer.test"', 'san = "other.test"'))
    await asyncio.sleep(0.1)
    assert await _reason(secured.get_pool(viewer)) == "UNAUTHENTICATED"

    async def drain() -> None:
        async for _ in stream:
            pass

    assert await _reason(_typed(drain())) == "UNAUTHENTICATED"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (None, "No such file"),
        ("", "nobody could call"),
        ("no toml [", "not TOML"),
        (ACCESS.replace("viewer.test", "other.test"), "would lock out everybody"),
        (ACCESS.replace('["inspect"]', '["coordinator"]'), "would lock out everybody"),
    ],
    ids=["gone", "empty", "spoilt", "another name", "another role"],
)
async def test_rules_that_nobody_could_call_under_are_not_used_and_said(
    secured: Secured,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    text: str | None,
    says: str,
) -> None:
    monkeypatch.setattr(guard, "LOOK_SECONDS", 0.0)
    viewer = secured.authority.credentials("viewer.test")
    stub = inspect_pb2_grpc.InspectServiceStub(secured.channel(viewer))
    watch = lambda: _typed(anext(aiter(stub.WatchRoutes(inspect_pb2.WatchRoutesRequest()))))  # noqa: E731
    await watch()
    if text is None:
        secured.access.unlink()
    else:
        secured.access.write_text(text)
    await watch()
    (line,) = UNUSED_FILES.list()
    assert str(secured.access) in line
    assert says in line
    assert sum(says in record.message for record in caplog.records) == 1
    seen = await secured.get_pool(viewer)
    assert list(seen.unused_files) == [line]
    console = Console(width=300)
    with console.capture() as capture:
        console.print(render(seen))
    assert says in capture.get()
    secured.access.write_text(ACCESS)
    assert not (await secured.get_pool(viewer)).unused_files


@pytest.mark.parametrize("is_meant", [True, False], ids=["meant", "sparing another"])
async def test_a_lockout_that_is_meant_or_spares_one_who_calls_is_used(
    secured: Secured, monkeypatch: pytest.MonkeyPatch, is_meant: bool
) -> None:
    monkeypatch.setattr(guard, "LOOK_SECONDS", 0.0)
    viewer = secured.authority.credentials("viewer.test")
    await secured.get_pool(viewer)
    if not is_meant:
        await secured.acquire(secured.authority.credentials("trainer.test"), "math")
    meant = "lock_out = true\n" if is_meant else ""
    secured.access.write_text(meant + ACCESS.replace("viewer.test", "other.test"))
    assert await _reason(secured.get_pool(viewer)) == "UNAUTHENTICATED"


async def test_certificates_that_cannot_be_used_leave_those_before_them_in_force(
    secured: Secured, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the server, of channels that are open, and of new ones."""
    monkeypatch.setattr("weft_rl.rpc.channel._LOOK_SECONDS", 0.0)
    viewer = secured.authority.credentials("viewer.test")
    await secured.get_pool(viewer)
    for own in (secured.credentials, viewer):
        Path(own.tls_key).write_text("spoilt")
    assert (await secured.get_pool(viewer)).coordinator_generation == 1  # over a new channel
    assert [line.partition(":")[0] for line in UNUSED_FILES.list()] == sorted(
        [secured.credentials.tls_cert, viewer.tls_cert]
    )
    secured.authority.issue(secured.credentials.tls_cert, secured.credentials.tls_key, "127.0.0.1")
    secured.authority.issue(viewer.tls_cert, viewer.tls_key, "viewer.test")
    await secured.get_pool(viewer)
    assert not UNUSED_FILES.list()


@pytest.mark.parametrize("path", ["/dev/zero", "/dev/null", "{}", "fifo"])
def test_a_file_without_end_is_no_file_of_credentials(tmp_path: Path, path: str) -> None:
    if path == "fifo":
        path = str(tmp_path / "fifo")
        os.mkfifo(path)
    with pytest.raises(InvalidRequestError, match=r"regular file|Is a directory"):
        Credentials(token_file=path.format(tmp_path)).metadata("127.0.0.1:1")
    with pytest.raises(InvalidRequestError, match=r"regular file|Is a directory"):
        Credentials(tls_ca=path.format(tmp_path)).channel_credentials()


async def test_rules_of_the_other_kind_need_a_restart(
    secured: Secured, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The handshakes of a server that runs ask for certificates, or do not."""
    monkeypatch.setattr(guard, "LOOK_SECONDS", 0.05)
    viewer = secured.authority.credentials("viewer.test")
    await secured.get_pool(viewer)
    secured.access.write_text(TOKEN_ACCESS)
    await asyncio.sleep(0.1)
    await secured.get_pool(viewer)
    assert "restart" in caplog.text


async def test_a_channel_closes_the_connections_that_it_had_before_a_rotation(
    secured: Secured, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("weft_rl.rpc.channel._LOOK_SECONDS", 0.0)
    viewer = secured.authority.credentials("viewer.test")
    channel = secured.channel(viewer)
    stub = inspect_pb2_grpc.InspectServiceStub(channel)
    stream = stub.WatchEvents(inspect_pb2.WatchEventsRequest(), timeout=30)
    waiting = asyncio.ensure_future(anext(aiter(stream)))
    await _typed(stub.GetPool(inspect_pb2.GetPoolRequest(), timeout=_SECONDS))
    secured.authority.issue(viewer.tls_cert, viewer.tls_key, "viewer.test")
    await _typed(stub.GetPool(inspect_pb2.GetPoolRequest(), timeout=_SECONDS))
    assert not waiting.done()
    await channel.close()
    async with asyncio.timeout(_SECONDS):
        (ended,) = await asyncio.gather(waiting, return_exceptions=True)
    assert isinstance(ended, grpc.RpcError | asyncio.CancelledError)


async def test_certificates_are_rotated_under_a_stream(
    secured: Secured, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("weft_rl.rpc.channel._LOOK_SECONDS", 0.0)
    viewer = secured.authority.credentials("viewer.test")
    stub = inspect_pb2_grpc.InspectServiceStub(secured.channel(viewer))
    stream = stub.WatchEvents(inspect_pb2.WatchEventsRequest(), timeout=30)
    first = asyncio.ensure_future(anext(aiter(stream)))
    call = lambda: _typed(stub.GetPool(inspect_pb2.GetPoolRequest(), timeout=_SECONDS))  # noqa: E731
    await call()
    own = secured.credentials
    secured.authority.issue(own.tls_cert, own.tls_key, "localhost", "127.0.0.1")
    secured.authority.issue(viewer.tls_cert, viewer.tls_key, "viewer.test")
    await call()  # over a new connection
    assert not first.done(), "the stream keeps its session"
    trainer = secured.authority.credentials("trainer.test")
    await secured.acquire(trainer, "math")
    assert (await first).kind == inspect_pb2.EVENT_KIND_LEASE_ACQUIRED
    soon = datetime.now(UTC) - timedelta(seconds=1)
    secured.authority.issue(viewer.tls_cert, viewer.tls_key, "viewer.test", not_after=soon)
    assert await _reason(call()) == "COORDINATOR_AWAY", (
        "an expired one is refused at the next handshake"
    )
    stream.cancel()


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"credentials": Credentials(), "access": None}, "--insecure"),
        ({"access": None}, "--access"),
        ({"credentials": Credentials()}, "--tls-cert"),
    ],
)
async def test_no_server_serves_strangers_unasked(
    tmp_path: Path, change: dict[str, Any], says: str
) -> None:
    pool = Secured(tmp_path)
    coordinator = Coordinator(
        CoordinatorConfig(
            catalog=tmp_path / "weft.db",
            listen="0.0.0.0:0",
            **{"credentials": pool.credentials, "access": pool.access, **change},
        )
    )
    with pytest.raises(InvalidRequestError, match=says):
        await coordinator.start()


async def test_insecure_is_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    made = await server.make_server([])
    with caplog.at_level(logging.WARNING):
        server.check_exposure("0.0.0.0:50051", server.Security(insecure=True))
    assert [r.message for r in caplog.records] == [
        "0.0.0.0:50051 serves everybody who reaches it: --insecure"
    ]
    await made.server.stop(0)


@pytest.mark.parametrize("secured", [ACCESS + "[limits]\nstreams = 2\n"], indirect=True)
async def test_one_identity_has_only_so_much_in_flight(secured: Secured) -> None:
    viewer = secured.authority.credentials("viewer.test")
    stub = inspect_pb2_grpc.InspectServiceStub(secured.channel(viewer))
    watch: Callable[[], Any] = lambda: stub.WatchEvents(  # noqa: E731
        inspect_pb2.WatchEventsRequest(), timeout=_SECONDS
    )
    streams = [watch() for _ in range(2)]
    waiting = [asyncio.ensure_future(anext(aiter(stream))) for stream in streams]
    await asyncio.sleep(0.2)
    assert await _reason(_typed(anext(aiter(watch())))) == "TOO_MANY_CALLS"
    assert not any(task.done() for task in waiting)
    for stream in streams:
        stream.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    await secured.get_pool(viewer)


def _services_of(channel: grpc.aio.Channel, version: str, *, asks: bool = True) -> Any:
    """A call of reflection that stays open: what the services of a server are.

    Where it is refused it must ask nothing: grpc.aio calls a write INTERNAL that the end of the
    call has overtaken, and forgets what the server said.
    """
    call = channel.stream_stream(
        f"/grpc.reflection.{version}.ServerReflection/ServerReflectionInfo",
        request_serializer=reflection_pb2.ServerReflectionRequest.SerializeToString,
        response_deserializer=reflection_pb2.ServerReflectionResponse.FromString,
    )

    async def requests() -> AsyncIterator[Any]:
        if asks:
            yield reflection_pb2.ServerReflectionRequest(list_services="")
        await asyncio.sleep(_SECONDS)

    return call(requests(), timeout=_SECONDS)


@pytest.mark.parametrize("secured", [ACCESS + "[limits]\nstreams = 2\n"], indirect=True)
@pytest.mark.parametrize("version", ["v1", "v1alpha"])
async def test_reflection_asks_who_calls_counts_them_and_says_who_was_refused(
    secured: Secured, version: str, caplog: pytest.LogCaptureFixture
) -> None:
    stranger = secured.channel(
        secured.authority.credentials("nobody.test")
    )  # of the CA, in no rule
    with caplog.at_level(logging.INFO, logger="weft_rl.audit"):
        shown = _typed(anext(aiter(_services_of(stranger, version, asks=False))))
        assert await _reason(shown) == "UNAUTHENTICATED"
    (line,) = [r.message for r in caplog.records if r.name == "weft_rl.audit"]
    assert "ServerReflectionInfo" in line
    assert "UNAUTHENTICATED" in line
    viewer = secured.channel(secured.authority.credentials("viewer.test"))
    caplog.clear()
    with caplog.at_level(logging.INFO, logger="weft_rl.audit"):
        calls = [_services_of(viewer, version) for _ in range(2)]
        for call in calls:
            answer = await anext(aiter(call))
            names = {s.name for s in answer.list_services_response.service}
            assert "weft.v1.InspectService" in names
        refused = _services_of(viewer, version, asks=False)
        assert await _reason(_typed(anext(aiter(refused)))) == "TOO_MANY_CALLS"
        for call in calls:
            call.cancel()
        await secured.get_pool(secured.authority.credentials("viewer.test"))
    lines = [r.message for r in caplog.records if r.name == "weft_rl.audit"]
    assert len(lines) == 1, lines  # of the one that was refused
