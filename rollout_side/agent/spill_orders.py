"""Orders to spill what is served, told to an engine when they change."""

from __future__ import annotations

from rollout_side.engine import Engine, SpillOrder
from weft.contract.names import BASE_POLICY, PolicyVersion, VersionVector


class SpillOrders:
    """What an engine was told to spill, and what it must hear of at the next time.

    Args:
        engine: Nothing is told to one without a spill directory.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._told = SpillOrder()
        # Not yet told to the spill directory.
        self._retired: set[PolicyVersion] = set()

    def retire(self, version: PolicyVersion) -> None:
        """Have a version removed from the spill directory."""
        if self._engine.spills:
            self._retired.add(version)

    async def tell(
        self, vector: VersionVector, retained_bases: tuple[int, ...], *, serves_all: bool
    ) -> None:
        """Have written to disk what is served now, beside all else; ``serves_all`` as in
        ``SpillOrder``."""
        if not self._engine.spills:
            return
        adapters = [
            PolicyVersion(name, version)
            for name, entry in vector.adapters.items()
            for version in entry.versions
        ]
        adapters.sort(key=lambda v: (-v.version, v.policy))
        bases = [PolicyVersion(BASE_POLICY, number) for number in retained_bases]
        order = SpillOrder(
            keep=(*adapters, *bases),
            retired=tuple(sorted(self._retired)),
            served_base=vector.base,
            serves_all=serves_all,
        )
        if order != self._told:
            await self._engine.spill(order)
            self._told = order
            self._retired.difference_update(order.retired)
