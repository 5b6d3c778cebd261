"""What a replica holds in memory: a model of ``rollout_side.memory.store.WorkerStore``."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from weft_rl.contract.errors import TransferAbortedError
from weft_rl.contract.names import BASE_POLICY, PolicyVersion
from weft_rl.coordinator.decisions.state.values import ContentDigest


@dataclass(frozen=True)
class Copy:
    """A version's bytes, whole."""

    transfer_id: str
    version: PolicyVersion
    digest: ContentDigest
    contents: tuple[bytes, ...] = ()
    delta_from: bytes = b""
    """Content that ``contents`` change, where they are a delta's; else empty."""


@dataclass
class Partial:
    """What one receiver has verified of a transfer so far."""

    transfer_id: str
    trainer_id: str
    contents: list[bytes] = field(default_factory=list)


class Store:
    """What one replica has; receivers are told apart by their index."""

    def __init__(self, num_receivers: int, base_copies: int) -> None:
        self.num_receivers, self.base_copies = num_receivers, base_copies
        self.staged: dict[tuple[str, int], Copy] = {}
        self.partial: dict[tuple[str, int], Partial] = {}
        self.adapters: dict[PolicyVersion, Copy] = {}
        self.bases: list[Copy] = []
        #: Versions of the base whose copies are not dropped.
        self.pinned: frozenset[int] = frozenset()
        self._discarded: deque[str] = deque(maxlen=256)

    def held(self, version: PolicyVersion) -> Copy | None:
        """A copy that can be sent or loaded."""
        if version.policy != BASE_POLICY:
            return self.adapters.get(version)
        return next((base for base in self.bases if base.version == version), None)

    def transfer_ids(self) -> tuple[str, ...]:
        """The transfers of which bytes wait, whole or in part."""
        return tuple(dict.fromkeys(transfer_id for transfer_id, _ in (*self.staged, *self.partial)))

    def num_held(self, index: int) -> int:
        """Transfers that take up staging memory at one receiver."""
        return sum(key[1] == index for key in (*self.staged, *self.partial))

    def take_partial(self, transfer_id: str, trainer_id: str, index: int) -> Partial:
        """What a receiver has of a transfer; others of its trainer are dropped."""
        for key, other in list(self.partial.items()):
            if key[1] == index and other.trainer_id == trainer_id and key[0] != transfer_id:
                del self.partial[key]
        partial = self.partial.pop((transfer_id, index), None)
        staged = self.staged.pop((transfer_id, index), None) if partial is None else None
        if staged is not None:
            return Partial(transfer_id, trainer_id, list(staged.contents))
        return partial or Partial(transfer_id, trainer_id)

    def put_partial(self, partial: Partial, index: int) -> None:
        """Keep what was interrupted, unless it was discarded meanwhile."""
        if partial.transfer_id not in self._discarded:
            self.partial[partial.transfer_id, index] = partial

    def put_staged(self, copy: Copy, index: int) -> None:
        """Keep what came whole, unless it was discarded meanwhile."""
        if copy.transfer_id in self._discarded:
            raise TransferAbortedError(f"{copy.transfer_id} was discarded meanwhile")
        self.staged[copy.transfer_id, index] = copy

    def all_staged(self, transfer_id: str) -> list[Copy] | None:
        """Every receiver's copy; None if one lacks it."""
        found = [self.staged.get((transfer_id, index)) for index in range(self.num_receivers)]
        copies = [copy for copy in found if copy is not None]
        return copies if len(copies) == self.num_receivers else None

    def drop_one(self, transfer_id: str, index: int) -> None:
        """Forget what one receiver has."""
        self.staged.pop((transfer_id, index), None)
        self.partial.pop((transfer_id, index), None)

    def discard(self, transfer_id: str) -> None:
        """Forget what is staged of a transfer, or is still to come."""
        self._discarded.append(transfer_id)
        for index in range(self.num_receivers):
            self.drop_one(transfer_id, index)

    def keep(self, copy: Copy) -> None:
        """It was loaded: keep it as what it is now; a base if it is still there."""
        was_there = copy in self.bases or (copy.transfer_id, 0) in self.staged
        for index in range(self.num_receivers):
            self.drop_one(copy.transfer_id, index)
        if copy.version.policy != BASE_POLICY:
            self.adapters[copy.version] = copy
        elif was_there:
            others = [base for base in self.bases if base.version != copy.version]
            self.bases = [copy, *others]
            self._drop_beyond()

    def drop_base(self, content: bytes) -> None:
        """Lose the copy of a base, unless it is pinned."""
        self.bases = [
            base
            for base in self.bases
            if base.digest.value != content or base.version.version in self.pinned
        ]

    def pin_bases(self, versions: tuple[int, ...]) -> None:
        """Keep copies of these, and no longer those of others beyond ``base_copies``."""
        self.pinned = frozenset(versions)
        self._drop_beyond()

    def _drop_beyond(self) -> None:
        beyond = self.bases[self.base_copies :]
        pinned = [base for base in beyond if base.version.version in self.pinned]
        self.bases = self.bases[: self.base_copies] + pinned
