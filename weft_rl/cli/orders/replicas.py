"""``weft cordon``, ``uncordon``, ``quarantine``, ``drain``, ``sleep`` and ``wake``: orders about
one replica."""

from __future__ import annotations

import time
from collections.abc import Callable

from rich.markup import escape

from weft_rl.cli.console.connection import CALL_SECONDS, connect
from weft_rl.cli.console.output import report
from weft_rl.contract.errors import PeerUnavailableError, TransferTimeoutError
from weft_rl.contract.sleep import SWITCH_SECONDS
from weft_rl.rpc.codec import duration_to_proto, when_running_to_proto
from weft_rl.v1 import admin_pb2, inspect_pb2
from weft_rl.v1.admin_pb2_grpc import AdminServiceStub
from weft_rl.v1.inspect_pb2_grpc import InspectServiceStub

_POLL_SECONDS = 0.2
#: A replica leaves some moments after its time is over.
_LEAVE_SECONDS = 15.0


def cordon(coordinator: str, replica_id: str, reason: str, *, json_output: bool = False) -> None:
    """Take a replica out of service; it still receives pushes.

    Raises:
        WeftError: It was refused.
    """
    request = admin_pb2.CordonRequest(replica_id=replica_id, reason=reason)
    with connect(coordinator) as channel:
        AdminServiceStub(channel).Cordon(request, timeout=CALL_SECONDS)
    report(json_output, f"[bold]{replica_id}[/] is out of service until it is uncordoned", request)


def quarantine(
    coordinator: str, replica_id: str, reason: str, *, json_output: bool = False
) -> None:
    """Take a replica out of service and out of transfers; it refuses requests.

    Raises:
        WeftError: It was refused.
    """
    request = admin_pb2.QuarantineRequest(replica_id=replica_id, reason=reason)
    with connect(coordinator) as channel:
        AdminServiceStub(channel).Quarantine(request, timeout=CALL_SECONDS)
    report(json_output, f"[bold]{replica_id}[/] is quarantined until it is uncordoned", request)


def uncordon(coordinator: str, replica_id: str, *, json_output: bool = False) -> None:
    """Put a replica back into service.

    Raises:
        WeftError: It was refused.
    """
    request = admin_pb2.UncordonRequest(replica_id=replica_id)
    with connect(coordinator) as channel:
        answer = AdminServiceStub(channel).Uncordon(request, timeout=CALL_SECONDS)
    if answer.state in (inspect_pb2.REPLICA_STATE_UNSPECIFIED, inspect_pb2.REPLICA_STATE_READY):
        words = "is ready as soon as it serves what the pool does"
    else:
        state = inspect_pb2.ReplicaState.Name(answer.state).removeprefix("REPLICA_STATE_")
        words = (
            "is no longer taken out of service; it is "
            f"{state.lower().replace('_', ' ')} ({escape(answer.state_reason)})"
        )
    report(json_output, f"[bold]{replica_id}[/] {words}", request, answer)


def drain(
    coordinator: str,
    replica_id: str,
    reason: str,
    *,
    timeout_seconds: float,
    json_output: bool = False,
) -> None:
    """Let a replica leave in good order, and wait until it has left.

    Raises:
        WeftError: It was refused.
        PeerUnavailableError: The replica is not heard any more.
        TransferTimeoutError: It has not left some time after it had to.
    """
    request = admin_pb2.DrainRequest(
        replica_id=replica_id, timeout=duration_to_proto(timeout_seconds), reason=reason
    )
    began = time.monotonic()
    with connect(coordinator) as channel:
        inspect = InspectServiceStub(channel)
        before = _find(inspect, replica_id)
        AdminServiceStub(channel).Drain(request, timeout=CALL_SECONDS)
        _wait_gone(
            lambda: _find(inspect, replica_id), before, began + timeout_seconds + _LEAVE_SECONDS
        )
    seconds = time.monotonic() - began
    text = f"[bold green]{replica_id}[/] has left the pool after {seconds:.1f} s"
    report(json_output, text, request)


def sleep(
    coordinator: str,
    replica_id: str,
    *,
    level: int,
    aborts: bool,
    timeout_seconds: float,
    json_output: bool = False,
) -> None:
    """Put a replica to sleep, and wait until it sleeps.

    Raises:
        WeftError: It was refused, or does not sleep in time.
    """
    request = admin_pb2.SleepReplicaRequest(
        replica_id=replica_id,
        when_running=when_running_to_proto(aborts),
        timeout=duration_to_proto(timeout_seconds),
        level=level,
    )
    with connect(coordinator) as channel:
        stub = AdminServiceStub(channel)
        stub.SleepReplica(request, timeout=timeout_seconds + SWITCH_SECONDS)
    report(json_output, f"[bold]{replica_id}[/] sleeps until it is woken", request)


def wake(coordinator: str, replica_id: str, *, json_output: bool = False) -> None:
    """Wake a replica, and wait until it is awake.

    Raises:
        WeftError: It was refused, or is not awake in time.
    """
    request = admin_pb2.WakeReplicaRequest(replica_id=replica_id)
    with connect(coordinator) as channel:
        AdminServiceStub(channel).WakeReplica(request, timeout=SWITCH_SECONDS)
    report(json_output, f"[bold]{replica_id}[/] is awake", request)


def _find(stub: InspectServiceStub, replica_id: str) -> inspect_pb2.Replica | None:
    request = inspect_pb2.ListReplicasRequest(replica_ids=[replica_id])
    response = stub.ListReplicas(request, timeout=CALL_SECONDS)
    return next(iter(response.replicas), None)


def _wait_gone(
    find: Callable[[], inspect_pb2.Replica | None],
    before: inspect_pb2.Replica | None,
    until: float,
) -> None:
    """Wait until the replica, or its process of ``before``, is no longer in the pool."""
    while (now_is := find()) is not None:
        if before and now_is.address != before.address:
            return  # another process has its name already
        if now_is.state == inspect_pb2.REPLICA_STATE_LOST:
            raise PeerUnavailableError(
                f"{now_is.replica_id} is not heard any more: look at its process"
            )
        if time.monotonic() > until:
            raise TransferTimeoutError(
                f"{now_is.replica_id} has not left ({now_is.state_reason}): look at its process"
            )
        time.sleep(_POLL_SECONDS)
