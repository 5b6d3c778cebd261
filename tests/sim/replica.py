"""A replica: registration, receivers in side groups, and an engine that may fail.

A model of ``rollout_side``: agent, registration, receiver, staged store.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Generator
from typing import TYPE_CHECKING, Any

from tests.sim.clock import Future, Process, any_of
from tests.sim.network import Stream
from tests.unit.coordinator.machine import CAPABILITIES
from weft.contract.errors import (
    CapacityError,
    DigestMismatchError,
    LoadFailedError,
    NotFoundError,
    NotReadyError,
    PeerUnavailableError,
    StaleEpochError,
    TransferTimeoutError,
    WeftError,
)
from weft.contract.names import BASE_POLICY, PolicyVersion
from weft.contract.versions import AdapterVersions, VersionVector
from weft.coordinator import effects
from weft.coordinator.state import ContentDigest, Group, Transfer

if TYPE_CHECKING:
    from tests.sim.world import World

#: Transfers whose bytes a replica has room for.
_STAGING_ROOM = 6


class SimReplica(Process):
    """One process of one replica."""

    def __init__(self, world: World, name: str, incarnation: str, num_receivers: int) -> None:
        super().__init__(world.clock, name)
        self.world = world
        self.incarnation = incarnation
        self.num_receivers = num_receivers
        self.vector = VersionVector()
        self.served: dict[PolicyVersion, ContentDigest] = {}
        self.staged: dict[tuple[str, int], tuple[PolicyVersion, ContentDigest]] = {}
        self.receivers: dict[tuple[str, int], Receiver] = {}
        self.discarded: deque[str] = deque(maxlen=256)
        self.failed: deque[str] = deque(maxlen=64)
        self.dirty_reason = ""
        self.ready = False
        self._generation = 0
        self._switching: deque[Future] = deque()
        self.spawn(self._stay_registered())

    def _stay_registered(self) -> Generator[Any, Any, None]:
        registered, interval = False, 1.0
        while True:
            try:
                if not registered:
                    interval = yield from self._register()
                    registered = True
                answer = yield self._call(
                    "heartbeat",
                    replica_id=self.name,
                    incarnation=self.incarnation,
                    vector=self.vector,
                    adapter_used_bytes=0,
                    staged=tuple(dict.fromkeys(transfer_id for transfer_id, _ in self.staged)),
                )
                self.ready = answer.ready
                yield interval
            except NotFoundError:
                registered = False
            except WeftError:
                yield 1.0

    def _register(self) -> Generator[Any, Any, float]:
        answer = yield self._call(
            "register",
            replica_id=self.name,
            incarnation=self.incarnation,
            address=self.name,
            capabilities=dataclasses.replace(CAPABILITIES, num_receivers=self.num_receivers),
            vector=self.vector,
        )
        self._generation = answer.generation
        if answer.reference_wanted:
            fingerprint = CAPABILITIES.base_fingerprint
            yield self._call("put_reference", fingerprint=fingerprint)
        return float(answer.heartbeat_seconds)

    def _call(self, method: str, **args: Any) -> Future:
        return self.world.network.call(self, "coordinator", method, 2.0, **args)

    # -- orders ----------------------------------------------------------------

    def serve(self, method: str, args: dict[str, Any], timeout: float) -> tuple[Future, Any]:
        """See ``network.Server``."""
        future = Future()
        if args["generation"] < self._generation:
            future.set(error=StaleEpochError("an older coordinator"))
            return future, None
        order = args["order"]
        match order:
            case effects.CallJoin():
                self._join(order.group, order.first_rank)
                future.set(True)
            case effects.CallDiscard():
                self.discard(order.transfer_id)
                future.set(True)
            case effects.CallRetire():
                self._retire(order.versions)
                future.set(self.vector)
            case effects.CallCommit():
                future = self.spawn(self._commit(order))
        return future, None

    def _join(self, group: Group, first_rank: int) -> None:
        for index in range(self.num_receivers):
            old = self.receivers.get((group.trainer_id, index))
            if old is not None:
                if old.group.group_id == group.group_id or old.group.epoch > group.epoch:
                    continue
                old.leave()
            receiver = Receiver(self, group, first_rank + index, index)
            self.receivers[group.trainer_id, index] = receiver

    def discard(self, transfer_id: str) -> None:
        """Drop staged bytes, and those that are still to be staged."""
        self.discarded.append(transfer_id)
        for index in range(self.num_receivers):
            self.staged.pop((transfer_id, index), None)

    def discard_one(self, transfer_id: str, index: int) -> None:
        """Drop the staged bytes of one receiver."""
        self.staged.pop((transfer_id, index), None)

    def _retire(self, versions: tuple[PolicyVersion, ...]) -> None:
        for version in versions:
            entry = self.vector.adapters.get(version.policy, AdapterVersions())
            if entry.alias != version.version and version.policy != BASE_POLICY:
                self.vector = self.vector.without_adapter(version)
                self.served.pop(version, None)

    def _commit(self, call: effects.CallCommit) -> Generator[Any, Any, VersionVector]:
        mine = Future()
        self._switching.append(mine)
        if self._switching[0] is not mine:
            yield mine
        try:
            yield from self._switch(call)
        finally:
            self._switching.popleft()
            if self._switching and self.alive:
                self._switching[0].set()
        return self.vector

    def _switch(self, call: effects.CallCommit) -> Generator[Any, Any, None]:
        version = call.version
        if self._serves(version):
            return
        if call.transfer_id in self.failed:
            raise NotReadyError(f"{call.transfer_id} failed to load here before")
        self._check_staged(call)
        outcome = self.world.load_outcome()
        yield self.world.random.uniform(0.001, outcome.seconds)
        if outcome.failure:
            self.failed.append(call.transfer_id)
        if outcome.failure == "clean":
            raise LoadFailedError("the engine said no", metadata={"dirty": "false"})
        if outcome.failure == "dirty":
            self.dirty_reason = "the engine broke"
            raise LoadFailedError(self.dirty_reason, metadata={"dirty": "true"})
        self._check_staged(call)  # an order to discard may have come meanwhile
        digest = self.staged[call.transfer_id, 0][1]
        self.discard(call.transfer_id)
        self.world.checks.switching(self, call.transfer_id, version, digest)
        if version.policy == BASE_POLICY:
            self.served.pop(PolicyVersion(BASE_POLICY, self.vector.base), None)
            self.vector = self.vector.with_base(version.version)
            self.dirty_reason = ""
        else:
            self.vector = self.vector.with_adapter(version)
        self.served[version] = digest
        self.world.trace(self.name, f"serves {version}")

    def _check_staged(self, call: effects.CallCommit) -> None:
        for index in range(self.num_receivers):
            staged = self.staged.get((call.transfer_id, index))
            if staged is None:
                raise NotReadyError(f"nothing is staged for {call.transfer_id}")
            if staged[1] != call.content_digest:
                raise DigestMismatchError("other bytes are staged")

    def _serves(self, version: PolicyVersion) -> bool:
        if version.policy == BASE_POLICY:
            return self.vector.base == version.version and not self.dirty_reason
        entry = self.vector.adapters.get(version.policy, AdapterVersions())
        return version.version in entry.versions and entry.alias >= version.version

    def is_member(self, group_id: str) -> bool:
        """Whether a receiver still is in that group."""
        return any(r.group.group_id == group_id and r.open for r in self.receivers.values())


class Receiver:
    """One rank of a side group, as the Weft thread of a worker."""

    def __init__(self, replica: SimReplica, group: Group, rank: int, index: int) -> None:
        self.replica, self.group, self.rank, self.index = replica, group, rank, index
        self.world = replica.world
        self.open = True
        self._directions: deque[tuple[Any, ...]] = deque()
        self._wake = Future()
        self._aborted = Future()
        self._prepared: Transfer | None = None
        self._deadline = 0.0
        self.stream: Stream | None = None
        replica.spawn(self._run())

    def leave(self) -> None:
        """End soon."""
        self.open = False
        if self.stream is not None:
            self.stream.leave()
        self._aborted.set(error=StaleEpochError("the replica left the side group"))
        self._put(("end", ""))

    def _put(self, message: tuple[Any, ...]) -> None:
        if message[0] == "abort":
            self._aborted.set(error=message[2])
        self._directions.append(message)
        self._wake.set()

    def _closed(self, error: WeftError) -> None:
        self.open = False
        self._put(("end", ""))

    def _run(self) -> Generator[Any, Any, None]:
        yield self.world.network.delay()
        if not self.open:
            return
        self.stream = self.world.attend(
            self.replica, self.group, self.rank, self._put, self._closed
        )
        while True:
            while not self._directions:
                self._wake = Future()
                yield self._wake
            kind, transfer_id, *rest = self._directions.popleft()
            try:
                if kind == "end":
                    self._prepared = None
                    return
                if kind == "prepare":
                    yield from self._prepare(*rest)
                elif kind == "start":
                    yield from self._receive(transfer_id)
                elif kind == "abort":
                    self._prepared = None
                    self.replica.discard_one(transfer_id, self.index)
            except WeftError as error:
                self._prepared = None
                self.stream.up(("failed", transfer_id, error.reason, error.message))

    def _prepare(self, transfer: Transfer, time_left: float) -> Generator[Any, Any, None]:
        assert self.stream is not None
        self._deadline = self.world.clock.now + time_left
        self._aborted = Future()
        yield self.world.random.uniform(0.001, 0.05)
        held = sum(index == self.index for _, index in self.replica.staged)
        if held >= _STAGING_ROOM:
            raise CapacityError("staging is full")
        self._prepared = transfer
        self.stream.up(("prepared", transfer.transfer_id))

    def _receive(self, transfer_id: str) -> Generator[Any, Any, None]:
        assert self.stream is not None
        transfer = self._prepared
        if transfer is None or transfer.transfer_id != transfer_id:
            raise WeftError(f"{transfer_id} was started but never prepared")
        world, broadcast = self.world, self.world.broadcast(transfer_id, transfer.trainer_id)
        late = TransferTimeoutError("the bytes did not come")
        left = self._deadline - world.clock.now
        digest = yield any_of(world.clock, left, broadcast.content, self._aborted, late=late)
        sender = broadcast.sender
        yield world.random.uniform(0.001, 0.1)
        if not world.network.connected(self.replica.name, sender):
            if world.random.random() < 0.5:
                raise PeerUnavailableError("the connection broke")
            yield any_of(world.clock, self._deadline - world.clock.now, self._aborted, late=late)
        if world.random.random() < world.corruption:
            if world.random.random() < 0.5:
                raise DigestMismatchError("a bucket's digest is not that of its trailer")
            digest = dataclasses.replace(digest, value=b"corrupt!")
        self._prepared = None
        if transfer_id in self.replica.discarded:
            raise StaleEpochError(f"{transfer_id} was discarded meanwhile")
        self.replica.staged[transfer_id, self.index] = (transfer.policy_version, digest)
        self.stream.up(("verified", transfer_id))
        self.stream.up(("staged", transfer_id, digest))
