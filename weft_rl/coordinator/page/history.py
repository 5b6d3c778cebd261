"""History of a pool, for a page that draws it: a fold over the driver's steps.

All that is kept has a bound, in number and in the length of its texts, and is forgotten with
the process. The event loop adds, any thread reads: entries are immutable.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from weft_rl.containers import LruMapping, replace
from weft_rl.contract.names import BASE_POLICY, VersionVector
from weft_rl.coordinator.decisions.state import effects, events
from weft_rl.coordinator.decisions.state.effects import EventKind
from weft_rl.coordinator.decisions.state.pool import PoolState
from weft_rl.coordinator.decisions.state.transfer import Transfer
from weft_rl.coordinator.decisions.state.values import Failure, Phase, PolicyKind
from weft_rl.coordinator.messages.wire import transfer_to_proto
from weft_rl.coordinator.runtime.watchers import Log
from weft_rl.v1 import publish_pb2

#: Pushes and rollbacks that are remembered, and as many clones and restores.
MAX_TRANSFERS: Final = 1000
#: Changes of what replicas are and serve: of a pool of a thousand, ten of each.
MAX_MARKS: Final = 10_000
#: How far back those are shown.
SHOWN_SECONDS: Final = 3600.0
#: Of a transfer: refusals whose reasons are kept, and replicas beyond which only the longest
#: pause is.
MAX_REASONS: Final = 16
MAX_PAUSES: Final = 64
_MAX_TEXT: Final = 500
# Sets of replicas, and vectors, that are recognised when they come again.
_MAX_RECENT: Final = 64
_STATES: Final = {
    EventKind.REPLICA_READY: "ready",
    EventKind.REPLICA_PENDING: "pending_weights",
    EventKind.REPLICA_LOST: "lost",
    EventKind.REPLICA_QUARANTINED: "quarantined",
    EventKind.REPLICA_DRAINING: "draining",
    EventKind.REPLICA_CORDONED: "cordoned",
    EventKind.REPLICA_ASLEEP: "asleep",
    EventKind.REPLICA_SUSPECT: "suspect",
    EventKind.REPLICA_LEFT: "gone",
    EventKind.QUARANTINE_ORDERED: "quarantined",
}
_KINDS: Final = {PolicyKind.BASE: "base", PolicyKind.ADAPTER: "adapter"}


@dataclass(frozen=True)
class Members:
    """Sorted ids of replicas; transfers with the same ones share them."""

    number: int
    revision: int
    """Revision of the first transfer that has them."""
    replica_ids: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class PastTransfer:
    """Transfer that has ended."""

    revision: int
    message: publish_pb2.Transfer
    """Transfer without the names of replicas, and with the first reasons alone."""
    kind: str
    backend: str
    commit_time: float
    """Time of its commit point, in seconds since 1970 like all times here; 0 if it came to none."""
    end_time: float
    waiting_seconds: float
    """Seconds that it waited for its turn."""
    replaced_version: int
    """Version that its policy served at the commit point; 0 if it came to none."""
    trained_on_base_version: int | None
    targets: Members
    served_by: Members
    pauses: Mapping[str, tuple[float, float]]
    """Seconds after the commit point at which generation resumed, and seconds that it had been
    paused, by replica."""


@dataclass(frozen=True, kw_only=True)
class Mark:
    """New state of a replica, or versions that it serves other than by a push or a rollback."""

    revision: int
    time: float
    replica_id: str
    state: str
    reason: str
    serves: Mapping[str, int]
    """Version that the replica serves, by policy."""
    switching: tuple[str, ...]
    """Policies that a push or a rollback was changing there at that time."""


@dataclass(frozen=True)
class StagingRate:
    """Fastest staging of a push that was seen."""

    bytes_per_second: float
    version: str
    time: float


class History:
    """History of one coordinator, from its start.

    Args:
        state: State at the start.
        now: Returns monotonic seconds, as ``step`` has them.
    """

    def __init__(self, state: PoolState, now: Callable[[], float]) -> None:
        self._now = now
        self.began_at = state.wall(now())
        self.revision = 0
        """Revision of the newest entry; set once that can be read."""
        self.transfers = Log[PastTransfer](MAX_TRANSFERS)
        self.repairs = Log[PastTransfer](MAX_TRANSFERS)
        """Clones and restores."""
        self.marks = Log[Mark](MAX_MARKS, self._keep_last)
        self.older_marks: Mapping[str, Mark] = {}
        """Newest mark that its log has forgotten, by replica of the pool."""
        self.rates: Mapping[str, StagingRate] = {}
        """Fastest staging seen, by backend."""
        self._replicas: Mapping[str, object] = {}
        self._pauses: dict[str, dict[str, tuple[float, float]]] = {}
        self._members = LruMapping[tuple[str, ...], Members](_MAX_RECENT)
        self._num_members = 0
        self._served = LruMapping[object, Mapping[str, int]](_MAX_RECENT)

    def count(
        self,
        event: events.Event,
        before: PoolState,
        after: PoolState,
        done: Sequence[effects.Effect],
    ) -> None:
        """Add what one step has changed; on the event loop, in O(what changed).

        Args:
            done: The step's effects.
        """
        marked = set()
        for effect in done:
            if isinstance(effect, effects.Announce) and effect.kind in _STATES:
                marked.add(effect.subject)
                self._add_mark(effect.subject, _STATES[effect.kind], effect.message, after)
        replica_id = getattr(event, "replica_id", "")
        if replica_id and replica_id not in marked and after.replicas is not before.replicas:
            self._note_served(event, replica_id, before, after)
        if isinstance(event, events.CommitAnswered) and event.pause_seconds:
            self._note_pause(event, before)
        if after.history is not before.history:
            for name, ended in after.history.items():
                if name not in before.history:
                    self._add_transfer(ended, after)

    # -- transfers -------------------------------------------------------------------

    def _note_pause(self, event: events.CommitAnswered, before: PoolState) -> None:
        transfer = before.transfers.get(event.transfer_id)
        if transfer is None or not transfer.commit_at or len(transfer.targets) > MAX_PAUSES:
            return  # the longest is all that is kept
        resumed = self._now() - transfer.commit_at
        pauses = self._pauses.setdefault(event.transfer_id, {})
        pauses[event.replica_id] = (resumed, event.pause_seconds)

    def _add_transfer(self, ended: Transfer, state: PoolState) -> None:
        revision = self.revision + 1
        staging = ended.commit_at - ended.start_at
        is_push = ended.purpose.name == "push"
        if is_push and ended.commit_at and ended.start_at and staging > 0:
            self._note_rate(ended, ended.layout.total_bytes / staging, state)
        created = ended.create_time or state.wall(ended.end_at)
        past = PastTransfer(
            revision=revision,
            message=transfer_to_proto(without_names(ended), state, ended.end_at, 0),
            kind=_KINDS[ended.kind],
            backend=ended.backend,
            commit_time=state.wall(ended.commit_at) if ended.commit_at else 0.0,
            end_time=state.wall(ended.end_at),
            waiting_seconds=max(0.0, created - state.wall(ended.begin_at)),
            replaced_version=ended.served_before,
            trained_on_base_version=ended.adapter.trained_on_base_version
            if ended.adapter
            else None,
            targets=self._same_members(ended.targets, revision),
            served_by=self._same_members(ended.served_by, revision),
            pauses=self._pauses.pop(ended.transfer_id, {}),
        )
        (self.repairs if ended.replica_id else self.transfers).add(past)
        self.revision = revision

    def _note_rate(self, ended: Transfer, bytes_per_second: float, state: PoolState) -> None:
        known = self.rates.get(ended.backend)
        if known is None or bytes_per_second > known.bytes_per_second:
            rate = StagingRate(
                bytes_per_second, str(ended.policy_version), state.wall(ended.commit_at)
            )
            self.rates = {**self.rates, ended.backend: rate}

    def _same_members(self, replica_ids: Sequence[str] | frozenset[str], revision: int) -> Members:
        key = tuple(sorted(replica_ids))
        known = self._members.get(key)
        if known is None:
            self._num_members += 1
            known = Members(self._num_members, revision, key)
            self._members.put(key, known)
        return known

    # -- replicas --------------------------------------------------------------------

    def _note_served(
        self, event: events.Event, replica_id: str, before: PoolState, after: PoolState
    ) -> None:
        """Add a mark if a replica serves something else, other than by a push or a rollback."""
        was, now = before.replicas.get(replica_id), after.replicas.get(replica_id)
        if was is None or now is None or was.vector is now.vector:
            return
        if isinstance(event, events.CommitAnswered):
            transfer = before.transfers.get(event.transfer_id)
            if transfer is not None and not transfer.replica_id:
                return
        if self._aliases(was.vector) is not self._aliases(now.vector) and now.announced:
            self._add_mark(replica_id, now.announced.name.lower(), "", after)

    def _add_mark(self, replica_id: str, state: str, reason: str, pool: PoolState) -> None:
        self._replicas = pool.replicas
        replica = pool.replicas.get(replica_id)
        mark = Mark(
            revision=self.revision + 1,
            time=pool.wall(self._now()),
            replica_id=replica_id,
            state=state,
            reason=reason[:_MAX_TEXT],
            serves=self._aliases(replica.vector) if replica else {},
            switching=tuple(
                t.policy
                for t in pool.transfers.values()
                if t.phase is Phase.COMMITTING and not t.replica_id and replica_id in t.switching
            ),
        )
        self.marks.add(mark)
        self.revision = mark.revision

    def _aliases(self, vector: VersionVector) -> Mapping[str, int]:
        """Return the version of each policy that answers to its name.

        Equal vectors give the same object, while they are recent.
        """
        known = self._served.get(vector.key)
        if known is None:
            known = {BASE_POLICY: vector.base}
            known.update({name: entry.alias for name, entry in vector.adapters.items()})
            self._served.put(vector.key, known)
        return known

    def _keep_last(self, dropped: Sequence[Mark]) -> None:
        last = {**self.older_marks, **{mark.replica_id: mark for mark in dropped}}
        self.older_marks = {name: mark for name, mark in last.items() if name in self._replicas}


def without_names(transfer: Transfer) -> Transfer:
    """Copy a transfer without its replicas, and with only the first reasons of its failures."""

    def first(failures: Mapping[str, Failure]) -> Mapping[str, Failure]:
        return {
            name: replace(failures[name], message=failures[name].message[:_MAX_TEXT])
            for name in sorted(failures)[:MAX_REASONS]
        }

    failure = transfer.failure
    return replace(
        transfer,
        targets=(),
        served_by=frozenset(),
        lost=transfer.lost[:MAX_REASONS],
        losses=first(transfer.losses),
        refusals=first(transfer.refusals),
        failure=replace(failure, message=failure.message[:_MAX_TEXT]) if failure else None,
    )
