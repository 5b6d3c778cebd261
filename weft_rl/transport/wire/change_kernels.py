"""Kernels that code the changed elements of a bucket on a GPU, and apply them.

Written in CUDA C++ (``cuda/``) and compiled at run time. ``change_coding`` has the same in torch,
which is the specification of the bytes; where no kernel can be compiled a warning says so. The rows
of the kernels' tables are laid out here, as ``cuda/common.cu`` has them.

Source: docs/protocol.md, A bucket of changes.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch

from weft_rl.contract.errors import DigestMismatchError
from weft_rl.contract.manifest import ALIGN_BYTES, Run, align_up
from weft_rl.transport.digests.host_copy import HostCopy
from weft_rl.transport.wire.change_coding import BLOCK_ELEMENTS, RunPlace, malformed, not_the_base

_log = logging.getLogger(__name__)

#: Threads of a program: they encode one block, or each warp decodes one.
_THREADS: Final = 256
_WARPS: Final = _THREADS // 32
#: Bytes that a thread reads at once.
_READ_BYTES: Final = 16
#: Elements whose bits a thread compares at once.
_UNIT_ELEMENTS: Final = 8
_HEADER_BYTES: Final = 8
_SUM_BYTES: Final = 8
#: Set in the environment for debugging: every launch is waited for, so that its own call fails, and
#: memory that kernels fill holds ones before.
_CHECKS: Final = "WEFT_CHECK_KERNELS" in os.environ

#: Bytes of a memory that no place can lie outside of: more than any GPU has.
ALL_MEMORY: Final = 2**60

#: Names of the kernels, and of the files of their sources.
KERNELS: Final = ("encode", "gather", "measure", "decode", "scatter")


class CodedChanges(NamedTuple):
    """Result of coding the changes of a bucket."""

    used_bytes: int
    """Bytes before the zeros at the payload's end."""
    num_changes: int
    """Elements that differ."""
    sums: list[int]
    """Difference of each run's digest, from old to new, mod 2**64."""
    head_bytes: int
    """Bytes before the bodies."""

    @property
    def num_bytes(self) -> int:
        """Size of the payload of changes; more than its buffer has if it does not fit, and then
        nothing in the buffer means anything."""
        return align_up(self.used_bytes)


class _Tables(NamedTuple):
    """Runs of a bucket and their blocks, on a device."""

    runs: torch.Tensor
    """int64, 8 words a run: see ``run_rows``."""
    owners: torch.Tensor
    """int32: the run of each block."""
    packed_at: tuple[int, ...]
    """The byte of each run's first element in a dense payload."""
    packed_bytes: int
    """Bytes of the dense payload."""

    @property
    def num_blocks(self) -> int:
        """Number of blocks of all runs."""
        return len(self.owners)

    @property
    def bodies_at(self) -> int:
        """First byte in a payload of changes that belongs to a body."""
        return len(self.runs) * _SUM_BYTES + self.num_blocks * _HEADER_BYTES


@lru_cache(maxsize=16)
def works(device: torch.device) -> bool:
    """Return whether a device runs the kernels; a warning says why not. Blocks for seconds the
    first time, while they are compiled."""
    why_not = _why_not(device)
    if why_not:
        _log.warning(
            "changes of tensors on %s are coded without kernels of our own, which makes pushes of "
            "changes slow: %s",
            device, why_not,
        )  # fmt: skip
    return not why_not


def run_rows(runs: Sequence[Run], itemsizes: Sequence[int]) -> list[tuple[int, ...]]:
    """Compute the row of each run in the kernels' table.

    Returns:
        The byte in a dense payload of its first element, its first block, its elements, the bytes
        of one, and as they lie in its tensor: the first, those of a row, and from one row to the
        next.
    """
    rows: list[tuple[int, ...]] = []
    at = block = 0
    for run, size in zip(runs, itemsizes, strict=True):
        num = run.num_elements
        first = run.first * size - run.begin_bytes(size)
        rows.append((at + first, block, num, size, run.first, run.count, run.stride, 0))
        at += run.payload_bytes(size)
        block += -(-num // BLOCK_ELEMENTS)
    return rows


def place_rows(
    runs: Sequence[Run], itemsizes: Sequence[int], places: Sequence[RunPlace], num_bytes: int
) -> list[tuple[int, ...]]:
    """Compute the row of each place in the kernels' table.

    Raises:
        ValueError: A place is not within memory of ``num_bytes``. Of all others no position within
            its run lies outside.
    """
    rows: list[tuple[int, ...]] = []
    for run, size, place in zip(runs, itemsizes, places, strict=True):
        num_rows, rest = divmod(run.num_elements - 1, place.row)
        # The last row may be short, and rows may overlap.
        last = num_rows * place.stride + rest
        if num_rows:
            last = max(last, (num_rows - 1) * place.stride + place.row - 1)
        end = place.at + (last + 1) * size
        if place.at < 0 or place.stride < 0 or place.at % size or end > num_bytes:
            raise ValueError(f"{place} of {run} is not within memory of {num_bytes} bytes")
        rows.append((place.at, place.row, place.stride, 0))
    return rows


def are_aligned(
    old: torch.Tensor,
    new: Sequence[torch.Tensor],
    runs: Sequence[Run],
    itemsizes: Sequence[int],
) -> bool:
    """Return whether new elements can be compared where they lie: units of eight begin there as
    they do in a dense payload."""
    begin, tables = old.data_ptr(), _tables(old.device, tuple(runs), tuple(itemsizes))
    return not any(
        (own.data_ptr() - begin - at) % (_UNIT_ELEMENTS * size)
        for own, at, size in zip(new, tables.packed_at, itemsizes, strict=True)
    )


def encode(
    old: torch.Tensor | Sequence[torch.Tensor],
    new: torch.Tensor | Sequence[torch.Tensor],
    runs: tuple[Run, ...],
    itemsizes: tuple[int, ...],
    out: torch.Tensor,
) -> CodedChanges:
    """Code the changes of a bucket's dense payload; as ``start_encode``, but blocks until it is
    done."""
    return start_encode(old, new, runs, itemsizes, out)()


def start_encode(
    old: torch.Tensor | Sequence[torch.Tensor],
    new: torch.Tensor | Sequence[torch.Tensor],
    runs: tuple[Run, ...],
    itemsizes: tuple[int, ...],
    out: torch.Tensor,
) -> Callable[[], CodedChanges]:
    """Begin to code the changes of a bucket's dense payload; return a function that blocks until
    it is done. Each of both payloads is read once.

    Runs on the calling thread's current stream. Needs as much memory again as ``out`` has, until
    it is done.

    Args:
        old: Dense payload, uint8, 1-D, contiguous, on a GPU where the kernels ``works``, beginning
            at a multiple of ``ALIGN_BYTES`` of it; or those of several buckets, of which each run
            lies in one.
        new: The same, or the elements of each run where they lie, if they ``are_aligned``. Not
            written to, nor freed, before it is done.
        runs, itemsizes: Runs that they hold, and the bytes of an element of each; 1, 2, 4 or 8.
        out: Receives the payload of changes: uint8, on that GPU, 1-D, contiguous, begun at a
            multiple of ``ALIGN_BYTES``.
    """
    device = out.device
    tables = _tables(device, runs, itemsizes)
    num_runs, num_blocks = len(runs), tables.num_blocks
    _check_memory(out)
    olds = _old_addresses([old] if isinstance(old, torch.Tensor) else old, tables)
    pairs = zip(olds, _new_addresses(new, tables), strict=True)
    addresses = _addresses(device, tuple(pairs))
    room = out.numel() // ALIGN_BYTES * ALIGN_BYTES
    capacity = max((room - tables.bodies_at) // 4, 0)
    # One tensor, which is fetched at once: words and elements, then two sums a run.
    totals = torch.zeros(2 + 2 * num_runs, dtype=torch.int64, device=device)
    fits_tables = room >= tables.bodies_at
    head = out if fits_tables else torch.empty(tables.bodies_at, dtype=torch.uint8, device=device)
    sums = head[: num_runs * _SUM_BYTES].view(torch.int64)
    headers = head[num_runs * _SUM_BYTES : tables.bodies_at].view(torch.int64)
    if num_blocks:
        begins = torch.empty(num_blocks, dtype=torch.int64, device=device)
        bodies = _memory(4 * capacity, device).view(torch.int32)
        _launch(
            "encode", device, num_blocks, addresses, tables.runs, tables.owners, totals[2:],
            headers, begins, bodies, totals, min(capacity, 2**31 - 1),
        )  # fmt: skip
        ends = (headers >> 48).bitwise_and_(0xFFFF).cumsum_(0)
        _launch(
            "gather", device, -(-num_blocks // _WARPS), bodies, begins, headers, ends,
            out[min(tables.bodies_at, room) :], num_blocks, min(capacity, 2**31 - 1),
            tables.bodies_at // 4,
        )  # fmt: skip
    else:
        out[: align_up(tables.bodies_at)].zero_()
    sums.copy_(totals[2::2])
    fetched = HostCopy(totals)

    def end() -> CodedChanges:
        num_words, num_changes, *both = fetched.wait().tolist()
        sums = [value % 2**64 for value in both[1::2]]
        return CodedChanges(tables.bodies_at + 4 * num_words, num_changes, sums, tables.bodies_at)

    return end


class ListedChanges:
    """Changes of a bucket that were read from a payload, beside what they would change.

    ``apply`` and ``undo`` run on the calling thread's current stream, which must be the one that
    decoded, or wait for it; and this must be kept until they are done.

    Args:
        runs: Runs of the bucket.
        launch: Function that scatters: new values for 0, former ones for 1.
        status: int32, on the GPU: not zero if the payload cannot be one.
        listed: Sums that the payload lists for each run, on the GPU, int64.
        found: Sums of what lies in memory, and of the changes, for each run in turn.
    """

    def __init__(
        self,
        runs: Sequence[Run],
        launch: Callable[[int], None],
        status: torch.Tensor,
        listed: torch.Tensor,
        found: torch.Tensor,
        num_bytes: int,
    ) -> None:
        self._launch = launch
        self._results = HostCopy(torch.cat([status, listed, found]))
        self._runs, self._num_runs = runs, len(listed)
        self._values: list[int] | None = None
        self._is_checked = False
        self.num_bytes = num_bytes
        """Memory of the lists and of the payload, kept as long as this is."""

    def _fetched(self) -> list[int]:
        if self._values is None:
            self._values = [value % 2**64 for value in self._results.wait().tolist()]
        return self._values

    def check(self) -> None:
        """Check that the payload is one of these runs, and was made from what lies in memory;
        blocks until that is known.

        Raises:
            DigestMismatchError: It is not.
        """
        values = self._fetched()
        if values[0]:
            raise _malformed()
        listed, found = values[1 : 1 + self._num_runs], values[1 + self._num_runs :: 2]
        for run, one, other in zip(self._runs, listed, found, strict=True):
            if one != other:
                raise not_the_base(run)
        self._is_checked = True

    def sums(self) -> list[int]:
        """Return the difference of each run's digest, from old to new, mod 2**64; blocks until it
        is known."""
        return self._fetched()[2 + self._num_runs :: 2]

    def apply(self) -> None:
        """Write the new values; does not block. The payload must still be there."""
        assert self._is_checked
        self._launch(0)

    def undo(self) -> None:
        """Write the former values where the new ones were written; does not block."""
        assert self._is_checked
        self._launch(1)


def decode(
    payload: torch.Tensor,
    runs: tuple[Run, ...],
    itemsizes: tuple[int, ...],
    data: torch.Tensor,
    places: tuple[RunPlace, ...],
    num_bytes: int | None = None,
) -> ListedChanges:
    """Read a payload of changes, and the elements that it would change; writes nothing there.

    Runs on the calling thread's current stream. Blocks until it is known how much memory the lists
    need: the size of a value twice and two bytes, for each change.

    Args:
        payload: uint8, 1-D, contiguous, on a GPU where the kernels ``works``, begun at a multiple
            of ``ALIGN_BYTES``. Kept, and must not change until it was applied.
        runs, itemsizes: Runs that it changes, and the bytes of an element of each.
        data: Memory of the elements: uint8, 1-D, contiguous, on that GPU, begun at a multiple of
            ``ALIGN_BYTES``.
        places: Place of each run in it.
        num_bytes: Bytes of the memory from ``data`` on, where it is longer than that: a GPU's has
            one address space. ``ALL_MEMORY`` for places in several allocations.

    Raises:
        DigestMismatchError: The payload is not one of these runs. That it was made from other
            weights, and most that is wrong within bodies, is found by ``ListedChanges.check``.
    """
    device = payload.device
    tables = _tables(device, runs, itemsizes)
    num_runs, num_blocks = len(runs), tables.num_blocks
    _check_memory(payload)
    _check_memory(data)
    placed = _places(device, runs, itemsizes, places, num_bytes or data.numel())
    if payload.numel() < tables.bodies_at or payload.numel() % ALIGN_BYTES:
        raise _malformed()
    sums = payload[: num_runs * _SUM_BYTES].view(torch.int64)
    headers = payload[num_runs * _SUM_BYTES : tables.bodies_at].view(torch.int64)
    found = torch.zeros(2 * num_runs, dtype=torch.int64, device=device)
    status = torch.zeros(1, dtype=torch.int64, device=device)
    if not num_blocks:
        return ListedChanges(runs, lambda is_undo: None, status, sums, found, 0)
    rooms_and_words = torch.empty(2, num_blocks, dtype=torch.int64, device=device)
    _launch(
        "measure", device, -(-num_blocks // _THREADS), headers, tables.runs, tables.owners,
        *rooms_and_words, status, num_blocks,
    )  # fmt: skip
    rooms, ends = rooms_and_words.cumsum_(1)
    size, num_words, is_bad = torch.stack([rooms[-1], ends[-1], status[0]]).tolist()
    end = tables.bodies_at + 4 * num_words
    if is_bad or align_up(end) != payload.numel():
        raise _malformed()
    bodies = payload[tables.bodies_at :].view(torch.int32)
    lists = _memory(size, device)
    num_ctas = -(-num_blocks // _WARPS)
    _launch(
        "decode", device, num_ctas, headers, bodies, ends, tables.runs, placed, tables.owners, data,
        rooms, lists, found, status, num_blocks, num_words, (align_up(end) - end) // 4,
    )  # fmt: skip

    def scatter(is_undo: int) -> None:
        _launch(
            "scatter", device, num_ctas, headers, bodies, ends, tables.runs, placed, tables.owners,
            data, rooms, lists, num_blocks, is_undo,
        )  # fmt: skip

    return ListedChanges(runs, scatter, status, sums, found, size + payload.numel())


def _malformed() -> DigestMismatchError:
    return malformed("it is none of these runs")


def _check_memory(memory: torch.Tensor) -> None:
    assert memory.dtype == torch.uint8
    assert memory.dim() == 1
    assert memory.is_contiguous()
    assert memory.data_ptr() % _READ_BYTES == 0, "is not aligned"


def _memory(num_bytes: int, device: torch.device) -> torch.Tensor:
    memory = torch.empty(num_bytes, dtype=torch.uint8, device=device)
    return memory.fill_(0xFF) if _CHECKS else memory


@lru_cache(maxsize=256)
def _tables(device: torch.device, runs: tuple[Run, ...], itemsizes: tuple[int, ...]) -> _Tables:
    assert set(itemsizes) <= {1, 2, 4, 8}, itemsizes
    rows = torch.tensor(run_rows(runs, itemsizes), dtype=torch.int64).view(-1, 8)
    num_blocks = (rows[:, 2] + BLOCK_ELEMENTS - 1) // BLOCK_ELEMENTS
    owners = torch.repeat_interleave(num_blocks).to(torch.int32)
    packed = sum(run.payload_bytes(size) for run, size in zip(runs, itemsizes, strict=True))
    return _Tables(rows.to(device), owners.to(device), tuple(rows[:, 0].tolist()), packed)


def _old_addresses(olds: Sequence[torch.Tensor], tables: _Tables) -> list[int]:
    """Return the address of each run's old elements."""
    found, begin, num = list[int](), 0, len(tables.packed_at)
    for old in olds:
        _check_memory(old)
        end = begin + old.numel()
        while len(found) < num and (at := tables.packed_at[len(found)]) < end:
            found.append(old.data_ptr() + at - begin)
        begin = end
    assert begin >= tables.packed_bytes, (begin, tables.packed_bytes)
    return found


def _new_addresses(new: torch.Tensor | Sequence[torch.Tensor], tables: _Tables) -> tuple[int, ...]:
    """Return the address of each run's new elements."""
    if isinstance(new, torch.Tensor):
        _check_memory(new)
        assert new.numel() >= tables.packed_bytes, (new.shape, tables.packed_bytes)
        return tuple(new.data_ptr() + at for at in tables.packed_at)
    return tuple(own.data_ptr() for own in new)


@lru_cache(maxsize=256)
def _addresses(device: torch.device, addresses: tuple[tuple[int, int], ...]) -> torch.Tensor:
    """Put the addresses of the old and the new elements of each run on a device."""
    return torch.tensor(addresses, dtype=torch.int64).to(device)


@lru_cache(maxsize=256)
def _places(
    device: torch.device,
    runs: tuple[Run, ...],
    itemsizes: tuple[int, ...],
    places: tuple[RunPlace, ...],
    num_bytes: int,
) -> torch.Tensor:
    rows = place_rows(runs, itemsizes, places, num_bytes)
    return torch.tensor(rows, dtype=torch.int64).view(-1, 4).to(device)


def _launch(name: str, device: torch.device, num_ctas: int, *args: torch.Tensor | int) -> None:
    """Launch a kernel on a device's current stream. Integers are passed in 32 bits."""
    assert all(isinstance(arg, torch.Tensor) or 0 <= arg < 2**31 for arg in args), args
    with torch.cuda.device(device):
        _compiled(name, device)((num_ctas, 1, 1), (_THREADS, 1, 1), list(args))
        if _CHECKS:
            torch.cuda.synchronize()


def source_of(kernel: str) -> str:
    """Read the source of one of ``KERNELS``; each is of its own, so that one that is asked for
    compiles no other."""
    folder = Path(__file__).parent / "cuda"
    return "\n".join((folder / f"{part}.cu").read_text() for part in ("common", kernel))


@lru_cache(maxsize=64)
def _compiled(name: str, device: torch.device) -> Any:
    """Compile a kernel for a device.

    torch has NVRTC and this call, which is private (it was public for one release); ``cuda-core``
    is the public way to the same, one more package that nothing else here needs.
    """
    with torch.cuda.device(device):
        return torch.cuda._compile_kernel(source_of(name), name)


def _why_not(device: torch.device) -> str:
    """Return why a device cannot run the kernels; empty if they compile and give back what they
    coded. A first push that had to compile one of them would wait for that."""
    runs, itemsizes = (Run(0, 0, 300),), (2,)
    size = runs[0].payload_bytes(2)
    old = (torch.arange(size, dtype=torch.int32) % 251).to(torch.uint8)
    new = old.clone()
    new[: 2 * 300 : 14] += 1  # by one step; each odd byte by 256 of them
    new[1 : 2 * 300 : 50] += 1
    try:
        old, new, out = (memory.to(device) for memory in (old, new, torch.zeros_like(old)))
        encoded = encode(old, new, runs, itemsizes, out)
        decoded = decode(out[: encoded.num_bytes], runs, itemsizes, old, (RunPlace(0, 300),))
        before = old.clone()
        decoded.check()
        decoded.apply()
        is_new = torch.equal(old, new)
        decoded.undo()
        is_right = is_new and torch.equal(old, before) and decoded.sums() == encoded.sums
    except Exception as error:  # noqa: BLE001 (a compiler's, a driver's)
        return f"torch compiles no kernel; it needs NVRTC and CUDA's headers: {error}"
    return "" if is_right else "the kernels do not give back what they coded"
