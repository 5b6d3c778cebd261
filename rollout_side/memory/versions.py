"""Versions in a worker's memory: staged, partial, retained, served; ``store`` holds them.

Nothing here knows vLLM.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

import torch

from rollout_side.memory.segment import SLICE_BYTES, DeviceSegment, Memory, Segment, SegmentRef
from weft_rl.containers import LruMapping
from weft_rl.contract.errors import CapacityError, DigestMismatchError
from weft_rl.contract.manifest import Manifest, Run, TensorSlot
from weft_rl.contract.names import BASE_POLICY, PolicyVersion, is_replica_sender
from weft_rl.progress import OnProgress
from weft_rl.transport.group import CPU
from weft_rl.transport.wire.buckets import in_manifest_order, tensor_sums
from weft_rl.transport.wire.changes import RunPlace


class BucketContents(NamedTuple):
    """Contents of a verified bucket."""

    runs: Sequence[Run]
    """Runs that it listed; empty if it lists none, and carries the tensors of its layout."""
    digests: list[int]
    """Digests of these runs or tensors, in order; empty for changes, whose result is digested."""
    changes: torch.Tensor | None = None
    """Coded changes of these runs, uint8, of this process; None where all elements came."""


class BaseChanges(NamedTuple):
    """Changes that make one version of the base of another, as a delta brought them."""

    from_digest: bytes
    """Content digest of the version that they change."""
    buckets: tuple[BucketContents, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes of the coded changes."""
        return sum(each.changes.numel() for each in self.buckets if each.changes is not None)

    def on_host(self) -> BaseChanges:
        """Return them in the host's memory; blocks for the copy."""
        buckets = [
            each if each.changes is None else each._replace(changes=each.changes.cpu())
            for each in self.buckets
        ]
        return self._replace(buckets=tuple(buckets))


def latest_changes(changes: Sequence[BaseChanges], most_bytes: int) -> list[BaseChanges]:
    """Return the last of successive changes that have at most ``most_bytes`` together."""
    kept: list[BaseChanges] = []
    for each in reversed(changes):
        most_bytes -= each.num_bytes
        if most_bytes < 0:
            break
        kept.insert(0, each)
    return kept


class ElementPlace(NamedTuple):
    """Place of some elements of a tensor in the served weights, one behind the other."""

    begin: int
    """First element of the tensor that lies there."""
    end: int
    """Element of the tensor behind the last that lies there."""
    bits: torch.Tensor
    """1-D view of the weights there, as integers of the element's size."""
    row: int = 0
    """Elements of a row, of rows of the tensor of which a part lies there; 0 where all elements
    between the two do."""
    stride: int = 0
    """Elements from the beginning of one row to that of the next."""

    @property
    def shard(self) -> ElementShard:
        """Elements that lie there."""
        return ElementShard(self.begin, self.end, self.row, self.stride)

    def read(self, elements: torch.Tensor) -> tuple[slice | torch.Tensor, torch.Tensor]:
        """Return which of some elements lie here, and their bits.

        Args:
            elements: Indices in the tensor, ascending; int64, on the device of the weights.
        """
        here = self.here(elements)
        return here, self.bits[self._at(elements[here])]

    def write(self, elements: torch.Tensor, values: torch.Tensor) -> None:
        """Overwrite those of some elements that lie here; see ``read``."""
        here = self.here(elements)
        self.bits[self._at(elements[here])] = values[here]

    def holds(self, run: Run) -> bool:
        """Return whether all elements of a run lie here, in one piece."""
        return not self.row and self.begin <= run.first and run.end <= self.end

    def here(self, elements: torch.Tensor) -> slice | torch.Tensor:
        """Return which of some elements lie here: a slice, or their indices."""
        bounds = torch.tensor([self.begin, self.end], device=elements.device)
        within = slice(*torch.searchsorted(elements, bounds).tolist())
        if not self.row:
            return within
        in_row: torch.Tensor = (elements[within] - self.begin) % self.stride < self.row
        found: torch.Tensor = in_row.nonzero().view(-1) + within.start
        return found

    def _at(self, elements: torch.Tensor) -> torch.Tensor:
        places = elements - self.begin
        if not self.row:
            return places
        rows = torch.div(places, self.stride, rounding_mode="floor")
        return places - rows * (self.stride - self.row)


class ElementShard(NamedTuple):
    """Elements of a tensor: all from ``begin`` to ``end``, or ``row`` of each ``stride``."""

    begin: int
    end: int
    row: int
    stride: int


class RunMemory(NamedTuple):
    """Memory of some runs in the served weights, if each run lies there in one piece."""

    first: torch.Tensor | None
    """uint8 view of the weights that begin first; None where a run lies in several pieces."""
    places: tuple[tuple[RunPlace, ...], ...]
    """Places of the runs, by bytes from there on; once more for those that lie there twice."""


#: Wire buckets of a delta whose runs' memory is known.
_MAX_RUN_MEMORIES = 64


@dataclass(frozen=True)
class ServedBase:
    """Base that the engine serves, read back from the engine: whole, or one rank's part of it. It
    exists if the base was loaded by plain copies; it is gone with the next load."""

    transfer_id: str
    version: PolicyVersion
    manifest: Manifest
    content_digest: bytes
    payload: Callable[[int, torch.Tensor], torch.Tensor] = field(repr=False, compare=False)
    """Function that copies a bucket, like ``StagedVersion.payload``."""
    tensor_digests: tuple[int, ...] = field(default=(), repr=False, compare=False)
    """Digests of its tensors, in the manifest's order; empty where it takes no deltas."""
    places: Callable[[int], Sequence[ElementPlace]] = field(
        default=lambda tensor: (), repr=False, compare=False
    )
    """Function that returns the places of a tensor's elements: each element that lies here has one
    or more."""
    run_memory: LruMapping[tuple[Run, ...], RunMemory] = field(
        default_factory=lambda: LruMapping(_MAX_RUN_MEMORIES), repr=False, compare=False
    )
    """Memory of runs whose changes were read; of all versions that deltas make of it."""
    is_whole: bool = field(default=True, compare=False)
    """True if all elements lie here, so that it can be sent."""
    device: torch.device = field(default=CPU, compare=False)
    """Device of the weights."""

    @property
    def shards(self) -> tuple[tuple[ElementShard, ...], ...]:
        """Elements of each tensor that lie here, in the order of ``places``."""
        every = range(len(self.manifest.tensors))
        return tuple(tuple(place.shard for place in self.places(tensor)) for tensor in every)

    @property
    def takes_deltas(self) -> bool:
        """True if elements can be read and written where they lie."""
        return bool(self.tensor_digests)


class PreparedSwitch(NamedTuple):
    """Switch of an engine's weights to another base, prepared while they were served."""

    era: int
    """Weights that it was prepared for; see ``ServedSlot.era``."""
    write: Callable[[], None]
    """Writes what differs; generation is paused."""


@dataclass(frozen=True)
class StagedVersion:
    """Bytes of one version, received whole and verified.

    ``segment`` holds the manifest's buckets one after the other, each with its
    trailer, so bucket ``i`` starts at the sum of ``wire_bytes`` before it.
    """

    transfer_id: str
    version: PolicyVersion
    manifest: Manifest
    segment: Segment
    content_digest: bytes
    received: PartialTransfer | None = None
    """Transfer as it was received, on the rank that received it."""
    device_copy: list[torch.Tensor] = field(default_factory=list)
    """At most one tensor: the copy of an adapter that was received on the engine's device."""
    spare: list[torch.Tensor] = field(default_factory=list)
    """At most one tensor: the copy that ``own_bytes`` returns next."""
    tensor_digests: tuple[int, ...] = ()
    """Digests of its tensors, in the manifest's order; empty where they are not known."""
    prepared: list[PreparedSwitch] = field(default_factory=list)
    """At most one: how the engine's weights become those of this version."""
    changes: list[BaseChanges] = field(default_factory=list)
    """Successive changes that led to it, while it is to be written to disk; none where it came
    whole."""

    @property
    def num_bytes(self) -> int:
        """Bytes of memory that it takes."""
        return self.segment.num_bytes

    def payload(self, index: int, out: torch.Tensor) -> torch.Tensor:
        """Copy one bucket's payload; only reads what is served.

        Args:
            out: uint8, at least the bucket's ``payload_bytes``, on any device; overwritten.

        Returns:
            The view of ``out`` that is the payload; on an accelerator once the calling
            thread's current stream is done.
        """
        at, size = self._starts[index], self.manifest.buckets[index].payload_bytes
        return out[:size].copy_(self.segment.data[at : at + size])

    @cached_property
    def _starts(self) -> list[int]:
        return bucket_starts(self.manifest)

    def check(self, content_digest: bytes) -> None:
        """Check that the staged content is what is to be committed.

        Raises:
            DigestMismatchError: Other bytes are staged.
        """
        if self.content_digest != content_digest:
            raise DigestMismatchError(
                f"{self.version} was staged with digest {self.content_digest.hex()}, but the "
                f"commit is for {content_digest.hex()}; push again"
            )

    def handle(self) -> StagedHandle:
        """Return the handle by which another worker of this machine attaches it, while this object
        lives."""
        return StagedHandle(
            self.transfer_id, self.version, self.manifest, self.segment.ref, self.content_digest
        )

    def take_device_copy(self) -> torch.Tensor | None:
        """Take the copy on the device, which is then the caller's; None if there is none."""
        return self.device_copy.pop() if self.device_copy else None

    def own_bytes(self) -> torch.Tensor:
        """Return a copy of the segment that is the caller's, page-locked if the segment is."""
        if self.spare:
            return self.spare.pop()
        data = self.segment.data
        return torch.empty_like(data, pin_memory=data.is_pinned()).copy_(data)

    def tensors(self, data: torch.Tensor | None = None) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the name and a view of every tensor, in manifest order; no copy.

        Args:
            data: A copy of the segment; by default the segment itself.

        The views are of shared memory that a later push may reuse once this version was dropped:
        clone what must outlive it, and never write.
        """
        yield from tensors_in(self.manifest, self.segment.data if data is None else data)


def tensors_in(manifest: Manifest, data: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the name and a view of every tensor in a segment's bytes, in manifest order; no
    copy."""
    starts = bucket_starts(manifest)
    for slot in manifest.tensors:
        yield slot.meta.name, tensor_in(slot, data[starts[slot.bucket] :])


def tensor_in(slot: TensorSlot, wire: torch.Tensor) -> torch.Tensor:
    """Return the view of a tensor in its bucket's bytes (uint8, which may continue behind it)."""
    raw = wire[slot.offset_bytes : slot.offset_bytes + slot.meta.num_bytes]
    return raw.view(getattr(torch, slot.meta.dtype.torch_name)).view(slot.meta.shape)


def bucket_starts(manifest: Manifest) -> list[int]:
    """Return the offset of each bucket's first byte in a segment."""
    starts, at = [], 0
    for bucket in manifest.buckets:
        starts.append(at)
        at += bucket.wire_bytes
    return starts


@dataclass(frozen=True)
class PartialTransfer:
    """Buckets of one version, verified from the first on; the others are still to come."""

    transfer_id: str
    trainer_id: str
    manifest: Manifest
    segment: Segment
    verified: list[BucketContents]
    """Contents of the verified buckets."""
    lists_runs: bool = False
    """True if the buckets list their runs; else they are those of the manifest."""
    settled: bool = False
    """True once no abandoned operation can write to the segment."""

    @classmethod
    def of_changes(cls, transfer_id: str, trainer_id: str, manifest: Manifest) -> PartialTransfer:
        """Return a transfer of which nothing has come, and which keeps nothing but changes."""
        nowhere = DeviceSegment(torch.empty(0, dtype=torch.uint8), owned=False)
        return cls(transfer_id, trainer_id, manifest, nowhere, [], lists_runs=True, settled=True)

    @property
    def num_verified(self) -> int:
        """Number of verified buckets."""
        return len(self.verified)

    def forget(self, first_bucket: int) -> None:
        """Forget buckets from ``first_bucket`` on, which come again."""
        del self.verified[first_bucket:]

    def tensor_digests(self) -> list[int]:
        """Return the digests of the version's tensors, in manifest order, once all buckets were
        verified.

        Raises:
            InvalidManifestError: Runs do not cover every element once; names a place.
        """
        if not self.lists_runs:
            return in_manifest_order(self.manifest, [each.digests for each in self.verified])
        runs = [run for bucket in self.verified for run in bucket.runs]
        digests = [digest for bucket in self.verified for digest in bucket.digests]
        return tensor_sums(self.manifest, runs, digests)

    def moved(self, memory: Memory, on_progress: OnProgress) -> PartialTransfer:
        """Return the transfer with its verified bytes in memory that nothing else can write to.
        Blocks for the copy.

        Raises:
            CapacityError: The accelerator has no room.
        """
        was_host = self.segment.data.device.type == "cpu"
        num_bytes = self.segment.num_bytes
        fresh = memory.allocate(num_bytes, adapter=was_host, on_progress=on_progress)
        end = sum(b.wire_bytes for b in self.manifest.buckets[: self.num_verified])
        if self.lists_runs:
            end = num_bytes  # runs may lie anywhere
        for start in range(0, end, SLICE_BYTES):
            part = slice(start, min(end, start + SLICE_BYTES))
            fresh.data[part].copy_(self.segment.data[part])
            on_progress(num_bytes, num_bytes)
        return replace(self, segment=fresh)


#: Whole version that can be sent to another replica.
SendableVersion = StagedVersion | ServedBase


@dataclass(frozen=True)
class StagedHandle:
    """Handle by which another worker of the same machine adopts a staged version."""

    transfer_id: str
    version: PolicyVersion
    manifest: Manifest
    segment: SegmentRef
    content_digest: bytes

    def attach(self) -> StagedVersion:
        """Map the bytes into this process; nothing is copied."""
        segment = self.segment.attach()
        return StagedVersion(
            self.transfer_id, self.version, self.manifest, segment, self.content_digest
        )


@dataclass(frozen=True)
class AdapterEntry:
    """An adapter version that the engine may load at any time."""

    config_json: str
    staged: StagedVersion


def is_adapter(version: PolicyVersion) -> bool:
    """Return whether a version is an adapter's, not the base's."""
    return version.policy != BASE_POLICY


class PartialTransfers:
    """Interrupted transfers, with what was verified of each; ``WorkerStore``'s lock guards them.

    A push resumes within moments or is discarded. A clone waits while pushes go before it. There
    is at most one partial clone, and it gives way if a push needs its room.
    """

    def __init__(self) -> None:
        self._partial: dict[str, PartialTransfer] = {}

    @property
    def transfer_ids(self) -> tuple[str, ...]:
        """Transfers that are kept in part."""
        return tuple(self._partial)

    def put(self, partial: PartialTransfer) -> list[str]:
        """Keep an interrupted transfer; return the transfers that were dropped for it."""
        dropped = self.drop_clones() if is_replica_sender(partial.trainer_id) else []
        self._partial[partial.transfer_id] = partial
        return [name for name in dropped if name != partial.transfer_id]

    def settle(self, trainer_id: str) -> None:
        """Note that operations of a sender's former group have ended for good."""
        for partial in list(self._partial.values()):
            if partial.trainer_id == trainer_id:
                self._partial[partial.transfer_id] = replace(partial, settled=True)

    def pop(self, transfer_id: str) -> PartialTransfer | None:
        """Remove and return a transfer; None if it is not here."""
        return self._partial.pop(transfer_id, None)

    def drop_others(self, transfer_id: str, trainer_id: str) -> list[str]:
        """Drop a sender's other transfers, since it carries out one at a time; return their ids."""
        return self._drop(
            [
                partial.transfer_id
                for partial in self._partial.values()
                if partial.trainer_id == trainer_id and partial.transfer_id != transfer_id
            ]
        )

    def drop_clones(self) -> list[str]:
        """Drop the transfers that came from replicas; return their ids."""
        return self._drop(
            [p.transfer_id for p in self._partial.values() if is_replica_sender(p.trainer_id)]
        )

    def _drop(self, names: list[str]) -> list[str]:
        for name in names:
            del self._partial[name]
        return names


_log = logging.getLogger(__name__)


class RetainedBases:
    """Copies of the base that are kept after they were loaded, last used first; ``WorkerStore``'s
    lock guards them. Late replicas clone them, a rollback loads them, a push takes their room.

    Methods that drop copies return their memory, which is the caller's again.
    """

    def __init__(self, base_copies: int) -> None:
        self._num_copies = base_copies
        self._copies: list[StagedVersion] = []
        # Versions whose copies stay beside the newest.
        self._pinned: frozenset[int] = frozenset()

    def __iter__(self) -> Iterator[StagedVersion]:
        """Iterate over the copies, last used first."""
        return iter(self._copies)

    @property
    def versions(self) -> tuple[int, ...]:
        """Versions of the copies, last used first."""
        return tuple(copy.version.version for copy in self._copies)

    @property
    def num_bytes(self) -> int:
        """Bytes of all copies."""
        return sum(copy.segment.num_bytes for copy in self._copies)

    @property
    def num_pinned_bytes(self) -> int:
        """Bytes of the copies that no push may take."""
        return sum(copy.segment.num_bytes for copy in self._copies if self._is_pinned(copy))

    @property
    def pinned(self) -> list[PolicyVersion]:
        """Versions of the copies that no push may take."""
        return [copy.version for copy in self._copies if self._is_pinned(copy)]

    def of_transfer(self, transfer_id: str) -> StagedVersion | None:
        """Return the copy that a transfer brought; None if there is none."""
        return next((copy for copy in self._copies if copy.transfer_id == transfer_id), None)

    def of_version(self, version: PolicyVersion) -> StagedVersion | None:
        """Return the copy of a version; None if there is none."""
        return next((copy for copy in self._copies if copy.version == version), None)

    def keep(self, base: StagedVersion) -> list[Segment]:
        """Retain a copy, or count a held one as used. It replaces other copies of its version; the
        least recently used beyond ``base_copies`` are dropped."""
        others = [copy for copy in self._copies if copy.version != base.version]
        gone = [c.segment for c in self._copies if c.version == base.version and c is not base]
        self._copies = [base, *others]
        return gone + self._drop_beyond()

    def pin(self, versions: Iterable[int]) -> list[Segment]:
        """Pin the held copies of these versions and unpin all others. Unpinned copies beyond
        ``base_copies`` are dropped."""
        self._pinned = frozenset(versions)
        return self._drop_beyond()

    def give_way(self, room_bytes: int, is_lent: Callable[[Segment], bool]) -> list[Segment]:
        """Drop copies, oldest first, until the others fit in ``room_bytes``. Copies that are being
        sent or are pinned stay."""
        dropped: list[Segment] = []
        while self._copies and self.num_bytes > room_bytes:
            droppable = (copy for copy in reversed(self._copies) if not is_lent(copy.segment))
            oldest = next((copy for copy in droppable if not self._is_pinned(copy)), None)
            if oldest is None:
                break  # the push is refused, with what holds the room
            self._copies.remove(oldest)
            dropped.append(oldest.segment)
        return dropped

    def move_newest(self, allocate: Callable[[int], Segment]) -> None:
        """Move the copy used last to the host, unless it lies there, is pinned or finds no room.
        Blocks for the copy.

        Args:
            allocate: Makes a host segment of so many bytes, or raises CapacityError.
        """
        copy = next(iter(self._copies), None)
        if copy is None or _is_on_host(copy) or self._is_pinned(copy):
            return
        try:
            segment = allocate(copy.segment.num_bytes)
        except CapacityError as error:
            _log.warning("no copy of the base is kept: %s", error)
            return
        for start in range(0, segment.num_bytes, SLICE_BYTES):
            part = slice(start, min(segment.num_bytes, start + SLICE_BYTES))
            segment.data[part].copy_(copy.segment.data[part])
        self._copies[0] = replace(copy, segment=segment)

    def drop_on_device(self) -> None:
        """Drop the copies on an accelerator, except pinned ones. Their memory is free once nobody
        sends them."""
        self._copies = [copy for copy in self._copies if _is_on_host(copy) or self._is_pinned(copy)]

    def _drop_beyond(self) -> list[Segment]:
        newest, beyond = self._copies[: self._num_copies], self._copies[self._num_copies :]
        self._copies = newest + [copy for copy in beyond if self._is_pinned(copy)]
        return [copy.segment for copy in beyond if not self._is_pinned(copy)]

    def _is_pinned(self, copy: StagedVersion) -> bool:
        return copy.version.version in self._pinned


def _is_on_host(copy: StagedVersion) -> bool:
    return copy.segment.data.device.type == "cpu"
