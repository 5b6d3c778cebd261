"""Orders of an operator as commands: about versions, about one replica, about the base model.

Each sends the request of one call of ``AdminService`` and prints what was done; programs get the
fields of the request and of the answer.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Annotated, Any

import grpc
import typer
from google.protobuf.message import Message
from rich.markup import escape

from weft_rl.cli.console.commands import Printed, pool_command
from weft_rl.cli.console.options import AdapterName, PolicyName, ReplicaId, TransferId
from weft_rl.cli.console.output import CALL_SECONDS
from weft_rl.cli.status import vector_text
from weft_rl.contract.errors import InvalidNameError, PeerUnavailableError, TransferTimeoutError
from weft_rl.contract.names import BASE_POLICY, MAX_VERSION, PolicyVersion, check_name, plural
from weft_rl.contract.options import DEFAULT_REQUESTS_SECONDS, SWITCH_SECONDS
from weft_rl.progress import shown
from weft_rl.rpc.codec import (
    POLICY_VERSION,
    duration_from_proto,
    duration_to_proto,
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


def _sent(
    channel: grpc.Channel, request: Message, timeout: float = CALL_SECONDS
) -> tuple[Message, Any]:
    """Send an order; return it and its answer."""
    call = type(request).__name__.removesuffix("Request")
    return request, getattr(AdminServiceStub(channel), call)(request, timeout=timeout)


# -- versions ----------------------------------------------------------------------------------


@pool_command
def rollback(
    channel: grpc.Channel,
    policy: PolicyName,
    to: Annotated[
        int,
        typer.Option("--to", metavar="VERSION", help="Version to serve.", min=0, max=MAX_VERSION),
    ],
    timeout: Annotated[
        float, typer.Option(help="Seconds that the rollback may take.", min=1)
    ] = 300.0,
) -> Iterator[Printed]:
    """Serve an earlier version again.

    Of an adapter, or of the base: weft versions says which, and how replicas do it.
    """
    with shown(f"rollback to {policy}@{to}"):
        _, done = _sent(channel, pb.RollbackRequest(policy=policy, to_version=to), timeout)
    pause = duration_from_proto(done.pause)
    text = f"[bold green]{policy}@{to}[/] is served "
    if done.replaced_version == to:
        text += "already"
    else:
        text += f"again by {plural(len(done.replica_ids), 'replica')}"
        if done.replaced_version or policy == BASE_POLICY:
            text += f", in place of {policy}@{done.replaced_version}"
        text += f" (paused for {pause:.3f} s)" if pause else ""
    yield text, done


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


@pool_command
def pin(
    channel: grpc.Channel,
    name: VersionName,
    number: VersionNumber = None,
    off: Annotated[bool, typer.Option("--off", help="Allow it to be retired again.")] = False,
) -> Iterator[Printed]:
    """Keep a version from being retired.

    Of the base, the replicas keep their copies of it.
    """
    version = parse_version(name, number)
    word = "may be retired" if off else "is kept until it is unpinned"
    request = pb.PinRequest(version=POLICY_VERSION.encode(version), pinned=not off)
    yield f"[bold green]{version}[/] {word}", *_sent(channel, request)


@pool_command
def retire(
    channel: grpc.Channel, name: VersionName, number: VersionNumber = None
) -> Iterator[Printed]:
    """Retire a version of an adapter now.

    Not the one that the bare name stands for.
    """
    version = parse_version(name, number)
    request = pb.RetireRequest(version=POLICY_VERSION.encode(version))
    yield f"[bold green]{version}[/] can no longer be requested", *_sent(channel, request)


@pool_command
def retain(
    channel: grpc.Channel,
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
) -> Iterator[Printed]:
    """Set how many versions of an adapter are kept.

    A restart of the coordinator does not change it.
    """

    request, done = _sent(channel, pb.SetRetentionRequest(policy=policy, num_versions=number))
    kept = done.num_versions
    versions = "the newest version is" if kept == 1 else f"the newest {kept} versions are"
    yield f"of [bold]{policy}[/] {versions} kept", request, done


@pool_command
def forget(
    channel: grpc.Channel,
    policy: AdapterName,
    force: Annotated[
        bool,
        typer.Option("--force", help="Also end its owner's lease and a push that is under way."),
    ] = False,
) -> Iterator[Printed]:
    """Remove an adapter and all its versions.

    Replicas delete them, from disk too. Its version numbers are not used again: a later push of the
    name goes on above them.
    """

    request, done = _sent(channel, pb.ForgetPolicyRequest(policy=policy, force=force))
    retired = plural(len(done.retired_versions), "version")
    text = f"[bold green]{policy}[/] is forgotten: {retired} retired, which replicas delete"
    yield text, request, done


@pool_command
def cancel(channel: grpc.Channel, transfer: TransferId, reason: Reason = "") -> Iterator[Printed]:
    """End a push or another transfer before its commit.

    What replicas serve stays as it is; the trainer is told the reason.
    """
    request = pb.CancelTransferRequest(transfer_id=transfer, reason=reason)
    yield f"[bold]{transfer}[/] has ended: nothing of it is served", *_sent(channel, request)


# -- one replica -------------------------------------------------------------------------------


@pool_command
def cordon(
    channel: grpc.Channel,
    replica: ReplicaId,
    reason: Reason = "",
    no_pushes: Annotated[
        bool,
        typer.Option("--no-pushes", help="Keep it out of transfers, too; it refuses requests."),
    ] = False,
) -> Iterator[Printed]:
    """Take a replica out of service, and out of transfers if told so."""
    request = pb.CordonRequest(replica_id=replica, reason=reason, no_pushes=no_pushes)
    yield f"[bold]{replica}[/] is out of service until it is uncordoned", *_sent(channel, request)


@pool_command
def uncordon(channel: grpc.Channel, replica: ReplicaId) -> Iterator[Printed]:
    """Put a replica that was cordoned back into service."""
    request, done = _sent(channel, pb.UncordonRequest(replica_id=replica))
    state = inspect_pb2.ReplicaState.Name(done.state).removeprefix("REPLICA_STATE_").lower()
    words = "is ready as soon as it serves what the pool serves"
    if state not in ("unspecified", "ready"):
        words = (
            f"is no longer cordoned; it is {state.replace('_', ' ')} ({escape(done.state_reason)})"
        )
    yield f"[bold]{replica}[/] {words}", request, done


@pool_command
def drain(
    channel: grpc.Channel,
    replica: ReplicaId,
    timeout: Annotated[
        float,
        typer.Option(
            help="Seconds that its requests and transfers may take to end.", min=0, max=86_400
        ),
    ] = 300.0,
    reason: Reason = "",
) -> Iterator[Printed]:
    """Let a replica finish its requests, leave the pool and end.

    Returns when it has left.
    """
    request = pb.DrainRequest(replica_id=replica, timeout=duration_to_proto(timeout), reason=reason)
    began = time.monotonic()
    with shown(f"drain of {replica}"):
        inspect = InspectServiceStub(channel)
        before = _find(inspect, replica)
        _sent(channel, request)
        _wait_gone(inspect, replica, before, began + timeout + _LEAVE_SECONDS)
    seconds = time.monotonic() - began
    yield f"[bold green]{replica}[/] has left the pool after {seconds:.1f} s", request


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
    """Wait until the process of ``before`` has left the pool, or raise why it has not."""
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


@pool_command
def sleep(
    channel: grpc.Channel,
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
) -> Iterator[Printed]:
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
    with shown(f"sleep of {replica}"):
        sent = _sent(channel, request, timeout + SWITCH_SECONDS)
    yield f"[bold]{replica}[/] sleeps until it is woken", *sent


@pool_command
def wake(channel: grpc.Channel, replica: ReplicaId) -> Iterator[Printed]:
    """Wake a replica, whoever put it to sleep.

    Returns when it is awake. Requests are routed to it once it holds what the pool serves. Does
    nothing if it is awake.
    """
    request = pb.WakeReplicaRequest(replica_id=replica)
    with shown(f"wake of {replica}"):
        sent = _sent(channel, request, SWITCH_SECONDS)
    yield f"[bold]{replica}[/] is awake", *sent


# -- the base model ----------------------------------------------------------------------------


@pool_command
def base(
    channel: grpc.Channel,
    rebind: Annotated[
        bool,
        typer.Option(
            "--rebind",
            help="Let the next replica bind the pool to its model; retires what was served.",
        ),
    ] = False,
) -> Iterator[Printed]:
    """Show which base model the pool is bound to, or unbind it.

    It can be unbound while no replica is in contact and no push runs. Version numbers go on.
    """
    _, found = _sent(channel, pb.GetBaseRequest())
    if not rebind:
        yield _base_text(found), found
        return
    bound = pb.RebindBaseRequest(base_fingerprint=found.base_fingerprint)
    request, done = _sent(channel, bound)
    text = "the pool was bound to no base model"
    if found.base_fingerprint:
        text = f"the pool is no longer bound to [bold green]{found.architecture}[/]"
    if names := ", ".join(f"{v.policy}@{v.version}" for v in done.retired_versions):
        text += f"; retired: {names}"
    yield f"{text}; {_NEXT_BASE}", request, done


def _base_text(found: pb.GetBaseResponse) -> str:
    """Describe what the pool is bound to, and what keeps it from being unbound."""
    if not found.base_fingerprint:
        return f"the pool is bound to no base model: {_NEXT_BASE}"
    lines = [
        f"the pool is bound to [bold]{found.architecture}[/] {found.base_fingerprint[:12]}; its "
        f"replicas serve {vector_text(found.version_vector)}"
    ]
    if found.checkpoint_digest:
        lines.append(
            f"base@0 is the checkpoint {found.checkpoint_digest.hex()[:12]} that "
            f"{found.checkpoint_replica_id} was started with"
        )
    hindrances = [plural(len(found.replica_ids), "replica") + " in contact"] * bool(
        found.replica_ids
    )
    hindrances += [plural(found.num_transfers, "transfer") + " under way"] * bool(
        found.num_transfers
    )
    if hindrances:
        lines.append(f"to bind it to another model, first end: {', '.join(hindrances)}")
    else:
        lines.append("it has none now: weft base --rebind retires these versions and unbinds it")
    return "\n".join(lines)
