"""Replica as the coordinator knows it, and orders to it: immutable values; times as in ``pool``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from weft_rl.containers import replace
from weft_rl.contract.capabilities import Capabilities
from weft_rl.contract.checkpoint import Checkpoint, not_compared
from weft_rl.contract.names import BASE_POLICY, PolicyVersion, VersionVector
from weft_rl.contract.replica_report import DrainNote, HeldVersion, ReplicaReport, Sleep
from weft_rl.coordinator.decisions.state.values import PolicyKind, StateReason


@dataclass(frozen=True, kw_only=True)
class StandingSleepOrder:
    """Order to a replica to sleep until somebody wakes it, or its trainer's lease has ended.

    Durable, but for ``until`` and ``confirmed``.
    """

    trainer_id: str
    """Trainer that ordered it; empty for an operator."""
    fencing_token: int = 0
    """Token of the base's lease that the order is a part of; 0 for an operator's order. Also 0 if a
    replica has reported the order and its trainer has not been heard since."""
    level: int = 1
    """Level of sleep: 1 moves weights to host memory, 2 discards them."""
    aborts: bool = False
    """True if running requests are aborted, rather than finished."""
    seconds: float = 0.0
    """Seconds that running requests may take to end."""
    until: float = float("inf")
    """Time at which an order that a replica has told of ends unless its trainer is heard."""
    confirmed: bool = False
    """True if the replica has slept by it, or came asleep to a coordinator that was restarted."""


@dataclass(frozen=True)
class SleepWait:
    """Call that waits until replicas sleep, or are awake."""

    replica_ids: tuple[str, ...]
    asleep: bool
    deadline: float


@dataclass(frozen=True)
class Backoff:
    """Delay after a version could not be brought to a replica, until it is retried."""

    count: int
    retry_at: float
    source: str
    """Source of the last attempt."""
    why: str


@dataclass(frozen=True)
class Suspect:
    """Suspicion that a replica hangs in a transfer or an order, until it answers a probe."""

    why: str
    probe_at: float
    """Earliest time at which it may be told again to attend a probe."""
    num_probes: int = 0
    group_id: str = ""
    """Group of the newest probe."""
    is_told: bool = False
    """True if it has taken the order to attend the newest probe."""


@dataclass(frozen=True)
class ReplicaDrain:
    """Drain of a replica: it leaves in good order, at ``deadline`` at the latest."""

    deadline: float
    reason: str

    def note(self, now: float) -> DrainNote:
        """Return the drain as it is told to the replica, and in listings."""
        return DrainNote(max(0.0, self.deadline - now), self.reason)


#: Checkpoint of a replica that says nothing of it.
NOT_TOLD = not_compared("it does not say what it was started with")


@dataclass(frozen=True)
class Replica:
    """Replica as last heard of."""

    replica_id: str
    incarnation: str
    address: str
    http_url: str
    model_name: str
    capabilities: Capabilities
    vector: VersionVector
    last_heard: float
    report: ReplicaReport = field(default_factory=ReplicaReport)
    """Last report, whole; fields below hold what is believed of it, or came of other answers."""
    lost: bool = False
    unheard_reason: str = ""
    """Reason why it may be dead: a transfer lost it, and it was not heard of since."""
    suspect: Suspect | None = None
    """Set while it takes no part in transfers, though its process is heard."""
    worked_at: float = float("-inf")
    """Time at which its work last made progress, by its reports; stays when the work is done."""
    dirty_reason: str = ""
    """Reason why its engine may hold mixed weights, which keeps it out of service."""
    commit_failure: str = ""
    """Reason why it did not switch to a committed version."""
    order_answered_at: float = float("-inf")
    """Time at which an order's outcome (CommitTransfer, say) last told what it serves."""
    retire_at: float = float("-inf")
    """Earliest time at which it may be asked again to drop versions."""
    announced: StateReason | None = None
    """State that watchers were told last, with the reason."""
    routed: bool = False
    """True if watchers of the routes see it."""
    retained: tuple[int, ...] = ()
    """Versions of the base that it holds a copy of, last used first."""
    undoable: tuple[int, ...] = ()
    """Versions of the base that it can switch to in place, and holds no copy of; nearest first."""
    backoffs: Mapping[PolicyVersion, Backoff] = field(default_factory=dict)
    """Versions that could not be brought to it yet."""
    spilled: frozenset[PolicyVersion] = frozenset()
    """Versions that lie in its spill directory."""
    drain: ReplicaDrain | None = None
    """Set while it is to leave."""
    unrecorded: frozenset[HeldVersion] = frozenset()
    """Versions that it holds and the catalog does not know; see adoption.py."""
    mistaken: frozenset[HeldVersion] = frozenset()
    """Versions that it holds with other bytes than their numbers have. They are not counted in
    ``vector``, ``retained``, ``undoable`` and ``spilled``, and are dropped."""
    checkpoint: Checkpoint = NOT_TOLD
    """Checkpoint that it was started with."""
    num_passed_over: int = 0
    """Deltas that began without it, one after the other, since it lacked their base."""
    refusing: str = ""
    """Reason why it refuses new requests, as it said last; empty while it is open."""
    order_number: int = 0
    """Number of the order by which it refuses requests, or takes them."""
    order_due: int = 0
    """Number of the order that it must have heard before it counts as open."""

    asleep: Sleep | None = None
    """Set while it says that it sleeps."""
    sleep_call_until: float = float("-inf")
    """Time until which it is not told again to sleep, or to wake; -inf once it has answered."""

    def with_vector(self, told: VersionVector) -> Replica:
        """Return the replica with what its process tells that it serves, unless that is older."""
        return self if told.revision < self.vector.revision else replace(self, vector=told)

    def believed_report(self, now: float) -> ReplicaReport:
        """Return its report with what the coordinator believes in place of what it said."""
        is_of_now = self.report.version_vector.base == self.vector.base
        return replace(
            self.report,
            version_vector=self.vector,
            retained_base_versions=self.retained,
            undo_base_versions=self.undoable,
            spilled_versions=self.spilled,
            dirty_reason=self.dirty_reason,
            base_as_started=self.report.base_as_started and is_of_now,
            engine=self.report.engine if is_of_now else None,
            refusing=self.refusing,
            order_number=self.order_number,
            sleep=self.asleep,
            drain=self.drain.note(now) if self.drain else None,
        )

    @property
    def work(self) -> str:
        """Work that it reported last; empty where there was none."""
        return self.report.work.what if self.report.work else ""

    @property
    def is_open(self) -> bool:
        """True if it has said that it takes requests, and was not ordered otherwise since."""
        return not self.refusing and self.order_number >= self.order_due

    def loads_in_place(self, kind: PolicyKind) -> bool:
        """Return whether it loads such a policy in place: it has no copy until it switches."""
        return kind is PolicyKind.BASE and self.capabilities.loads_in_place

    def silence(self, since: float, now: float) -> float:
        """Return the seconds without progress of an order told at ``since``, or of its own work."""
        return now - max(since, self.worked_at)

    @property
    def is_away(self) -> bool:
        """True if it was silent for too long, or since a transfer lost it."""
        return self.lost or bool(self.unheard_reason)

    @property
    def in_contact(self) -> bool:
        """True if it is heard and its weights are whole; ``eligible_targets`` asks for more."""
        return not self.is_away and not self.dirty_reason


def holds(replica: Replica, version: PolicyVersion) -> bool:
    """Return whether a replica has a copy of a version's bytes in memory, to send or load."""
    if version.policy == BASE_POLICY:
        return version.version in replica.retained
    return replica.vector.holds(version)


def can_switch(replica: Replica, version: PolicyVersion) -> bool:
    """Return whether a replica can switch to a version by what is in its memory: a copy, or the
    elements that deltas have changed."""
    is_undoable = version.policy == BASE_POLICY and version.version in replica.undoable
    return is_undoable or holds(replica, version)


def held_versions(replica: Replica) -> Iterator[PolicyVersion]:
    """Yield every version for which ``holds`` is true."""
    for number in replica.retained:
        yield PolicyVersion(BASE_POLICY, number)
    for name, entry in replica.vector.adapters.items():
        for number in entry.versions:
            yield PolicyVersion(name, number)
