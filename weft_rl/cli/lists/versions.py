"""``weft versions``: what has been pushed, and what became of it."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Console
from rich.table import Table
from rich.text import Text

from weft_rl.cli.console.connection import CALL_SECONDS, connect
from weft_rl.cli.console.output import print_json, shown_time
from weft_rl.rpc.pool_listing import list_policies
from weft_rl.v1 import inspect_pb2 as pb
from weft_rl.v1.inspect_pb2_grpc import InspectServiceStub

_MAX_PAGE = 1000
_STATES = {
    pb.VERSION_STATE_STAGING: ("staging", "yellow"),
    pb.VERSION_STATE_COMMITTED: ("committed", "green"),
    pb.VERSION_STATE_ABORTED: ("aborted", "red"),
    pb.VERSION_STATE_RETIRED: ("retired", "dim"),
    pb.VERSION_STATE_FAILED: ("failed", "red"),
}
_DIGEST_CHARS = 12


def show_versions(coordinator: str, policy: str, *, limit: int, json_output: bool) -> None:
    """Print the newest versions of one policy, or of each.

    Raises:
        WeftError: The coordinator does not answer, or knows no such policy.
    """
    with connect(coordinator) as channel:
        stub = InspectServiceStub(channel)
        policies = {p.policy: p for p in list_policies(stub, CALL_SECONDS)}
        names = [policy] if policy else [name for name, p in policies.items() if p.last_version]
        listed = {name: list(_newest(stub, name, limit)) for name in names}
    if json_output:
        print_json(pb.ListVersionsResponse(versions=[v for of in listed.values() for v in of]))
        return
    Console().print(
        render(
            [(policies.get(name, pb.Policy()), v) for name, found in listed.items() for v in found]
        )
    )


def _newest(stub: InspectServiceStub, policy: str, limit: int) -> Iterator[pb.Version]:
    token = ""
    while limit > 0:
        size = min(limit, _MAX_PAGE)
        request = pb.ListVersionsRequest(policy=policy, page_size=size, page_token=token)
        page = stub.ListVersions(request, timeout=CALL_SECONDS)
        yield from page.versions
        limit -= len(page.versions)
        token = page.next_page_token
        if not token:
            return


def render(versions: list[tuple[pb.Policy, pb.Version]]) -> Table:
    """Render versions as a table, each with its policy."""
    table = Table(title="versions", title_justify="left")
    for column in ("version", "state", "pushed by", "begun", "content", "remarks"):
        table.add_column(column, overflow="fold")
    for policy, version in versions:
        number = version.version.version
        table.add_row(
            f"{version.version.policy}@{number}",
            Text(*_STATES.get(version.state, ("unknown", "red"))),
            version.trainer_id,
            shown_time(version.create_time),
            version.content_digest_hex[:_DIGEST_CHARS] or "-",
            Text("\n").join(_remarks(policy, version)),
        )
    return table


def _remarks(policy: pb.Policy, version: pb.Version) -> Iterator[Text]:
    number = version.version.version
    if policy.served_version == number:
        yield Text("served", "bold")
    if number in policy.pinned_versions:
        yield Text("pinned")
    if version.HasField("trained_on_base_version"):
        yield Text(f"trained on base@{version.trained_on_base_version}", "dim")
    if version.failure_reason:
        yield Text(f"{version.failure_reason}: {version.failure_message}", "red")
