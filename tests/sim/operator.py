"""An operator: rolls back, pins, retires, forgets; takes replicas out of service, and puts them
back."""

from __future__ import annotations

import contextlib
from collections.abc import Generator
from typing import TYPE_CHECKING, Any

from tests.sim.clock import Process
from weft_rl.contract.errors import (
    NotFoundError,
    NotReadyError,
    PeerUnavailableError,
    TransferTimeoutError,
    WeftError,
)
from weft_rl.contract.names import BASE_POLICY, PolicyVersion
from weft_rl.coordinator.decisions.state.effects import RetiredAnswer, RollbackAnswer

if TYPE_CHECKING:
    from tests.sim.world import World


class SimOperator(Process):
    """Somebody at a terminal; nothing of it is ever repeated by itself."""

    def __init__(self, world: World) -> None:
        super().__init__(world.clock, "operator")
        self.world = world
        #: Pinned for certain, and not asked to be let go since.
        self.pinned: set[PolicyVersion] = set()
        self._let_go: set[PolicyVersion] = set()
        #: Versions of an adapter to keep, by policy, where it was told that they are.
        self.retention: dict[str, int] = {}
        self._retention_asked: set[str] = set()
        #: Policies that a request to forget may still be on its way for.
        self._forget_asked: set[str] = set()
        #: Replicas taken out of service for certain, and never asked to be put back.
        self.out_of_service: set[str] = set()
        self._put_back: set[str] = set()
        self.busy = False
        self._lost = 0
        self._num_cancels = 3 * (world.seed % 4 == 0)
        self._mean_seconds = world.random.choice([1.0, 3.0, 10.0])
        self.spawn(self._work())

    def catalog_lost(self) -> None:
        """What was ordered is not known any more, nor is what is being answered."""
        self._lost += 1
        self.pinned.clear()
        self.retention.clear()
        self.out_of_service.clear()

    def _work(self) -> Generator[Any, Any, None]:
        random = self.world.random
        while True:
            yield random.expovariate(1 / self._mean_seconds)
            if self.world.quiet:
                return
            self.busy = True
            try:
                yield from random.choice(
                    [
                        *[self._roll_back] * 4,
                        *[self._pin] * 2,
                        *[self._unpin] * 2,
                        self._retire,
                        self._retain,
                        self._forget,
                        self._take_out_of_service,
                        self._uncordon,
                        self._drain,
                        self._sleep_or_wake,
                        *[self._cancel] * self._num_cancels,
                        *[self._undo] * (8 * self.world.goes_back),
                    ]
                )()
            except WeftError as error:
                self.world.trace(self.name, f"refused: {error!r}")
            self.busy = False

    def _some_version(self) -> PolicyVersion | None:
        """Most often one that is there: of an adapter, or a base that somebody retains."""
        random, catalog = self.world.random, self.world.catalog
        if not catalog.policies:
            return None
        policy = random.choice(sorted(catalog.policies))
        known = sorted(v for v in catalog.versions if v.policy == policy)
        if random.random() < 0.8:
            stores = [replica.store for replica in self.world.replicas.values()]
            there = {base.version for store in stores for base in store.bases}
            replicas = self.world.replicas.values()
            there |= {base.version for replica in replicas for base in replica.undo.former}
            if policy != BASE_POLICY:
                there = {v for store in stores for v in store.adapters if v.policy == policy}
            served = PolicyVersion(policy, catalog.policies[policy].served_version)
            known = sorted(there - {served})
        return random.choice(known[-4:]) if known else None

    def _undo(self) -> Generator[Any, Any, None]:
        """A rollback to a base that replicas can go back to by old elements alone."""
        replicas = self.world.replicas.values()
        former = {base.version for replica in replicas for base in replica.undo.former}
        if former:
            yield from self._roll_back_to(self.world.random.choice(sorted(former)))

    def _roll_back(self) -> Generator[Any, Any, None]:
        if (version := self._some_version()) is not None:
            yield from self._roll_back_to(version)

    def _roll_back_to(self, version: PolicyVersion) -> Generator[Any, Any, None]:
        number = self.world.checks.num_served(version.policy)
        seconds = self.world.random.choice([2.0, 8.0])
        lost = self._lost
        answer: RollbackAnswer = yield self._call("rollback", seconds, version=version)
        if lost == self._lost:
            self.world.checks.rolled_back(answer, number)

    def _pin(self) -> Generator[Any, Any, None]:
        version = self._some_version()
        # A request to let go may still be on its way: what was let go stays so.
        if version is None or version in self._let_go:
            return
        lost = self._lost
        yield self._call("pin", 2.0, version=version, pinned=True)
        is_sure = version not in self._let_go and version.policy not in self._forget_asked
        if is_sure and lost == self._lost:
            self.pinned.add(version)

    def _unpin(self) -> Generator[Any, Any, None]:
        if self.pinned:
            version = self.world.random.choice(sorted(self.pinned))
            self.pinned.discard(version)
            self._let_go.add(version)
            yield self._call("pin", 2.0, version=version, pinned=False)

    def _retire(self) -> Generator[Any, Any, None]:
        version = self._some_version()
        if self.world.random.random() < 0.5:
            version = yield from self._being_replaced()
        if version is not None:
            lost = self._lost
            yield self._call("retire", 2.0, version=version)
            if lost == self._lost:
                self.world.checks.orders.retired(version)

    def _being_replaced(self) -> Generator[Any, Any, PolicyVersion | None]:
        """What replicas switch from, at the worst moment: they may go back to it."""
        for _ in range(200):
            for transfer in self.world.coordinator.state.transfers.values():
                if transfer.may_be_undone and transfer.served_before:
                    return PolicyVersion(transfer.policy, transfer.served_before)
            yield 0.02
        return None

    def _retain(self) -> Generator[Any, Any, None]:
        """Once for each policy: a request may be carried out again, after a later one."""
        left = sorted(set(self.world.catalog.policies) - self._retention_asked)
        if left:
            replaced = yield from self._being_replaced()
            left = [policy for policy in left if replaced and policy == replaced.policy] or left
            policy, number = self.world.random.choice(left), self.world.random.choice([1, 2, 4])
            self._retention_asked.add(policy)
            lost = self._lost
            yield self._call("retain", 2.0, policy=policy, num_versions=number)
            if lost == self._lost and policy not in self._forget_asked:
                self.retention[policy] = number

    def _forget(self) -> Generator[Any, Any, None]:
        """An adapter, whose owner as often as not goes on; what was ordered of it ends, too."""
        known = self.world.catalog.policies.values()
        names = sorted(p.name for p in known if p.name != BASE_POLICY and p.served_version)
        if not names:
            return
        policy, force = self.world.random.choice(names), self.world.random.random() < 0.6
        self._forget_asked.add(policy)
        self.pinned = {version for version in self.pinned if version.policy != policy}
        self.retention.pop(policy, None)
        lost = self._lost
        answer: RetiredAnswer = yield self._call("forget", 2.0, policy=policy, force=force)
        if lost == self._lost:
            for version in answer.retired_versions:
                self.world.checks.orders.retired(version)

    def _some_replica(self) -> str:
        """Some replica: as often as not one that a transfer occupies."""
        random, transfers = self.world.random, self.world.coordinator.state.transfers
        taken = sorted({name for transfer in transfers.values() for name in transfer.occupied})
        return random.choice(
            taken if taken and random.random() < 0.5 else list(self.world.replicas)
        )

    def _take_out_of_service(self) -> Generator[Any, Any, None]:
        no_pushes = self.world.random.choice([False, True])
        order = {"replica_id": (name := self._some_replica()), "no_pushes": no_pushes}
        lost = self._lost
        yield self._call("take_out_of_service", 2.0, reason="it looks odd", **order)
        if name not in self._put_back and lost == self._lost:
            self.out_of_service.add(name)

    def _uncordon(self) -> Generator[Any, Any, None]:
        names = sorted(self.world.catalog.out_of_service)
        if names:
            name = self.world.random.choice(names)
            self._putting_back(name)
            yield self._call("uncordon", 2.0, replica_id=name)

    def _putting_back(self, name: str) -> None:
        self._put_back.add(name)
        self.out_of_service.discard(name)

    def _drain(self) -> Generator[Any, Any, None]:
        name, seconds = self._some_replica(), self.world.random.choice([0.0, 2.0, 5.0])
        yield self._call("drain", 2.0, replica_id=name, timeout_seconds=seconds, reason="old card")

    def _cancel(self) -> Generator[Any, Any, None]:
        """Some transfer, also one that is committing: what is committed stays."""
        transfers = sorted(self.world.coordinator.state.transfers)
        if transfers:
            name = self.world.random.choice(transfers)
            yield self._call("cancel", 2.0, transfer_id=name, reason="it takes long")

    def _sleep_or_wake(self) -> Generator[Any, Any, None]:
        method = self.world.random.choice(["sleep_replica", "wake_replica"])
        yield self._call(method, 4.0, replica_id=self._some_replica())

    def put_back(self) -> Generator[Any, Any, None]:
        """Have every replica serve in the end, also those of which a late order comes."""
        for _ in range(2):
            yield 4.0
            for name in sorted(self.world.replicas):
                self._putting_back(name)
                with contextlib.suppress(NotFoundError, NotReadyError):
                    yield from self._until_answered("uncordon", replica_id=name)
                with contextlib.suppress(NotFoundError):
                    yield from self._until_answered("wake_replica", replica_id=name)

    def _until_answered(self, method: str, **args: Any) -> Generator[Any, Any, None]:
        while True:
            try:
                yield self._call(method, 2.0, **args)
                return
            except (PeerUnavailableError, TransferTimeoutError):
                yield 0.5

    def _call(self, method: str, timeout: float, **args: Any) -> Any:
        return self.world.network.call(self, "coordinator", method, timeout, **args)
