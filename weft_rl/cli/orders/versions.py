"""``weft rollback``, ``pin``, ``retire``, ``retain`` and ``forget``: orders about versions."""

from __future__ import annotations

from weft_rl.cli.console.connection import CALL_SECONDS, connect
from weft_rl.cli.console.options import MAX_VERSION
from weft_rl.cli.console.output import plural, report
from weft_rl.contract.errors import InvalidNameError
from weft_rl.contract.names import PolicyVersion, check_name
from weft_rl.rpc.codec import duration_from_proto
from weft_rl.v1 import admin_pb2, types_pb2
from weft_rl.v1.admin_pb2_grpc import AdminServiceStub


def roll_back(
    coordinator: str,
    policy: str,
    to_version: int,
    *,
    timeout_seconds: float,
    json_output: bool = False,
) -> None:
    """Make the pool serve ``policy@to_version`` again and print who does.

    Raises:
        WeftError: It was refused, or no replica could switch.
    """
    request = admin_pb2.RollbackRequest(policy=policy, to_version=to_version)
    with connect(coordinator) as channel:
        response = AdminServiceStub(channel).Rollback(request, timeout=timeout_seconds)
    name = f"{policy}@{to_version}"
    if response.replaced_version == to_version:
        report(json_output, f"[bold green]{name}[/] is served already", response)
        return
    pause = duration_from_proto(response.pause)
    report(
        json_output,
        f"[bold green]{name}[/] is served again by {plural(len(response.replica_ids), 'replica')}, "
        f"in place of {policy}@{response.replaced_version}"
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
        version = PolicyVersion.parse(name)
        if version.version > MAX_VERSION:
            raise InvalidNameError(f"{name[:80]}: no version's number is that large")
        return version
    raise InvalidNameError(f"name one version: {name.partition('@')[0]}@3")


def retire(coordinator: str, version: PolicyVersion, *, json_output: bool = False) -> None:
    """Retire an adapter version now.

    Raises:
        WeftError: It was refused.
    """
    wanted = types_pb2.PolicyVersion(policy=version.policy, version=version.version)
    request = admin_pb2.RetireRequest(version=wanted)
    with connect(coordinator) as channel:
        AdminServiceStub(channel).Retire(request, timeout=CALL_SECONDS)
    report(json_output, f"[bold green]{version}[/] can no longer be requested", request)


def retain(coordinator: str, policy: str, num_versions: int, *, json_output: bool = False) -> None:
    """Keep so many of an adapter's newest versions; 0 for the coordinator's number.

    Raises:
        WeftError: It was refused.
    """
    request = admin_pb2.SetRetentionRequest(policy=policy, num_versions=num_versions)
    with connect(coordinator) as channel:
        response = AdminServiceStub(channel).SetRetention(request, timeout=CALL_SECONDS)
    number = response.num_versions
    kept = "the newest version is" if number == 1 else f"the newest {number} versions are"
    report(json_output, f"of [bold]{policy}[/] {kept} kept", request, response)


def forget(coordinator: str, policy: str, *, by_force: bool, json_output: bool = False) -> None:
    """End an adapter's policy.

    Raises:
        WeftError: It was refused.
    """
    request = admin_pb2.ForgetPolicyRequest(policy=policy, force=by_force)
    with connect(coordinator) as channel:
        response = AdminServiceStub(channel).ForgetPolicy(request, timeout=CALL_SECONDS)
    number = plural(len(response.retired_versions), "version")
    report(
        json_output,
        f"[bold green]{policy}[/] is forgotten: {number} retired, which replicas drop",
        request,
        response,
    )


def pin(
    coordinator: str, version: PolicyVersion, *, pinned: bool, json_output: bool = False
) -> None:
    """Keep a version from being retired, or let it go.

    Raises:
        WeftError: It was refused.
    """
    wanted = types_pb2.PolicyVersion(policy=version.policy, version=version.version)
    request = admin_pb2.PinRequest(version=wanted, pinned=pinned)
    with connect(coordinator) as channel:
        AdminServiceStub(channel).Pin(request, timeout=CALL_SECONDS)
    word = "is kept until it is unpinned" if pinned else "may be retired"
    report(json_output, f"[bold green]{version}[/] {word}", request)
