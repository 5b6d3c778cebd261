"""Deltas that are applied to the weights that an engine serves, and taken back from them.

Nothing is written before the commit. Until then a delta is read against the served weights: its
old elements must be there, and the digest of what it makes is that of what is served, plus what
its changes add. The old elements are kept, so that a version can be gone back to as long as they
are.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import NamedTuple, Protocol

import torch

from rollout_side.memory.versions import ElementPlace, PartialTransfer, ServedBase
from weft_rl.contract.errors import DigestMismatchError, LoadFailedError, NotReadyError
from weft_rl.contract.manifest import Manifest, Run
from weft_rl.contract.names import PolicyVersion
from weft_rl.transport.digests.wsum64 import content_digest
from weft_rl.transport.wire import change_kernels
from weft_rl.transport.wire.changes import (
    RunPlace,
    decode_changes,
    has_kernels,
    run_elements,
    run_sum,
)


class PlacedChanges(Protocol):
    """Changes of some runs, read against the weights that they are to be written over."""

    @property
    def num_bytes(self) -> int:
        """Bytes of memory that it takes."""

    def apply(self) -> None:
        """Write the new elements."""

    def undo(self) -> None:
        """Write the old elements back."""


class ChangedElements(NamedTuple):
    """Elements of one tensor, ascending, with the bits that they have and will have; see
    ``PlacedChanges``."""

    places: Sequence[ElementPlace]
    elements: torch.Tensor
    """Indices in the tensor, int64, on the device of the weights."""
    old: torch.Tensor
    new: torch.Tensor

    @property
    def num_bytes(self) -> int:
        return self.elements.nbytes + self.old.nbytes + self.new.nbytes

    def apply(self) -> None:
        self._write(self.new)

    def undo(self) -> None:
        self._write(self.old)

    def _write(self, values: torch.Tensor) -> None:
        for place in self.places:
            place.write(self.elements, values)


@dataclass(frozen=True, kw_only=True)
class StagedDelta:
    """Delta that was received whole and verified against what is served."""

    transfer_id: str
    version: PolicyVersion
    base: ServedBase
    """Base that it changes."""
    content_digest: bytes
    """Digest of the version that it makes."""
    tensor_digests: tuple[int, ...]
    """Digests of that version's tensors, in the manifest's order."""
    changes: tuple[PlacedChanges, ...] = field(repr=False)
    received: PartialTransfer | None = None

    @property
    def manifest(self) -> Manifest:
        """Layout of the version."""
        return self.base.manifest

    @property
    def num_bytes(self) -> int:
        """Bytes of memory that it takes."""
        return sum(each.num_bytes for each in self.changes)

    def check(self, content_digest: bytes) -> None:
        """Check that the staged content is what is to be committed.

        Raises:
            DigestMismatchError: It makes something else.
        """
        if self.content_digest != content_digest:
            raise DigestMismatchError(
                f"{self.version} was staged with digest {self.content_digest.hex()}, but the "
                f"commit is for {content_digest.hex()}; push again"
            )

    @property
    def undo(self) -> StagedDelta:
        """The same once it was applied: what takes it back, without what it came as."""
        changes = tuple(
            each._replace(new=each.old[:0]) if isinstance(each, ChangedElements) else each
            for each in self.changes
        )
        return replace(self, changes=changes, received=None)

    @property
    def _made(self) -> ServedBase:
        return replace(
            self.base,
            transfer_id=self.transfer_id,
            version=self.version,
            content_digest=self.content_digest,
            tensor_digests=self.tensor_digests,
        )

    def apply(self, served: ServedBase | None) -> ServedBase:
        """Write the new elements over the old ones; return the base that is served then. Blocks;
        generation is paused.

        Args:
            served: Base that is served now.

        Raises:
            NotReadyError: That is not the one that it changes; nothing was written.
            LoadFailedError: It failed midway; the old elements are back, unless metadata says
                ``dirty``.
        """
        if served is None or served.content_digest != self.base.content_digest:
            raise NotReadyError(
                f"{self.version} changes {self.base.version}, which is not served any more; push "
                "again",
                reason="NOT_STAGED",
            )
        try:
            self._each(lambda changes: changes.apply())
        except Exception as error:
            self.take_back(error)
            raise LoadFailedError(
                f"applying {self.version} failed, and {self.base.version} is back: {error}"
            ) from error
        return self._made

    def take_back(self, cause: Exception | None = None) -> ServedBase:
        """Write the old elements back; return the base that is served then. Blocks; generation is
        paused.

        Raises:
            LoadFailedError: Metadata ``dirty``: it failed midway.
        """
        try:
            self._each(lambda changes: changes.undo())
        except Exception as error:  # noqa: BLE001 (whatever failed, the weights are mixed)
            raise LoadFailedError(
                f"taking {self.version} back failed midway, the weights are mixed: {error}",
                metadata={"dirty": "true"},
            ) from (cause or error)
        return self.base

    def _each(self, write: Callable[[PlacedChanges], None]) -> None:
        with torch.no_grad():
            for changes in self.changes:
                write(changes)
        if (device := self.base.device).type == "cuda":
            torch.cuda.current_stream(device).synchronize()


def stage_delta(
    base: ServedBase,
    transfer_id: str,
    version: PolicyVersion,
    payloads: Iterable[tuple[Sequence[Run], torch.Tensor]],
    report: Callable[[int], None] = lambda bucket: None,
) -> StagedDelta:
    """Read a delta against the served base; writes nothing.

    Args:
        base: Base that it changes, served now.
        payloads: Runs and coded changes of each wire bucket, on the device of the weights.
        report: Called with the number of each wire bucket before it is read.

    Raises:
        DigestMismatchError: An old element is not the one that was changed, or a payload is
            malformed.
    """
    digests, changes = list(base.tensor_digests), list[PlacedChanges]()
    for number, (runs, payload) in enumerate(payloads):
        report(number)
        sizes = [base.manifest.tensors[run.tensor].meta.dtype.itemsize_bytes for run in runs]
        read = _read_by_kernels(base, runs, sizes, payload)
        placed, sums = _read(base, runs, sizes, payload) if read is None else read
        changes += placed
        for run, change in zip(runs, sums, strict=True):
            digests[run.tensor] = (digests[run.tensor] + change) % 2**64
    return StagedDelta(
        transfer_id=transfer_id,
        version=version,
        base=base,
        content_digest=content_digest(digests),
        tensor_digests=tuple(digests),
        changes=tuple(changes),
    )


_Read = tuple[Sequence[PlacedChanges], Sequence[int]]


def _read(
    base: ServedBase, runs: Sequence[Run], sizes: Sequence[int], payload: torch.Tensor
) -> _Read:
    """Read the changes of a wire bucket; return them, and what each run's digest changes by."""
    found, sums = list[PlacedChanges](), []
    for run, size, own in zip(runs, sizes, decode_changes(payload, runs, sizes), strict=True):
        elements, places = run_elements(run, own.positions), base.places(run.tensor)
        old = torch.empty(len(elements), dtype=places[0].bits.dtype, device=elements.device)
        for place in places:  # of what lies twice, either
            here, bits = place.read(elements)
            old[here] = bits
        if run_sum(run, own.positions, old, size) != own.old_sum:
            raise _not_the_base(base, run)
        new = own.new_values(old)
        sums.append(run_sum(run, own.positions, new, size) - own.old_sum)
        if len(elements):
            found.append(ChangedElements(places, elements, old, new))
    return found, sums


#: More than any GPU has: a place is not looked at as one of the memory that begins there.
_ALL_MEMORY = 2**60


def _read_by_kernels(
    base: ServedBase, runs: Sequence[Run], sizes: Sequence[int], payload: torch.Tensor
) -> _Read | None:
    """Read as ``_read`` does, on a GPU, where every run lies in one piece, as often as it lies
    there; else return None."""
    if not has_kernels(payload.device):
        return None
    of_runs = [base.places(run.tensor) for run in runs]
    for run, found in zip(runs, of_runs, strict=True):
        if not all(place.begin <= run.first and run.end <= place.end for place in found):
            return None
    memory = min((p.bits for found in of_runs for p in found), key=lambda bits: bits.data_ptr())
    if memory.data_ptr() % 16:  # which kernels read at once
        return None
    first, placed, sums = memory.data_ptr(), list[PlacedChanges](), list[int]()
    for nth in range(max(map(len, of_runs))):  # tied weights lie twice
        chosen = [found[min(nth, len(found) - 1)] for found in of_runs]
        places = [
            RunPlace(
                place.bits.data_ptr() - first + (run.first - place.begin) * size,
                run.count,
                run.stride,
            )
            for run, size, place in zip(runs, sizes, chosen, strict=True)
        ]
        changes = change_kernels.decode(
            payload, tuple(runs), tuple(sizes), memory.view(torch.uint8), tuple(places), _ALL_MEMORY
        )
        try:
            changes.check()
        except DigestMismatchError as error:
            raise DigestMismatchError(f"{base.version}: {error.message}") from error
        placed.append(changes)
        sums = changes.sums()
    return placed, sums


def _not_the_base(base: ServedBase, run: Run) -> DigestMismatchError:
    name = base.manifest.tensors[run.tensor].meta.name
    return DigestMismatchError(
        f"tensor {name!r} of {base.version} is not the one that was changed: the weights here are "
        "not those that the delta was made from"
    )


#: Bases that can be gone back to, at most: each is named in heartbeats, and has digests of its own.
MOST_FORMER = 64


class ServedSlot:
    """Slot of the base that the engine's own weights hold, if they can be read: not before they
    were loaded whole, nor while the engine sleeps. Keeps the old elements of the deltas that were
    applied to it, newest last."""

    def __init__(self, lock: threading.RLock) -> None:
        self._lock = lock
        self._asleep: ServedBase | None = None
        self._applied: list[StagedDelta] = []
        #: None while there is none.
        self.base: ServedBase | None = None

    def set(self, base: ServedBase | None) -> ServedBase | None:
        """Set the base that can be read from now on; None before the weights are loaded anew.
        Returns the former one. Deltas before it cannot be taken back any more."""
        with self._lock:
            self._applied.clear()
            former, self.base = self.base, base
            return former

    def is_of(self, transfer_id: str, content_digest: bytes) -> bool:
        """Return whether the weights are those that a transfer brought, whole."""
        base = self.base
        return base is not None and (base.transfer_id, base.content_digest) == (
            transfer_id,
            content_digest,
        )

    # -- deltas ---------------------------------------------------------------------

    @property
    def former(self) -> tuple[ServedBase, ...]:
        """Bases that can be gone back to, newest first."""
        return tuple(delta.base for delta in reversed(self._applied))

    @property
    def undo_bytes(self) -> int:
        """Bytes of the old elements."""
        return sum(delta.num_bytes for delta in self._applied)

    def apply(self, delta: StagedDelta) -> None:
        """Apply a delta to the served base; blocks, generation is paused.

        Raises:
            NotReadyError, LoadFailedError: See ``StagedDelta.apply``.
        """
        with self._lock:
            served = self.base
        with self._unless_dirty():
            made = delta.apply(served)
        with self._lock:
            self.base = made
            self._applied.append(delta.undo)

    def go_back(self, transfer_id: str, content_digest: bytes) -> bool:
        """Take deltas back until the served base is the one that a transfer brought; blocks,
        generation is paused. Returns False, with nothing done, where that is none of ``former``.

        Raises:
            LoadFailedError: Metadata ``dirty``: it failed midway.
        """
        wanted = (transfer_id, content_digest)
        if wanted not in [(base.transfer_id, base.content_digest) for base in self.former]:
            return False
        while not self.is_of(transfer_id, content_digest):
            with self._unless_dirty():
                base = self._applied[-1].take_back()
            with self._lock:
                self._applied.pop()
                self.base = base
        return True

    def bound(self, room_bytes: int) -> None:
        """Forget old elements, oldest first, beyond so many bytes and ``MOST_FORMER`` deltas."""
        with self._lock:
            while self._applied and (
                len(self._applied) > MOST_FORMER or self.undo_bytes > room_bytes
            ):
                self._applied.pop(0)

    @contextmanager
    def _unless_dirty(self) -> Iterator[None]:
        """Forget the base where the weights inside the ``with`` were left mixed."""
        try:
            yield
        except LoadFailedError as error:
            if error.metadata.get("dirty") == "true":
                self.set(None)
            raise

    # -- sleep ----------------------------------------------------------------------

    def fall_asleep(self) -> None:
        """Forbid reads of the weights, and forget old elements, whose memory the engine gives
        back."""
        with self._lock:
            self._applied.clear()
            if self.base is not None:
                self._asleep, self.base = self.base, None

    def wake_up(self, *, discarded: bool) -> None:
        """Allow reads of the weights again, as they were, unless they were discarded. A base that
        was loaded since stays."""
        with self._lock:
            former, self._asleep = self._asleep, None
            if self.base is None and not discarded:
                self.base = former
