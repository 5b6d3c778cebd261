"""How a replica stays in the pool: a model of ``rollout_side.agent.registration``."""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Generator
from typing import TYPE_CHECKING, Any

from tests.sim.clock import Future
from tests.unit.coordinator.decisions.machine import CAPABILITIES
from weft_rl.contract.errors import NotFoundError, WeftError
from weft_rl.contract.replica_report import HeldVersion, OutOfService, ReplicaReport

if TYPE_CHECKING:
    from tests.sim.replica import SimReplica


_DIGESTS = ("narrow", "wide")


class SimRegistration:
    """The registration of one process, and its heartbeats."""

    def __init__(self, replica: SimReplica) -> None:
        self._replica = replica
        self._coordinator_id = self._pool_id = ""
        self._told: frozenset[HeldVersion] = frozenset()
        self._held_wanted = False
        self._out_of_service: OutOfService | None = None

    def stay(self) -> Generator[Any, Any, None]:
        """Register, beat, and register again where that is not known any more."""
        replica, interval = self._replica, 1.0
        while True:
            try:
                if not replica.is_known:
                    interval = yield from self._register()
                    replica.is_known = True
                    replica.is_of_another_pool = False
                note = replica.drain.note()
                held, complete = replica.held(), self._held_wanted
                answer = yield self._call(
                    "heartbeat",
                    replica_id=replica.name,
                    incarnation=replica.incarnation,
                    report=ReplicaReport(
                        version_vector=replica.vector,
                        retained_base_versions=replica.memory[0],
                        undo_base_versions=replica.memory[2],
                        dirty_reason=replica.dirty_reason,
                        pinned_base_versions=frozenset(replica.pins),
                        drain=note,
                        refusing=replica.refusing,
                        order_number=replica.order[1],
                        sleep=replica.asleep or replica.sleep.to_sleep,
                        work=replica.work(),
                    ),
                    staged=replica.memory[1],
                    held=sorted(held if complete else held - self._told, key=str),
                    held_versions_complete=complete,
                )
                self._told, self._held_wanted = held, answer.held_versions_wanted
                replica.ready = answer.ready
                replica.generation = max(replica.generation, answer.coordinator_generation)
                self._out_of_service = answer.out_of_service
                replica.last_epoch = max(replica.last_epoch, answer.epoch)
                self._pool_id = answer.pool_id
                replica.obey(replica.generation, answer.order_number, answer.out_of_service)
                replica.pins_told = answer.pinned_base_versions
                replica.drain.hear(answer, is_noted=note is not None)
                yield interval
            except NotFoundError:
                replica.is_known = False
            except WeftError as error:
                replica.is_of_another_pool = error.reason == "POOL_MISMATCH"
                yield 1.0

    def _register(self) -> Generator[Any, Any, float]:
        replica = self._replica
        capabilities = dataclasses.replace(
            CAPABILITIES,
            num_receivers=replica.kind.num_receivers,
            gpu_uuids=(replica.name,),
            can_sleep=True,
            loads_in_place=replica.kind.in_place,
            # Processes differ in what they hold their base in.
            reference_digest=_DIGESTS[zlib.crc32(replica.incarnation.encode()) % len(_DIGESTS)],
        )
        held = replica.held()
        answer = yield self._call(
            "register",
            replica_id=replica.name,
            incarnation=replica.incarnation,
            address=replica.name,
            capabilities=capabilities,
            report=ReplicaReport(
                version_vector=replica.vector,
                retained_base_versions=replica.memory[0],
                undo_base_versions=replica.memory[2],
                dirty_reason=replica.dirty_reason,
                drain=replica.drain.note(),
                refusing=replica.refusing,
                sleep=replica.asleep,
                work=replica.work(),
            ),
            held=sorted(held, key=str),
            last_coordinator_generation=replica.generation,
            last_epoch=replica.last_epoch,
            last_coordinator_id=self._coordinator_id,
            out_of_service=self._out_of_service,
            pool_id=self._pool_id,
        )
        self._told = held
        replica.world.checks.losses.registered(replica, answer.coordinator_generation)
        replica.generation = max(replica.generation, answer.coordinator_generation)
        self._coordinator_id, self._pool_id = answer.coordinator_id, answer.pool_id
        self._out_of_service = answer.out_of_service
        replica.last_epoch = max(replica.last_epoch, answer.epoch)
        replica.obey(replica.generation, answer.order_number, answer.out_of_service)
        if answer.reference_wanted:
            fingerprint, digest = capabilities.base_fingerprint, capabilities.reference_digest
            yield self._call("put_reference", fingerprint=fingerprint, digest=digest)
        return float(answer.heartbeat_interval_seconds)

    def _call(self, method: str, **args: Any) -> Future:
        network = self._replica.world.network
        return network.call(self._replica, "coordinator", method, 2.0, **args)
