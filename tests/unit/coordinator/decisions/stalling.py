"""Pushes whose members say what they do, or nothing."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from tests.unit.coordinator.decisions.machine import LAYOUT, Machine
from weft_rl.contract.manifest import WSUM64
from weft_rl.contract.replica_report import ReplicaWork
from weft_rl.coordinator.decisions.state import events
from weft_rl.coordinator.decisions.state.transfer import Activity, RankReport
from weft_rl.coordinator.decisions.state.values import ContentDigest, Failure, Phase

LATE = Failure("DEADLINE", "the deadline of JoinGroup passed", {})
BUCKETS = dataclasses.replace(LAYOUT, num_buckets=4)
DIGEST = ContentDigest(WSUM64, b"\1" * 8, BUCKETS.total_bytes)


def push(phase: Phase, *replica_ids: str, **changes: object) -> tuple[Machine, int, int]:
    m = Machine().pool(*(replica_ids or ("r0", "r1", "r2")))
    policy = str(changes.pop("policy", "math"))
    m.acquire(policy)
    changes = {"timeout": 600.0, "layout": BUCKETS, **changes}
    ticket = m.begin(policy, **changes)
    waiter = m.await_end(ticket)
    if phase is Phase.STAGING:
        m.attend_all(ticket)
        m.prepare_all(ticket)
    return m, ticket, waiter


def say(
    m: Machine,
    ticket: int,
    activity: Activity = Activity.WAITING,
    *,
    bucket: int = 0,
    ranks: tuple[int, ...] = (0, 1, 2, 3),
    num_verified: Mapping[int, int] | None = None,
) -> None:
    transfer = m.transfer(ticket)
    report = RankReport(transfer.transfer_id, activity, bucket)
    reports = dict.fromkeys(ranks, report)
    heard = events.RanksHeard(transfer.group_id, reports, transfer.transfer_id, num_verified or {})
    m.do(heard)


def pass_saying(m: Machine, ticket: int, seconds: float, **said: object) -> None:
    """Time goes by in which ranks say what they do, once a second."""
    for _ in range(int(seconds)):
        if m.transfer(ticket).uncommitted:
            say(m, ticket, **said)  # type: ignore[arg-type]
        m.pass_time(1.0)


def pass_stuck(m: Machine, replica_id: str, what: str, seconds: float, since: float = 0.0) -> None:
    """Time goes by in which a replica says that it is at something and does not get on, which it
    has not for ``since`` seconds before."""
    begun_at, end = m.now - since, m.now + seconds
    while m.now < end:
        m.works[replica_id] = ReplicaWork(what, m.now + 0.25 - begun_at)
        m.pass_time(0.25)


def suspects_of(m: Machine) -> list[str]:
    return [r.replica_id for r in m.state.replicas.values() if r.suspect]
