"""Members of a stream group in one process, each at an address of its own."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from weft_rl.contract.group import LinkUsage
from weft_rl.rpc.security.credentials import Credentials
from weft_rl.transport.stream.members import StreamReceiver, StreamSender
from weft_rl.transport.stream.messages import PLACE, Place
from weft_rl.transport.stream.works import StreamWork
from weft_rl.transport.wire.buckets import WHOLE, BucketOptions
from weft_rl.transport.wire.lane_options import LaneOptions

#: A bucket of some hundred pieces.
SIZE = 3 * 2**20 + 5
SECONDS = 20.0


def host_of(rank: int) -> str:
    """Where a rank listens."""
    return f"127.0.0.{rank + 1}"


def content(seed: int, size: int = SIZE) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator)


class Group:
    """A sender and its receivers.

    Args:
        credentials: By rank; none by default.
        sites: By rank; all one by default.
    """

    def __init__(
        self, size: int, credentials: Sequence[Credentials] = (), sites: Sequence[str] = ()
    ) -> None:
        self.store = dist.HashStore()
        self.store.set_timeout(timedelta(seconds=SECONDS))
        shown = [*credentials] or [Credentials()] * size
        sites = [*sites] or [""] * size
        #: Bytes that were sent, by who sent them and to whom.
        self.sent = Counter[tuple[int, int]]()

        def options(rank: int) -> LaneOptions:
            def on_sent(sent: Mapping[int, LinkUsage]) -> None:
                for target, usage in sent.items():
                    self.sent[rank, target] += usage.num_bytes

            return LaneOptions(
                host=host_of(rank), credentials=shown[rank], site=sites[rank], on_sent=on_sent
            )

        self.sender = StreamSender(self.store, 0, size, options(0))
        self.receivers = [
            StreamReceiver(self.store, rank, size, options(rank)) for rank in range(1, size)
        ]

    def place(self, rank: int) -> Place:
        """Read the place that a rank has announced."""
        return PLACE.unpack(bytes.fromhex(self.store.get(f"stream/{rank}").decode()))

    def send(self, seed: int, options: BucketOptions = WHOLE, *, size: int = SIZE) -> StreamWork:
        return self.sender.broadcast(content(seed, size), SECONDS, options)

    def post(self, rank: int, size: int = SIZE) -> tuple[StreamWork, torch.Tensor]:
        """Post a receive; returns it and its memory."""
        memory = torch.zeros(size, dtype=torch.uint8)
        return self.receivers[rank - 1].broadcast(memory, SECONDS), memory

    def close(self) -> None:
        for member in (self.sender, *self.receivers):
            member.abort()
        for member in (self.sender, *self.receivers):
            assert member.settle(SECONDS), "its threads have not ended"


def finish(work: StreamWork) -> None:
    """Wait for a broadcast, and for its error."""
    assert work.wait_until(time.monotonic() + SECONDS)
    work.finish()
