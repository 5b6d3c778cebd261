"""Preflight: checks whether a version may go to its replicas, before a byte moves."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from weft_rl.containers import replace
from weft_rl.contract.adapter import check_adapter
from weft_rl.contract.adapter_config import AdapterSpec
from weft_rl.contract.backends import BACKENDS
from weft_rl.contract.errors import (
    BaseMismatchError,
    CapacityError,
    InvalidNameError,
    NotReadyError,
    UnsupportedError,
    WeftError,
)
from weft_rl.contract.group import MAX_GROUP_SIZE
from weft_rl.contract.manifest import Manifest
from weft_rl.contract.names import BASE_POLICY, PolicyVersion, name_in_the_way
from weft_rl.contract.tensors import Reference, check_base
from weft_rl.coordinator.decisions.state import events
from weft_rl.coordinator.decisions.state.change import Change
from weft_rl.coordinator.decisions.state.effects import CheckFit
from weft_rl.coordinator.decisions.state.pool import FitKey, PoolState
from weft_rl.coordinator.decisions.state.replica import Replica, holds
from weft_rl.coordinator.decisions.state.replica_state import is_joining
from weft_rl.coordinator.decisions.state.transfer import Transfer
from weft_rl.coordinator.decisions.state.values import Failure, PolicyKind

#: Answers that are remembered: layouts x adapter configs x kinds of replicas.
MAX_FITS = 4096


def check_fit(
    manifest: Manifest, adapter: AdapterSpec | None, reference: Reference, key: FitKey
) -> Failure | None:
    """Compare a layout with the base and a replica's capabilities; O(tensors)."""
    metas = [slot.meta for slot in manifest.tensors]
    try:
        if adapter is None:
            check_base(metas, reference)
        else:
            check_adapter(adapter.config_json, metas, reference, key.capabilities)
    except WeftError as error:
        return Failure.of(error)
    return None


def fit_key(transfer: Transfer, replica: Replica) -> FitKey:
    """Return the key of all that the answer for this replica depends on."""
    config_digest = transfer.adapter.config_digest if transfer.adapter else b""
    return FitKey(transfer.layout.digest, config_digest, replica.capabilities)


def fit_checked(change: Change, event: events.FitChecked) -> None:
    """Remember an answer, and forget the oldest ones."""
    fits = {**change.state.fits, event.key: event.failure}
    while len(fits) > MAX_FITS:
        del fits[next(iter(fits))]
    change.state = replace(
        change.state, fits=fits, fits_under_way=change.state.fits_under_way - {event.key}
    )


def forget_unanswered(change: Change, event: events.FitChecked) -> None:
    """Forget a preflight that could not be carried out."""
    if event.failure and event.failure.reason == "INTERNAL":
        known = {key: fit for key, fit in change.state.fits.items() if key != event.key}
        change.state = replace(change.state, fits=known)


def fits(change: Change, transfer: Transfer, replicas: Iterable[Replica]) -> bool:
    """Return whether every answer is there and positive; asks for those that are not there.

    Raises:
        WeftError: The first replica's refusal.
    """
    complete = True
    for key in {fit_key(transfer, replica) for replica in replicas}:
        if key in change.state.fits:
            failure = change.state.fits[key]
            if failure:
                raise failure.error()
            continue
        complete = False
        if key not in change.state.fits_under_way:
            assert transfer.layout.manifest is not None
            change.fit_under_way(key)
            change.emit(CheckFit(key, transfer.layout.manifest, transfer.adapter))
    return complete


def are_described(state: PoolState, replicas: Iterable[Replica]) -> bool:
    """Return whether the tensors of the replicas' bases and drafts are known."""
    return not not_described(state, replicas)


def not_described(state: PoolState, replicas: Iterable[Replica]) -> list[tuple[str, str]]:
    """Return the replicas of which something is not known, each with the model that it is of."""
    found = []
    for replica in replicas:
        told = replica.capabilities
        if told.reference_digest not in state.references_known:
            found.append((replica.replica_id, "its base model"))
        elif told.draft_fingerprint not in state.drafts_known:
            model = f"the model that drafts tokens there ({told.draft_method or 'a draft'})"
            found.append((replica.replica_id, model))
    return found


def check_names(state: PoolState, policy: str) -> None:
    """Refuse an adapter whose name a replica's server has for something else.

    All replicas are asked that may serve it one day: one that is out of service comes back.
    O(replicas).

    Raises:
        InvalidNameError: Metadata names the replica and the name.
    """
    if policy == BASE_POLICY:
        return
    for replica in state.replicas.values():
        name = name_in_the_way(policy, replica.capabilities.served_names)
        if name and not replica.lost:
            raise InvalidNameError(
                f"replica {replica.replica_id!r} has the name {name!r} for its base model or for "
                f"an adapter from a file. Give the policy {policy!r} another name, or start the "
                "replica with another --served-model-name or --lora-modules",
                metadata={"replica": replica.replica_id, "name": name},
            )


def check_takes_bases(state: PoolState, policy: str) -> None:
    """Refuse a base where a replica in contact cannot load any.

    The others would serve it, and that replica would never again serve what the pool serves.
    O(replicas).

    Raises:
        UnsupportedError: Metadata names the replica.
    """
    if policy != BASE_POLICY:
        return
    for replica in state.replicas.values():
        why = replica.capabilities.base_refusal
        if why and not replica.lost:
            raise UnsupportedError(
                f"replica {replica.replica_id!r} cannot load a base while it runs: {why}. Push "
                "adapters, which it serves, or stop it, if others can",
                metadata={"replica": replica.replica_id},
            )


def lacking_room(
    state: PoolState, transfer: Transfer, replicas: Iterable[Replica]
) -> dict[str, Failure]:
    """Return the replicas without room for a transfer now, and why (``STAGING_FULL``); cheap."""
    need = transfer.layout.wire_bytes
    full = {}
    for replica in replicas:
        capabilities = replica.capabilities
        if replica.loads_in_place(transfer.kind):
            continue
        if transfer.kind is PolicyKind.BASE:
            room = capabilities.staging_capacity_bytes - replica.report.pinned_base_bytes
            what = "staging"
        elif capabilities.lora_enabled:
            room = capabilities.adapter_capacity_bytes - replica.report.adapter_used_bytes
            what = "adapter"
        else:
            continue  # refused with LORA_DISABLED by check_fit
        if need > room:
            error = CapacityError(
                f"replica {replica.replica_id!r} has {max(0, room)} bytes of {what} memory free, "
                f"this push needs {need}{_way_out(state, transfer, replica)}",
                metadata={"replica": replica.replica_id, "need_bytes": str(need)},
            )
            full[replica.replica_id] = Failure.of(error)
    return full


def check_group(
    state: PoolState,
    transfer: Transfer,
    replicas: Iterable[Replica],
    *,
    check_finite: bool,
    carries_runs: bool,
) -> None:
    """Refuse what these replicas cannot take together; cheap.

    That is: too many replicas, a backend that one of them has not, or another base.

    Args:
        check_finite: True if the sender gives up at the first value that is not finite.
        carries_runs: True if the sender fills the buckets in an order of its own.

    Raises:
        BaseMismatchError: The adapter names another base than the pool's.
        NotReadyError: ``BACKEND_MISMATCH``.
        CapacityError: ``GROUP_TOO_LARGE``.
        UnsupportedError: A replica that loads in place cannot check the bytes first, or take them
            in another order than the layout's.
    """
    spec = transfer.adapter
    if spec and spec.base_fingerprint and spec.base_fingerprint != state.fingerprint:
        raise BaseMismatchError(
            f"the adapter fits the base {spec.base_fingerprint[:12]}, the pool serves "
            f"{state.fingerprint[:12]} ({state.architecture})",
            metadata={
                "pool_fingerprint": state.fingerprint,
                "adapter_fingerprint": spec.base_fingerprint,
            },
        )
    size = transfer.num_senders
    for replica in replicas:
        size += replica.capabilities.num_receivers
        if size > MAX_GROUP_SIZE:
            raise CapacityError(
                f"the replicas in contact have more than {MAX_GROUP_SIZE - transfer.num_senders} "
                "receivers, which is all that a side group holds beside its senders",
                reason="GROUP_TOO_LARGE",
            )
        capabilities = replica.capabilities
        if transfer.backend not in capabilities.backends:
            raise NotReadyError(
                f"replica {replica.replica_id!r} cannot use the side-group backend "
                f"{transfer.backend!r}; it offers {', '.join(capabilities.backends)}",
                reason="BACKEND_MISMATCH",
                metadata={"replica": replica.replica_id},
            )
        is_tried = capabilities.trial_name in transfer.trial_names
        if BACKENDS[transfer.backend].within_host and not is_tried:
            raise NotReadyError(
                f"replica {replica.replica_id!r} joined after the sender had tried which replicas "
                "can read its memory: try again",
                reason="BACKEND_MISMATCH",
                metadata={"replica": replica.replica_id},
            )
        if replica.loads_in_place(transfer.kind):
            if check_finite:
                raise _checked_too_late(replica)
            if carries_runs:
                raise _in_no_order(replica)


#: Deltas in a row that pass over a replica that has still to catch up.
_MOST_PASSED_OVER = 3


def why_no_delta(state: PoolState, replicas: Collection[Replica]) -> str:
    """Explain why replicas cannot take a delta of the served base; empty if they can.

    A replica that has still to catch up stands in nobody's way: a delta passes it over. After a few
    it needs a version that is sent whole, for pushes may come faster than a clone.
    """
    if not state.vector.base:
        return "the pool serves base@0, which was not pushed"
    if not state.served_base_content:
        return f"the content of base@{state.vector.base} is not known"
    if not replicas:
        return "no replica is in contact"
    refusals = [(replica, _why_no_delta_at(state, replica)) for replica in replicas]
    for replica, why in refusals:
        if why and not is_joining(state, replica):
            return why
        if why and replica.num_passed_over >= _MOST_PASSED_OVER:
            return f"{why}, and {replica.num_passed_over} deltas have passed it over"
    return refusals[0][1] if all(why for _, why in refusals) else ""


def passed_over_by_delta(
    state: PoolState, transfer: Transfer, replicas: Collection[Replica]
) -> set[str]:
    """Return the replicas, all of which have still to catch up, that cannot take a delta.

    Raises:
        NotReadyError: ``DELTA_REFUSED``: the delta is from another base than the pool serves, or
            a replica that is up to date cannot take it, or none can.
    """
    _check_content(state, transfer, why_no_delta(state, replicas))
    return {replica.replica_id for replica in replicas if _why_no_delta_at(state, replica)}


def takers_of_delta(state: PoolState, replicas: Collection[Replica]) -> set[str]:
    """Return the replicas that could take a delta of the served base, whatever the others can."""
    if not state.vector.base or not state.served_base_content:
        return set()
    return {replica.replica_id for replica in replicas if not _why_no_delta_at(state, replica)}


def sent_whole_beside_delta(
    state: PoolState, transfer: Transfer, replicas: Collection[Replica]
) -> frozenset[str]:
    """Return the replicas that a mixed push sends all elements: those that cannot take its delta.
    They include replicas that have still to catch up, which a delta alone would pass over.

    Raises:
        NotReadyError: ``DELTA_REFUSED``: the delta is from another base than the pool serves, or
            none of them can take it.
    """
    takers = takers_of_delta(state, replicas)
    _check_content(state, transfer, "" if takers else why_no_delta(state, replicas))
    return frozenset(replica.replica_id for replica in replicas) - takers


def _check_content(state: PoolState, transfer: Transfer, why: str) -> None:
    """Refuse a delta for ``why``, or because it is from another base than the pool serves."""
    if not why and transfer.layout.digest + transfer.delta_from != state.served_base_content:
        why = f"the pool serves base@{state.vector.base} of another content than the delta is from"
    if why:
        raise delta_refused(why)


def delta_refused(why: str) -> NotReadyError:
    """Return the refusal of a delta that replicas could take as a push of the whole version."""
    return NotReadyError(f"{why}: push the same weights whole", reason="DELTA_REFUSED")


def _why_no_delta_at(state: PoolState, replica: Replica) -> str:
    served = PolicyVersion(BASE_POLICY, state.vector.base)
    # In parts at its ranks, it may lie nowhere whole.
    is_in_place = replica.report.takes_deltas and replica.vector.base == served.version
    if is_in_place or holds(replica, served):
        return ""
    if replica.loads_in_place(PolicyKind.BASE):
        return f"{replica.replica_id} loads bases in place, and cannot read {served} back"
    return f"{replica.replica_id} holds no copy of {served}"


def other_base(state: PoolState, policy: str, spec: AdapterSpec) -> Failure | None:
    """Return why an adapter is refused over the served base; None if it was trained on that.

    Asked only for adapters that may be served over no other base.
    """
    base = state.vector.base
    is_known = spec.trained_on_base_version is not None
    if is_known and not state.is_other_base(spec.trained_on_base_version):
        return None
    trained_on = "?" if spec.trained_on_base_version is None else spec.trained_on_base_version
    remedy = (
        "say base='only base@N'"
        if spec.trained_on_base_version is None
        else f"train on the newer base, or push with base='base@{trained_on}' to serve it over this"
    )
    return Failure(
        "BASE_MISMATCH",
        f"the adapter {policy!r} was trained on base@{trained_on}, the pool serves "
        f"base@{base}: {remedy}",
        {"trained_on_base_version": str(trained_on), "base_version": str(base)},
    )


def _checked_too_late(replica: Replica) -> UnsupportedError:
    return UnsupportedError(
        f"check_finite: replica {replica.replica_id!r} loads a base in place as it arrives. A NaN "
        "in a later bucket would leave it with mixed weights. Check the model before the push and "
        "push without check_finite, or start the replicas with --staging device or host",
        metadata={"replica": replica.replica_id},
    )


def _in_no_order(replica: Replica) -> UnsupportedError:
    return UnsupportedError(
        f"replica {replica.replica_id!r} loads a base in place as it arrives. A tensor that turns "
        "out to be missing would leave it with mixed weights. Say beforehand what comes, and in "
        "which order (metadata=), or start the replicas with --staging device or host",
        metadata={"replica": replica.replica_id},
    )


def _way_out(state: PoolState, transfer: Transfer, replica: Replica) -> str:
    """Explain what holds the memory, and how it is let go of."""
    if transfer.kind is PolicyKind.ADAPTER:
        return (
            ": end what is done with (weft forget POLICY), keep fewer versions (weft retain POLICY "
            "N), or start it with a larger --adapter-memory-gib"
        )
    if not replica.report.pinned_base_bytes:
        return ""
    names = ", ".join(f"base@{v}" for v in state.pinned_bases if v in replica.retained)
    return (
        f": {replica.report.pinned_base_bytes} are held by {names or 'versions'} that are pinned; "
        "unpin, or start it with a larger --staging-memory-gib"
    )
