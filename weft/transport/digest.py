"""Digests over buckets, the same on every side.

They find accidents (a bucket lost, torn or reordered), not attacks. Source of the
algorithms: protos/weft/v1/types.proto, DigestAlgorithm; xxHash's XXH3 64-bit with
seed 0, and a weighted sum for accelerators, whose weights come from SplitMix64
(Steele, Lea, Flood: Fast Splittable Pseudorandom Number Generators, 2014).
"""

from __future__ import annotations

from functools import lru_cache

import torch
import xxhash

from weft.contract.errors import UnsupportedError
from weft.contract.manifest import TRAILER_BYTES, WSUM64, XXH3_64, Manifest, check_trailer

_MASK = 2**64 - 1
_ROW_WORDS = 4096
# Weights are made for this many rows at a time: enough for a bucket of 1 GiB.
_ROWS = 32768


def payload_digest(payload: torch.Tensor, algorithm: int) -> int:
    """Digest of a uint8 tensor, on whatever device it lies.

    Reads it once (``XXH3_64``, on a CPU, without the interpreter's lock) or twice
    (``WSUM64``); blocks until that is done. On an accelerator it runs on the calling
    thread's current stream.

    Raises:
        UnsupportedError: This side does not know the algorithm, or not on this device.
    """
    if algorithm == WSUM64:
        return _weighted_sum(payload.view(torch.int64))
    if algorithm != XXH3_64:
        raise UnsupportedError(f"digest algorithm {algorithm} is not known here; update this side")
    if payload.device.type != "cpu":
        raise UnsupportedError(f"xxh3_64 cannot be computed on {payload.device}; use wsum64")
    return xxhash.xxh3_64_intdigest(payload.numpy().data)


def verify_bucket(wire: torch.Tensor, manifest: Manifest, index: int, nonce: int) -> int:
    """Check a bucket that has arrived against its trailer; returns its payload's digest.

    Raises:
        DigestMismatchError: Other bytes arrived than were sent.
    """
    bucket = manifest.buckets[index]
    digest = payload_digest(wire[: bucket.payload_bytes], manifest.digest_algorithm)
    end = bucket.payload_bytes + TRAILER_BYTES
    check_trailer(
        wire[bucket.payload_bytes : end].cpu().numpy().data,
        digest=digest,
        nonce=nonce,
        bucket=index,
        payload_bytes=bucket.payload_bytes,
    )
    return digest


def content_digest(bucket_digests: list[int]) -> bytes:
    """One digest over all buckets of a version; 8 bytes, big-endian.

    Source: protos/weft/v1/types.proto, ContentDigest.
    """
    joined = b"".join(digest.to_bytes(8, "little") for digest in bucket_digests)
    return xxhash.xxh3_64_digest(joined)


def run_digest(content: torch.Tensor, first_byte: int) -> int:
    """What some bytes of a bucket's payload add to its ``WSUM64`` digest, modulo 2^64.

    Reads them twice; blocks until that is done.

    Args:
        content: uint8, 1-D, contiguous, a multiple of 8 bytes, on any device.
        first_byte: Where in the payload they begin; a multiple of 8.
    """
    return _weighted_sum(content.view(torch.int64), first_byte // 8)


def tensor_digest(content: torch.Tensor, *, first_byte: int = 0) -> int:
    """Digest of one tensor's bytes, wherever it lies: in a file, a bucket, a model.

    Linear: the digests of a tensor's pieces, each with where it begins, add up (modulo
    2^64) to that of the whole. Reads the bytes twice; blocks until that is done.

    Args:
        content: uint8, 1-D, contiguous, on any device.
        first_byte: Where in its tensor a piece begins; a multiple of 32 KiB.

    Source: protos/weft/v1/registry.proto, Checkpoint.digest.
    """
    first_row, rest = divmod(first_byte, 8 * _ROW_WORDS)
    assert not rest, f"a piece that begins at byte {first_byte}"
    whole = content.numel() // 8 * 8
    total = _weighted_sum(content[:whole].view(torch.int64), first_row * _ROW_WORDS)
    if whole < content.numel():
        last = torch.zeros(8, dtype=torch.uint8, device=content.device)
        last[: content.numel() - whole] = content[whole:]
        row, column = divmod(whole // 8, _ROW_WORDS)
        weight = (
            _rows_from(content.device, first_row + row)[0] + _column_weights(content.device)[column]
        )
        total += int((last.view(torch.int64) * weight).sum().item())
    return total & _MASK


def _weighted_sum(words: torch.Tensor, first_word: int = 0) -> int:
    """Sum of ``words[i] * (row_weight[i // 4096] + column_weight[i % 4096])`` mod 2^64.

    As two plain sums over the rows and columns of a matrix, so that nothing of the
    payload's size is ever made: int64 arithmetic wraps around as it should.

    Args:
        words: int64, 1-D, contiguous.
        first_word: Where they begin, where they are a piece of more.
    """
    columns = _column_weights(words.device)
    total = torch.zeros((), dtype=torch.int64, device=words.device)
    first_row, column = divmod(first_word, _ROW_WORDS)
    if column:  # the rest of a row that was begun before
        head = words[: _ROW_WORDS - column]
        row = _rows_from(words.device, first_row)[0]
        total += (head * (columns[column : column + head.numel()] + row)).sum()
        words, first_row = words[head.numel() :], first_row + 1
    num_rows, rest = divmod(words.numel(), _ROW_WORDS)
    done = 0
    while done < num_rows:
        rows = _rows_from(words.device, first_row + done)
        count = min(rows.numel(), num_rows - done)
        begin = done * _ROW_WORDS
        matrix = words[begin : begin + count * _ROW_WORDS].view(count, _ROW_WORDS)
        total += (matrix.sum(1) * rows[:count]).sum() + (matrix.sum(0) * columns).sum()
        done += count
    if rest:
        tail = words[num_rows * _ROW_WORDS :]
        row = _rows_from(words.device, first_row + num_rows)[0]
        total += (tail * (columns[:rest] + row)).sum()
    return int(total.item()) & _MASK


def _rows_from(device: torch.device, row: int) -> torch.Tensor:
    """Weights of ``row`` and of what follows it in its block; a view."""
    return _row_weights(device, row - row % _ROWS)[row % _ROWS :]


@lru_cache(maxsize=256)
def _row_weights(device: torch.device, first: int) -> torch.Tensor:
    """Even weights of rows ``first`` to ``first + _ROWS``; 256 KiB each."""
    return _split_mix(first, _ROWS, device) << 1


@lru_cache(maxsize=64)
def _column_weights(device: torch.device) -> torch.Tensor:
    """Odd weights of the columns."""
    return (_split_mix(2**32, _ROW_WORDS, device) << 1) + 1


def _split_mix(first: int, count: int, device: torch.device) -> torch.Tensor:
    """Outputs ``first`` to ``first + count`` of SplitMix64 seeded with 0, as int64."""
    state = torch.arange(first + 1, first + count + 1, dtype=torch.int64)
    z = state * _signed(0x9E3779B97F4A7C15)
    z = (z ^ _shifted(z, 30)) * _signed(0xBF58476D1CE4E5B9)
    z = (z ^ _shifted(z, 27)) * _signed(0x94D049BB133111EB)
    return (z ^ _shifted(z, 31)).to(device)


def _shifted(z: torch.Tensor, bits: int) -> torch.Tensor:
    """Logical shift to the right: torch's own keeps the sign."""
    return (z >> bits) & ((1 << (64 - bits)) - 1)


def _signed(value: int) -> int:
    return value - 2**64 if value >= 2**63 else value
