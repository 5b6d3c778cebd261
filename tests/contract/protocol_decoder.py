"""What docs/protocol.md says of bytes, digests, names and errors, followed to the letter: with
the standard library and the xxhash package, and nothing of ours.
"""

from __future__ import annotations

import hashlib
import re
import struct
from collections.abc import Iterable, Iterator
from typing import Any

import xxhash

_MASK = 2**64 - 1
_XXH3_64, _WSUM64 = 1, 2
#: ``DataType`` by number: how struct reads one element. bfloat16 is the upper half of a float32.
_FORMATS = {1: "f", 2: "e", 4: "d", 7: "b", 8: "h", 9: "i", 10: "q", 11: "B", 12: "?"}
_BFLOAT16 = 3
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")


# -- digests ---------------------------------------------------------------------------


def split_mix(n: int) -> int:
    """The n-th output, from 0, of SplitMix64 seeded with 0."""
    z = (n + 1) * 0x9E3779B97F4A7C15 & _MASK
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & _MASK
    z = (z ^ z >> 27) * 0x94D049BB133111EB & _MASK
    return z ^ z >> 31


def wsum64(content: bytes) -> int:
    """The weighted sum; the last word is filled up with zeros."""
    content += bytes(-len(content) % 8)
    total = 0
    for i, (word,) in enumerate(struct.iter_unpack("<Q", content)):
        weight = 2 * split_mix(i // 4096) + 2 * split_mix(2**32 + i % 4096) + 1
        total += word * weight
    return total & _MASK


def digest(content: bytes, algorithm: int) -> int:
    """The digest of a payload."""
    return {_XXH3_64: xxhash.xxh3_64_intdigest, _WSUM64: wsum64}[algorithm](content)


def content_digest(digests: Iterable[int]) -> bytes:
    """The digest over a whole version."""
    return xxhash.xxh3_64_digest(b"".join(d.to_bytes(8, "little") for d in digests))


def layout_digest(algorithm: int, buckets: list[dict[str, Any]], tensors: list[Any]) -> bytes:
    """What a manifest is known by."""
    text = f"{algorithm}\n"
    for bucket in buckets:
        text += f"{bucket['payload_bytes']} {bucket['num_tensors']}\n"
    for t in tensors:
        dims = ",".join(map(str, t["dims"]))
        text += f"{t['name']} {t['dtype']} {dims} {t['bucket']} {t['offset_bytes']}\n"
    return hashlib.sha256(text.encode()).digest()


def fingerprint(architecture: str, tensors: list[dict[str, Any]]) -> str:
    """What a base model is known by."""
    lines = sorted(f"{t['name']} {','.join(map(str, t['dims']))}\n" for t in tensors)
    return hashlib.sha256((architecture + "\n" + "".join(lines)).encode()).hexdigest()


def checkpoint_digest(tensors: list[dict[str, Any]]) -> bytes:
    """What base@0 is known by; a tensor has the bytes that its file has."""
    lines = []
    for t in tensors:
        dims = ",".join(map(str, t["dims"]))
        lines.append(f"{t['name']} {t['dtype']} {dims} {wsum64(t['content']):016x}\n")
    return hashlib.sha256("".join(sorted(lines)).encode()).digest()


# -- a bucket on the wire --------------------------------------------------------------


def open_bucket(wire: bytes, index: int, nonce: int, algorithm: int) -> tuple[bytes, int]:
    """The payload of a bucket and its digest; raises ValueError unless its trailer is right."""
    payload_bytes = len(wire) - 256
    payload, trailer = wire[:payload_bytes], wire[payload_bytes : payload_bytes + 32]
    found = digest(payload, algorithm)
    if struct.unpack("<QQQQ", trailer) != (found, nonce, index, payload_bytes):
        raise ValueError(f"bucket {index} is not what was sent")
    return payload, found


def values(payload: bytes, tensor: dict[str, Any]) -> list[float]:
    """The elements of a tensor that lies in a bucket, row-major."""
    count = 1
    for dim in tensor["dims"]:
        count *= dim
    if tensor["dtype"] == _BFLOAT16:
        halves = struct.unpack_from(f"<{count}H", payload, tensor["offset_bytes"])
        return [struct.unpack("<f", struct.pack("<I", half << 16))[0] for half in halves]
    form = f"<{count}{_FORMATS[tensor['dtype']]}"
    return [float(value) for value in struct.unpack_from(form, payload, tensor["offset_bytes"])]


# -- names -----------------------------------------------------------------------------


def is_name(text: str) -> bool:
    """Whether a policy, a trainer or a replica can be called so."""
    return bool(_NAME.fullmatch(text)) and ".." not in text


def parse_version(text: str) -> tuple[str, int] | None:
    """``math@17``."""
    name, at, number = text.rpartition("@")
    if not at or not re.fullmatch("[0-9]+", number) or not is_name(name):
        return None
    return name, int(number)


def name_in_the_way(policy: str, served_names: list[str]) -> str:
    """Which of a server's own names keeps an adapter from being called ``policy``."""
    taken = re.compile(re.escape(policy) + "(@[0-9]+)?")
    return next((name for name in served_names if taken.fullmatch(name)), "")


# -- errors ----------------------------------------------------------------------------


def error_info(details: bytes) -> tuple[int, str, str, dict[str, str]]:
    """Code, message, reason and metadata of a ``grpc-status-details-bin`` trailer."""
    status = _fields(details)
    for packed in status.get(3, []):
        detail = _fields(packed)
        if detail[1][0] == b"type.googleapis.com/google.rpc.ErrorInfo":
            info = _fields(detail[2][0])
            assert info[2][0] == b"weft"
            entries = [_fields(entry) for entry in info.get(3, [])]
            metadata = {e[1][0].decode(): e[2][0].decode() for e in entries}
            return status[1][0], status[2][0].decode(), info[1][0].decode(), metadata
    raise ValueError("no ErrorInfo")


def retry_seconds(details: bytes) -> int | None:
    """What its ``RetryInfo`` says, if there is one."""
    for packed in _fields(details).get(3, []):
        detail = _fields(packed)
        if detail[1][0] == b"type.googleapis.com/google.rpc.RetryInfo":
            delay = _fields(_fields(detail[2][0])[1][0])
            return int(delay[1][0])
    return None


def _fields(message: bytes) -> dict[int, list[Any]]:
    """The fields of a protobuf message of numbers and of what has a length."""
    found: dict[int, list[Any]] = {}
    rest = iter(message)
    for first in rest:
        key = _varint(first, rest)
        value: Any = _varint(next(rest), rest)
        if key & 7 == 2:
            value = bytes(next(rest) for _ in range(value))
        found.setdefault(key >> 3, []).append(value)
    return found


def _varint(byte: int, rest: Iterator[int]) -> int:
    value, shift = byte & 0x7F, 7
    while byte & 0x80:
        byte = next(rest)
        value |= (byte & 0x7F) << shift
        shift += 7
    return value
