"""What rank 0 makes of a push that other ranks send."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import grpc
import pytest

from trainer_side.pool import client as module
from trainer_side.pool.backend_selection import BackendSelection
from trainer_side.pool.client import PoolClient, reporter_for
from trainer_side.pushes.rank_push import RankPush
from weft_rl.contract.errors import PeerUnavailableError, TransferTimeoutError
from weft_rl.contract.manifest import Manifest, plan_buckets
from weft_rl.contract.tensors import DataType, TensorMeta
from weft_rl.v1 import publish_pb2 as pb
from weft_rl.v1 import types_pb2

MANIFEST: Manifest = plan_buckets([TensorMeta("w", DataType.FLOAT32, (8,))], 1024)
BEGUN = pb.BeginTransferResponse(
    transfer_id="t",
    version=types_pb2.PolicyVersion(policy="base", version=3),
    group=pb.GroupPlan(group_id="g", epoch=2, backend="gloo"),
)


class Others(RankPush):
    """The other ranks send; this one has nothing to add."""

    def __init__(self) -> None:
        self.added, self.num_bytes = 0, MANIFEST.total_bytes

    def add_up(self, totals: Any = None) -> Any:
        self.added += 1


class Coordinator:
    """What becomes of the transfer, as it is told."""

    target, credentials = "127.0.0.1:1", None

    def __init__(self, outcome: pb.Transfer | Exception) -> None:
        self._outcome = outcome
        self.aborted: list[BaseException] = []
        self.stub = SimpleNamespace(AwaitTransfer=self._await)
        self.leases = SimpleNamespace(published=lambda policy: None)

    def _await(self, request: pb.AwaitTransferRequest, timeout: float) -> None:
        raise grpc.RpcError

    def call(
        self, call: Callable[[float], Any], deadline: float, waits_for: str
    ) -> pb.AwaitTransferResponse:
        if isinstance(self._outcome, Exception):
            raise self._outcome
        return pb.AwaitTransferResponse(transfer=self._outcome)

    def abort(self, begun: pb.BeginTransferResponse, error: BaseException) -> None:
        self.aborted.append(error)


def client_of(coordinator: Coordinator, progress: Callable[[str, int, int], None]) -> PoolClient:
    given: Any = coordinator
    return PoolClient(given, "127.0.0.1", BackendSelection("gloo"), reporter_for(progress))


def test_its_success_is_shown_as_that_of_any_push() -> None:
    transfer = pb.Transfer(transfer_id="t", epoch=2, num_buckets=4, num_buckets_verified=4)
    shown: list[tuple[str, int, int]] = []
    others = Others()
    client = client_of(Coordinator(transfer), lambda *said: shown.append(said))
    assert client.outcome(BEGUN, others, time.monotonic() + 5) == transfer
    assert shown == [("base@3", 4, 4)]
    assert others.added == 1


def test_its_failure_is_told_and_says_what_it_has_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    verdict = PeerUnavailableError("it died", metadata={"replicas": "replica-0"})
    monkeypatch.setattr(module, "error_from_rpc", lambda error: verdict)
    coordinator = Coordinator(PeerUnavailableError("it died"))
    client = client_of(coordinator, lambda *said: None)
    with (
        pytest.raises(PeerUnavailableError, match="replica-0 had begun to load it in place"),
        client.carrying_out(BEGUN, Others()),
    ):
        client.outcome(BEGUN, Others(), time.monotonic() + 5)
    assert [repr(error) for error in coordinator.aborted] == [repr(PeerUnavailableError("it died"))]


def test_the_coordinator_has_time_to_say_why_a_push_ended_at_its_deadline() -> None:
    """Both have the same deadline, and it is the coordinator that knows who did not come."""
    waited: list[float] = []

    class Late(Coordinator):
        def call(
            self, call: Callable[[float], Any], deadline: float, waits_for: str
        ) -> pb.AwaitTransferResponse:
            self.stub.AwaitTransfer = SimpleNamespace(future=self._future)
            with pytest.raises(grpc.RpcError):
                call(5.0)
            raise TransferTimeoutError(f"waited for {waits_for}")

        def _future(self, request: pb.AwaitTransferRequest, timeout: float) -> Any:
            waited.append(timeout)
            raise grpc.RpcError

    client = client_of(Late(pb.Transfer()), lambda *said: None)
    with pytest.raises(TransferTimeoutError, match="waited for the replicas to switch"):
        client.outcome(BEGUN, Others(), time.monotonic() + 5)
    assert 5.5 < waited[0] < 10
