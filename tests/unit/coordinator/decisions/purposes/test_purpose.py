"""The common course of a transfer serves a purpose that it has never heard of."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import ClassVar

import pytest

from tests.unit.coordinator.decisions.machine import DIGEST, LAYOUT, SPEC, Machine
from weft_rl.coordinator.decisions.state import effects, events
from weft_rl.coordinator.decisions.state.change import Change
from weft_rl.coordinator.decisions.state.transfer import Transfer, TransferIds
from weft_rl.coordinator.decisions.state.values import Failure, Phase, PolicyKind
from weft_rl.coordinator.decisions.transfers.lifecycle import at_commit_point, call_to_commit
from weft_rl.coordinator.decisions.transfers.purpose import AdmissionQueue, Purpose


@dataclass(frozen=True, kw_only=True)
class Reload(Purpose):
    """A fifth purpose, in one place: a replica loads once more what it has staged."""

    name: ClassVar[str] = "reload"
    replica_id: str = field()

    def admit(self, change: Change, transfer: Transfer, queue: AdmissionQueue) -> Iterable[str]:
        if self.replica_id in queue.taken:
            return [self.replica_id]
        replica = change.state.replicas[self.replica_id]
        change.put_transfer(at_commit_point(change, transfer, [replica]))
        change.emit(call_to_commit(transfer, replica, DIGEST))
        return [self.replica_id]

    def on_answered(self, change: Change, transfer: Transfer) -> None:
        failure = next(iter(transfer.refusals.values()), None)
        phase = Phase.ABORTED if failure else Phase.COMMITTED
        change.end_transfer(replace(transfer, phase=phase, failure=failure))


def _waiting(m: Machine, ticket: int) -> Transfer:
    return Transfer(
        ids=TransferIds(f"t{ticket}", ticket, f"g{ticket}", "", ""),
        purpose=Reload(replica_id="r0"),
        policy="math",
        kind=PolicyKind.ADAPTER,
        trainer_id="(nobody)",
        layout=LAYOUT,
        adapter=SPEC,
        begin_at=m.now,
        version=1,
        content_digest=DIGEST,
    )


def _pool() -> tuple[Machine, int]:
    m = Machine().pool("r0", "r1")
    m.acquire("math")
    m.run_to(Phase.COMMITTED)
    ticket = next(m.ids)
    waiting = _waiting(m, ticket)
    m.state = replace(m.state, transfers={**m.state.transfers, waiting.transfer_id: waiting})
    return m, ticket


@pytest.mark.parametrize("failure", [None, Failure("LOAD_FAILED", "no", {"dirty": "false"})])
def test_a_further_purpose_takes_its_turn_commits_and_ends(failure: Failure | None) -> None:
    m, ticket = _pool()
    waiting = m.await_end(ticket)
    (order,) = m.found(effects.CallCommit)
    assert (order.replica_id, order.version.version) == ("r0", 1)
    m.answer_commit(ticket, "r0", failure)
    ended = m.transfer(ticket)
    assert ended.phase is (Phase.ABORTED if failure else Phase.COMMITTED)
    if failure:
        assert m.error(waiting).reason == "LOAD_FAILED"
    else:
        assert m.answer(waiting) == ended
    assert m.transfer(m.run_to(Phase.COMMITTED)).served_by == {"r0", "r1"}


def test_it_waits_for_a_push_and_a_push_waits_for_it() -> None:
    m = Machine().pool("r0", "r1")
    m.acquire("math")
    push = m.run_to(Phase.STAGING)
    ticket = next(m.ids)
    m.state = replace(m.state, transfers={**m.state.transfers, f"t{ticket}": _waiting(m, ticket)})
    m.do(events.Tick())
    assert m.transfer(ticket).phase is Phase.WAITING
    behind = m.begin()
    m.finish(push)
    assert m.transfer(ticket).phase is Phase.COMMITTING
    assert m.transfer(behind).phase is Phase.WAITING, "the replica does one thing at a time"
    m.answer_commit(ticket, "r0")
    assert m.transfer(behind).phase is Phase.FORMING
