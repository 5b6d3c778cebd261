"""``python -m benchmarks.compression``: what lossless compression of a dense push would gain.

The exponent of a bfloat16 weight holds less than 3 bits, its sign and mantissa 8. So the exponents
of each piece, cut as the stream plane cuts a bucket, are coded, and the other bytes go as they are.
Rates are bytes of weights that one core encodes or decodes a second, the best of several rounds.
For links, the slowest of encoding, link and decoding is calculated, and compared with a run over
TCP on the loopback whose sender keeps to the link's rate. A package that is not installed is left
out.

Weights are random normals, of another scale in each tensor; ``--safetensors`` reads a model's.
"""

from __future__ import annotations

import argparse
import importlib
import os
import socket
import struct
import time
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from pathlib import Path
from queue import Queue
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from benchmarks.machine import describe
from weft_rl.transport.stream.messages import piece_bytes
from weft_rl.transport.stream.piece_coding import decode_piece, encode_piece

#: Of a bucket of 64 MiB.
_PIECE_WEIGHTS = piece_bytes(64 * 2**20, 1) // 2
_TENSORS = 32
_ROUNDS = 5
_LINKS = {"100 Mbit/s": 12.5e6, "1 Gbit/s": 125e6, "25 Gbit/s": 3.125e9}
_CORES = (1, 8)
#: Pieces that wait between two steps of a run.
_AHEAD = 16
_HEAD = struct.Struct("<II")

Weights = NDArray[np.uint16]
"""Bits of bfloat16."""


@dataclass(frozen=True)
class PieceCoder:
    """Pair of functions that encode and decode a piece."""

    name: str
    encode: Callable[[Weights], tuple[Any, Any]]
    """Returns two buffers: the coded bytes, and the bytes that go as they are."""
    decode: Callable[[Any, Any], Weights]


@dataclass(frozen=True)
class CodingRates:
    """Measured size and speed of a coder."""

    ratio: float
    encoded: float
    """Bytes of weights a second and core."""
    decoded: float

    def times_plain(self, link: float, num_cores: int) -> float:
        """Return the time of a long push, divided by the time without coding."""
        step = min(self.encoded * num_cores, self.decoded * num_cores, link / self.ratio)
        return link / step


def random_weights(num_bytes: int) -> Weights:
    """Draw normals whose standard deviations are 0.008 to 0.06."""
    generator = torch.Generator().manual_seed(0)
    size = num_bytes // 2 // _TENSORS
    scales = torch.logspace(-2.1, -1.2, _TENSORS)
    return _bits([torch.randn(size, generator=generator) * scale for scale in scales])


def read_weights(path: Path, num_bytes: int) -> Weights:
    """Read the first weights of a model."""
    load = importlib.import_module("safetensors.torch").load_file
    return _bits([each for each in load(path).values() if each.is_floating_point()], num_bytes // 2)


def _bits(tensors: list[torch.Tensor], most: int | None = None) -> Weights:
    flat = torch.cat([each.to(torch.bfloat16).flatten() for each in tensors])[:most]
    return flat.view(torch.int16).numpy().view(np.uint16)


def separate(piece: Weights) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Return the exponents, and bytes that hold a mantissa and its sign."""
    exponents = (piece >> 7).view(np.uint8)[::2].copy()
    turned = piece << 1
    turned |= piece >> 15
    return exponents, turned.view(np.uint8)[::2].copy()


def join(exponents: Any, others: Any) -> Weights:
    """Undo ``separate``."""
    turned = np.empty(len(others), np.uint16)
    halves = turned.view(np.uint8)
    halves[::2], halves[1::2] = np.frombuffer(others, np.uint8), np.frombuffer(exponents, np.uint8)
    piece = turned >> 1
    piece |= turned << 15
    return piece


def entropy_ratio(pieces: list[Weights]) -> float:
    """Return the least ratio of a code that knows how often each exponent is in each piece."""
    num_bits = 0.0
    for piece in pieces:
        counts = np.bincount(separate(piece)[0])
        counts = counts[counts > 0]
        num_bits += 8 * len(piece) - float((counts * np.log2(counts / len(piece))).sum())
    return num_bits / sum(16 * len(piece) for piece in pieces)


def _coder(name: str, encode: Callable[[Any], Any], decode: Callable[[Any], Any]) -> PieceCoder:
    def encode_weights(piece: Weights) -> tuple[Any, Any]:
        exponents, others = separate(piece)
        return encode(exponents), others

    return PieceCoder(name, encode_weights, lambda coded, others: join(decode(coded), others))


def coders() -> Iterator[PieceCoder]:
    """Make the coders whose packages are installed."""
    yield _coder("separation alone", lambda exponents: exponents, lambda coded: coded)
    yield _coder("zlib, level 1", lambda data: zlib.compress(data, 1), zlib.decompress)
    yield _coder("zlib, Huffman only", _zlib_huffman, partial(zlib.decompress, wbits=-15))
    yield PieceCoder("that of streams", _encode_as_streams, _decode_as_streams)
    for package, make in (("zstandard", _zstandard), ("lz4", _lz4), ("zipnn", _zipnn)):
        try:
            yield from make(f"{package} {metadata.version(package)}")
        except (ImportError, metadata.PackageNotFoundError):
            print(f"{package} is not installed and is left out")


def _encode_as_streams(piece: Weights) -> tuple[Any, Any]:
    return encode_piece(memoryview(piece).cast("B")), piece[:0]


def _decode_as_streams(coded: Any, _: Any) -> Weights:
    piece = np.empty(_PIECE_WEIGHTS, np.uint16)
    assert decode_piece(coded, memoryview(piece).cast("B"))
    return piece


def _zlib_huffman(data: Any) -> bytes:
    coder = zlib.compressobj(1, zlib.DEFLATED, -15, strategy=zlib.Z_HUFFMAN_ONLY)
    return coder.compress(data) + coder.flush()


def _zstandard(name: str) -> Iterator[PieceCoder]:
    zstandard = importlib.import_module("zstandard")
    decode = zstandard.ZstdDecompressor().decompress
    for level in (-5, 1, 3):
        yield _coder(f"{name}, level {level}", zstandard.ZstdCompressor(level).compress, decode)
    # Few exponents repeat for 7 bytes, and a small table finds fewer: Huffman's code remains.
    params = zstandard.ZstdCompressionParameters.from_level(
        1, strategy=zstandard.STRATEGY_FAST, min_match=7, hash_log=6, chain_log=6
    )
    encode = zstandard.ZstdCompressor(compression_params=params).compress
    yield _coder(f"{name}, Huffman only", encode, decode)


def _lz4(name: str) -> Iterator[PieceCoder]:
    block = importlib.import_module("lz4.block")
    yield _coder(name, block.compress, block.decompress)


def _zipnn(name: str) -> Iterator[PieceCoder]:
    # It separates by itself.
    zipnn = importlib.import_module("zipnn").ZipNN(
        bytearray_dtype="bfloat16", input_format="byte", threads=1
    )
    yield PieceCoder(
        name,
        lambda piece: (zipnn.compress(bytearray(piece)), b""),
        lambda coded, _: np.frombuffer(zipnn.decompress(coded), np.uint16),
    )


def measure(coder: PieceCoder, pieces: list[Weights]) -> CodingRates:
    """Encode and decode pieces on this thread, and compare what comes out."""
    num_bytes = sum(piece.nbytes for piece in pieces)
    encode_seconds = decode_seconds = float("inf")
    for _ in range(_ROUNDS):
        began = time.perf_counter()
        coded = [coder.encode(piece) for piece in pieces]
        encode_seconds = min(encode_seconds, time.perf_counter() - began)
        began = time.perf_counter()
        decoded = [coder.decode(*each) for each in coded]
        decode_seconds = min(decode_seconds, time.perf_counter() - began)
    assert all(map(np.array_equal, decoded, pieces)), coder.name
    left = sum(len(one) + len(other) for one, other in coded)
    return CodingRates(left / num_bytes, num_bytes / encode_seconds, num_bytes / decode_seconds)


def push(coder: PieceCoder, pieces: list[Weights], link: float) -> float:
    """Return the seconds from the first piece encoded to the last one decoded, each of encoding,
    sending, receiving and decoding in a thread of its own."""
    to_send: Queue[Any] = Queue(_AHEAD)
    to_decode: Queue[Any] = Queue(_AHEAD)
    decoded: list[Weights] = []
    with socket.create_server(("127.0.0.1", 0)) as server:
        sending = socket.create_connection(server.getsockname())
        receiving = server.accept()[0]

    def encode() -> None:
        for piece in pieces:
            to_send.put(coder.encode(piece))

    def send() -> None:
        due = time.perf_counter()
        for _ in pieces:
            coded, others = to_send.get()
            due = max(due, time.perf_counter() - 0.002)  # a sleep may be late by so much
            due += (len(coded) + len(others)) / link
            sending.sendall(_HEAD.pack(len(coded), len(others)))
            sending.sendall(coded)
            sending.sendall(others)
            time.sleep(max(0.0, due - time.perf_counter()))

    def receive() -> None:
        for _ in pieces:
            sizes = _HEAD.unpack(_receive(receiving, _HEAD.size))
            to_decode.put([_receive(receiving, size) for size in sizes])

    def decode() -> None:
        decoded.extend(coder.decode(*to_decode.get()) for _ in pieces)

    with sending, receiving, ThreadPoolExecutor(4) as pool:
        began = time.perf_counter()
        for step in [pool.submit(step) for step in (encode, send, receive, decode)]:
            step.result()
        seconds = time.perf_counter() - began
    assert all(map(np.array_equal, decoded, pieces)), coder.name
    return seconds


def _receive(connected: socket.socket, num_bytes: int) -> bytearray:
    content = bytearray(num_bytes)
    into = memoryview(content)
    while into:
        got = connected.recv_into(into)
        assert got, "the sender has ended"
        into = into[got:]
    return content


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mib", type=int, default=128)
    parser.add_argument("--safetensors", type=Path, help="weights of a model, in place of normals")
    parser.add_argument("--link-mbit", type=float, nargs="*", default=[1000.0, 2500.0])
    args = parser.parse_args()
    num_bytes = args.mib * 2**20
    path = args.safetensors
    weights = read_weights(path, num_bytes) if path else random_weights(num_bytes)
    pieces = [weights[at:][:_PIECE_WEIGHTS] for at in range(0, len(weights), _PIECE_WEIGHTS)]
    plain = PieceCoder("plain", lambda piece: (memoryview(piece).cast("B"), b""),
                       lambda coded, _: np.frombuffer(coded, np.uint16))  # fmt: skip
    rates = Table("coder", "ratio", "encode, GB/s", "decode, GB/s")
    links = Table("coder", *(f"{name}\ncores: {num}" for name in _LINKS for num in _CORES),
                  title="time of a push, divided by that without coding")  # fmt: skip
    runs = Table("coder", "Mbit/s", "calculated", "run", title="the same, of runs")
    for coder in coders():
        each = measure(coder, pieces)
        rates.add_row(coder.name, f"{each.ratio:.3f}", f"{each.encoded / 1e9:.2f}",
                      f"{each.decoded / 1e9:.2f}")  # fmt: skip
        links.add_row(coder.name, *(f"{each.times_plain(link, num):.2f}"
                                    for link in _LINKS.values() for num in _CORES))  # fmt: skip
        for mbit in args.link_mbit if coder.name.endswith("Huffman only") else ():
            link = mbit * 1e6 / 8
            took = [min(push(one, pieces, link) for _ in range(2)) for one in (plain, coder)]
            runs.add_row(coder.name, f"{mbit:.0f}", f"{each.times_plain(link, 1):.2f}",
                         f"{took[1] / took[0]:.2f} ({took[0]:.2f} s plain)")  # fmt: skip
    console = Console(width=120)
    console.print(describe(), highlight=False)
    console.print(f"{weights.nbytes / 1e6:.0f} MB of {path.name if path else 'random normals'}; "
                  f"entropy of the exponents: a ratio of {entropy_ratio(pieces):.3f}")  # fmt: skip
    for table in (rates, links, runs):
        console.print(table)


if __name__ == "__main__":
    main()
