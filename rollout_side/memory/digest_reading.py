"""Digests of the tensors of a version that a worker holds, made on request.

A thread reads the bytes in place and reserves nothing: if a push needs the memory, it takes it, and
the reading fails. So verifying never delays requests or pushes.
"""

from __future__ import annotations

import logging
import os
import threading
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from rollout_side.memory.store import WorkerStore
from rollout_side.memory.versions import SendableVersion, StagedVersion
from weft_rl.contract.checkpoint import StoredTensor
from weft_rl.contract.errors import LoadFailedError, NotFoundError, WeftError
from weft_rl.contract.manifest import TensorSlot
from weft_rl.contract.names import PolicyVersion
from weft_rl.transport.digests.wsum64 import tensor_digest
from weft_rl.transport.group import on_device

_log = logging.getLogger(__name__)

#: Largest number of tensors in one answer.
PART_TENSORS = 4096
#: A reading ends by itself if its digests are not taken for so long.
IDLE_SECONDS = 60.0
_LOWEST_PRIORITY = 19


@dataclass(frozen=True)
class TensorDigests:
    """Tensors of a version with their digests, or a part of them."""

    tensors: tuple[StoredTensor, ...]
    is_all: bool = True
    """True if no other part follows."""


class DigestReader:
    """Reading of one version's tensor digests; its thread begins at once.

    Args:
        store: Store that holds the version.
        version: Version to read.

    Raises:
        NotFoundError: The version is not held.
    """

    def __init__(self, store: WorkerStore, version: PolicyVersion) -> None:
        self._store, self._version = store, version
        copy = store.sendable(version)
        self._changed = threading.Condition()
        self._found: deque[StoredTensor] = deque()
        self._error: WeftError | None = None
        self._is_over = self._is_closed = False
        # Only the thread refers to the copy: once it has ended, nothing here keeps its memory.
        threading.Thread(
            target=self._run, args=(copy,), name=f"weft-digest-{version}", daemon=True
        ).start()

    def take(self) -> TensorDigests:
        """Return the digests found since the last call. At most
        ``PART_TENSORS`` come at once, in the order of the layout. Does not block.

        Raises:
            NotFoundError: The version was dropped while it was read.
            LoadFailedError: The version could not be read.
        """
        with self._changed:
            num_tensors = min(PART_TENSORS, len(self._found))
            part = tuple(self._found.popleft() for _ in range(num_tensors))
            self._changed.notify()
            if not part and self._error is not None:
                raise self._error
            is_all = self._is_over and not self._found and self._error is None
            return TensorDigests(part, is_all)

    def close(self) -> None:
        """End the thread soon; does not wait for it."""
        with self._changed:
            self._is_closed = True
            self._changed.notify()

    def _run(self, copy: SendableVersion) -> None:
        # For this thread only: serving goes first.
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _LOWEST_PRIORITY)
        error: WeftError | None = None
        try:
            with on_device(self._store.memory.device):
                for part in self._buckets(copy):
                    self._put(part)
        except WeftError as raised:
            error = raised
        except Exception as raised:  # noqa: BLE001 (the edge of a thread)
            _log.exception("reading %s failed", self._version)
            error = LoadFailedError(f"{self._version} could not be read: {raised!r}")
        with self._changed:
            self._error, self._is_over = error, True

    def _put(self, part: list[StoredTensor]) -> None:
        with self._changed:
            self._found.extend(part)
            asked = self._changed.wait_for(
                lambda: self._is_closed or len(self._found) <= PART_TENSORS, IDLE_SECONDS
            )
            if self._is_closed or not asked:
                raise LoadFailedError(f"the digests of {self._version} were not taken in time")

    def _buckets(self, copy: SendableVersion) -> Iterator[list[StoredTensor]]:
        """Yield the digested tensors of each bucket, each checked to be still held once it was
        read."""
        manifest, device = copy.manifest, self._store.memory.device
        buffer = torch.empty(0, dtype=torch.uint8)
        on_host = isinstance(copy, StagedVersion) and copy.segment.data.device.type == "cpu"
        if not on_host:
            buffer = torch.empty(max(b.payload_bytes for b in manifest.buckets), dtype=torch.uint8)
        start = 0
        for index, bucket in enumerate(manifest.buckets):
            if on_host:
                assert isinstance(copy, StagedVersion)
                payload = copy.segment.data[start : start + bucket.payload_bytes]
            else:
                payload = copy.payload(index, buffer)
                if device.type == "cuda":
                    torch.cuda.current_stream(device).synchronize()
            slots = [manifest.tensors[i] for i in manifest.tensors_by_bucket[index]]
            found = [self._digested(slot, payload) for slot in slots]
            self._check_held(copy)
            yield found
            start += bucket.wire_bytes

    def _digested(self, slot: TensorSlot, payload: torch.Tensor) -> StoredTensor:
        meta = slot.meta
        content = payload[slot.offset_bytes : slot.offset_bytes + meta.num_bytes]
        # Once closed, a wrong digest does no harm: ``_put`` raises before it is given.
        digest = tensor_digest(content, going_on=lambda: not self._is_closed)
        return StoredTensor(meta.name, meta.dtype.safetensors_name, meta.shape, digest)

    def _check_held(self, copy: SendableVersion) -> None:
        """Check that the version is still held.

        Raises:
            NotFoundError: The memory may be another version's by now, or was while it was read.
        """
        try:
            is_held = self._store.sendable(self._version) is copy
        except NotFoundError:
            is_held = False
        if not is_held:
            raise NotFoundError(f"{self._version} was dropped while it was read; verify again")
