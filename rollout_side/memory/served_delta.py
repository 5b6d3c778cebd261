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
from functools import cached_property
from typing import NamedTuple, Protocol

import torch

from rollout_side.memory.versions import (
    ElementPlace,
    PartialTransfer,
    RunMemory,
    ServedBase,
    StagedVersion,
)
from weft_rl.contract.errors import DigestMismatchError, LoadFailedError, NotReadyError
from weft_rl.contract.manifest import Manifest, Run
from weft_rl.contract.names import PolicyVersion
from weft_rl.transport.digests.wsum64 import content_digest
from weft_rl.transport.wire import change_kernels, host_changes
from weft_rl.transport.wire.changes import (
    RunPlace,
    decode_changes,
    has_host_coder,
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

    @property
    def only_old(self) -> ChangedElements:
        """The same without the new bits: they lie in the weights."""
        return self._replace(new=self.old[:0])

    @property
    def only_new(self) -> ChangedElements:
        """The same without the old bits: they lie in the weights."""
        return self._replace(old=self.new[:0])

    def completed(self) -> ChangedElements:
        """Return the same with the bits that it was left without, read from the weights."""
        if len(self.old) == len(self.new):
            return self
        bits = torch.empty_like(self.old if len(self.old) else self.new)
        for place in self.places:
            here, found = place.read(self.elements)
            bits[here] = found
        return self._replace(new=bits) if len(self.old) else self._replace(old=bits)

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

    @cached_property
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
        return self._with(lambda each: each.only_old)

    @property
    def redo(self) -> StagedDelta:
        """The same once it was taken back: what applies it again."""
        return self._with(lambda each: each.only_new)

    def completed(self) -> StagedDelta:
        """Return the same with both old and new elements, where it kept one of the two."""
        return self._with(ChangedElements.completed)

    def _with(self, change: Callable[[ChangedElements], ChangedElements]) -> StagedDelta:
        changes = tuple(
            change(each) if isinstance(each, ChangedElements) else each for each in self.changes
        )
        return replace(self, changes=changes, received=None)

    @property
    def made(self) -> ServedBase:
        """Base that is served once it is applied."""
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
            self.write_each(lambda changes: changes.apply())
        except Exception as error:
            self.take_back(error)
            raise LoadFailedError(
                f"applying {self.version} failed, and {self.base.version} is back: {error}"
            ) from error
        return self.made

    def take_back(self, cause: Exception | None = None) -> ServedBase:
        """Write the old elements back; return the base that is served then. Blocks; generation is
        paused.

        Raises:
            LoadFailedError: Metadata ``dirty``: it failed midway.
        """
        try:
            self.write_each(lambda changes: changes.undo())
        except Exception as error:  # noqa: BLE001 (whatever failed, the weights are mixed)
            raise LoadFailedError(
                f"taking {self.version} back failed midway, the weights are mixed: {error}",
                metadata={"dirty": "true"},
            ) from (cause or error)
        return self.base

    def write_each(self, write: Callable[[PlacedChanges], None]) -> None:
        """Call a function with the changes of each wire bucket; blocks until all are written."""
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
        placed, sums = (
            _read_by_kernels(base, runs, sizes, payload)
            or _read_by_host(base, runs, sizes, payload)
            or _read(base, runs, sizes, payload)
        )
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
            raise not_the_base(base, run)
        new = own.new_values(old)
        sums.append(run_sum(run, own.positions, new, size) - own.old_sum)
        if len(elements):
            found.append(ChangedElements(places, elements, old, new))
    return found, sums


#: Deltas that are kept, to switch between their versions; heartbeats name each.
MOST_UNDO = 100


def _read_by_kernels(
    base: ServedBase, runs: Sequence[Run], sizes: Sequence[int], payload: torch.Tensor
) -> _Read | None:
    """Read as ``_read`` does, on a GPU, where every run lies in one piece, as often as it lies
    there; else return None."""
    if not has_kernels(payload.device):
        return None
    memory = _run_memory(base, tuple(runs), sizes)
    if memory.first is None or memory.first.data_ptr() % 16:  # which kernels read at once
        return None
    placed, sums = list[PlacedChanges](), list[int]()
    for places in memory.places:
        changes = change_kernels.decode(
            payload, tuple(runs), tuple(sizes), memory.first, places, change_kernels.ALL_MEMORY
        )
        try:
            changes.check()
        except DigestMismatchError as error:
            raise DigestMismatchError(f"{base.version}: {error.message}") from error
        placed.append(changes)
        sums = changes.sums()
    return placed, sums


def _read_by_host(
    base: ServedBase, runs: Sequence[Run], sizes: Sequence[int], payload: torch.Tensor
) -> _Read | None:
    """Read as ``_read`` does, in C, where every run lies in one piece and nothing is wrong; else
    return None."""
    if not has_host_coder(payload.device):
        return None
    memory = _run_memory(base, tuple(runs), sizes)
    if memory.first is None or any(run.num_elements >= 2**32 for run in runs):
        return None
    try:
        listed = host_changes.read(payload, runs, sizes, memory.first, memory.places)
    except DigestMismatchError:
        return None  # ``_read`` names the tensor
    return [listed], listed.sums


def _run_memory(base: ServedBase, runs: tuple[Run, ...], sizes: Sequence[int]) -> RunMemory:
    """Return the memory of runs of the served weights, which is found once: for hundreds of tensors
    that takes milliseconds."""
    memory = base.run_memory.get(runs)
    if memory is None:
        memory = _find_memory(base, runs, sizes)
        base.run_memory.put(runs, memory)
    return memory


def _find_memory(base: ServedBase, runs: Sequence[Run], sizes: Sequence[int]) -> RunMemory:
    of_runs = [base.places(run.tensor) for run in runs]
    for run, found in zip(runs, of_runs, strict=True):
        if not all(place.holds(run) for place in found):
            return RunMemory(None, ())
    first = min((p.bits for found in of_runs for p in found), key=lambda bits: bits.data_ptr())

    def place_of(run: Run, size: int, place: ElementPlace) -> RunPlace:
        at = place.bits.data_ptr() - first.data_ptr() + (run.first - place.begin) * size
        return RunPlace(at, run.count, run.stride)

    times = [
        tuple(
            place_of(run, size, found[min(nth, len(found) - 1)])
            for run, size, found in zip(runs, sizes, of_runs, strict=True)
        )
        for nth in range(max(map(len, of_runs)))  # tied weights lie twice
    ]
    return RunMemory(first.view(torch.uint8), tuple(times))


def not_the_base(base: ServedBase, run: Run) -> DigestMismatchError:
    """Return the refusal of changes whose old elements are not those of a base."""
    name = base.manifest.tensors[run.tensor].meta.name
    return DigestMismatchError(
        f"tensor {name!r} of {base.version} is not the one that was changed: the weights here are "
        "not those that the delta was made from"
    )


class ServedSlot:
    """Slot of the base that the engine's own weights hold, if they can be read: not before they
    were loaded whole, nor while the engine sleeps. Keeps the old elements of the deltas that were
    applied to it, and the new ones of those that were taken back, the newest of either last."""

    def __init__(self, lock: threading.RLock) -> None:
        self._lock = lock
        #: Held while the weights are switched between versions that are kept.
        self._switching = threading.RLock()
        self._asleep: ServedBase | None = None
        self._applied: list[StagedDelta] = []
        self._taken_back: list[StagedDelta] = []
        self._before: tuple[str, bytes] = "", b""
        self._num_changes, self._num_readers = 1, 0
        self._is_whole, self._is_asleep = True, False
        #: None while there is none.
        self.base: ServedBase | None = None

    def set(self, base: ServedBase | None, *, is_loaded: bool = False) -> ServedBase | None:
        """Set the base that can be read from now on. Returns the former one. Deltas before it
        cannot be taken back any more.

        Args:
            base: None where the weights hold not all its bytes unchanged, and before they are
                loaded anew.
            is_loaded: True for None if they are whole.
        """
        with self._lock:
            self._forget()
            self._num_changes += 1
            self._is_whole = is_loaded or base is not None
            former, self.base = self.base, base
            return former

    # -- weights of any form --------------------------------------------------------

    @property
    def era(self) -> int:
        """Number that is another one once the weights have changed; 0 while they are not whole, or
        asleep."""
        return self._num_changes if self._is_whole and not self._is_asleep else 0

    @contextmanager
    def reading(self) -> Iterator[int]:
        """Keep the engine from falling asleep inside the ``with``, where ``era`` is not 0: that is
        yielded. It may load other weights meanwhile."""
        with self._lock:
            era = self.era
            self._num_readers += bool(era)
        try:
            yield era
        finally:
            with self._lock:
                self._num_readers -= bool(era)

    @property
    def is_being_read(self) -> bool:
        """True inside of ``reading``."""
        return self._num_readers > 0

    def take_prepared(self, staged: StagedVersion) -> Callable[[], None] | None:
        """Return what was prepared to switch to a version, if the weights are still those that it
        was prepared for; once."""
        switch = staged.prepared.pop() if staged.prepared else None
        return switch.write if switch is not None and switch.era == self.era else None

    def _forget(self) -> None:
        self._applied.clear()
        self._taken_back.clear()

    def is_of(self, transfer_id: str, content_digest: bytes) -> bool:
        """Return whether the weights are those that a transfer brought, whole."""
        base = self.base
        return base is not None and (base.transfer_id, base.content_digest) == (
            transfer_id,
            content_digest,
        )

    # -- deltas ---------------------------------------------------------------------

    @property
    def reachable(self) -> tuple[ServedBase, ...]:
        """Bases that can be switched to from here: older ones, then those that were gone back
        from; nearest first."""
        older = (delta.base for delta in reversed(self._applied))
        return (*older, *(delta.made for delta in reversed(self._taken_back)))

    @property
    def undo_bytes(self) -> int:
        """Bytes of the elements that are kept."""
        return sum(delta.num_bytes for delta in (*self._applied, *self._taken_back))

    def apply(self, delta: StagedDelta) -> None:
        """Apply a delta to the served base, which leaves those that were gone back from; blocks,
        generation is paused.

        Raises:
            NotReadyError, LoadFailedError: See ``StagedDelta.apply``.
        """
        with self._switching:
            self._note()
            self._apply(delta)
            with self._lock:
                self._taken_back.clear()

    def _note(self) -> None:
        base = self.base
        self._before = ("", b"") if base is None else (base.transfer_id, base.content_digest)

    def switch_back(self) -> bool:
        """Switch to what was served before the last switch; see ``switch_to``."""
        return self.switch_to(*self._before)

    def _apply(self, delta: StagedDelta) -> None:
        with self._lock:
            served = self.base
        with self._unless_dirty():
            made = delta.apply(served)
        with self._lock:
            self.base = made
            self._num_changes += 1
            self._applied.append(delta.undo)

    def switch_to(self, transfer_id: str, content_digest: bytes) -> bool:
        """Take deltas back, or apply them again, until the served base is the one that a transfer
        brought; blocks, generation is paused. Returns False, with nothing done, where it is not,
        and is none of ``reachable``.

        Raises:
            LoadFailedError: It failed, and the base is the one before, unless metadata says
                ``dirty``.
        """
        with self._switching:
            return self._switch_to(transfer_id, content_digest)

    def _switch_to(self, transfer_id: str, content_digest: bytes) -> bool:
        self._note()
        wanted = (transfer_id, content_digest)
        older = [(delta.base.transfer_id, delta.base.content_digest) for delta in self._applied]
        later = [(delta.made.transfer_id, delta.made.content_digest) for delta in self._taken_back]
        if wanted not in (*older, *later):
            return self.is_of(transfer_id, content_digest)
        begun_at = len(self._applied)
        try:
            while not self.is_of(transfer_id, content_digest):
                self._take_back() if wanted in older else self._apply_again()
        except Exception as error:
            self._return(begun_at, error)
            if isinstance(error, LoadFailedError):
                raise
            raise LoadFailedError(
                f"switching in place failed on the way: {type(error).__name__}: {error}"
            ) from error
        return True

    def _return(self, num_applied: int, cause: Exception) -> None:
        """Go back to where so many deltas are applied, after a switch has failed on its way."""
        try:
            while self.base is not None and len(self._applied) != num_applied:
                is_beyond = len(self._applied) > num_applied
                self._take_back() if is_beyond else self._apply_again()
        except Exception as error:  # noqa: BLE001 (whatever failed, the version is another)
            self.set(None)
            raise LoadFailedError(
                f"switching in place failed on the way, and back: {error}",
                metadata={"dirty": "true"},
            ) from cause

    def _take_back(self) -> None:
        delta = self._applied[-1].completed()
        with self._unless_dirty():
            base = delta.take_back()
        with self._lock:
            self._applied.pop()
            self._taken_back.append(delta.redo)
            self._num_changes += 1
            self.base = base

    def _apply_again(self) -> None:
        self._apply(self._taken_back[-1].completed())
        with self._lock:
            self._taken_back.pop()

    def bound(self, room_bytes: int, most: int | None = None) -> None:
        """Forget kept elements beyond so many bytes, and beyond so many deltas (``MOST_UNDO``): of
        the oldest bases first, then of the newest that were gone back from. Of what another thread
        switches by none is forgotten: it bounds them itself."""
        most = MOST_UNDO if most is None else min(most, MOST_UNDO)
        if not self._switching.acquire(blocking=False):
            return
        try:
            with self._lock:
                while kept := self._applied or self._taken_back:
                    num_deltas = len(self._applied) + len(self._taken_back)
                    if self.undo_bytes <= room_bytes and num_deltas <= most:
                        return
                    kept.pop(0)
        finally:
            self._switching.release()

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
            self._forget()
            self._is_asleep = True
            if self.base is not None:
                self._asleep, self.base = self.base, None

    def wake_up(self, *, discarded: bool) -> None:
        """Allow reads of the weights again, as they were, unless they were discarded. A base that
        was loaded since stays."""
        with self._lock:
            former, self._asleep = self._asleep, None
            self._is_asleep = False
            self._is_whole &= not discarded
            if self.base is None and not discarded:
                self.base = former
