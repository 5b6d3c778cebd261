"""``weft status``: the pool as tables."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Annotated, Final

import grpc
import typer
from rich.console import Group, RenderableType
from rich.live import Live
from rich.text import Text

from weft_rl.cli.console.options import DEFAULT_COORDINATOR, Coordinator, Json, Wide
from weft_rl.cli.console.output import print_json, rate
from weft_rl.cli.console.table import ColumnSpec, FittedTable, listing_console
from weft_rl.contract.backends import GLOO, NCCL
from weft_rl.contract.errors import PeerUnavailableError, TransferTimeoutError
from weft_rl.contract.names import BASE_POLICY, plural, provenance
from weft_rl.coordinator.decisions.state.values import ReplicaState
from weft_rl.rpc.channel import open_channel
from weft_rl.rpc.codec import duration_from_proto
from weft_rl.rpc.pool_listing import get_pool
from weft_rl.rpc.status import error_from_rpc
from weft_rl.units import shown_bytes
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
        *([_policies(pool)] if _has_policies(pool) else []),
        *(_transfer("active", t) for t in pool.active_transfers),
        *([_transfer("last", pool.last_transfer)] if pool.HasField("last_transfer") else []),
    )  # fmt: skip


def _problems(pool: pb.GetPoolResponse) -> list[Text]:
    """List the problems that the coordinator reports."""
    mild = [one.severity == pb.PROBLEM_SEVERITY_WARNING for one in pool.problems]
    found = [
        Text(one.message, "yellow" if is_mild else "red")
        for one, is_mild in zip(pool.problems, mild, strict=True)
    ]
    if more := pool.num_more_problems:
        errors = max(0, pool.num_errors - mild.count(False))
        of_them = f", {errors} of them errors" if errors else ""
        found.append(Text(f"and {more} more problems{of_them}", "red" if errors else "yellow"))
    return found


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


def _serves(replica: pb.Replica) -> str:
    """Format the versions by which a replica differs from the pool; most serve what it does."""
    if replica.report.dirty_reason:
        return "mixed weights"
    found = [
        f"{one.policy}@{one.version if one.version >= 0 else '?'}"
        if one.version or one.policy == BASE_POLICY
        else f"no {one.policy}"
        for one in replica.differences[:_MAX_NAMED]
    ]
    more = len(replica.differences) - len(found) + replica.num_more_differences
    return "  ".join(found) + (f"  and {more} more" if more else "") or "as the pool"


def _versions(replica: pb.Replica) -> str:
    known = replica.capabilities
    return f"Weft {known.weft_version}, vLLM {known.engine_version}"


#: Columns that are shown where replicas differ.
_MAY_DIFFER: Final[Mapping[str, Callable[[pb.Replica], str]]] = {
    "model": lambda replica: replica.model_name,
    "versions": _versions,
}
_NO_REPLICAS = Text("no replicas: `weft rollout -- MODEL` starts one", "dim")


def _replicas(pool: pb.GetPoolResponse) -> FittedTable:
    """Make the table of replicas; in a large pool, those that are not ready come first."""
    replicas = list(pool.replicas)
    if more := _num_replicas(pool) - min(len(replicas), _MAX_REPLICAS):
        replicas.sort(key=lambda replica: replica.state == pb.REPLICA_STATE_READY)
    columns = [
        ColumnSpec("replica", lambda r: r.replica_id),
        ColumnSpec("state", _state_text, is_prose=True),
        ColumnSpec("serves", _serves, is_prose=True),
        ColumnSpec("OpenAI API", lambda r: r.http_url, 1),
        ColumnSpec("seen", lambda r: f"{duration_from_proto(r.since_heartbeat):.1f} s ago", 2),
    ]
    for name, of in _MAY_DIFFER.items():
        if len({*map(of, pool.replicas)}) > 1:
            columns.append(ColumnSpec(name, of, 3))
    table = FittedTable("replicas", columns, caption=_more(more))
    told = {(one.replica_id, one.message) for one in pool.problems if one.replica_id}
    for replica in replicas[:_MAX_REPLICAS]:
        name, why = replica.replica_id, replica.state_reason
        is_told = any(of == name and why in message for of, message in told)
        notes = ("" if is_told else why, _not_compared(pool, replica), stale_draft(replica))
        table.add(replica, [Text(note, "dim") for note in notes if note])
    return table


def _state_text(replica: pb.Replica) -> Text:
    word, colour = _state(replica.state)
    if replica.report.HasField("drain"):
        word += f" for {duration_from_proto(replica.report.drain.time_left):.0f} s"
    return Text(word, colour)


def _state(state: pb.ReplicaState.ValueType) -> tuple[str, str]:
    """Return the word and the colour of a replica's state."""
    if state not in [*ReplicaState]:  # of a newer coordinator
        return "unknown", "red"
    known = ReplicaState(state)
    return known.word, _COLOURS.get(known, "yellow")


def _more(number: int) -> str:
    return f"and {number} more: --json lists all" if number else ""


def _not_compared(pool: pb.GetPoolResponse, replica: pb.Replica) -> str:
    """Explain why a replica's base@0 was not compared; empty if it was."""
    known = replica.checkpoint.state != registry_pb2.CHECKPOINT_STATE_NOT_COMPARED
    if known or pool.version_vector.base or replica.version_vector.base:
        return ""
    return f"base@0 not compared: {replica.checkpoint.reason}"


def stale_draft(replica: pb.Replica) -> str:
    """Describe a replica whose draft model was not pushed with its base; empty for others."""
    method, version = replica.capabilities.draft_method, replica.report.engine.draft_version
    is_told = replica.report.HasField("engine")
    if not method or not is_told or replica.version_vector.base == version:
        return ""
    if not replica.capabilities.draft_fingerprint:
        return f"drafts tokens by {method}, which no push updates: fewer drafts are accepted"
    of = f"base@{version}" if version >= 0 else "no base, since a load failed"
    return f"drafts tokens by {method} of {of}: fewer drafts are accepted"


def _has_policies(pool: pb.GetPoolResponse) -> bool:
    is_listed = any(policy.last_version for policy in pool.policies)
    return is_listed or pool.num_policies > len(pool.policies)


def _policies(pool: pb.GetPoolResponse) -> FittedTable:
    """Make the table of policies: first those that need an operator, then those with an owner."""
    policies = [policy for policy in pool.policies if policy.last_version]
    unlisted = max(0, pool.num_policies - len(pool.policies))
    if more := len(policies) + unlisted - min(len(policies), _MAX_POLICIES):
        policies.sort(
            key=lambda p: (
                not (p.lost or p.publish_again_version or p.over_another_base),
                not p.HasField("lease"),
            )
        )
    columns = (
        ColumnSpec("policy", lambda p: p.policy),
        ColumnSpec("served", lambda p: _served(pool, p), is_prose=True),
        ColumnSpec("newest", lambda p: str(p.last_version), 2),
        ColumnSpec("keeps", _kept, 3),
        ColumnSpec("owner", _owner, 1),
    )
    table = FittedTable("policies", columns, caption=_more(more))
    for policy in policies[:_MAX_POLICIES]:
        table.add(policy)
    return table


def _owner(policy: pb.Policy) -> str:
    if not policy.HasField("lease"):
        return "-"
    left = duration_from_proto(policy.lease.time_to_live)
    return f"{policy.lease.trainer_id} (lease {left:.0f} s)"


def _kept(policy: pb.Policy) -> str:
    if not policy.num_retained:
        return "-"
    return f"{policy.num_retained}{'' if policy.has_own_retention else ' (default)'}"


def _served(pool: pb.GetPoolResponse, policy: pb.Policy) -> str:
    """Format the version behind the bare name, and remarks on it."""
    is_base = policy.kind == types_pb2.POLICY_KIND_BASE and bool(pool.base_fingerprint)
    served = "nothing yet"
    if policy.served_version or is_base:
        served = f"{policy.policy}@{policy.served_version}"
    is_adapter = policy.kind == types_pb2.POLICY_KIND_ADAPTER and policy.served_version
    has_base = policy.HasField("trained_on_base_version")
    if is_adapter and (not has_base or policy.over_another_base):
        trained_on = policy.trained_on_base_version if has_base else None
        served += f" ({provenance(trained_on, pool.version_vector.base)})"
    if policy.pinned:
        served += f" (pinned: {', '.join(map(str, policy.pinned))})"
    if undo := [way.version for way in policy.rollback_versions if way.num_undo]:
        served += f" (undo in place: {plural(len(undo), 'version')}, as far as {min(undo)})"
    return served


def sent_text(transfer: publish_pb2.Transfer, unit: str = "") -> str:
    """Format the bytes that a replica receives with a transfer: ``95,500,000 bytes``, or of a
    delta ``delta 1.20 MB of 95.5 MB``, with ``, whole to 1`` where others take all.

    Args:
        unit: What follows the number of bytes where it is no delta.
    """
    if not transfer.delta_from:
        return f"{transfer.total_bytes:,}{unit}"
    text = f"delta {shown_bytes(transfer.sent_bytes)} of {shown_bytes(transfer.total_bytes)}"
    num_whole = len(transfer.whole_replica_ids)
    return f"{text}, whole to {num_whole}" if num_whole else text


def hop_text(hop: publish_pb2.Hop) -> str:
    """Format what a link between two members carried: ``A to B: 1.20 MB/s (3.1 MB wait)``."""
    usage = hop.usage
    speed = rate(usage.num_bytes, duration_from_proto(usage.busy)) or "too short to measure"
    waiting = f" ({shown_bytes(usage.num_waiting)} wait)" if usage.num_waiting else ""
    sites = ", between sites" if usage.between_sites else ""
    return f"{hop.source} to {hop.target}: {speed}{sites}{waiting}"


def secrecy_text(transfer: publish_pb2.Transfer) -> str:
    """Format whether a transfer's links are encrypted: ``encrypted``, ``in plaintext``, ``partly
    in plaintext``; empty where it is not known, or there are none."""
    if not transfer.hops:
        return "in plaintext" if transfer.backend in (NCCL, GLOO) else ""
    encrypted = {hop.usage.encrypted for hop in transfer.hops}
    if len(encrypted) > 1:
        return "partly in plaintext"
    return "encrypted" if encrypted == {True} else "in plaintext"


def _transfer(which: str, transfer: publish_pb2.Transfer) -> Text:
    """Format a transfer as one line: what, how much, how fast, how it ended."""
    state = publish_pb2.TransferState.Name(transfer.state)
    word = state.removeprefix("TRANSFER_STATE_").lower()
    forming, staging, committing = (
        duration_from_proto(d) for d in (transfer.forming, transfer.staging, transfer.committing)
    )
    speed = rate(transfer.sent_bytes if transfer.delta_from else transfer.total_bytes, staging)
    text = Text.assemble(
        (f"{which} transfer  ", "dim"),
        (f"{transfer.version.policy}@{transfer.version.version}", "bold"),
        f" from {transfer.trainer_id}: {word}, {sent_text(transfer, ' bytes')} to "
        f"{plural(len(transfer.replica_ids), 'replica')} in {forming + staging + committing:.3f} s "
        f"(staging {staging:.3f} s{f', {speed}' if speed else ''})",
    )
    if transfer.backend:
        why = f": {transfer.backend_reason}" if transfer.backend_reason else ""
        secrecy = secrecy_text(transfer)
        text.append(f"\n  over {transfer.backend}{f', {secrecy}' if secrecy else ''}{why}", "dim")
    if transfer.hops:
        text.append(f"\n  slowest link: {hop_text(transfer.hops[0])}", "dim")
    if transfer.HasField("failure"):
        text.append(f"\n  {transfer.failure.reason}: {transfer.failure.message}", "red")
    return text
