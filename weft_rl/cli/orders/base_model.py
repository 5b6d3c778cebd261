"""``weft base``: the base model that the pool is bound to."""

from __future__ import annotations

from rich.console import Console

from weft_rl.cli.console.connection import CALL_SECONDS, connect
from weft_rl.cli.console.output import plural, print_json, report
from weft_rl.cli.lists.status import vector_text
from weft_rl.v1 import admin_pb2
from weft_rl.v1.admin_pb2_grpc import AdminServiceStub

_NEXT = "the next replica that registers binds the pool to its base model"


def show(coordinator: str, *, json_output: bool = False) -> None:
    """Print what the pool is bound to, and what hinders binding it anew.

    Raises:
        WeftError: The coordinator does not answer.
    """
    with connect(coordinator) as channel:
        found = _get(AdminServiceStub(channel))
    if json_output:
        print_json(found)
        return
    console = Console()
    if not found.base_fingerprint:
        console.print(f"the pool is bound to none: {_NEXT}")
        return
    console.print(
        f"the pool is bound to [bold]{found.architecture}[/] {found.base_fingerprint[:12]}, and "
        f"serves {vector_text(found.version_vector)}"
    )
    if found.checkpoint_digest:
        console.print(
            f"base@0 is the checkpoint {found.checkpoint_digest.hex()[:12]} that "
            f"{found.checkpoint_replica_id} was started with"
        )
    hindrances = []
    if found.replica_ids:
        hindrances.append(plural(len(found.replica_ids), "replica") + " in contact")
    if found.num_transfers:
        hindrances.append(plural(found.num_transfers, "transfer") + " under way")
    if hindrances:
        console.print(f"to bind it anew, end these first: {', '.join(hindrances)}")
    else:
        console.print("weft base --rebind retires what it serves, and lets it be bound anew")


def rebind(coordinator: str, *, json_output: bool = False) -> None:
    """Let go of the base model that the pool is bound to now.

    Raises:
        WeftError: It was refused.
    """
    with connect(coordinator) as channel:
        stub = AdminServiceStub(channel)
        found = _get(stub)
        request = admin_pb2.RebindBaseRequest(base_fingerprint=found.base_fingerprint)
        answer = stub.RebindBase(request, timeout=CALL_SECONDS)
    names = ", ".join(f"{v.policy}@{v.version}" for v in answer.retired_versions)
    report(
        json_output,
        f"[bold green]{found.architecture or 'no base model'}[/] "
        f"{'is let go of' if found.base_fingerprint else 'was bound'}"
        f"{f'; retired: {names}' if names else ''}; {_NEXT}",
        request,
        answer,
    )


def _get(stub: AdminServiceStub) -> admin_pb2.GetBaseResponse:
    return stub.GetBase(admin_pb2.GetBaseRequest(), timeout=CALL_SECONDS)
