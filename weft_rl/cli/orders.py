"""Orders of an operator as commands: about versions, about one replica, about the base model."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated

import typer
from rich.markup import escape

from weft_rl.cli.console.options import (
    DEFAULT_COORDINATOR,
    AdapterName,
    Coordinator,
    Json,
    PolicyName,
    ReplicaId,
)
from weft_rl.cli.console.output import CALL_SECONDS, connect, print_json, print_text, report
from weft_rl.cli.status import vector_text
from weft_rl.contract.errors import InvalidNameError, PeerUnavailableError, TransferTimeoutError
from weft_rl.contract.names import BASE_POLICY, MAX_VERSION, PolicyVersion, check_name, plural
from weft_rl.contract.options import DEFAULT_REQUESTS_SECONDS, SWITCH_SECONDS
from weft_rl.progress import shown
from weft_rl.rpc.codec import (
    duration_from_proto,
    duration_to_proto,
    version_to_proto,
    when_running_to_proto,
)
from weft_rl.v1 import admin_pb2 as pb
from weft_rl.v1 import inspect_pb2
from weft_rl.v1.admin_pb2_grpc import AdminServiceStub
from weft_rl.v1.inspect_pb2_grpc import InspectServiceStub

VersionName = Annotated[
    str, typer.Argument(metavar="NAME@VERSION", help="The version: math@3, or math 3.")
]
VersionNumber = Annotated[
    int | None, typer.Argument(metavar="VERSION", hidden=True, min=1, max=MAX_VERSION)
]
Reason = Annotated[str, typer.Option(metavar="TEXT", help="Reason, shown by weft status.")]

_POLL_SECONDS = 0.2
#: A draining replica leaves a few moments after its time is over.
_LEAVE_SECONDS = 15.0
_NEXT_BASE = "the next replica that registers binds the pool to its base model"


@contextmanager
def _admin(coordinator: str) -> Iterator[AdminServiceStub]:
    with connect(coordinator) as channel:
        yield AdminServiceStub(channel)


# -- versions ----------------------------------------------------------------------------------


def rollback(
    policy: PolicyName,
    to: Annotated[
        int,
        typer.Option("--to", metavar="VERSION", help="Version to serve.", min=0, max=MAX_VERSION),
    ],
    coordinator: Coordinator = DEFAULT_COORDINATOR,
    json_output: Json = False,
    timeout: Annotated[
        float, typer.Option(help="Seconds that the rollback may take.", min=1)
    ] = 300.0,
) -> None:
    """Serve an earlier version again.

    Of an adapter, or of the base if replicas hold copies of it.
    """
    request = pb.RollbackRequest(policy=policy, to_version=to)
    with _admin(coordinator) as admin, shown(f"rollback to {policy}@{to}"):
        response = admin.Rollback(request, timeout=timeout)
    name = f"[bold green]{policy}@{to}[/]"
    if response.replaced_version == to:
        report(json_output, f"{name} is served already", response)
        return
    pause = duration_from_proto(response.pause)
    is_instead = response.replaced_version or policy == BASE_POLICY
    report(
        json_output,
        f"{name} is served again by {plural(len(response.replica_ids), 'replica')}"
        + (f", in place of {policy}@{response.replaced_version}" if is_instead else "")
        + (f" (paused for {pause:.3f} s)" if pause else ""),
        response,
    )


def parse_version(name: str, number: int | None) -> PolicyVersion:
    """Parse ``math@3``, or ``math`` and 3.

    Raises:
        InvalidNameError: Neither form is given.
    """
    if number is not None and "@" not in name:
        return PolicyVersion(check_name(name, "policy"), number)
    if number is None and "@" in name:
        return PolicyVersion.parse(name)
    raise InvalidNameError(f"name one version: {name.partition('@')[0]}@3")


def pin(
    name: VersionName,
    number: VersionNumber = None,
    off: Annotated[bool, typer.Option("--off", help="Allow it to be retired again.")] = False,
    coordinator: Coordinator = DEFAULT_COORDINATOR,
    json_output: Json = False,
) -> None:
    """Keep a version from being retired.

    Of the base, the replicas keep their copies of it.
    """
    version = parse_version(name, number)
    request = pb.PinRequest(version=version_to_proto(version), pinned=not off)
    with _admin(coordinator) as admin:
        admin.Pin(request, timeout=CALL_SECONDS)
    word = "may be retired" if off else "is kept until it is unpinned"
    report(json_output, f"[bold green]{version}[/] {word}", request)


def retire(
    name: VersionName,
    number: VersionNumber = None,
    coordinator: Coordinator = DEFAULT_COORDINATOR,
    json_output: Json = False,
) -> None:
    """Retire a version of an adapter now.

    Not the one that the bare name stands for.
    """
    version = parse_version(name, number)
    request = pb.RetireRequest(version=version_to_proto(version))
    with _admin(coordinator) as admin:
        admin.Retire(request, timeout=CALL_SECONDS)
    report(json_output, f"[bold green]{version}[/] can no longer be requested", request)


def retain(
    policy: AdapterName,
    number: Annotated[
        int,
        typer.Argument(
            metavar="VERSIONS",
            help="Number of newest versions to keep; 0: the coordinator's --retain-versions.",
            min=0,
            max=1000,
        ),
    ],
    coordinator: Coordinator = DEFAULT_COORDINATOR,
    json_output: Json = False,
) -> None:
    """Set how many versions of an adapter are kept.

    A restart of the coordinator does not change it.
    """
    request = pb.SetRetentionRequest(policy=policy, num_versions=number)
    with _admin(coordinator) as admin:
        response = admin.SetRetention(request, timeout=CALL_SECONDS)
    kept = response.num_versions
    versions = "the newest version is" if kept == 1 else f"the newest {kept} versions are"
    report(json_output, f"of [bold]{policy}[/] {versions} kept", request, response)


def forget(
    policy: AdapterName,
    force: Annotated[
        bool,
        typer.Option("--force", help="Also end its owner's lease and a push that is under way."),
    ] = False,
    coordinator: Coordinator = DEFAULT_COORDINATOR,
    json_output: Json = False,
) -> None:
    """Remove an adapter and all its versions.

    Replicas delete them, from disk too. Its version numbers are not used again: a later push of the
    name goes on above them.
    """
    request = pb.ForgetPolicyRequest(policy=policy, force=force)
    with _admin(coordinator) as admin:
        response = admin.ForgetPolicy(request, timeout=CALL_SECONDS)
    retired = plural(len(response.retired_versions), "version")
    text = f"[bold green]{policy}[/] is forgotten: {retired} retired, which replicas delete"
    report(json_output, text, request, response)


# -- one replica -------------------------------------------------------------------------------


def cordon(
    replica: ReplicaId,
    reason: Reason = "",
    coordinator: Coordinator = DEFAULT_COORDINATOR,
    json_output: Json = False,
) -> None:
    """Take a replica out of service; it still receives pushes."""
    request = pb.CordonRequest(replica_id=replica, reason=reason)
    with _admin(coordinator) as admin:
        admin.Cordon(request, timeout=CALL_SECONDS)
    report(json_output, f"[bold]{replica}[/] is out of service until it is uncordoned", request)


def quarantine(
    replica: ReplicaId,
    reason: Annotated[str, typer.Option(metavar="TEXT", help="Reason, shown by weft status.")],
    coordinator: Coordinator = DEFAULT_COORDINATOR,
    json_output: Json = False,
) -> None:
    """Take a replica out of service and out of transfers.

    It refuses new requests.
    """
    request = pb.QuarantineRequest(replica_id=replica, reason=reason)
    with _admin(coordinator) as admin:
        admin.Quarantine(request, timeout=CALL_SECONDS)
    report(json_output, f"[bold]{replica}[/] is quarantined until it is uncordoned", request)


def uncordon(
    replica: ReplicaId,
    coordinator: Coordinator = DEFAULT_COORDINATOR,
    json_output: Json = False,
) -> None:
    """Put a cordoned or quarantined replica back into service."""
    request = pb.UncordonRequest(replica_id=replica)
    with _admin(coordinator) as admin:
        response = admin.Uncordon(request, timeout=CALL_SECONDS)
    state = inspect_pb2.ReplicaState.Name(response.state).removeprefix("REPLICA_STATE_").lower()
    words = "is ready as soon as it serves what the pool serves"
    if state not in ("unspecified", "ready"):
        words = (
            f"is no longer cordoned or quarantined; it is {state.replace('_', ' ')} "
            f"({escape(response.state_reason)})"
        )
    report(json_output, f"[bold]{replica}[/] {words}", request, response)


def drain(
    replica: ReplicaId,
    timeout: Annotated[
        float,
        typer.Option(
            help="Seconds that its requests and transfers may take to end.", min=0, max=86_400
        ),
    ] = 300.0,
    reason: Reason = "",
    coordinator: Coordinator = DEFAULT_COORDINATOR,
    json_output: Json = False,
) -> None:
    """Let a replica finish its requests, leave the pool and end.

    Returns when it has left.
    """
    request = pb.DrainRequest(replica_id=replica, timeout=duration_to_proto(timeout), reason=reason)
    began = time.monotonic()
    with connect(coordinator) as channel, shown(f"drain of {replica}"):
        inspect = InspectServiceStub(channel)
        before = _find(inspect, replica)
        AdminServiceStub(channel).Drain(request, timeout=CALL_SECONDS)
        _wait_gone(inspect, replica, before, began + timeout + _LEAVE_SECONDS)
    seconds = time.monotonic() - began
    text = f"[bold green]{replica}[/] has left the pool after {seconds:.1f} s"
    report(json_output, text, request)


def _find(stub: InspectServiceStub, replica_id: str) -> inspect_pb2.Replica | None:
    request = inspect_pb2.ListReplicasRequest(replica_ids=[replica_id])
    response = stub.ListReplicas(request, timeout=CALL_SECONDS)
    return next(iter(response.replicas), None)


def _wait_gone(
    stub: InspectServiceStub,
    replica_id: str,
    before: inspect_pb2.Replica | None,
    until: float,
) -> None:
    """Wait until the replica's process, that of ``before``, is no longer in the pool.

    Raises:
        PeerUnavailableError: The replica no longer sends heartbeats.
        TransferTimeoutError: It has not left in time.
    """
    while (found := _find(stub, replica_id)) is not None:
        if before and found.address != before.address:
            return  # another process has its name already
        if found.state == inspect_pb2.REPLICA_STATE_LOST:
            raise PeerUnavailableError(
                f"{replica_id} no longer sends heartbeats: look at its process"
            )
        if time.monotonic() > until:
            raise TransferTimeoutError(
                f"{replica_id} has not left ({found.state_reason}): look at its process"
            )
        time.sleep(_POLL_SECONDS)


def sleep(
    replica: ReplicaId,
    level: Annotated[
        int,
        typer.Option(
            help="vLLM's: 1 moves the weights to host memory, 2 discards them.", min=1, max=2
        ),
    ] = 1,
    abort: Annotated[
        bool, typer.Option("--abort", help="Abort running requests instead of waiting for them.")
    ] = False,
    timeout: Annotated[
        float, typer.Option(help="Seconds that its requests may take to end.", min=0, max=86_400)
    ] = DEFAULT_REQUESTS_SECONDS,
    coordinator: Coordinator = DEFAULT_COORDINATOR,
    json_output: Json = False,
) -> None:
    """Put a replica to sleep, so that its GPU memory is free.

    Returns when it sleeps. Only a replica started with --enable-sleep. While it sleeps no requests
    are routed to it, it refuses those that come, and it keeps up with pushes. After level 2 it
    wakes with the base that was pushed since, or else with a copy: its own, its checkpoint's files,
    or a peer's.
    """
    request = pb.SleepReplicaRequest(
        replica_id=replica,
        when_running=when_running_to_proto(abort),
        timeout=duration_to_proto(timeout),
        level=level,
    )
    with _admin(coordinator) as admin, shown(f"sleep of {replica}"):
        admin.SleepReplica(request, timeout=timeout + SWITCH_SECONDS)
    report(json_output, f"[bold]{replica}[/] sleeps until it is woken", request)


def wake(
    replica: ReplicaId,
    coordinator: Coordinator = DEFAULT_COORDINATOR,
    json_output: Json = False,
) -> None:
    """Wake a replica, whoever put it to sleep.

    Returns when it is awake. Requests are routed to it once it holds what the pool serves. Does
    nothing if it is awake.
    """
    request = pb.WakeReplicaRequest(replica_id=replica)
    with _admin(coordinator) as admin, shown(f"wake of {replica}"):
        admin.WakeReplica(request, timeout=SWITCH_SECONDS)
    report(json_output, f"[bold]{replica}[/] is awake", request)


# -- the base model ----------------------------------------------------------------------------


def base(
    rebind: Annotated[
        bool,
        typer.Option(
            "--rebind",
            help="Let the next replica bind the pool to its model; retires what was served.",
        ),
    ] = False,
    coordinator: Coordinator = DEFAULT_COORDINATOR,
    json_output: Json = False,
) -> None:
    """Show which base model the pool is bound to, or unbind it.

    It can be unbound while no replica is in contact and no push runs. Version numbers go on.
    """
    with _admin(coordinator) as admin:
        found = admin.GetBase(pb.GetBaseRequest(), timeout=CALL_SECONDS)
        if rebind:
            request = pb.RebindBaseRequest(base_fingerprint=found.base_fingerprint)
            response = admin.RebindBase(request, timeout=CALL_SECONDS)
    if rebind:
        names = ", ".join(f"{v.policy}@{v.version}" for v in response.retired_versions)
        unbound = "the pool was bound to no base model"
        if found.base_fingerprint:
            unbound = f"the pool is no longer bound to [bold green]{found.architecture}[/]"
        unbound += f"; retired: {names}" if names else ""
        report(json_output, f"{unbound}; {_NEXT_BASE}", request, response)
    elif json_output:
        print_json(found)
    else:
        _show_base(found)


def _show_base(found: pb.GetBaseResponse) -> None:
    """Print what the pool is bound to, and what keeps it from being unbound."""
    if not found.base_fingerprint:
        print_text(f"the pool is bound to no base model: {_NEXT_BASE}")
        return
    print_text(
        f"the pool is bound to [bold]{found.architecture}[/] {found.base_fingerprint[:12]}; its "
        f"replicas serve {vector_text(found.version_vector)}"
    )
    if found.checkpoint_digest:
        print_text(
            f"base@0 is the checkpoint {found.checkpoint_digest.hex()[:12]} that "
            f"{found.checkpoint_replica_id} was started with"
        )
    hindrances = []
    if found.replica_ids:
        hindrances.append(plural(len(found.replica_ids), "replica") + " in contact")
    if found.num_transfers:
        hindrances.append(plural(found.num_transfers, "transfer") + " under way")
    if hindrances:
        print_text(f"to bind it to another model, first end: {', '.join(hindrances)}")
    else:
        print_text("it has none now: weft base --rebind retires these versions and unbinds it")
