"""A replica of several ranks, and what loads on each of them."""

from __future__ import annotations

import secrets
import threading
import time

from rollout_side.memory.handoff import Handoff, HandoffQueue, RankHandoff, RankServer
from rollout_side.receive.incoming_buckets import LoadingSink, ReceiveRing
from tests.doubles.wire import seal_wire
from weft_rl.contract.errors import (
    LoadFailedError,
    WeftError,
)
from weft_rl.contract.manifest import plan_buckets, whole_plan
from weft_rl.contract.names import PolicyVersion
from weft_rl.contract.tensors import DataType, TensorMeta
from weft_rl.transport.digests.wsum64 import part_digests
from weft_rl.transport.group import CPU
from weft_rl.transport.wire.buckets import whole_parts

MANIFEST = plan_buckets([TensorMeta(f"w{i}", DataType.FLOAT32, (64, 8)) for i in range(4)], 2048)
COUNT = len(MANIFEST.buckets)
BASE = PolicyVersion("base", 1)
WAIT_SECONDS = 20.0
NONCE = 7


def nothing() -> None:
    """A side group that goes on."""


class Replica:
    """The receiving rank's ends, and loaders of as many ranks as are asked for."""

    def __init__(self, num_ranks: int = 2, seconds: float = WAIT_SECONDS) -> None:
        self.secret = secrets.token_hex(8)
        deadline = time.monotonic() + seconds
        self.queue = HandoffQueue("t", BASE, MANIFEST, deadline, num_ranks)
        self.server = RankServer(
            self.secret,
            lambda name: self.queue if name == "t" else None,
            lambda connection, told: None,
        )
        self.buffers = self.group()

    def group(self) -> ReceiveRing:
        """What a side group receives in: fewer buffers than buckets."""
        plan = whole_plan(self.queue.manifest)
        return ReceiveRing(
            self.queue.manifest, plan, LoadingSink(self.queue, plan, CPU, 2, nothing), {}, 2
        )

    def land(self, index: int) -> None:
        """A bucket arrives, once there is room for it."""
        self.buffers.make_room(index, wait=True)
        size = MANIFEST.buckets[index].payload_bytes
        wire = self.buffers.wire(index)
        wire[:size].fill_(index + 1)
        digests = part_digests(wire[:size], whole_parts(MANIFEST, index))
        seal_wire(wire, size, NONCE, index, digests)
        self.buffers.accept(index, NONCE)()

    def rank(self, rank: int = 1, transfer_id: str = "t") -> RankHandoff:
        return RankHandoff(self.secret, rank, transfer_id, BASE)


class Loader:
    """Loads as Weft's do, and notes what it saw; waits before a bucket for ``gate``."""

    def __init__(self, stop_at: int = COUNT, error: Exception | None = None) -> None:
        self.seen: list[int] = []
        self.gate = threading.Event()
        self._stop_at, self._error = stop_at, error

    def __call__(self, handoff: Handoff) -> None:
        try:
            assert handoff.manifest.layout_digest == MANIFEST.layout_digest
            for index, wire in handoff.buckets():
                if index == self._stop_at:
                    if self._error is not None:
                        raise self._error
                    assert self.gate.wait(WAIT_SECONDS)
                size = MANIFEST.buckets[index].payload_bytes
                assert (wire[:size] == index + 1).all()
                handoff.report_progress()
                self.seen.append(index)
        except WeftError as error:
            if not handoff.is_begun:
                raise
            raise LoadFailedError(error.message, metadata={"dirty": "true"}) from error
