"""What trainers, replicas and operators call, as the events that the services make of it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from weft_rl.contract.names import PolicyVersion
from weft_rl.contract.replica_report import HeldVersion
from weft_rl.coordinator.decisions.state import events
from weft_rl.coordinator.decisions.state.pool import PoolState
from weft_rl.coordinator.decisions.state.replica_state import base_targets
from weft_rl.coordinator.decisions.state.values import HeldVersionRecord, VersionState
from weft_rl.coordinator.decisions.step import already_committed
from weft_rl.coordinator.decisions.transfers import preflight

if TYPE_CHECKING:
    from tests.sim.coordinator import SimCoordinator


@dataclass(frozen=True)
class Target:
    """What DescribeTarget tells of the base that is served."""

    content: bytes
    delta_refusal: str
    num_delta_replicas: int


def describe(state: PoolState) -> Target:
    """As ``PublishServicer.DescribeTarget``."""
    replicas = base_targets(state)
    refusal = preflight.why_no_delta(state, replicas)
    takers = preflight.takers_of_delta(state, replicas) if refusal else ()
    return Target(state.served_base_content, refusal, len(takers))


#: Calls whose event is made of what they are called with.
_PLAIN: dict[str, Callable[..., events.Event]] = {
    "leave": events.Leave,
    "acquire": events.AcquirePolicy,
    "renew": events.RenewLease,
    "release": events.ReleasePolicy,
    "retain": events.SetRetention,
    "forget": events.ForgetPolicy,
    "take_out_of_service": events.Cordon,
    "uncordon": events.Uncordon,
    "cancel": events.CancelTransfer,
    "drain": events.Drain,
}


class Services:
    """A method for each other call: its event, or None where it is answered at once.

    Raises:
        WeftError: It is refused at once.
    """

    def __init__(self, coordinator: SimCoordinator) -> None:
        self._coordinator = coordinator

    def event(self, method: str, ticket: int, timeout: float, **args: Any) -> events.Event | None:
        """The event of a call."""
        if method in _PLAIN:
            return _PLAIN[method](ticket=ticket, **args)
        made: events.Event | None = getattr(self, method)(ticket=ticket, timeout=timeout, **args)
        return made

    def register(self, timeout: float, held: list[HeldVersion], **args: Any) -> events.Event:
        heard = self._heard(held)
        return events.Register(**args, held=heard, http_url="", model_name="tiny")

    def _heard(self, held: list[HeldVersion]) -> tuple[HeldVersionRecord, ...]:
        find = self._coordinator.world.catalog.find_version
        return tuple(HeldVersionRecord(one, find(one.version)) for one in held)

    def put_reference(self, ticket: int, timeout: float, fingerprint: str, digest: str) -> None:
        self._coordinator.post(events.ReferenceKnown(fingerprint, reference_digest=digest))

    def heartbeat(
        self, timeout: float, staged: tuple[str, ...], held: list[HeldVersion], **args: Any
    ) -> events.Event:
        records = {name: self._coordinator.world.catalog.find_transfer(name) for name in staged}
        return events.Heartbeat(**args, staged=records, held=self._heard(held))

    def describe(self, ticket: int, timeout: float) -> events.Event:
        return events.DescribeTarget(ticket, self._answer_by(timeout))

    def put_manifest(self, ticket: int, timeout: float, digest: bytes) -> None:
        self._coordinator.manifests.add(digest)

    def begin(self, timeout: float, layout: Any, time_left: float, **args: Any) -> events.Event:
        deadline = self._coordinator.clock.now + time_left
        answer_by = self._answered_by(args["ticket"], timeout, deadline)
        return events.BeginTransfer(
            **args,
            layout_digest=layout.digest,
            layout=layout if layout.digest in self._coordinator.manifests else None,
            deadline=deadline,
            answer_by=answer_by,
            backend="gloo",
            ids=self._coordinator.new_transfer_ids(),
            recorded=self._recorded(args["policy"], args["request_id"]),
        )

    def _answered_by(self, ticket: int, timeout: float, deadline: float = math.inf) -> float:
        """When a call is answered, though nothing else happens by then."""
        coordinator, answer_by = self._coordinator, min(deadline, self._answer_by(timeout))

        def tick() -> None:
            if coordinator.alive and ticket in coordinator.calls:
                coordinator.post(events.Tick())

        coordinator.clock.after(answer_by - coordinator.clock.now + 0.001, tick)
        return answer_by

    def _recorded(self, policy_name: str, request_id: str) -> Any:
        policy = self._coordinator.state.policies.get(policy_name)
        if policy is None or policy.lease is None:
            return None
        return self._coordinator.world.catalog.find_request(policy.lease.trainer_id, request_id)

    def _answer_by(self, timeout: float) -> float:
        return self._coordinator.clock.now + timeout - min(0.25, timeout * 0.2)

    def await_transfer(self, ticket: int, timeout: float, transfer_id: str) -> Any:
        record = self._forgotten(transfer_id)
        if record is None:
            return events.AwaitTransfer(ticket, transfer_id)
        if record.failure:
            raise record.failure.error()
        return None

    def _forgotten(self, transfer_id: str) -> Any:
        state = self._coordinator.state
        if transfer_id in state.transfers or transfer_id in state.history:
            return None
        record = self._coordinator.world.catalog.find_transfer(transfer_id)
        return record if record and record.state is not VersionState.STAGING else None

    def abort(self, timeout: float, **args: Any) -> events.Event | None:
        record = self._forgotten(args["transfer_id"])
        if record is None:
            return events.AbortTransfer(**args, message="gave up")
        if record.state not in (VersionState.ABORTED, VersionState.FAILED):
            raise already_committed(str(record.version))
        return None

    def rollback(self, ticket: int, timeout: float, version: PolicyVersion) -> events.Event:
        answer_by = self._answered_by(ticket, timeout)
        recorded = self._coordinator.flushed(version)
        ids = self._coordinator.new_transfer_ids()
        return events.Rollback(ticket, version.policy, version.version, ids, answer_by, recorded)

    def pin(
        self, ticket: int, timeout: float, version: PolicyVersion, pinned: bool
    ) -> events.Event:
        recorded = self._coordinator.flushed(version)
        return events.Pin(ticket, version, pinned, recorded)

    def retire(self, ticket: int, timeout: float, version: PolicyVersion) -> events.Event:
        recorded = self._coordinator.flushed(version)
        return events.Retire(ticket, version, recorded)

    def sleep_rollouts(self, ticket: int, timeout: float, **args: Any) -> events.Event:
        answer_by = self._answered_by(ticket, timeout)
        return events.SleepRollouts(ticket=ticket, answer_by=answer_by, **args)

    def wake_rollouts(
        self, ticket: int, timeout: float, fencing_token: int, session_id: str
    ) -> events.Event:
        answer_by = self._answered_by(ticket, timeout)
        return events.WakeRollouts(ticket, fencing_token, session_id, answer_by)

    def sleep_replica(self, ticket: int, timeout: float, replica_id: str) -> events.Event:
        answer_by = self._answered_by(ticket, timeout)
        return events.SleepReplica(ticket, replica_id, True, 1.0, answer_by, level=2)

    def wake_replica(self, ticket: int, timeout: float, replica_id: str) -> events.Event:
        answer_by = self._answered_by(ticket, timeout)
        return events.WakeReplica(ticket, replica_id, answer_by)
