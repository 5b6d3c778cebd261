"""``weft transfers``: what is under way, and what has ended."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from weft_rl.cli.console.connection import CALL_SECONDS, connect
from weft_rl.cli.console.output import print_json, shown_time
from weft_rl.rpc.codec import duration_from_proto
from weft_rl.v1 import inspect_pb2
from weft_rl.v1 import publish_pb2 as pb
from weft_rl.v1.inspect_pb2_grpc import InspectServiceStub

_STATES = {
    pb.TRANSFER_STATE_FORMING: ("forming", "yellow"),
    pb.TRANSFER_STATE_STAGING: ("staging", "yellow"),
    pb.TRANSFER_STATE_COMMITTING: ("committing", "yellow"),
    pb.TRANSFER_STATE_COMMITTED: ("committed", "green"),
    pb.TRANSFER_STATE_ABORTED: ("aborted", "red"),
}


def show_transfers(coordinator: str, purpose: str, *, limit: int, json_output: bool) -> None:
    """Print transfers: those under way, then the newest that ended.

    Args:
        purpose: Value of the option; empty for all.

    Raises:
        WeftError: The coordinator does not answer.
    """
    with connect(coordinator) as channel:
        listed = list(_list(InspectServiceStub(channel), purpose, limit))
    if json_output:
        print_json(inspect_pb2.ListTransfersResponse(transfers=listed))
    else:
        Console().print(render(listed))


def _list(stub: InspectServiceStub, purpose: str, limit: int) -> Iterator[pb.Transfer]:
    token = ""
    while True:
        request = inspect_pb2.ListTransfersRequest(page_token=token)
        page = stub.ListTransfers(request, timeout=CALL_SECONDS)
        for transfer in page.transfers:
            if purpose in ("", purpose_of(transfer)):
                yield transfer
                limit -= 1
                if not limit:
                    return
        token = page.next_page_token
        if not token:
            return


def purpose_of(transfer: pb.Transfer) -> str:
    """Return ``push``, ``clone``, ``restore`` or ``rollback``."""
    name = pb.TransferPurpose.Name(transfer.purpose)
    return name.removeprefix("TRANSFER_PURPOSE_").lower()


def render(transfers: Sequence[pb.Transfer]) -> Table:
    """Render transfers as a table: what, who, how it stands, and where the time went."""
    table = Table(
        title="transfers",
        title_justify="left",
        caption="seconds: forming + staging + committing",
        caption_justify="left",
    )
    for column in ("transfer", "from", "state", "bytes", "replicas", "begun", "seconds"):
        table.add_column(column, overflow="fold", justify="right" if column == "bytes" else "left")
    for transfer in transfers:
        word, colour = _STATES.get(transfer.state, ("unknown", "red"))
        state = Text(word, colour)
        if transfer.failure_reason:
            state.append(f"\n{transfer.failure_reason}: {transfer.failure_message}", "dim")
        for refusal in transfer.refusals:
            state.append(f"\n{refusal.replica_id}: {refusal.message}", "dim")
        table.add_row(
            f"{purpose_of(transfer)} {transfer.version.policy}@{transfer.version.version}",
            transfer.trainer_id,
            state,
            f"{transfer.total_bytes:,}",
            _replicas(transfer),
            shown_time(transfer.begin_time),
            _seconds(transfer),
        )
    return table


def _seconds(transfer: pb.Transfer) -> str:
    """Format where the time went, and how long generation was paused."""
    parts = (transfer.forming, transfer.staging, transfer.committing)
    text = " + ".join(f"{duration_from_proto(part):.2f}" for part in parts)
    pause = duration_from_proto(transfer.pause)
    return f"{text}\npaused for {pause:.3f}" if pause else text


def _replicas(transfer: pb.Transfer) -> str:
    """Format how many of how many replicas switched; of one, its name."""
    asked = len(transfer.replica_ids)
    if asked == 1:
        return transfer.replica_ids[0]
    if transfer.state == pb.TRANSFER_STATE_COMMITTED:
        return f"{len(transfer.serving_replica_ids)} of {asked}"
    return str(asked)
