"""Push: a trainer brings a new version to every eligible replica.

It waits until there are enough replicas, preflight has passed, and no ready replica is occupied
by another transfer. A replica that has still to catch up takes part if it is free; otherwise it
gets the version afterwards. A clone gives way to a push. A policy changes once at a time, even
where the replicas concerned differ. One file: these are the rules of one purpose, read together.

At the commit point one durable write makes the version COMMITTED, and only then are
replicas told. The push counts as committed if at least one replica serves the version. If
none does, the trainer is told LOAD_FAILED with the first reason. The version fails as soon as
it is certain that nobody serves it (withdrawals.py): at once where every replica has refused
definitely. Until then it stays COMMITTED: some replica may hold it, and going back could serve
two truths.

One file: what a push needs to begin and what it does on its course are rules about the same
transfer, and change together.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from weft_rl.containers import replace
from weft_rl.contract.adapter_config import AdapterSpec, parse_config
from weft_rl.contract.errors import (
    CapacityError,
    InvalidAdapterError,
    InvalidRequestError,
    NotReadyError,
    PeerUnavailableError,
    RequestConflictError,
    TransferTimeoutError,
    WeftError,
)
from weft_rl.contract.manifest import check_gapless, check_send_plan
from weft_rl.contract.names import BASE_POLICY
from weft_rl.coordinator.decisions.policies import leases
from weft_rl.coordinator.decisions.state import events
from weft_rl.coordinator.decisions.state.change import Change
from weft_rl.coordinator.decisions.state.effects import (
    BeginAnswer,
    EventKind,
    OpenGroup,
    SavePolicy,
    SaveVersion,
)
from weft_rl.coordinator.decisions.state.pool import (
    Lease,
    Policy,
    PoolState,
    is_overdue,
    live_lease,
    require_lease,
)
from weft_rl.coordinator.decisions.state.replica import Replica
from weft_rl.coordinator.decisions.state.replica_state import is_joining, obeys_pins
from weft_rl.coordinator.decisions.state.transfer import Group, Transfer, group_members
from weft_rl.coordinator.decisions.state.values import (
    ContentDigest,
    Failure,
    Phase,
    PolicyKind,
    VersionState,
)
from weft_rl.coordinator.decisions.transfers import (
    abort,
    lifecycle,
    preflight,
    regrouping,
    stalls,
    withdrawals,
)
from weft_rl.coordinator.decisions.transfers.abort import discard, end_group
from weft_rl.coordinator.decisions.transfers.lifecycle import take_over
from weft_rl.coordinator.decisions.transfers.purpose import AdmissionQueue, Purpose
from weft_rl.coordinator.decisions.transfers.withdrawals import all_definite, is_dirty

_FOR_REPLICAS = "replicas"
_FOR_JOINING = "replicas that are catching up"
_FOR_PINS = " to hear what is pinned"
# Reasons for the loss of a replica that it has not given itself.
_SILENCE = frozenset({"PEER_GONE", "STALLED", "COORDINATOR_AWAY", "DEADLINE"})


@dataclass(frozen=True, kw_only=True)
class Push(Purpose):
    """Transfer in which a trainer brings a new version to the pool."""

    name: ClassVar[str] = "push"
    brings_version: ClassVar[bool] = True
    request_id: str = field()
    session_id: str
    fencing_token: int = field()
    min_replicas: int
    require_all: bool
    """True if the loss of one of ``required`` fails the push."""
    refuse_other_base: bool
    """True if an adapter is refused over another base than it was trained on."""
    check_finite: bool
    """True if the sender gives up at the first bucket that holds NaN or infinity."""
    carries_runs: bool = field()
    wanted_group_id: str
    """The group of the trainer's former push, which may still be there."""
    answer_by: float
    """Time by which BeginTransfer must have been answered, at most the transfer's deadline."""
    required: frozenset[str] = frozenset()
    """Replicas that were ready when it took its turn; all that take part, if none was. The
    others take part as long as they can, and catch up otherwise."""
    admitted_at: float = 0.0
    """Time when it was its turn."""
    served_over: int | None = None
    over_another_base: bool = False

    # -- its turn -----------------------------------------------------------------

    def admit(self, change: Change, transfer: Transfer, queue: AdmissionQueue) -> Iterable[str]:
        replicas = queue.targets(transfer.kind)
        if is_overdue(change.state, transfer.policy, change.now):
            leases.end_overdue(change, transfer.policy)
            return ()  # the push has ended with it
        try:
            waits_for = self._try(change, transfer, replicas, queue)
        except WeftError as error:
            change.refuse(transfer.begin_tickets, error)
            change.drop_transfer(transfer.transfer_id)
            return ()
        if waits_for and waits_for != transfer.waits_for:
            change.put_transfer(replace(transfer, waits_for=waits_for))
        if waits_for in (_FOR_REPLICAS, _FOR_JOINING) or waits_for.endswith(_FOR_PINS):
            return ()
        return [replica.replica_id for replica in replicas]

    def _try(
        self, change: Change, transfer: Transfer, replicas: Sequence[Replica], queue: AdmissionQueue
    ) -> str:
        """Start a push if it may; otherwise say what it waits for."""
        if change.now >= self.answer_by:
            raise self._too_late(change.state, transfer, replicas)
        require_lease(change.state, transfer.policy, self.fencing_token, change.now)
        if len(replicas) < self.min_replicas or not preflight.are_described(change.state, replicas):
            return _FOR_REPLICAS
        fits = preflight.fits(change, transfer, replicas)
        unheard = _unheard(change.state, transfer, replicas)
        waited_for = [r.replica_id for r in unheard if not is_joining(change.state, r)]
        if waited_for or len(unheard) == len(replicas):
            return ", ".join(waited_for or [r.replica_id for r in unheard]) + _FOR_PINS
        if queue.must_wait(replicas) or change.state.is_changing(transfer.policy):
            return "its turn"
        preflight.check_names(change.state, transfer.policy)  # some came while it waited
        preflight.check_takes_bases(change.state, transfer.policy)
        passed_over = {replica.replica_id for replica in unheard}
        if transfer.is_mixed:
            whole_for = preflight.sent_whole_beside_delta(change.state, transfer, replicas)
            transfer = replace(transfer, whole_for=whole_for)
        elif transfer.delta_from:
            passed_over |= preflight.passed_over_by_delta(change.state, transfer, replicas)
        free = [r for r in queue.free(replicas) if r.replica_id not in passed_over]
        if len(free) < self.min_replicas:
            if transfer.delta_from:
                why = f"{len(free)} replicas can take a delta now, the push needs"
                raise preflight.delta_refused(f"{why} {self.min_replicas}")
            return _FOR_JOINING
        full = preflight.lacking_room(change.state, transfer, free)
        if full and (self.require_all or len(free) - len(full) < self.min_replicas):
            raise next(iter(full.values())).error()
        free = [replica for replica in free if replica.replica_id not in full]
        preflight.check_group(
            change.state,
            transfer,
            free,
            check_finite=self.check_finite,
            carries_runs=self.carries_runs,
        )
        if mismatch := self._other_base(change.state, transfer):
            raise mismatch.error()
        if not fits:
            return "preflight"
        if transfer.is_mixed and transfer.whole_for.issuperset(r.replica_id for r in free):
            raise preflight.delta_refused("no replica that can take the delta is free for the push")
        self._count_passed_over(change, transfer, replicas, passed_over)
        take_over(change, free, transfer)
        transfer = replace(transfer, lost=tuple(full), losses=full)
        self._start(change, transfer, free)
        return ""

    def _count_passed_over(
        self,
        change: Change,
        transfer: Transfer,
        replicas: Sequence[Replica],
        names: Collection[str],
    ) -> None:
        """Count, at each replica, the deltas in a row that have passed it over."""
        for replica in replicas:
            is_one = bool(transfer.delta_from) and replica.replica_id in names
            count = replica.num_passed_over + 1 if is_one else 0
            if count != replica.num_passed_over:
                change.put_replica(replace(replica, num_passed_over=count))

    def _too_late(
        self, state: PoolState, transfer: Transfer, replicas: Sequence[Replica]
    ) -> WeftError:
        num_replicas = len(replicas)
        lacking = preflight.not_described(state, replicas)
        if lacking and num_replicas >= self.min_replicas:
            models = "; ".join(f"{name} has not described {model}" for name, model in lacking[:3])
            more = f", nor have {len(lacking) - 3} more theirs" if len(lacking) > 3 else ""
            return PeerUnavailableError(
                f"{models}{more}; the push's time is up: start what does not describe it again, or "
                "stop it",
                reason="POOL_EMPTY",
                metadata={"replicas": ", ".join(name for name, _ in lacking)},
            )
        if transfer.waits_for == _FOR_REPLICAS or num_replicas < self.min_replicas:
            return PeerUnavailableError(
                f"{num_replicas} replicas are in contact and have described their base, the push "
                f"needs {self.min_replicas}; its time is up{_and_suspects(state)}. Start more, or "
                "require fewer; weft status lists them",
                reason="POOL_EMPTY",
            )
        waits_for = transfer.waits_for
        return TransferTimeoutError(f"the push's time was up while it waited for {waits_for}")

    def _other_base(self, state: PoolState, transfer: Transfer) -> Failure | None:
        """Return why an adapter is refused over the served base: asked at the begin and at the
        commit point, between which a base may have come."""
        if transfer.adapter is None or not self.refuse_other_base:
            return None
        return preflight.other_base(state, transfer.policy, transfer.adapter)

    def _start(self, change: Change, transfer: Transfer, replicas: Sequence[Replica]) -> None:
        tickets = transfer.begin_tickets
        policy = change.state.policies[transfer.policy]
        policy = replace(policy, last_version=policy.last_version + 1)
        change.put_policy(policy)
        wanted, session_id = self.wanted_group_id, self.session_id
        kept = kept_group(change.state, transfer, wanted, session_id, replicas)
        ready = [r.replica_id for r in replicas if not is_joining(change.state, r)]
        group = kept or new_group(change, transfer, session_id, replicas)
        longest = change.state.settings.max_transfer_seconds
        transfer = replace(
            transfer,
            phase=Phase.FORMING,
            version=policy.last_version,
            create_time=change.state.wall(change.now),
            group_id=group.group_id,
            epoch=group.epoch,
            targets=tuple(member.replica_id for member in group.members),
            purpose=replace(
                self,
                required=frozenset(ready or [replica.replica_id for replica in replicas]),
                admitted_at=change.now,
            ),
            begin_tickets=(),
            deadline=min(transfer.deadline, change.now + longest),
        )
        change.put_transfer(transfer)
        change.emit(SavePolicy(policy), SaveVersion(transfer.record(VersionState.STAGING)))
        change.announce_transfer(
            EventKind.TRANSFER_BEGUN,
            transfer,
            f" by trainer {transfer.trainer_id} to "
            f"{len(transfer.targets)} replicas, epoch {group.epoch}, {_sent(transfer)}",
        )
        if kept is None:
            change.emit(OpenGroup(group))
            regrouping.call_to_join(change, transfer, group)
        for ticket in tickets:
            change.reply(ticket, begin_answer(transfer, group))
        lifecycle.prepare_if_complete(change, transfer)

    # -- under way ----------------------------------------------------------------

    def requires(self, replica_id: str) -> bool:
        return self.require_all and replica_id in self.required

    def may_continue(self, transfer: Transfer, group: Group, lost: Collection[str]) -> bool:
        # A push that loads in place already is not given up because of one replica (abort.py).
        num_left = sum(member.replica_id not in lost for member in group.members)
        if transfer.loading:
            return num_left > 0
        return num_left >= self.min_replicas and not any(map(self.requires, lost))

    def on_members_lost(
        self, change: Change, transfer: Transfer, lost: Mapping[str, Failure]
    ) -> None:
        group = change.state.groups[transfer.group_id]
        if all(member.replica_id not in lost for member in group.members):
            return  # they were lost before
        for replica_id, why in lost.items():
            replica = change.state.replicas.get(replica_id)
            is_silent = replica is not None and replica.suspect is None and why.reason in _SILENCE
            if is_silent and replica is not None:
                # Most often its process is dead: no push waits for it until it is heard again.
                change.put_replica(replace(replica, unheard_reason=why.message))
            abort.abandon(change, transfer, [replica_id], why)
        if not self.may_continue(transfer, group, lost):
            abort.abort(change, transfer, next(iter(lost.values())))
        else:
            regrouping.resume_without(change, transfer, lost)

    def on_sender_stalled(self, change: Change, transfer: Transfer, failure: Failure) -> None:
        if not transfer.taken_up:  # it was interrupted as it began, say
            why = f"{transfer.trainer_id} has not come to its push: {failure.message}"
            abort.abort(change, transfer, Failure("TRANSFER_ABORTED", why, failure.metadata))
        elif stalls.trainer_delays_others(change, transfer):
            abort.abort(change, transfer, failure)

    def time_is_up(self, state: PoolState, transfer: Transfer) -> str:
        longest = state.settings.max_transfer_seconds
        if transfer.deadline < self.admitted_at + longest:
            return super().time_is_up(state, transfer)
        return f"the push took longer than the coordinator's --max-transfer-seconds ({longest:g})"

    def on_aborted(self, change: Change, ended: Transfer) -> None:
        assert ended.failure is not None
        # Not at once: a restart ends a version that is STAGING in the same way.
        change.emit(SaveVersion(ended.record(VersionState.ABORTED), durable=False))
        change.announce_transfer(
            EventKind.TRANSFER_ABORTED,
            ended,
            f": {ended.failure.message} [{ended.failure.reason}]",
        )

    # -- the commit point and its end ---------------------------------------------

    def on_staged(self, change: Change, transfer: Transfer, digest: ContentDigest) -> None:
        if is_overdue(change.state, transfer.policy, change.now):
            leases.end_overdue(change, transfer.policy)
            return
        policy = change.state.policies[transfer.policy]
        lease = live_lease(policy, change.now)
        if lease is None or lease.fencing_token != self.fencing_token:
            failure = Failure("LEASE_FENCED", f"the lease of {policy.name!r} is no longer held")
            abort.abort(change, transfer, failure)
            return
        if mismatch := self._other_base(change.state, transfer):
            abort.abort(change, transfer, mismatch)
            return
        replicas = [change.state.replicas[name] for name in transfer.targets]
        served_over = change.state.vector.base if transfer.adapter else None
        trained_on = transfer.adapter.trained_on_base_version if transfer.adapter else None
        is_other = change.state.is_other_base(trained_on)
        transfer = replace(
            lifecycle.at_commit_point(change, transfer, replicas),
            content_digest=digest,
            purpose=replace(self, served_over=served_over, over_another_base=is_other),
        )
        policy = replace(
            policy,
            served_version=transfer.version,
            versions=_with_version(policy, transfer.version),
            forgotten=False,
            trained_on=_with_trained_on(policy, transfer),
        )
        change.put_policy(policy)
        change.put_transfer(transfer)
        if transfer.kind is PolicyKind.BASE:
            change.state = change.state.with_base_content(
                transfer.version, transfer.layout.digest, digest
            )
        record = transfer.record(VersionState.COMMITTED, change.state.wall(change.now))
        change.emit(SaveVersion(record), SavePolicy(policy))
        change.announce_transfer(EventKind.TRANSFER_STAGED, transfer, "")
        change.emit(*(lifecycle.call_to_commit(transfer, replica, digest) for replica in replicas))

    def on_answered(self, change: Change, transfer: Transfer) -> None:
        is_undone = transfer.is_replaced_kept and not transfer.served_by and all_definite(transfer)
        ended = replace(transfer, phase=Phase.ABORTED if is_undone else Phase.COMMITTED)
        if not transfer.served_by:
            ended = replace(ended, failure=_nobody_serves(transfer, is_undone))
        ended = change.end_transfer(ended)
        if is_undone:
            withdrawals.undo(change, ended)
        elif ended.failure and transfer.is_replaced_kept:
            withdrawals.wait_for_reports(change, ended)
        if ended.refusals:
            discard(change, ended.transfer_id, ended.refusals)
        is_settled = bool(ended.served_by) or not transfer.is_replaced_kept
        if transfer.kind is PolicyKind.BASE and is_settled:
            withdrawals.retire_replaced(change, ended)
        seconds = change.now - transfer.begin_at
        served = f"{len(transfer.served_by)} of {len(transfer.targets)} replicas"
        change.announce_transfer(
            EventKind.TRANSFER_COMMITTED
            if ended.phase is Phase.COMMITTED
            else EventKind.TRANSFER_ABORTED,
            transfer,
            f" served by {served}, epoch {transfer.epoch}, "
            f"{_sent(transfer)}, {seconds:.3f} seconds"
            + (f"; {ended.failure.message}" if ended.failure else ""),
        )


def begin_answer(transfer: Transfer, group: Group | None) -> BeginAnswer:
    """Return the answer to BeginTransfer; ``group`` is None once the transfer has ended."""
    return BeginAnswer(
        transfer.transfer_id,
        transfer.policy_version,
        transfer.ids.nonce,
        transfer.targets,
        group,
    )


def _sent(transfer: Transfer) -> str:
    """Format what each replica receives, for messages."""
    text = f"{'a delta of ' if transfer.delta_from else ''}{transfer.sent_bytes} bytes"
    if not transfer.sent_whole:
        return text
    num_whole = len(transfer.sent_whole)
    return f"{text}, to {num_whole} of them {transfer.layout.total_bytes} bytes"


def _unheard(state: PoolState, transfer: Transfer, replicas: Sequence[Replica]) -> list[Replica]:
    """List the replicas that would drop pinned copies if they were brought this transfer now."""
    if transfer.kind is not PolicyKind.BASE or not state.pinned_bases:
        return []
    return [replica for replica in replicas if not obeys_pins(state, replica)]


def _and_suspects(state: PoolState) -> str:
    """Return a note on suspects, which would otherwise be there, for error messages."""
    names = sorted(r.replica_id for r in state.replicas.values() if r.suspect and not r.lost)
    if not names:
        return ""
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return f"; {names[0]} is suspect{more}: `weft status` says why"


def _with_version(policy: Policy, version: int) -> tuple[int, ...]:
    """Return the versions of a policy with a new one, which replaces that of the base."""
    return (version,) if policy.kind is PolicyKind.BASE else (*policy.versions, version)


def _with_trained_on(policy: Policy, transfer: Transfer) -> dict[int, int]:
    """Return the bases, where known, that kept versions and the new one were trained on."""
    known = {v: base for v, base in policy.trained_on.items() if v in policy.versions}
    base = transfer.adapter.trained_on_base_version if transfer.adapter else None
    return known if base is None else {**known, transfer.version: base}


def _nobody_serves(transfer: Transfer, is_undone: bool) -> Failure:
    replica_id, first = min(transfer.refusals.items())
    what = f"{first.message} [{first.reason}]"
    if is_undone:
        stays = f"{transfer.policy}@{transfer.served_before} stays"
        outcome = f"it is withdrawn, {stays}" if transfer.served_before else "it is withdrawn"
    else:
        outcome = "it is withdrawn once it is certain that none of them serves it"
        if not transfer.is_replaced_kept:
            outcome = "what it replaced is gone: push again"
    return Failure(
        "LOAD_FAILED",
        f"no replica could switch to {transfer.policy_version}; {replica_id}: {what}; {outcome}",
        {
            "member": replica_id,
            "cause": first.reason,
            "dirty": "true" if any(map(is_dirty, transfer.refusals.values())) else "false",
            "withdrawn": "true" if is_undone else "false",
        },
    )


def kept_group(
    state: PoolState,
    transfer: Transfer,
    wanted_group_id: str,
    session_id: str,
    replicas: Sequence[Replica],
) -> Group | None:
    """Return the group of the trainer's former push, if all of it is there and suits this one.

    Args:
        wanted_group_id: The group that the trainer has.
        session_id: Session of the trainer's process.
        replicas: Replicas that take part.
    """
    group = state.groups.get(wanted_group_id)
    if (
        group is not None
        and (group.trainer_id, group.session_id) == (transfer.trainer_id, session_id)
        and group.backend == transfer.backend
        and group.complete
        and group.num_senders == transfer.num_senders
        and group.members == group_members(replicas, transfer.num_senders)
    ):
        return group
    return None


def new_group(
    change: Change, transfer: Transfer, session_id: str, replicas: Sequence[Replica]
) -> Group:
    """Create a group in place of the trainer's old ones."""
    in_use = {t.group_id for t in change.state.transfers.values()}
    for old in list(change.state.groups.values()):
        if old.trainer_id == transfer.trainer_id and old.group_id not in in_use:
            end_group(change, old.group_id, "a new group of its trainer replaced it")
    name, secret = transfer.ids.group(0)
    group = Group(
        name,
        secret,
        change.next_epoch(),
        transfer.trainer_id,
        session_id,
        transfer.backend,
        group_members(replicas, transfer.num_senders),
        num_senders=transfer.num_senders,
    )
    change.put_group(group)
    return group


# -- BeginTransfer: a push that waits, or the one that the request made before ---

#: Transfers of one policy that may be under way or wait.
MAX_TRANSFERS_PER_POLICY = 16


def begin(change: Change, event: events.BeginTransfer) -> None:
    """Accept a push, or answer the one that this request id already made."""
    policy, lease = require_lease(
        change.state, event.policy, event.fencing_token, change.now, event.session_id
    )
    if not _answer_again(change, event, lease):
        _check_request(change.state, event, policy)
        change.put_transfer(_new_transfer(change.now, event, policy, lease))


def _answer_again(change: Change, event: events.BeginTransfer, lease: Lease) -> bool:
    state = change.state
    for known in (*state.transfers.values(), *state.history.values()):
        if (known.trainer_id, known.purpose.request_id) == (lease.trainer_id, event.request_id):
            _check_same(event, known.policy, known.layout.digest)
            if known.uncommitted and known.send_plan != event.send_plan:
                raise RequestConflictError(
                    f"request id {event.request_id!r} was used for a push with another send plan: "
                    "a new push needs a new id"
                )
            if known.phase is Phase.WAITING:
                tickets = (*known.begin_tickets, event.ticket)
                change.put_transfer(replace(known, begin_tickets=tickets))
            else:
                is_open = known.phase < Phase.COMMITTED
                group = state.groups.get(known.group_id) if is_open else None
                change.reply(event.ticket, begin_answer(known, group))
            return True
    record = event.recorded
    if record is None or record.trainer_id != lease.trainer_id:
        return False
    _check_same(event, record.version.policy, record.layout_digest)
    change.reply(event.ticket, BeginAnswer(record.transfer_id, record.version, 0, (), None))
    return True


def _check_same(event: events.BeginTransfer, policy: str, layout_digest: bytes) -> None:
    if (policy, layout_digest) != (event.policy, event.layout_digest):
        raise RequestConflictError(
            f"request id {event.request_id!r} was used for a push of {policy!r} with "
            f"{'the same' if layout_digest == event.layout_digest else 'another'} layout: "
            "a new push needs a new id"
        )


def _check_request(state: PoolState, event: events.BeginTransfer, policy: Policy) -> None:
    if not 1 <= len(event.request_id) <= 128:
        raise InvalidRequestError("request_id must have 1 to 128 characters")
    if policy.kind is PolicyKind.ADAPTER and event.adapter is None:
        raise InvalidAdapterError(f"a push of the adapter {policy.name!r} needs an adapter spec")
    if policy.kind is PolicyKind.BASE and event.adapter is not None:
        raise InvalidAdapterError("a push of the base has no adapter spec")
    if event.carries_runs and event.adapter is not None:
        raise InvalidRequestError("carries_runs is of pushes of the base; this is an adapter")
    if event.adapter is not None:
        parse_config(event.adapter.config_json)
        _check_base(state, event.adapter)
    preflight.check_names(state, policy.name)
    preflight.check_takes_bases(state, policy.name)
    if event.layout is None:
        raise NotReadyError(
            f"no manifest of layout {event.layout_digest.hex()[:12] or '(empty)'} is known: "
            "call PutManifest first",
            reason="MANIFEST_UNKNOWN",
        )
    if event.carries_runs and event.send_plan is not None:
        raise InvalidRequestError("a push has a send plan, or carries_runs, or neither; not both")
    if event.send_plan is not None and event.send_plan.delta_from and event.adapter is not None:
        raise InvalidRequestError("deltas are of pushes of the base; this is an adapter")
    if event.layout.manifest is not None:
        if event.carries_runs or event.send_plan is not None:
            check_gapless(event.layout.manifest)
        if event.send_plan is not None:
            check_send_plan(event.send_plan, event.layout.manifest)
    under_way = sum(
        t.policy == policy.name and t.purpose.fencing_token is not None
        for t in state.transfers.values()
    )
    if under_way >= MAX_TRANSFERS_PER_POLICY:
        raise CapacityError(
            f"{under_way} pushes of {policy.name!r} are under way or wait already",
            metadata={"num_transfers": str(under_way)},
        )


def _check_base(state: PoolState, adapter: AdapterSpec) -> None:
    """Refuse an adapter that names a version of the base that never was."""
    trained_on, base = adapter.trained_on_base_version, state.policies.get(BASE_POLICY)
    newest = base.last_version if base else 0
    if trained_on is not None and trained_on > newest:
        raise InvalidAdapterError(
            f"the adapter is said to be trained on {BASE_POLICY}@{trained_on}, which never was: "
            f"the newest number of the base is {newest}. Give base= the one that it was trained "
            "on",
            metadata={"trained_on_base_version": str(trained_on)},
        )


def _new_transfer(
    now: float, event: events.BeginTransfer, policy: Policy, lease: Lease
) -> Transfer:
    layout, plan = event.layout, event.send_plan
    assert layout is not None
    if plan is not None:
        layout = replace(layout, num_buckets=len(plan.buckets))
    return Transfer(
        ids=event.ids,
        purpose=Push(
            request_id=event.request_id,
            session_id=lease.session_id,
            fencing_token=lease.fencing_token,
            min_replicas=max(1, event.min_replicas),
            require_all=event.min_replicas == 0,
            check_finite=event.check_finite,
            refuse_other_base=event.refuse_other_base,
            carries_runs=event.carries_runs,
            wanted_group_id=event.group_id,
            answer_by=min(event.deadline, event.answer_by),
        ),
        policy=policy.name,
        kind=policy.kind,
        trainer_id=lease.trainer_id,
        layout=layout,
        send_plan=plan,
        delta_from=plan.delta_from if plan else b"",
        delta_bytes=sum(wire.payload_bytes for wire in plan.parts[0].buckets) if plan else 0,
        adapter=event.adapter,
        backend=event.backend,
        backend_reason=event.backend_reason,
        trial_names=event.trial_names,
        begin_at=now,
        deadline=event.deadline,
        begin_tickets=(event.ticket,),
    )
