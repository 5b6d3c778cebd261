"""``python -m benchmarks.bare_sockets``: TCP on the loopback, the floor of NCCL's sockets.

Two processes, as many connections as asked for and a thread for each at both ends; bytes go from
prefaulted memory to prefaulted memory. No GPU, no digest, no control plane.
"""

from __future__ import annotations

import argparse
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

_BUFFER_BYTES = 16 * 2**20
_SECONDS = 60.0


def _receive(port: int, num_connections: int, num_bytes: int) -> None:
    """Read so many bytes from each connection; answer each with a byte when all have come."""
    peers = [
        socket.create_connection(("127.0.0.1", port), _SECONDS) for _ in range(num_connections)
    ]

    def read(peer: socket.socket) -> None:
        into, left = memoryview(bytearray(_BUFFER_BYTES)), num_bytes
        while left:
            got = peer.recv_into(into[: min(left, _BUFFER_BYTES)])
            if not got:
                raise ConnectionError("the sender has gone")
            left -= got
        peer.sendall(b"1")

    with ThreadPoolExecutor(num_connections) as pool:
        list(pool.map(read, peers))


def measure(num_connections: int, num_bytes: int) -> float:
    """Return the bytes per second that go over so many connections at once; blocks."""
    share = num_bytes // num_connections
    with socket.create_server(("127.0.0.1", 0), backlog=num_connections) as server:
        server.settimeout(_SECONDS)
        receiver = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.bare_sockets", "--receive",
             str(server.getsockname()[1]), "--connections", str(num_connections),
             "--bytes", str(share)],
        )  # fmt: skip
        peers = [server.accept()[0] for _ in range(num_connections)]
        data = memoryview(bytes(1) * _BUFFER_BYTES)

        def write(peer: socket.socket) -> None:
            peer.settimeout(_SECONDS)
            for at in range(0, share, _BUFFER_BYTES):
                peer.sendall(data[: min(_BUFFER_BYTES, share - at)])
            peer.recv(1)

        began = time.perf_counter()
        with ThreadPoolExecutor(num_connections) as pool:
            list(pool.map(write, peers))
        seconds = time.perf_counter() - began
        for peer in peers:
            peer.close()
        receiver.wait(10)
    return share * num_connections / seconds


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--connections", type=int, nargs="+", default=[1, 2, 4, 8, 16])
    parser.add_argument("--bytes", type=int, default=16_381_000_000)
    parser.add_argument("--receive", type=int, metavar="PORT", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.receive is not None:
        _receive(args.receive, args.connections[0], args.bytes)
        return
    for count in args.connections:
        rate = measure(count, args.bytes)
        print(f"RESULT {count} connections: {args.bytes / rate * 1e3:.0f} ms for "
              f"{args.bytes / 1e9:.3f} GB ({rate / 1e9:.1f} GB/s)", flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
