"""``weft status``: the pool as tables."""

from __future__ import annotations

import sys
import time
from contextlib import nullcontext
from typing import Annotated, Literal

import grpc
import typer
from rich.console import Group, RenderableType
from rich.live import Live
from rich.text import Text

from weft_rl.cli.console.options import DEFAULT_COORDINATOR, Coordinator, Json, Wide
from weft_rl.cli.console.output import print_json, rate
from weft_rl.cli.console.table import ColumnSpec, FittedTable, listing_console
from weft_rl.contract.errors import PeerUnavailableError, TransferTimeoutError
from weft_rl.contract.names import PolicyVersion, plural, provenance
from weft_rl.coordinator.decisions.problems import explain_conflict, explain_unused_file
from weft_rl.coordinator.decisions.state.values import ReplicaState
from weft_rl.rpc.channel import open_channel
from weft_rl.rpc.codec import duration_from_proto
from weft_rl.rpc.pool_listing import get_pool
from weft_rl.rpc.status import error_from_rpc
from weft_rl.v1 import inspect_pb2 as pb
from weft_rl.v1 import publish_pb2, registry_pb2, types_pb2
from weft_rl.v1.inspect_pb2_grpc import InspectServiceStub

_CALL_SECONDS = 5.0
#: A table shows what of a large pool has arrived by then.
_PATIENCE_SECONDS = 2.0
#: Deadline of the whole list, which programs get.
_WHOLE_SECONDS = 60.0
#: Replicas that the table lists.
_MAX_REPLICAS = 200
#: Policies that the table lists, and adapters that are named in one place.
_MAX_POLICIES, _MAX_NAMED = 20, 3
#: Version numbers of an adapter that are listed.
_MAX_NUMBERS = 8
_COLOURS = {
    ReplicaState.READY: "green",
    ReplicaState.LOST: "red",
    ReplicaState.QUARANTINED: "red",
}


def status(
    coordinator: Coordinator = DEFAULT_COORDINATOR,
    watch: Annotated[
        bool, typer.Option("--watch", "-w", help="Refresh until interrupted.")
    ] = False,
    wide: Wide = False,
    json_output: Json = False,
    interval: Annotated[float, typer.Option(help="Seconds between refreshes.", min=0.1)] = 1.0,
) -> None:
    """Show the pool: replicas, what they serve, the last transfer."""
    with open_channel(coordinator) as channel:
        stub = InspectServiceStub(channel)
        pool = read_pool(stub, whole=json_output)
        if not watch:
            print_json(pool) if json_output else listing_console(wide=wide).print(render(pool))
            return
        live_view = Live(auto_refresh=False, console=listing_console(wide=wide))
        with nullcontext() if json_output else live_view as live:
            shown, away = render(pool), ""
            while True:
                if live is None:
                    print_json(pool) if not away else print(away, file=sys.stderr, flush=True)
                else:
                    shown = shown if away else render(pool)
                    live.update(Group(shown, Text(away, "red")) if away else shown, refresh=True)
                time.sleep(interval)
                try:
                    pool, away = read_pool(stub, whole=json_output), ""
                except (PeerUnavailableError, TransferTimeoutError) as error:
                    away = f"{error.message}; this is how it was before"


def read_pool(stub: InspectServiceStub, *, whole: bool = False) -> pb.GetPoolResponse:
    """Read the pool; of a large one only what arrives in time, unless ``whole``.

    Raises:
        WeftError: The coordinator does not answer.
    """
    try:
        if whole:
            return get_pool(stub, _WHOLE_SECONDS)
        return get_pool(stub, _CALL_SECONDS, _PATIENCE_SECONDS)
    except grpc.RpcError as error:
        raise error_from_rpc(error) from error


def render(pool: pb.GetPoolResponse) -> RenderableType:
    """Render the pool: replicas, policies, transfers."""
    return Group(
        _headline(pool), *_problems(pool), _replicas(pool) if _num_replicas(pool) else _NO_REPLICAS,
        *_out_of_service_elsewhere(pool), *([_policies(pool)] if _has_policies(pool) else []),
        *(_transfer("active", t) for t in pool.active_transfers),
        *([_transfer("last", pool.last_transfer)] if pool.HasField("last_transfer") else []),
    )  # fmt: skip


def _problems(pool: pb.GetPoolResponse) -> list[Text]:
    """List what is wrong now, as the coordinator says it."""
    if not pool.problems:
        return [Text(text, "red") for text in _problems_of_older(pool)]
    is_warning = [one.severity == pb.PROBLEM_SEVERITY_WARNING for one in pool.problems]
    found = [
        Text(one.message, "yellow" if mild else "red")
        for one, mild in zip(pool.problems, is_warning, strict=True)
    ]
    if more := pool.num_more_problems:
        # One that does not count errors sends them first.
        errors = pool.num_errors - is_warning.count(False) if pool.num_errors else 0
        is_mild = not errors if pool.num_errors else is_warning[-1]
        of_them = f", {errors} of them errors" if errors > 0 else ""
        found.append(Text(f"and {more} more problems{of_them}", "yellow" if is_mild else "red"))
    return found


def _problems_of_older(pool: pb.GetPoolResponse) -> list[str]:
    """List problems that a coordinator which sends none tells otherwise, and no table shows."""
    conflicts = [
        explain_conflict(
            PolicyVersion(policy.policy, conflict.version),
            {found.content_digest: found.replica_ids for found in conflict.contents},
        )
        for policy in pool.policies
        for conflict in policy.conflicts
    ]
    return [*map(explain_unused_file, pool.unused_files), *conflicts]


def _told_of(pool: pb.GetPoolResponse, kind: Literal["replica_id", "policy"]) -> dict[str, str]:
    """Return what problems say, by replica or by policy."""
    told = dict[str, str]()
    for one in pool.problems:
        # An older coordinator does not say of which kind the subject is.
        name = getattr(one, kind) if one.replica_id or one.policy else one.subject
        told[name] = f"{told.get(name, '')}{one.message}\n"
    return told


def _headline(pool: pb.GetPoolResponse) -> Text:
    counts = {count.state: count.num_replicas for count in pool.replica_counts}
    ready = counts.get(
        pb.REPLICA_STATE_READY, sum(r.state == pb.REPLICA_STATE_READY for r in pool.replicas)
    )
    names = {replica.model_name for replica in pool.replicas}
    of_model = f"of {names.pop()} " if len(names) == 1 else ""
    vector = pool.version_vector
    served = vector_text(vector, most=_MAX_NAMED)
    kept = ""
    if not _num_replicas(pool):
        kept = f"; replicas that come serve {served}" if vector.base or vector.adapters else ""
        served = "nothing"
    return Text.assemble(
        (f"pool {of_model}serves ", "dim"),
        (served, "bold"),
        (f"   {ready} of {_num_replicas(pool)} replicas ready{kept}", "dim"),
    )  # fmt: skip


def _num_replicas(pool: pb.GetPoolResponse) -> int:
    """Return the number of replicas of the whole pool, whether or not all are in the message."""
    return max(len(pool.replicas), sum(count.num_replicas for count in pool.replica_counts))


def vector_text(vector: types_pb2.VersionVector, most: int | None = None) -> str:
    """Format ``base@3 math@2 (1,2)``: the alias behind each name, then what is retained.

    Args:
        most: Name so many adapters, and say how many more there are.
    """
    parts = [_base_text(vector), *map(_adapter_text, vector.adapters[:most])]
    more = len(vector.adapters) - (len(parts) - 1) + vector.num_more_adapters
    return "  ".join(parts) + (f"  and {more} more" if more else "")


def _base_text(vector: types_pb2.VersionVector) -> str:
    return f"base@{vector.base}" if vector.base >= 0 else "base@?"


def _adapter_text(entry: types_pb2.AdapterVersions) -> str:
    numbers = [*map(str, entry.versions)]
    if len(numbers) > _MAX_NUMBERS:
        numbers[_MAX_NUMBERS // 2 : -(_MAX_NUMBERS // 2)] = ["…"]
    return f"{entry.policy}@{entry.alias} ({','.join(numbers)})"


def _serves(replica: types_pb2.VersionVector, pool: types_pb2.VersionVector) -> str:
    """Format the versions by which a replica differs from the pool; most replicas serve what it
    does."""
    if replica == pool:
        return "as the pool"
    here = {entry.policy: _adapter_text(entry) for entry in replica.adapters}
    wanted = {entry.policy: _adapter_text(entry) for entry in pool.adapters}
    cut = [m.adapters[-1].policy for m in (replica, pool) if m.num_more_adapters]
    if cut:  # as far as both are listed
        last = min(cut)
        here = {name: text for name, text in here.items() if name <= last}
        wanted = {name: text for name, text in wanted.items() if name <= last}
    differing = [_base_text(replica)] if replica.base != pool.base else []
    for name in sorted(here.keys() | wanted.keys()):
        if here.get(name) != wanted.get(name):
            differing.append(here.get(name, f"no {name}"))
    if not differing:
        return "as the pool"
    more = len(differing) - _MAX_NAMED
    return "  ".join(differing[:_MAX_NAMED]) + (f"  and {more} more" if more > 0 else "")


_NO_REPLICAS = Text("no replicas: `weft rollout -- MODEL` starts one", "dim")
_REPLICA_COLUMNS = (
    ColumnSpec("replica"),
    ColumnSpec("state", is_prose=True),
    ColumnSpec("serves", is_prose=True),
    ColumnSpec("OpenAI API", 1),
    ColumnSpec("seen", 2),
    ColumnSpec("model", 3),
)


def _replicas(pool: pb.GetPoolResponse) -> FittedTable:
    """Make the table of replicas; in a large pool, those that are not ready come first."""
    replicas = list(pool.replicas)
    if more := _num_replicas(pool) - min(len(replicas), _MAX_REPLICAS):
        replicas.sort(key=lambda replica: replica.state == pb.REPLICA_STATE_READY)
    are_mixed = len({replica.model_name for replica in pool.replicas}) > 1
    columns = _REPLICA_COLUMNS if are_mixed else _REPLICA_COLUMNS[:-1]
    table = FittedTable("replicas", columns, caption=_more(more))
    told = _told_of(pool, "replica_id")
    for replica in replicas[:_MAX_REPLICAS]:
        word, colour = _state(replica.state)
        state = Text(word, colour)
        if replica.report.HasField("drain"):
            state.append(
                f" for {duration_from_proto(replica.report.drain.time_left):.0f} s", colour
            )
        why = replica.state_reason
        if why in told.get(replica.replica_id, ""):
            why = ""
        notes = (why, _not_compared(pool, replica), stale_draft(replica))
        seen = duration_from_proto(replica.since_heartbeat)
        table.add_row(
            replica.replica_id,
            state,
            "mixed weights"
            if replica.report.dirty_reason
            else _serves(replica.version_vector, pool.version_vector),
            replica.http_url,
            f"{seen:.1f} s ago",
            *([replica.model_name] if are_mixed else []),
            notes=[Text(note, "dim") for note in notes if note],
        )
    return table


def _state(state: pb.ReplicaState.ValueType) -> tuple[str, str]:
    """Return the word and the colour of a replica's state."""
    if state not in [*ReplicaState]:  # of a newer coordinator
        return "unknown", "red"
    known = ReplicaState(state)
    return known.word, _COLOURS.get(known, "yellow")


def _more(number: int) -> str:
    return f"and {number} more: --json lists all" if number else ""


def _not_compared(pool: pb.GetPoolResponse, replica: pb.Replica) -> str:
    """Explain why a replica's base@0 could not be compared with that of the others, if so."""
    known = replica.checkpoint_state != registry_pb2.CHECKPOINT_STATE_NOT_COMPARED
    if known or pool.version_vector.base or replica.version_vector.base:
        return ""
    return f"base@0 not compared: {replica.checkpoint_reason}"


def stale_draft(replica: pb.Replica) -> str:
    """Tell of a replica whose model of drafts is not of the base that it serves."""
    method, version = replica.capabilities.draft_method, replica.report.draft_version
    if not method or replica.version_vector.base == version:
        return ""
    if not replica.capabilities.draft_fingerprint:
        return f"drafts tokens by {method}, which no push updates: fewer drafts are accepted"
    of = f"base@{version}" if version >= 0 else "no base, since a load failed"
    return f"drafts tokens by {method} of {of}: fewer drafts are accepted"


def _out_of_service_elsewhere(pool: pb.GetPoolResponse) -> list[Text]:
    """List orders about replicas that are not in the pool."""
    here = {replica.replica_id for replica in pool.replicas}
    more = pool.num_more_out_of_service
    return [
        Text(
            f"{order.replica_id} is not in the pool; {_state(order.state)[0]} by an operator"
            + (f": {order.reason}" if order.reason else ""),
            "yellow",
        )
        for order in pool.out_of_service
        if order.replica_id not in here
    ] + [Text(f"and {more} more orders that keep replicas out of service", "yellow")] * bool(more)


_POLICY_COLUMNS = (
    ColumnSpec("policy"),
    ColumnSpec("served", is_prose=True),
    ColumnSpec("newest", 2),
    ColumnSpec("keeps", 3),
    ColumnSpec("owner", 1),
)


def _has_policies(pool: pb.GetPoolResponse) -> bool:
    is_listed = any(policy.last_version for policy in pool.policies)
    return is_listed or pool.num_policies > len(pool.policies)


def _policies(pool: pb.GetPoolResponse) -> FittedTable:
    """Make the table of the policies that ever had a version. Of many, those that need an operator
    come first, then those that a trainer owns."""
    policies = [policy for policy in pool.policies if policy.last_version]
    unlisted = max(0, pool.num_policies - len(pool.policies))
    if more := len(policies) + unlisted - min(len(policies), _MAX_POLICIES):
        policies.sort(
            key=lambda p: (
                not (p.lost or p.publish_again_version or p.over_another_base),
                not p.HasField("lease"),
            )
        )
    table = FittedTable("policies", _POLICY_COLUMNS, caption=_more(more))
    told = _told_of(pool, "policy")
    for policy in policies[:_MAX_POLICIES]:
        owner, notes = "-", []
        if policy.HasField("lease"):
            left = duration_from_proto(policy.lease.time_to_live)
            owner = f"{policy.lease.trainer_id} (lease {left:.0f} s)"
        if (text := _missing_text(policy)) and policy.policy not in told:
            notes.append(text)
        served = _served(pool, policy)
        trained_on = None
        if policy.HasField("trained_on_base_version"):
            trained_on = policy.trained_on_base_version
        base = pool.version_vector.base
        is_adapter = policy.kind == types_pb2.POLICY_KIND_ADAPTER and policy.served_version
        if is_adapter and (trained_on is None or policy.over_another_base):
            served += f" ({provenance(trained_on, base)})"
        if policy.pinned_versions:
            served += f" (pinned: {', '.join(map(str, policy.pinned_versions))})"
        keeps = "-"
        if policy.num_retained:
            keeps = f"{policy.num_retained}{'' if policy.has_own_retention else ' (default)'}"
        table.add_row(
            policy.policy, served, str(policy.last_version), keeps, owner,
            notes=[Text(note, "dim") for note in notes],
        )  # fmt: skip
    return table


def _served(pool: pb.GetPoolResponse, policy: pb.Policy) -> str:
    """Format the version that the bare name stands for."""
    is_base = policy.kind == types_pb2.POLICY_KIND_BASE and bool(pool.base_fingerprint)
    if policy.served_version or is_base:
        return f"{policy.policy}@{policy.served_version}"
    return "nothing yet"


def _missing_text(policy: pb.Policy) -> str:
    """Say that no replica holds what a policy serves; empty if one does."""
    if policy.lost:
        return _lost_text(policy)
    if not policy.publish_again_version:
        return ""
    lost = f"{policy.policy}@{policy.publish_again_version}"
    asked = "is asked to publish it again" if policy.HasField("lease") else "push it again"
    return f"{lost} is held by no replica: {asked}"


def _lost_text(policy: pb.Policy) -> str:
    """Say that a policy is lost, and how to restore or remove it."""
    name = policy.policy
    order = "weft rollback base --to 0"
    if policy.kind == types_pb2.POLICY_KIND_ADAPTER:
        order = f"weft forget {name}"
    what = f"{name}@{policy.served_version} is lost: no replica in contact holds it"
    return f"{what}; push it again, or {order}"


def _transfer(which: str, transfer: publish_pb2.Transfer) -> Text:
    """Format a transfer as one line: what, how much, how fast, how it ended."""
    state = publish_pb2.TransferState.Name(transfer.state)
    word = state.removeprefix("TRANSFER_STATE_").lower()
    forming, staging, committing = (
        duration_from_proto(d) for d in (transfer.forming, transfer.staging, transfer.committing)
    )
    speed = rate(transfer.total_bytes, staging)
    text = Text.assemble(
        (f"{which} transfer  ", "dim"),
        (f"{transfer.version.policy}@{transfer.version.version}", "bold"),
        f" from {transfer.trainer_id}: {word}, {transfer.total_bytes:,} bytes to "
        f"{plural(len(transfer.replica_ids), 'replica')} in {forming + staging + committing:.3f} s "
        f"(staging {staging:.3f} s{f', {speed}' if speed else ''})",
    )
    if transfer.backend:
        why = f": {transfer.backend_reason}" if transfer.backend_reason else ""
        text.append(f"\n  over {transfer.backend}{why}", "dim")
    if transfer.failure_reason:
        text.append(f"\n  {transfer.failure_reason}: {transfer.failure_message}", "red")
    return text
