"""Source of a clone: a thread that sends a held version to another replica.

Each clone has a thread, beside the engine's thread and the receiver's. It only reads the served
bytes. Each bucket is copied into a buffer, digested anew and sealed with its own trailer. So a
corrupted copy is found here, not served elsewhere.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

import torch

from rollout_side.engine import SendOrder
from rollout_side.memory.handoff import synchronize
from rollout_side.memory.store import WorkerStore
from rollout_side.memory.versions import SendableVersion
from weft_rl.contract.backends import GLOO
from weft_rl.contract.errors import TransferAbortedError, WeftError
from weft_rl.contract.manifest import whole_plan
from weft_rl.transport.backends import allocate
from weft_rl.transport.digests.wsum64 import part_digests
from weft_rl.transport.group import CPU, on_device, window
from weft_rl.transport.sender import SenderProgress, SendingRank
from weft_rl.transport.wire.buckets import SealedBucket, in_manifest_order, seal_bucket, whole_parts

_log = logging.getLogger(__name__)

# The coordinator ends the group after the last bucket; else this rank leaves by itself.
_END_SECONDS = 30.0


class Cloner:
    """Clones that one worker process sends to others. At most one clone per replica is under way,
    since the coordinator serialises them.

    Args:
        store: Store of adapters, retained bases, and the base that is served.
    """

    def __init__(self, store: WorkerStore) -> None:
        self._store = store
        self._lock = threading.Lock()
        self._sending: dict[str, _Clone] = {}

    def send(self, order: SendOrder) -> None:
        """Begin to send a clone; returns at once. A group that is sent to already is left alone.

        Raises:
            NotFoundError: The version is not held.
        """
        self._store.sendable(order.version)
        with self._lock:
            self._sending = {k: s for k, s in self._sending.items() if s.thread.is_alive()}
            if order.ticket.group_id not in self._sending:
                self._sending[order.ticket.group_id] = _Clone(order, self._store)

    def close(self) -> None:
        """Give up the clones under way; does not wait for them."""
        with self._lock:
            for sending in self._sending.values():
                sending.stop()


class _Clone:
    def __init__(self, order: SendOrder, store: WorkerStore) -> None:
        self._order, self._store = order, store
        self._device = store.memory.device_of(order.ticket.backend)
        self._rank: SendingRank | None = None
        self._stopped = False
        self.thread = threading.Thread(
            target=self._run, name=f"weft-clone-{order.transfer_id}", daemon=True
        )
        self.thread.start()
        store.threads.add(self.thread)

    def stop(self) -> None:
        """End the thread soon."""
        self._stopped = True
        if (rank := self._rank) is not None:
            rank.abort(TransferAbortedError("the replica is stopping"))

    def _run(self) -> None:
        # The engine's, also where buckets are sent from the host: it reads its weights back.
        with on_device(self._store.memory.device):
            self._attend()

    def _attend(self) -> None:
        order, version = self._order, self._order.version
        deadline = time.monotonic() + order.timeout_seconds
        try:
            rank = self._rank = SendingRank(order.ticket, self._device)
            try:
                if not self._stopped:
                    self._send(rank, deadline)
                    rank.wait(lambda: not rank.usable, _END_SECONDS)
            finally:
                rank.leave()
        except WeftError as error:
            _log.info("sending clone %s of %s ended: %s", order.transfer_id, version, error)
        except Exception:  # noqa: BLE001 (the edge of a thread)
            # The coordinator notices: the rank never attends, or its stream breaks.
            _log.exception("sending clone %s of %s failed", order.transfer_id, version)

    def _send(self, rank: SendingRank, deadline: float) -> None:
        order, began = self._order, time.monotonic()
        try:
            with self._store.lend(lambda: self._store.sendable(order.version)) as copy:
                buckets = CopiedBuckets(copy, order.nonce, self._device, order.ticket.backend)
                rank.send(SenderProgress(order.transfer_id, buckets, deadline))
        except Exception as error:
            rank.give_up(order.transfer_id, error)  # also if the version is no longer held
            raise
        _log.info(
            "sent a clone of %s: %d bytes in %.3f s, epoch %d",
            order.version,
            copy.manifest.total_bytes,
            time.monotonic() - began,
            order.ticket.epoch,
        )


class CopiedBuckets:
    """A held version's buckets as they travel, under a new nonce; see ``Buckets``. The version is
    only read. Each buffer is as large as the largest bucket."""

    def __init__(
        self, copy: SendableVersion, nonce: int, device: torch.device = CPU, backend: str = GLOO
    ) -> None:
        self.manifest, self.plan, self.sender = copy.manifest, whole_plan(copy.manifest), 0
        need = max(bucket.wire_bytes for bucket in self.manifest.buckets)
        self.num_buffers = min(window(device, backend), len(self.manifest.buckets))
        self._buffers = [allocate(backend, need, device) for _ in range(self.num_buffers)]
        self._copy, self._nonce = copy, nonce
        self._digests: list[list[int]] = []

    def make(self, index: int, on_progress: Callable[[], None] = lambda: None) -> SealedBucket:
        """Copy a bucket, digest it anew and seal it."""
        buffer = self._buffer(index)
        payload = self._copy.payload(index, buffer)
        if payload.device.type == "cpu":
            synchronize()  # a GPU writes to locked memory while this thread goes on
        digests = part_digests(payload, whole_parts(self.manifest, index))
        self._digests.append(digests)
        return seal_bucket(len(payload), self._nonce, index, digests)

    def are_summed(self) -> bool:
        """See ``Buckets``: one rank sends all."""
        return True

    def digests(self, made: list[int]) -> list[int]:
        return in_manifest_order(self.manifest, self._digests)

    def wire(self, index: int) -> torch.Tensor:
        return self._buffer(index)[: self.manifest.buckets[index].wire_bytes]

    def _buffer(self, index: int) -> torch.Tensor:
        return self._buffers[index % self.num_buffers]
