"""What one client, or a thousand, may take of a server; and a push that succeeds meanwhile.

Bounds are made small where waiting for the real ones would take long. That what is set is
what gRPC acts by is shown here, too: a name that it does not know it ignores.
"""

from __future__ import annotations

import socket
import ssl
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from tests.doubles import attacks
from tests.doubles.attacks import refusal
from tests.doubles.audit_log import audit_lines
from tests.doubles.certificates import Authority
from tests.doubles.engine import EngineDouble
from tests.doubles.pool import Pool, running_pool
from tests.doubles.raw_http2 import (
    DATA,
    MAX_CONCURRENT_STREAMS,
    RST_STREAM,
    SETTINGS,
    Frame,
    RawClient,
)
from tests.integration.models import Model, lora, peft_of, same, weights
from tests.waits import until
from trainer_side import Publisher, Tls
from weft_rl.coordinator.runtime.watchers import MAX_BEHIND
from weft_rl.rpc import inbound, server
from weft_rl.rpc.channel import MAX_MESSAGE_BYTES, open_channel
from weft_rl.rpc.security import guard
from weft_rl.rpc.security.credentials import Credentials
from weft_rl.rpc.security.guard import AccessFile
from weft_rl.rpc.server import Security
from weft_rl.v1 import publish_pb2 as pb
from weft_rl.v1.publish_pb2_grpc import PublishServiceStub

_SECONDS = 10.0
#: A push's deadline here: it takes a tenth of a second where nobody is in its way.
_PUSH_SECONDS = 10.0
_REFUSED_STREAM = (7).to_bytes(4, "big")
_REPLICA = """
[[identity]]
san = "127.0.0.1"
roles = ["coordinator"]
"""


class Attacked:
    """A pool of one replica where all show certificates; a trainer, and Mallory, who is known
    there, too, and may push another policy."""

    def __init__(self, pool: Pool, authority: Authority, lines: list[dict[str, str]]) -> None:
        self.pool, self.lines = pool, lines
        self.trainer = authority.credentials("trainer.test")
        self.mallory = authority.credentials("mallory.test")
        own = Tls(ca=authority.path, cert=self.trainer.tls_cert, key=self.trainer.tls_key)
        self._publisher = Publisher(
            pool.target, trainer_id="t", timeout_seconds=_PUSH_SECONDS, tls=own
        )
        self._num_pushes = 0

    @property
    def coordinator(self) -> Any:
        return self.pool.coordinator

    def push(self) -> None:
        """A legitimate push, which has its bytes served by its deadline."""
        self._num_pushes += 1
        model = peft_of(Model(self._num_pushes))
        began = time.monotonic()
        assert (
            str(self._publisher.push_adapter(model, "math").version) == f"math@{self._num_pushes}"
        )
        assert time.monotonic() - began < _PUSH_SECONDS
        (agent,) = self.pool.agents.values()
        assert isinstance(agent.engine, EngineDouble)
        assert same(agent.engine.adapter(f"math@{self._num_pushes}"), lora(model))

    def audited(self, **facts: str) -> list[dict[str, str]]:
        return [line for line in self.lines if facts.items() <= line.items()]

    def close(self) -> None:
        self._publisher.close()


@contextmanager
def attacked(folder: Path, monkeypatch: pytest.MonkeyPatch, **options: int) -> Iterator[Attacked]:
    """A pool under attack whose coordinator has these arguments of gRPC's otherwise."""
    named = dict(server.SERVER_OPTIONS) | {f"grpc.{name}": n for name, n in options.items()}
    monkeypatch.setattr(server, "SERVER_OPTIONS", list(named.items()))
    authority = Authority(folder)
    own = authority.credentials("localhost", "127.0.0.1", file="server")
    for variable, value in own.to_environment().items():
        monkeypatch.setenv(variable, value)
    at_coordinator, at_replica = folder / "coordinator.toml", folder / "replica.toml"
    at_coordinator.write_text(attacks.ACCESS)
    at_replica.write_text(_REPLICA)
    with (
        audit_lines() as lines,
        running_pool(folder / "weft.db", credentials=own, access=at_coordinator) as pool,
    ):
        pool.security = Security(credentials=own, access=AccessFile(at_replica))
        pool.add_replica("replica-0", EngineDouble(weights(Model())))
        with closing(Attacked(pool, authority, lines)) as made:
            made.push()
            yield made


@pytest.fixture
def under(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Attacked]:
    with attacked(tmp_path, monkeypatch) as made:
        yield made


def _plain(target: str) -> socket.socket:
    host, _, port = target.rpartition(":")
    return socket.create_connection((host, int(port)), timeout=_SECONDS)


def _closed_after(connection: socket.socket) -> float:
    """How long the server waits for somebody who says no more."""
    began = time.monotonic()
    with suppress(ConnectionError):
        assert connection.recv(1) == b"", "it is not answered either"
    return time.monotonic() - began


# -- connections -------------------------------------------------------------------


def test_no_more_connections_than_there_may_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with attacked(tmp_path, monkeypatch, max_allowed_incoming_connections=30) as under:
        clients = []
        num_refused = 0
        for _ in range(60):
            try:
                client = RawClient(under.pool.target, under.mallory)
            except OSError:
                num_refused += 1
                continue
            clients.append(client)
            num_refused += next(client.frames(_SECONDS), None) is None
        assert 30 <= num_refused < 60
        under.push()  # over connections that are there
        for client in clients:
            client.close()
        until(lambda: _is_served(under))


def _is_served(under: Attacked) -> bool:
    try:
        client = RawClient(under.pool.target, under.mallory)
    except OSError:
        return False
    with closing(client):
        return next(client.frames(1.0), None) is not None


# -- those who are slow on purpose ---------------------------------------------------


@pytest.mark.parametrize("begun", [b"", b"\x16\x03\x01\x02\x00\x01"], ids=["silent", "half"])
def test_a_handshake_that_never_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, begun: bytes
) -> None:
    with attacked(tmp_path, monkeypatch, server_handshake_timeout_ms=1000) as under:
        connections = [_plain(under.pool.target) for _ in range(50)]
        for connection in connections:
            connection.sendall(begun)
        under.push()
        for connection in connections:
            with connection:
                assert _closed_after(connection) < 3.0
        under.push()


def test_tls_and_then_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with attacked(tmp_path, monkeypatch, server_handshake_timeout_ms=1000) as under:
        context = ssl.create_default_context(cafile=under.mallory.tls_ca)
        context.load_cert_chain(under.mallory.tls_cert, under.mallory.tls_key)
        context.set_alpn_protocols(["h2"])
        with context.wrap_socket(_plain(under.pool.target), server_hostname="127.0.0.1") as made:
            under.push()
            made.settimeout(_SECONDS)
            began = time.monotonic()
            with suppress(OSError):
                while made.recv(4096):
                    pass
            assert time.monotonic() - began < 3.0


@pytest.mark.parametrize("begun", [b"", bytes([0, 0, 50, 1, 4])], ids=["idle", "half a frame"])
def test_a_connection_without_calls(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, begun: bytes
) -> None:
    with attacked(tmp_path, monkeypatch, max_connection_idle_ms=1000) as under:
        clients = [RawClient(under.pool.target, under.mallory) for _ in range(20)]
        for client in clients:
            client.send(begun)
        under.push()
        for client in clients:
            with closing(client):
                assert client.seconds_until_closed(_SECONDS) < 5.0
        under.push()


def test_no_more_calls_on_a_connection_than_there_may_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (
        attacked(tmp_path, monkeypatch, max_concurrent_streams=8) as under,
        closing(RawClient(under.pool.target, under.mallory)) as client,
    ):
        streams = [client.call("weft.v1.InspectService/WatchEvents") for _ in range(20)]
        frames = list(client.frames(1.0))  # until those that are let in watch
        under.push()
        frames += client.frames(1.0)
        (allowed,) = {n for f in frames if (n := _setting(f, MAX_CONCURRENT_STREAMS)) is not None}
        assert allowed == 8
        answered = {f.stream for f in frames if f.kind == DATA}
        assert len(answered) == 8
        reset = {f.stream for f in frames if (f.kind, f.data) == (RST_STREAM, _REFUSED_STREAM)}
        assert not answered & reset
        assert answered | reset <= set(streams)


def _setting(found: Frame, name: int) -> int | None:
    pairs = [found.data[i : i + 6] for i in range(0, len(found.data), 6)]
    values = {int.from_bytes(p[:2], "big"): int.from_bytes(p[2:], "big") for p in pairs}
    return values.get(name) if found.kind == SETTINGS else None


def test_the_bounds_that_a_server_has_by_default(under: Attacked) -> None:
    """The arguments that the tests above make small are those that a server is given."""
    options = dict(server.SERVER_OPTIONS)
    assert options["grpc.server_handshake_timeout_ms"] == 10_000
    assert options["grpc.max_connection_idle_ms"] == 600_000
    assert options["grpc.max_allowed_incoming_connections"] == 16_384
    assert options["grpc.max_concurrent_streams"] == 1_024


# -- watches that nobody reads -------------------------------------------------------


@pytest.mark.parametrize("method", ["WatchEvents", "WatchRoutes"])
def test_a_watch_that_never_reads_is_ended(
    under: Attacked, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    monkeypatch.setattr(inbound, "SEND_SECONDS", 1.0)
    name = f"weft.v1.InspectService/{method}"
    client = RawClient(under.pool.target, under.mallory, window=0)
    with closing(client):
        client.call(name)
        feed = under.coordinator.driver.feed
        if method == "WatchEvents":
            until(lambda: len(feed.watchers) == 1)
            (watcher,) = feed.watchers
            for _ in range(MAX_BEHIND * 3):
                under.pool.call(lambda: feed.publish(0.0, _event()))
                assert len(watcher._queue) <= MAX_BEHIND
        under.push()
        until(lambda: bool(under.audited(call=name)))
        (line,) = under.audited(call=name)
        assert (line["who"], line["result"]) == ("mallory.test", "TOO_SLOW")
        until(lambda: not feed.watchers)
    under.push()


def _event() -> Any:
    from weft_rl.coordinator.decisions.state.effects import Announce, EventKind

    return Announce(EventKind.REPLICA_READY, "r0", "x" * 200)


def test_a_stream_that_nobody_reads_ends_with_its_identity(
    under: Attacked, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inbound, "STREAM_LOOK_SECONDS", 0.2)
    monkeypatch.setattr(guard, "LOOK_SECONDS", 0.05)
    with closing(RawClient(under.pool.target, under.mallory, window=0)) as client:
        client.call("weft.v1.InspectService/WatchEvents")
        feed = under.coordinator.driver.feed
        until(lambda: len(feed.watchers) == 1)
        under.push()  # it has something to say now, and cannot
        rules = under.coordinator.config.access
        rules.write_text(attacks.ACCESS.replace("mallory.test", "nobody.test"))
        until(lambda: not feed.watchers)


# -- calls that must not be answered -------------------------------------------------


@contextmanager
def _publishing(under: Attacked, who: Credentials) -> Iterator[PublishServiceStub]:
    with open_channel(under.pool.target, who) as channel:
        yield PublishServiceStub(channel)


def test_a_message_that_is_too_large(under: Attacked) -> None:
    large = pb.RenewLeaseRequest(policy="chess", session_id="x" * (MAX_MESSAGE_BYTES + 1))
    with _publishing(under, under.mallory) as stub:
        error = refusal(lambda: stub.RenewLease(large, timeout=_SECONDS))
    assert error.status == "RESOURCE_EXHAUSTED"
    # A client that has no bound of its own: the server has.
    for answer in islice(attacks.oversized(under.pool.target, under.mallory), 3):
        assert answer == "RESOURCE_EXHAUSTED", "and it is not read to its end"
    under.push()


def test_a_fencing_token_that_is_shown_again(under: Attacked) -> None:
    with _publishing(under, under.trainer) as stub:
        old, new = attacks.displaced(stub)
        assert new > old
        for token, session in ((old, "old"), (old, "new"), (new, "old")):
            error = refusal(lambda: attacks.begin(stub, token, session))  # noqa: B023
            assert (error.status, error.reason) == ("ABORTED", "LEASE_FENCED")
    assert len(under.audited(who="trainer.test", policy="code", result="LEASE_FENCED")) == 3
    under.push()


def test_a_policy_of_somebody_elses(under: Attacked) -> None:
    """Also with the fencing token of a lease of one's own."""
    with _publishing(under, under.mallory) as stub:
        token = attacks.acquire(stub, "chess", "m")
        for call in (
            lambda: attacks.acquire(stub, "math", "m"),
            lambda: attacks.abort(stub, "math", token),
        ):
            error = refusal(call)
            assert (error.status, error.reason) == ("PERMISSION_DENIED", "POLICY_NOT_ALLOWED")
    lines = under.audited(who="mallory.test", policy="math", result="POLICY_NOT_ALLOWED")
    assert [line["call"].rpartition("/")[2] for line in lines] == ["AcquirePolicy", "AbortTransfer"]
    under.push()


def test_whatever_an_attack_asks_it_is_answered_so_while_a_push_succeeds(
    under: Attacked, tmp_path: Path
) -> None:
    """Those that ``benchmarks.attacked`` times, a thousand idle connections among them."""
    known = attacks.identities(Authority.of(under.mallory.tls_ca), tmp_path)
    for name, attack in attacks.ATTACKS.items():
        attempts = attack.attempts(under.pool.target, known[attack.who])
        with closing(attempts):
            assert next(attempts) == attack.answer, name
            under.push()
            assert next(attempts) == attack.answer, name
    under.push()
