"""An operator who rolls policies back, and pins and unpins their versions."""

from __future__ import annotations

from collections.abc import Generator
from typing import TYPE_CHECKING, Any

from tests.sim.clock import Process
from weft.contract.errors import WeftError
from weft.contract.names import BASE_POLICY, PolicyVersion
from weft.coordinator.effects import RollbackAnswer

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
        self.busy = False
        self._mean_seconds = world.random.choice([1.0, 3.0, 10.0])
        self.spawn(self._work())

    def _work(self) -> Generator[Any, Any, None]:
        random = self.world.random
        while True:
            yield random.expovariate(1 / self._mean_seconds)
            if self.world.quiet:
                return
            self.busy = True
            try:
                yield from random.choice(
                    [self._roll_back, self._roll_back, self._pin, self._unpin]
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
            if policy != BASE_POLICY:
                there = {v for store in stores for v in store.adapters if v.policy == policy}
            served = PolicyVersion(policy, catalog.policies[policy].served_version)
            known = sorted(there - {served})
        return random.choice(known[-4:]) if known else None

    def _roll_back(self) -> Generator[Any, Any, None]:
        version = self._some_version()
        if version is None:
            return
        number = self.world.checks.num_served(version.policy)
        seconds = self.world.random.choice([2.0, 8.0])
        answer: RollbackAnswer = yield self._call("rollback", seconds, version=version)
        self.world.checks.rolled_back(answer, number)

    def _pin(self) -> Generator[Any, Any, None]:
        version = self._some_version()
        # A request to let go may still be on its way: what was let go stays so.
        if version is None or version in self._let_go:
            return
        yield self._call("pin", 2.0, version=version, pinned=True)
        if version not in self._let_go:
            self.pinned.add(version)

    def _unpin(self) -> Generator[Any, Any, None]:
        if self.pinned:
            version = self.world.random.choice(sorted(self.pinned))
            self.pinned.discard(version)
            self._let_go.add(version)
            yield self._call("pin", 2.0, version=version, pinned=False)

    def _call(self, method: str, seconds: float, **args: Any) -> Any:
        return self.world.network.call(self, "coordinator", method, seconds, **args)
