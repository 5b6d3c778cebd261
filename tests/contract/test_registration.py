"""A replica that the coordinator refuses, or cannot answer: one that serves stays, says why and
asks again."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from concurrent import futures
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from grpc_status import rpc_status

from rollout_side.agent.registration import HeldVersions, Registration
from rollout_side.config import AgentConfig
from tests.doubles.certificates import Authority
from tests.doubles.tiny_model import CAPABILITIES, REFERENCE
from tests.waits import until
from weft_rl.contract.errors import (
    BaseMismatchError,
    CapacityError,
    InvalidManifestError,
    InvalidNameError,
    NotAllowedError,
    NotFoundError,
    NotReadyError,
    RequestConflictError,
    UnauthenticatedError,
    WeftError,
)
from weft_rl.contract.replica_report import ReplicaReport
from weft_rl.rpc.codec import duration_to_proto
from weft_rl.rpc.status import status_from_error
from weft_rl.v1 import registry_pb2, registry_pb2_grpc

_SECONDS = 10.0
_CONTACT_SECONDS = 1.0
REFUSALS = [
    UnauthenticatedError("the bearer token is none of the access file's"),
    NotAllowedError("r0 may not call Heartbeat: its roles are none", reason="ROLE_MISSING"),
    NotReadyError("the coordinator speaks revision 99", reason="REVISION_MISMATCH"),
    BaseMismatchError("another base model"),
    InvalidNameError("a served name is that of an adapter"),
    RequestConflictError("a live replica has this id"),
    NotReadyError("a reason that nobody knows yet", reason="OF_NEXT_YEAR"),
]


class Registry(registry_pb2_grpc.RegistryServiceServicer):
    """Fails as often as it is told to, then answers."""

    def __init__(self, errors: list[WeftError]) -> None:
        self.errors = errors
        self.registered, self.refused = threading.Event(), threading.Event()
        self.beats = 0
        self.requests: list[Any] = []
        #: Answers every call while it is set.
        self.refusal: WeftError | None = None
        self.answer = registry_pb2.HeartbeatResponse(ready=True)
        #: Asks for a description of the base, and refuses it.
        self.refused_description: WeftError | None = None
        #: What ended the replica, if something did.
        self.failed: list[WeftError] = []
        self.ended = threading.Event()

    def fail(self, error: WeftError) -> None:
        self.failed.append(error)
        self.ended.set()

    def _refuse(self, context: Any) -> None:
        error = self.refusal or (self.errors.pop(0) if self.errors else None)
        if error is not None:
            self.refused.set()
            context.abort_with_status(rpc_status.to_status(status_from_error(error)))

    def Register(self, request: Any, context: Any) -> Any:  # noqa: N802
        self.requests.append(request)
        self._refuse(context)
        self.registered.set()
        return registry_pb2.RegisterResponse(
            heartbeat_interval=duration_to_proto(0.02),
            coordinator_generation=3,
            reference_wanted=self.refused_description is not None,
        )

    def PutReference(self, requests: Any, context: Any) -> Any:  # noqa: N802
        assert self.refused_description is not None
        status = status_from_error(self.refused_description)
        context.abort_with_status(rpc_status.to_status(status))

    def Heartbeat(self, request: Any, context: Any) -> Any:  # noqa: N802
        self._refuse(context)
        self.beats += 1
        return self.answer

    def Leave(self, request: Any, context: Any) -> Any:  # noqa: N802
        return registry_pb2.LeaveResponse()


Start = Callable[..., Registration]


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    """Starts a registration of little patience with a registry; both end with the test."""
    monkeypatch.setattr("rollout_side.agent.registration._RETRY_SECONDS", 0.01)
    with contextlib.ExitStack() as stack:

        def begin(
            registry: Registry,
            current: Callable[[], HeldVersions] = lambda: HeldVersions(ReplicaReport()),
            credentials: grpc.ServerCredentials | None = None,
        ) -> Registration:
            server = grpc.server(futures.ThreadPoolExecutor(4))
            registry_pb2_grpc.add_RegistryServiceServicer_to_server(registry, server)
            listen = "127.0.0.1:0"
            if credentials:
                port = server.add_secure_port(listen, credentials)
            else:
                port = server.add_insecure_port(listen)
            server.start()
            stack.callback(lambda: server.stop(None).wait())
            registration = _registration(f"127.0.0.1:{port}", registry.fail, current)
            registration.start()
            stack.callback(registration.stop)
            return registration

        yield begin


def _registration(
    target: str, failed: Callable[[WeftError], None], current: Callable[[], HeldVersions]
) -> Registration:
    engine: Any = SimpleNamespace(
        capabilities=replace(CAPABILITIES, reference_digest="d" * 64),
        reference=REFERENCE,
        model_name="tiny",
    )
    config = AgentConfig(
        coordinator=target,
        replica_id="r0",
        unready_after_seconds=_CONTACT_SECONDS,
        conflict_patience_seconds=0.05,
    )
    return Registration(
        config,
        "127.0.0.1:1",
        engine,
        current=current,
        on_failed=failed,
        on_answer=lambda told: None,
    )


def test_a_replica_outlives_a_coordinator_that_fails(
    start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    error = WeftError("the coordinator failed on this call; read its log")
    registry = Registry([error, error, CapacityError("too many calls", reason="TOO_SLOW")])
    start(registry)
    assert registry.registered.wait(_SECONDS)
    assert not registry.failed
    assert len(registry.requests) == 4
    told = [record.message for record in caplog.records if "tries again" in record.message]
    assert len(told) == 2, "once for each reason"
    assert "the coordinator failed on this call" in told[0]


def test_it_tells_the_next_coordinator_what_it_was_ordered_last(start: Start) -> None:
    registry = Registry([])
    order = registry_pb2.OutOfService(no_pushes=True, reason="nonsense")
    start(registry)

    def forgets(number: int) -> None:
        """Once the newest answer was heard, the coordinator is another one."""
        beats = registry.beats
        until(lambda: registry.beats > beats + 1)
        registry.errors.append(NotFoundError("register again", reason="REPLICA_UNKNOWN"))
        until(lambda: len(registry.requests) == number)

    until(lambda: registry.beats > 0)
    registry.answer = registry_pb2.HeartbeatResponse(out_of_service=order, epoch=41)
    forgets(2)
    registry.answer = registry_pb2.HeartbeatResponse(epoch=42)
    forgets(3)
    first, second, third = registry.requests
    assert not first.HasField("out_of_service")
    assert (second.out_of_service, second.last_epoch) == (order, 41)
    assert (third.HasField("out_of_service"), third.last_epoch) == (False, 42)


@pytest.mark.parametrize("error", REFUSALS, ids=lambda error: error.reason)
def test_a_refusal_never_ends_a_replica_that_was_taken_in(
    start: Start, caplog: pytest.LogCaptureFixture, error: WeftError
) -> None:
    registry = Registry([])
    registration = start(registry)
    until(registration.ready.is_set)
    registry.refusal = error
    until(lambda: not registration.in_contact)
    assert error.message in registration.trouble
    assert not registration.is_known
    registration.registered.clear()  # as after NOT_FOUND: Register is refused alike
    num_requests = len(registry.requests)
    until(lambda: len(registry.requests) > num_requests + 2)
    registry.refusal = None
    until(lambda: registration.in_contact and registration.is_known)
    assert not registration.trouble
    assert not registry.failed
    said = [r.message for r in caplog.records if error.message in r.message]
    assert len(said) == 1, "once, however often it is asked again"


@pytest.mark.parametrize("error", REFUSALS, ids=lambda error: error.reason)
def test_at_a_fresh_start_what_the_replica_itself_is_ends_it_and_nothing_else_does(
    start: Start, error: WeftError
) -> None:
    """Access files, tokens and revisions are mended by others, while it waits."""
    registry = Registry([])
    registry.refusal = error
    start(registry)
    is_final = error.reason in {"BASE_MISMATCH", "INVALID_NAME", "REQUEST_CONFLICT"}
    if is_final:
        assert registry.ended.wait(_SECONDS)
    else:
        until(lambda: len(registry.requests) > 3)
        registry.refusal = None
        assert registry.registered.wait(_SECONDS)
    assert [refusal.reason for refusal in registry.failed] == ([error.reason] if is_final else [])


def test_a_replica_whose_first_description_is_refused_ends_with_the_reason(start: Start) -> None:
    registry = Registry([])
    registry.refused_description = InvalidManifestError("a module has 9 other names")
    start(registry)
    assert registry.ended.wait(_SECONDS)
    assert [refusal.message for refusal in registry.failed] == ["a module has 9 other names"]
    assert registry.beats == 0


def test_what_fails_in_the_replica_itself_does_not_end_its_thread_in_silence(
    start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    registry, broken = Registry([]), True

    def current() -> HeldVersions:
        if broken:
            raise ValueError("a directory that nobody can parse")
        return HeldVersions(ReplicaReport())

    registration = start(registry, current)
    until(lambda: "a directory that nobody can parse" in registration.trouble)
    broken = False
    assert registry.registered.wait(_SECONDS)
    until(lambda: not registration.trouble)
    assert not registry.failed
    assert sum("nobody can parse" in record.message for record in caplog.records) == 1


def test_an_expired_certificate_is_called_so(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    authority = Authority(tmp_path)
    own = authority.credentials("localhost", "127.0.0.1", file="server")
    before = datetime.now(UTC) - timedelta(seconds=5)
    expired = authority.credentials("replica.test", not_after=before)
    for variable, value in expired.to_environment().items():
        monkeypatch.setenv(variable, value)
    registry = Registry([])
    registration = start(registry, credentials=own.server_credentials(ask=True))
    until(lambda: "certificate has expired" in registration.trouble)
    assert expired.tls_cert in registration.trouble
    assert not registry.failed


def test_a_token_file_that_is_away_keeps_the_token_that_it_held(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "token"
    file.write_text("a-token-of-many-characters")
    monkeypatch.setenv("WEFT_TOKEN_FILE", str(file))
    monkeypatch.setattr("weft_rl.rpc.channel._LOOK_SECONDS", 0.0)
    registry = Registry([])
    registration = start(registry)
    until(registration.ready.is_set)
    file.unlink()
    beats = registry.beats
    until(lambda: registry.beats > beats + 3)
    assert registration.in_contact
    assert not registry.failed
