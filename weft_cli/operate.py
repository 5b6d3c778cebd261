"""``weft rollback`` and ``weft pin``: what operators ask of a coordinator."""

from __future__ import annotations

import grpc
from rich.console import Console

from weft.rpc.channel import open_channel
from weft.rpc.codec import duration_from_proto
from weft.rpc.status import error_from_rpc
from weft.v1 import admin_pb2, types_pb2
from weft.v1.admin_pb2_grpc import AdminServiceStub

_PIN_SECONDS = 10.0


def roll_back(coordinator: str, policy: str, to_version: int, *, timeout_seconds: float) -> None:
    """Make the pool serve ``policy@to_version`` again and print who does.

    Raises:
        WeftError: It was refused, or no replica could switch.
    """
    request = admin_pb2.RollbackRequest(policy=policy, to_version=to_version)
    with open_channel(coordinator) as channel:
        try:
            response = AdminServiceStub(channel).Rollback(request, timeout=timeout_seconds)
        except grpc.RpcError as error:
            raise error_from_rpc(error) from error
    name = f"{policy}@{to_version}"
    if response.replaced_version == to_version:
        Console().print(f"[bold green]{name}[/] is served already")
        return
    count = len(response.replica_ids)
    pause = duration_from_proto(response.pause)
    Console().print(
        f"[bold green]{name}[/] is served again by {count} replica{'' if count == 1 else 's'}, "
        f"in place of {policy}@{response.replaced_version}"
        + (f" (paused for {pause:.3f} s)" if pause else "")
    )


def pin(coordinator: str, policy: str, version: int, *, pinned: bool) -> None:
    """Keep ``policy@version`` from being retired, or let it go.

    Raises:
        WeftError: It was refused.
    """
    wanted = types_pb2.PolicyVersion(policy=policy, version=version)
    with open_channel(coordinator) as channel:
        try:
            AdminServiceStub(channel).Pin(
                admin_pb2.PinRequest(version=wanted, pinned=pinned), timeout=_PIN_SECONDS
            )
        except grpc.RpcError as error:
            raise error_from_rpc(error) from error
    word = "is kept until it is unpinned" if pinned else "may be retired"
    Console().print(f"[bold green]{policy}@{version}[/] {word}")
