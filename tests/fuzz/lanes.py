"""``python -m tests.fuzz.lanes --frames 98000``: frames on the port of a process's lanes, true ones
and garbled ones, while a group of streams sends: no crash, no leak and no wait."""

from __future__ import annotations

import argparse
import os
import random
import socket
import sys
import time
from contextlib import closing, suppress

import torch

from tests.processes import holding
from tests.unit.transport.stream.chain import Group, content, finish
from tests.waits import until
from weft_rl.transport.stream.messages import (
    MESSAGES,
    Challenge,
    Held,
    KeptBucket,
    LaneHello,
    Message,
    Place,
    Proof,
    Serves,
    Wants,
)

#: Of each connection at most.
_MOST_FRAMES = 5
_BURST = 500


def garbled(chance: random.Random, place: Place) -> bytes:
    """Make one to five frames: of any kind, with fields that may be true, and bytes that may be
    changed, missing or too many."""
    said = bytearray()
    for _ in range(chance.randint(1, _MOST_FRAMES)):
        number, fields = MESSAGES.encode(_any(chance, place))
        length = len(fields) if chance.random() < 0.9 else chance.getrandbits(64)
        said += MESSAGES.pack_head(number) + length.to_bytes(8, "little") + fields
    for _ in range(chance.choice((0, 0, 1, 3))):
        said[chance.randrange(len(said))] = chance.randrange(256)
    if chance.random() < 0.3:
        del said[chance.randrange(len(said)) :]
    return bytes(said) + chance.randbytes(chance.choice((0, 0, 0, 40, 3000)))


def _any(chance: random.Random, place: Place) -> Message:
    def key() -> bytes:
        return chance.choice((place.key, chance.randbytes(16)))

    held = Held(chance.randrange(4), chance.randbytes(chance.randrange(20)))
    hello = LaneHello(key(), chance.randrange(5), key(), chance.randrange(6), chance.randbytes(16))
    others: list[Message] = [
        Challenge(chance.randbytes(16), chance.randbytes(32)),
        Proof(chance.randbytes(32)),
        Wants(chance.randrange(9), (held,) * chance.randrange(3)),
        Serves(chance.getrandbits(64)),
        KeptBucket(chance.getrandbits(64), tuple(range(chance.randrange(9)))),
    ]
    return hello if chance.random() < 0.6 else chance.choice(others)


def send_frames(place: Place, chance: random.Random, num_connections: int) -> None:
    """Open connections to a member one after the other, say something and leave."""
    for _ in range(num_connections):
        connected = socket.create_connection((place.host, place.port), 10)
        with connected as stranger, suppress(ConnectionError):
            stranger.sendall(garbled(chance, place))


def push(group: Group, seed: int) -> None:
    """Send a bucket to all, and compare what they have."""
    sent = group.send(seed)
    posted = [group.post(rank) for rank in range(1, 1 + len(group.receivers))]
    for work, memory in posted:
        finish(work)
        work.keep()
        assert torch.equal(memory, content(seed))
    finish(sent)


def main() -> int:
    """Run it; raises where something is wrong."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz.lanes", description=__doc__)
    parser.add_argument("--frames", type=int, default=98_000)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    chance, own = random.Random(options.seed), os.getpid()
    with closing(Group(3)) as group:
        for seed in range(60):  # the allocator keeps what it has had once
            push(group, seed)
        before, sent, longest = holding(own), 0, 0.0
        while sent < options.frames:
            send_frames(group.place(chance.randrange(3)), chance, _BURST)
            sent += _BURST * (1 + _MOST_FRAMES) // 2
            began = time.monotonic()
            push(group, sent)
            longest = max(longest, time.monotonic() - began)
        until(lambda: holding(own).threads <= before.threads, 20)
        until(lambda: holding(own).descriptors <= before.descriptors, 20)
        grown = (holding(own).memory_bytes - before.memory_bytes) / 2**20
        print(f"about {sent:,} frames; the slowest push between them took {longest:.2f} s; memory "
              f"grew by {grown:.1f} MiB")  # fmt: skip
        assert grown < 50, "memory is kept"
    return 0


if __name__ == "__main__":
    sys.exit(main())
