"""A pool that consists of events: drives ``step`` with a clock of its own."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping
from typing import Any, TypeVar

from weft_rl.contract.adapter_config import AdapterSpec
from weft_rl.contract.capabilities import Capabilities
from weft_rl.contract.errors import WeftError
from weft_rl.contract.manifest import WSUM64, plan_buckets
from weft_rl.contract.names import AdapterVersions, PolicyVersion, VersionVector
from weft_rl.contract.replica_report import HeldVersion, OutOfService, ReplicaReport, ReplicaWork
from weft_rl.contract.tensors import DataType, TensorMeta
from weft_rl.coordinator.decisions.state import effects, events
from weft_rl.coordinator.decisions.state.pool import PoolSettings, PoolState
from weft_rl.coordinator.decisions.state.replica import NOT_TOLD
from weft_rl.coordinator.decisions.state.replica_state import (
    explain_state,
    is_routable,
    replica_state,
    state_reason,
)
from weft_rl.coordinator.decisions.state.transfer import Transfer, TransferIds
from weft_rl.coordinator.decisions.state.values import (
    ContentDigest,
    Failure,
    HeldVersionRecord,
    Phase,
    PolicyKind,
    RecordedFacts,
    ReplicaState,
    StateReason,
    VersionLayout,
    VersionRecord,
)
from weft_rl.coordinator.decisions.step import step

E = TypeVar("E")

BF16 = DataType.BFLOAT16
CAPABILITIES = Capabilities(
    engine_version="0.26",
    base_fingerprint="f" * 64,
    architecture="Tiny",
    base_dtype=BF16,
    adapter_dtype=BF16,
    lora_enabled=True,
    max_lora_rank=16,
    staging_capacity_bytes=1 << 20,
    adapter_capacity_bytes=1 << 20,
)
LAYOUT = VersionLayout.of(plan_buckets([TensorMeta("w", BF16, (4, 4))]))
OTHER_LAYOUT = VersionLayout.of(plan_buckets([TensorMeta("w", BF16, (8, 8))]))
SPEC = AdapterSpec('{"peft_type": "LORA", "r": 4, "lora_alpha": 8}')
DIGEST = ContentDigest(WSUM64, b"\1" * 8, LAYOUT.total_bytes)
LOAD_FAILED = Failure("LOAD_FAILED", "the engine said no", {"dirty": "false"})
DIRTY = Failure("LOAD_FAILED", "the engine broke", {"dirty": "true"})
GONE = Failure("PEER_GONE", "no answer", {})


class Machine:
    """State, clock and everything that was ever emitted."""

    def __init__(self, **settings: Any) -> None:
        self.state = PoolState(settings=PoolSettings(**{"lost_after_seconds": 6.0} | settings))
        self.now = 100.0
        self.all: list[effects.Effect] = []
        self.last: list[effects.Effect] = []
        self.ids = itertools.count(1)
        #: What is staged digests to this, and whether a base is what replicas were started with.
        self.digest, self.base_as_started = DIGEST, False
        self.tokens: dict[str, int] = {}
        self.refused_rank = -1
        self.refusal: Failure | None = None
        self.base_copies = 1
        self.answered_lookups = self.answered_inquiries = 0
        #: What a replica names in heartbeats, with digests, until a test changes it.
        self.says: dict[str, Any] = {}
        #: What it says that it is at.
        self.works: dict[str, ReplicaWork] = {}

    def do(self, event: events.Event) -> list[effects.Effect]:
        self.state, self.last = step(self.state, event, self.now)
        self.all += self.last
        return self.last

    def pass_time(self, seconds: float, *, beats: bool = True, renews: bool = True) -> None:
        """Let time pass in small steps; replicas beat and trainers renew meanwhile."""
        end = self.now + seconds
        while self.now < end:
            self.now = min(end, self.now + 0.25)
            for replica in list(self.state.replicas.values()) if beats else []:
                vector, retained, spilled, held = self.says.get(
                    replica.replica_id, (replica.vector, replica.retained, replica.spilled, {})
                )
                self.do(
                    events.Heartbeat(
                        0,
                        replica.replica_id,
                        replica.incarnation,
                        ReplicaReport(
                            version_vector=vector,
                            retained_base_versions=retained,
                            undo_base_versions=replica.undoable,
                            dirty_reason=replica.dirty_reason,
                            spilled_versions=spilled,
                            pinned_base_versions=replica.report.pinned_base_versions,
                            pinned_base_bytes=replica.report.pinned_base_bytes,
                            refusing=self.ordered_refusal(replica.replica_id),
                            order_number=self.state.order_number,
                            sleep=replica.asleep,
                            work=self.works.get(replica.replica_id),
                        ),
                        held=self.heard(held),
                        held_versions_complete=bool(held),
                    )
                )
            for policy, token in self.tokens.items() if renews else []:
                self.do(events.RenewLease(0, policy, token))
            self.do(events.Tick())

    def found(self, kind: type[E]) -> list[E]:
        """Effects of the last step, by type."""
        return [effect for effect in self.last if isinstance(effect, kind)]

    def ever(self, kind: type[E]) -> list[E]:
        return [effect for effect in self.all if isinstance(effect, kind)]

    def answer(self, ticket: int) -> Any:
        (reply,) = [e for e in self.ever(effects.Reply) if e.ticket == ticket]
        return reply.answer

    def error(self, ticket: int) -> WeftError:
        (refusal,) = [e for e in self.ever(effects.Refuse) if e.ticket == ticket]
        return refusal.error

    def answered(self, ticket: int) -> bool:
        return any(
            e.ticket == ticket for e in self.all if isinstance(e, effects.Reply | effects.Refuse)
        )

    # -- replicas --------------------------------------------------------------

    def standing(self, replica_id: str) -> tuple[ReplicaState, str]:
        """A replica's state, and why. Only a ready one has no reason, and the cheap answers say
        the same."""
        replica = self.state.replicas[replica_id]
        where, why = explain_state(self.state, replica)
        known = state_reason(self.state, replica)
        assert where is known.state is replica_state(self.state, replica)
        assert (known is StateReason.READY) is (not why) is (where is ReplicaState.READY)
        assert is_routable(self.state, replica) is replica.routed
        assert replica.routed is (where is ReplicaState.READY) or where is ReplicaState.SUSPECT
        return where, why

    def register(self, replica_id: str, incarnation: str = "i1", **capabilities: Any) -> int:
        ticket = next(self.ids)
        vector = capabilities.pop("vector", VersionVector())
        retained = capabilities.pop("retained", ())
        spilled = frozenset(map(PolicyVersion.parse, capabilities.pop("spilled", ())))
        dirty_reason = capabilities.pop("dirty_reason", "")
        http_url = capabilities.pop("http_url", "")
        held = capabilities.pop("held", {})
        if held:
            self.says[replica_id] = vector, retained, spilled, held
        last_generation = capabilities.pop("last_generation", 0)
        last_epoch = capabilities.pop("last_epoch", 0)
        last_coordinator_id = capabilities.pop("last_coordinator_id", "")
        checkpoint = capabilities.pop("checkpoint", NOT_TOLD)
        asleep = capabilities.pop("asleep", None)
        out_of_service = capabilities.pop("out_of_service", None)
        pool_id = capabilities.pop("pool_id", "")
        self.do(
            events.Register(
                ticket=ticket,
                replica_id=replica_id,
                incarnation=incarnation,
                address=f"{replica_id}:1",
                http_url=http_url,
                model_name="tiny",
                capabilities=dataclasses.replace(CAPABILITIES, **capabilities),
                held=self.heard(held),
                last_coordinator_generation=last_generation,
                last_epoch=last_epoch,
                last_coordinator_id=last_coordinator_id,
                checkpoint=checkpoint,
                out_of_service=out_of_service,
                pool_id=pool_id,
                report=ReplicaReport(
                    version_vector=vector,
                    retained_base_versions=retained,
                    dirty_reason=dirty_reason,
                    spilled_versions=spilled,
                    sleep=asleep,
                ),
            )
        )
        return ticket

    def beat(
        self,
        replica_id: str,
        incarnation: str = "",
        *,
        ticket: int = 0,
        staged: Mapping[str, VersionRecord | None] | None = None,
        held: tuple[HeldVersionRecord, ...] = (),
        complete: bool = False,
        **said: Any,
    ) -> Any:
        """A heartbeat that says what is known already, but for ``said``; returns its answer."""
        replica = self.state.replicas.get(replica_id)
        if replica is not None:
            said.setdefault("version_vector", replica.vector)
            incarnation = incarnation or replica.incarnation
        report, ticket = ReplicaReport(**said), ticket or next(self.ids)
        self.do(
            events.Heartbeat(ticket, replica_id, incarnation, report, staged or {}, held, complete)
        )
        return next((e.answer for e in self.found(effects.Reply) if e.ticket == ticket), None)

    def heard(self, held: dict[str, bytes]) -> tuple[HeldVersionRecord, ...]:
        """Digests by version; those of what is spilled with a + behind it."""
        return tuple(
            HeldVersionRecord(
                HeldVersion(version, digest, name.endswith("+")), self.record(version)
            )
            for name, digest in held.items()
            for version in [PolicyVersion.parse(name.rstrip("+"))]
        )

    def describe_held(self, failure: Failure | None = None, **changes: Any) -> list[PolicyVersion]:
        """Answer what holders are asked, as they would; returns the versions, as asked."""
        asked = self.ever(effects.DescribeVersion)[self.answered_inquiries :]
        self.answered_inquiries += len(asked)
        for effect in asked:
            is_base = effect.version.policy == "base"
            facts = RecordedFacts(
                ContentDigest(WSUM64, effect.digest, LAYOUT.total_bytes),
                LAYOUT.digest,
                None if is_base else SPEC,
            )
            fields: dict[str, Any] = {
                "replica_id": effect.replica_id,
                "incarnation": effect.incarnation,
                "version": effect.version,
                "digest": effect.digest,
                "facts": None if failure else facts,
                "failure": failure,
                "recorded": self.record(effect.version),
            }
            self.do(events.VersionDescribed(**fields | changes))
        return [effect.version for effect in asked]

    def pool(self, *replica_ids: str) -> Machine:
        for replica_id in replica_ids:
            self.register(replica_id)
        self.do(events.ReferenceKnown(CAPABILITIES.base_fingerprint))
        return self

    # -- trainers --------------------------------------------------------------

    def ordered_refusal(self, replica_id: str) -> str:
        """Reason with which a replica refuses requests, by the order that stands."""
        return self.state.out_of_service.get(replica_id, OutOfService()).refusal

    def acquire(self, policy: str, trainer: str = "t1", session: str = "s1", **more: Any) -> int:
        ticket = next(self.ids)
        kind = PolicyKind.BASE if policy == "base" else PolicyKind.ADAPTER
        self.do(events.AcquirePolicy(ticket, trainer, session, policy, kind, **more))
        reply = [e for e in self.found(effects.Reply) if e.ticket == ticket]
        if reply and isinstance(reply[0].answer, effects.LeaseAnswer):
            self.tokens[policy] = reply[0].answer.lease.fencing_token
        return ticket

    def begin(self, policy: str = "math", **changes: Any) -> int:
        ticket = next(self.ids)
        fields: dict[str, Any] = {
            "ticket": ticket,
            "request_id": f"q{ticket}",
            "policy": policy,
            "fencing_token": self.tokens.get(policy, 0),
            "layout": LAYOUT,
            "adapter": None if policy == "base" else SPEC,
            "min_replicas": 0,
            "deadline": self.now + changes.pop("timeout", 60.0),
            "answer_by": float("inf"),
            "backend": "gloo",
            "group_id": "",
            "ids": TransferIds(
                f"t{ticket}", ticket, f"g{ticket}", f"token{ticket}", f"secret{ticket}"
            ),
            "recorded": None,
        }
        fields |= changes
        layout = fields["layout"]
        fields.setdefault("layout_digest", layout.digest if layout else b"unknown")
        self.do(events.BeginTransfer(**fields))
        self.check_fits()
        return ticket

    def check_fits(self) -> None:
        """Answer preflight as the driver would; ``refusal`` where it should refuse."""
        for effect in self.found(effects.CheckFit):
            refused = effect.key.capabilities.max_lora_rank == self.refused_rank
            self.do(events.FitChecked(effect.key, self.refusal if refused else None))

    def transfer(self, ticket: int) -> Transfer:
        name = f"t{ticket}"
        return self.state.transfers.get(name) or self.state.history[name]

    # -- operators ---------------------------------------------------------------

    def roll_back(self, policy: str, to_version: int, seconds: float = 60.0) -> int:
        ticket = next(self.ids)
        record = self.record(PolicyVersion(policy, to_version))
        ids = TransferIds(f"t{ticket}", ticket, f"g{ticket}", "token", "secret")
        self.do(events.Rollback(ticket, policy, to_version, ids, self.now + seconds, record))
        return ticket

    # -- clones ----------------------------------------------------------------

    def look_ups(self) -> list[effects.LookUp]:
        """Those that were not answered yet."""
        return self.ever(effects.LookUp)[self.answered_lookups :]

    def answer_look_ups(self, failure: Failure | None = None, **changes: Any) -> list[int]:
        """Answer as the driver would; the tickets name what was begun or waits."""
        tickets = []
        for effect in self.look_ups():
            self.answered_lookups += 1
            ticket = next(self.ids)
            tickets.append(ticket)
            fields: dict[str, Any] = {
                "replica_id": effect.replica_id,
                "incarnation": effect.incarnation,
                "source_id": effect.source_id,
                "version": effect.version,
                "ids": TransferIds(
                    f"t{ticket}", ticket, f"g{ticket}", f"k{ticket}", f"secret{ticket}"
                ),
                "record": self.record(effect.version),
                "layout": LAYOUT,
                "failure": failure,
            }
            self.do(events.LookedUp(**fields | changes))
            self.check_fits()
        return [t for t in tickets if f"t{t}" in self.state.transfers]

    def record(self, version: PolicyVersion) -> VersionRecord | None:
        """What the catalog has of a version."""
        found = [s.record for s in self.ever(effects.SaveVersion) if s.record.version == version]
        return found[-1] if found else None

    def finish(self, ticket: int, **failures: Failure) -> None:
        """A clone from its group to its end."""
        self.attend_all(ticket)
        self.prepare_all(ticket)
        self.stage_all(ticket)
        self.answer_commits(ticket, **failures)

    # -- ranks -----------------------------------------------------------------

    def attend_all(self, ticket: int) -> None:
        transfer = self.transfer(ticket)
        for rank in range(self.state.groups[transfer.group_id].size):
            self.do(events.RankAttends(transfer.group_id, rank))

    def prepare_all(self, ticket: int) -> None:
        transfer = self.transfer(ticket)
        for rank in self.state.groups[transfer.group_id].receivers:
            self.do(events.RankPrepared(transfer.group_id, transfer.transfer_id, rank))

    def stage(self, ticket: int, rank: int, digest: ContentDigest = DIGEST) -> None:
        transfer = self.transfer(ticket)
        self.do(events.RankStaged(transfer.group_id, transfer.transfer_id, rank, digest))

    def stage_all(self, ticket: int) -> None:
        transfer = self.transfer(ticket)
        for rank in range(self.state.groups[transfer.group_id].size):
            self.stage(ticket, rank, self.digest)

    def answer_commits(self, ticket: int, **failures: Failure) -> None:
        """Every replica answers; those named fail."""
        transfer = self.transfer(ticket)
        for replica_id in transfer.targets:
            self.answer_commit(ticket, replica_id, failures.get(replica_id))

    def answer_commit(
        self,
        ticket: int,
        replica_id: str,
        failure: Failure | None = None,
        *,
        undoable: tuple[int, ...] = (),
    ) -> None:
        transfer = self.transfer(ticket)
        replica = self.state.replicas.get(replica_id)
        vector = replica.vector if replica else VersionVector()
        retained = replica.retained if replica else ()
        if transfer.kind is PolicyKind.BASE:
            vector = vector.with_base(transfer.version)
            others = [v for v in retained if v != transfer.version]
            retained = (transfer.version, *others)[: self.base_copies]
        else:
            wanted = self.state.policies[transfer.policy].served_version
            held = vector.adapters.get(transfer.policy, AdapterVersions()).versions
            vector = vector.with_adapter(transfer.policy_version, wanted if wanted in held else 0)
        incarnation = replica.incarnation if replica else "i1"
        if failure is not None and failure.reason != "PEER_GONE":  # signed, as replicas do
            failure = dataclasses.replace(
                failure, metadata={**failure.metadata, "incarnation": incarnation}
            )
        self.do(
            events.CommitAnswered(
                transfer.transfer_id,
                replica_id,
                replica.incarnation if replica else "i1",
                None if failure else vector,
                0.5,
                failure,
                retained,
                self.base_as_started,
                undoable,
            )
        )

    def answer_discard(self, ticket: int, replica_id: str) -> None:
        """It holds nothing of the transfer, and serves what it was last heard to."""
        replica = self.state.replicas[replica_id]
        self.do(
            events.DiscardAnswered(replica_id, f"t{ticket}", replica.incarnation, replica.vector)
        )

    def run_to(self, phase: Phase, policy: str = "math", **changes: Any) -> int:
        """A push that has come so far and no further."""
        ticket = self.begin(policy, **changes)
        if phase >= Phase.STAGING:
            if not self.state.groups[self.transfer(ticket).group_id].complete:
                self.attend_all(ticket)
            self.prepare_all(ticket)
        if phase >= Phase.COMMITTING:
            self.stage_all(ticket)
        if phase >= Phase.COMMITTED:
            self.answer_commits(ticket)
        assert self.transfer(ticket).phase is phase
        return ticket

    def await_end(self, ticket: int) -> int:
        waiter = next(self.ids)
        self.do(events.AwaitTransfer(waiter, f"t{ticket}"))
        return waiter


def saved_versions(machine: Machine) -> list[VersionRecord]:
    """Records in the order of saving."""
    return [save.record for save in machine.ever(effects.SaveVersion)]
