"""One step in the making: the state so far and the effects so far.

Local to a call of ``step``; the rules share it so that each can be short.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from weft_rl.containers import replace
from weft_rl.contract.errors import WeftError
from weft_rl.contract.names import PolicyVersion
from weft_rl.coordinator.decisions.state.effects import (
    Announce,
    CallAnswer,
    Effect,
    EventKind,
    Refuse,
    Reply,
    SaveEpoch,
    SavePolicyDropped,
)
from weft_rl.coordinator.decisions.state.pool import FitKey, Policy, PoolState
from weft_rl.coordinator.decisions.state.replica import Replica
from weft_rl.coordinator.decisions.state.transfer import Group, Transfer

#: Ended transfers that are remembered.
MAX_HISTORY = 100
#: Events whose subject is a policy.
_ABOUT_POLICIES: Final = frozenset(
    {
        EventKind.LEASE_ACQUIRED,
        EventKind.LEASE_RELEASED,
        EventKind.RETENTION_SET,
        EventKind.POLICY_FORGOTTEN,
        EventKind.UNRECORDED_VERSIONS,
    }
)


class Change:
    """Decisions of a step so far; ``state`` is replaced, never mutated.

    ``touched`` are the replicas whose state may have changed; ``touched_all`` is True if what
    the pool serves has.
    """

    def __init__(self, state: PoolState, now: float) -> None:
        self.state = state
        self.now = now
        self.effects: list[Effect] = []
        self.touched: set[str] = set()
        self.touched_all = False

    def emit(self, *effects: Effect) -> None:
        """Add effects, in order."""
        self.effects += effects

    def reply(self, ticket: int, answer: CallAnswer) -> None:
        """Answer a call."""
        self.effects.append(Reply(ticket, answer))

    def refuse(self, tickets: Iterable[int], error: WeftError) -> None:
        """Fail calls."""
        self.effects += [Refuse(ticket, error) for ticket in tickets]

    def announce(self, kind: EventKind, subject: str, message: str) -> None:
        """Notify watchers of something that happened, and log it."""
        concerns = None
        if "@" in subject:
            concerns = PolicyVersion.parse(subject)
        elif kind in _ABOUT_POLICIES:
            concerns = PolicyVersion(subject, 0)
        self.effects.append(Announce(kind, subject, message, concerns))

    def announce_transfer(self, kind: EventKind, transfer: Transfer, text: str) -> None:
        """Notify watchers of a step of a transfer, and log it.

        Args:
            text: What follows the version's name.
        """
        moved = transfer.policy_version
        self.effects.append(Announce(kind, transfer.transfer_id, f"{moved}{text}", moved))

    def put_replica(self, replica: Replica) -> Replica:
        """Add or replace a replica; returns it."""
        self.touched.add(replica.replica_id)
        replicas = {**self.state.replicas, replica.replica_id: replica}
        self.state = replace(self.state, replicas=replicas)
        return replica

    def drop_replica(self, replica_id: str) -> None:
        """Forget a replica."""
        self.touched.add(replica_id)
        replicas = {k: v for k, v in self.state.replicas.items() if k != replica_id}
        self.state = replace(self.state, replicas=replicas)

    def put_policy(self, policy: Policy) -> None:
        """Add or replace a policy."""
        old = self.state.policies.get(policy.name)
        self.touched_all |= old is None or old.versions != policy.versions
        self.state = replace(self.state, policies={**self.state.policies, policy.name: policy})
        if policy.name in self.state.forgotten:
            others = {k: v for k, v in self.state.forgotten.items() if k != policy.name}
            self.state = replace(self.state, forgotten=others)

    def drop_policy(self, policy: Policy) -> None:
        """Forget a policy that never had a version; its tokens are not given again."""
        others = {k: v for k, v in self.state.policies.items() if k != policy.name}
        floor = max(self.state.token_floor, policy.fencing_token)
        self.state = replace(self.state, policies=others, token_floor=floor)
        self.emit(SavePolicyDropped(policy.name, floor))

    def put_away(self, policy: Policy) -> None:
        """Keep the numbers of a policy that was forgotten, and nothing else of it."""
        self.touched_all |= policy.name in self.state.policies
        others = {k: v for k, v in self.state.policies.items() if k != policy.name}
        forgotten = {**self.state.forgotten, policy.name: policy}
        self.state = replace(self.state, policies=others, forgotten=forgotten)

    def next_epoch(self) -> int:
        """Advance the epoch counter and return it; durable before its group is opened."""
        epoch = self.state.epoch_counter + 1
        self.state = replace(self.state, epoch_counter=epoch)
        self.effects.append(SaveEpoch(epoch))
        return epoch

    def put_group(self, group: Group) -> None:
        """Add or replace a group."""
        self.state = replace(self.state, groups={**self.state.groups, group.group_id: group})

    def drop_group(self, group_id: str) -> None:
        """Forget a group."""
        groups = {k: v for k, v in self.state.groups.items() if k != group_id}
        self.state = replace(self.state, groups=groups)

    def put_transfer(self, transfer: Transfer) -> Transfer:
        """Add or replace a transfer under way; returns it."""
        transfers = {**self.state.transfers, transfer.transfer_id: transfer}
        self.state = replace(self.state, transfers=transfers)
        return transfer

    def drop_transfer(self, transfer_id: str) -> None:
        """Forget a transfer that never got a version."""
        transfers = {k: v for k, v in self.state.transfers.items() if k != transfer_id}
        self.state = replace(self.state, transfers=transfers)

    def end_transfer(self, transfer: Transfer, answer: CallAnswer | None = None) -> Transfer:
        """Move a transfer under way to the history, and answer the calls that wait for it.

        Args:
            transfer: As it ended; those calls are refused if it has a failure.
            answer: Answer to them otherwise; by default the transfer.

        Returns:
            The transfer as it is remembered.
        """
        tickets = (*transfer.begin_tickets, *transfer.await_tickets)
        transfer = replace(transfer, end_at=self.now, begin_tickets=(), await_tickets=())
        if transfer.failure:
            self.refuse(tickets, transfer.failure.error())
        for ticket in () if transfer.failure else tickets:
            self.reply(ticket, answer or transfer)
        if transfer.replica_id:  # what the pool serves is the same
            self.touched.add(transfer.replica_id)
        else:
            self.touched_all = True
        self.drop_transfer(transfer.transfer_id)
        layout = replace(transfer.layout, manifest=None)
        transfer = replace(transfer, layout=layout, send_plan=None)
        history = {**self.state.history, transfer.transfer_id: transfer}
        while len(history) > MAX_HISTORY:
            del history[next(iter(history))]
        self.state = replace(self.state, history=history)
        return transfer

    def look_up(self, replica_id: str) -> None:
        """Remember that something is being looked up for a replica."""
        self.state = replace(self.state, lookups=self.state.lookups | {replica_id})

    def looked_up(self, replica_id: str) -> None:
        """Forget that something is being looked up for a replica."""
        self.touched.add(replica_id)
        self.state = replace(self.state, lookups=self.state.lookups - {replica_id})

    def fit_under_way(self, key: FitKey) -> None:
        """Remember that preflight was asked for an answer."""
        self.state = replace(self.state, fits_under_way=self.state.fits_under_way | {key})
