"""``python -m benchmarks.chain``: how long a chain of many receivers takes, calculated by pieces.

Each link carries one piece after the other; a receiver passes a piece on once it has all of it. The
sender keeps two buckets: the first piece of a bucket leaves once all receivers have verified the
bucket before the last. Headers of TCP, IP and Ethernet are counted; nothing else of a machine is.
``make network`` measures chains of 1 to 4.
"""

from __future__ import annotations

import argparse

import numpy as np

from weft_rl.transport.stream.messages import PIECE_HEAD, piece_bytes

_WINDOW = 2
#: Of an Ethernet frame of 1,514 bytes, which has 1,448 of the stream.
_HEADERS = 1514 / 1448
#: Bytes a second that a receiver verifies.
_VERIFIED = 5e9


def seconds(num_bytes: int, mbit: float, num_receivers: int, bucket_bytes: int) -> float:
    """Return the time until the last receiver has verified the last bucket."""
    size = piece_bytes(min(bucket_bytes, num_bytes), num_receivers)
    piece_seconds = (size + PIECE_HEAD.size) * _HEADERS * 8 / (mbit * 1e6)
    has = np.zeros(num_receivers + 1)
    """When each has the last piece so far; the sender has left it then."""
    verified: list[float] = []
    for begin in range(0, num_bytes, bucket_bytes):
        may_begin = verified[-_WINDOW] if len(verified) >= _WINDOW else 0.0
        has[0] = max(has[0], may_begin)
        for _ in range(0, min(bucket_bytes, num_bytes - begin), size):
            for hop in range(1, num_receivers + 1):
                has[hop] = max(has[hop], has[hop - 1]) + piece_seconds
        verified.append(has[-1] + bucket_bytes / _VERIFIED)
    return verified[-1]


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--megabytes", type=float, default=512.0)
    parser.add_argument("--mbit", type=float, default=1000.0)
    parser.add_argument("--bucket-mib", type=int, default=64)
    parser.add_argument("--receivers", type=int, nargs="+", default=[1, 2, 4, 16, 128, 1000])
    args = parser.parse_args()
    floor = args.megabytes * 8 / args.mbit
    for count in args.receivers:
        took = seconds(int(args.megabytes * 1e6), args.mbit, count, args.bucket_mib * 2**20)
        print(f"{count:5} receivers: {took:6.2f} s, {took / floor:.2f} times the floor")


if __name__ == "__main__":
    main()
