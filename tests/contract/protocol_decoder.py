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
_WSUM64 = 2
#: Bytes of one element, of ``DataType`` by number.
_SIZES = {1: 4, 2: 2, 3: 2, 4: 8, 5: 1, 6: 1, 7: 1, 8: 2, 9: 4, 10: 8, 11: 1, 12: 1}
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


def wsum64(content: bytes, first_byte: int = 0) -> int:
    """The weighted sum of bytes that begin there in their tensor, a multiple of 8; the last word
    is filled up with zeros."""
    content += bytes(-len(content) % 8)
    total = 0
    for i, (word,) in enumerate(struct.iter_unpack("<Q", content), first_byte // 8):
        weight = 2 * split_mix(i // 4096) + 2 * split_mix(2**32 + i % 4096) + 1
        total += word * weight
    return total & _MASK


def joined(digests: Iterable[int]) -> bytes:
    """Digests as they are digested further."""
    return b"".join(d.to_bytes(8, "little") for d in digests)


def content_digest(digests: Iterable[int]) -> bytes:
    """The digest over a whole version, of those of its tensors in the manifest's order."""
    return xxhash.xxh3_64_digest(joined(digests))


def layout_digest(buckets: list[dict[str, Any]], tensors: list[Any]) -> bytes:
    """What a manifest is known by."""
    text = f"{_WSUM64}\n"
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


def reference_digest(tensors: list[dict[str, Any]], modules: list[dict[str, Any]]) -> str:
    """What tells bases of one fingerprint apart."""
    lines = sorted(f"{t['name']} {t['dtype']} {','.join(map(str, t['dims']))}\n" for t in tensors)
    lines += sorted(
        f"{m['name']} {','.join(map(str, m['dims']))} {' '.join(m['other_names'])}\n"
        for m in modules
    )
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def checkpoint_digest(tensors: list[dict[str, Any]]) -> bytes:
    """What base@0 is known by; a tensor has the bytes that its file has."""
    lines = []
    for t in tensors:
        dims = ",".join(map(str, t["dims"]))
        lines.append(f"{t['name']} {t['dtype']} {dims} {wsum64(t['content']):016x}\n")
    return hashlib.sha256("".join(sorted(lines)).encode()).digest()


# -- a bucket on the wire --------------------------------------------------------------


def open_bucket(
    wire: bytes, index: int, nonce: int, tensors: list[dict[str, Any]]
) -> tuple[bytes, list[int]]:
    """The payload of a bucket and the digests of its tensors, by offset; raises ValueError unless
    its trailer is right."""
    payload = wire[: len(wire) - 256]
    own = sorted((t for t in tensors if t["bucket"] == index), key=lambda t: t["offset_bytes"])
    digests = [wsum64(payload[t["offset_bytes"] : _block_end(t)]) for t in own]
    _check_trailer(wire, len(payload), index, nonce, joined(digests))
    return payload, digests


def open_shared_bucket(
    wire: bytes, payload_bytes: int, index: int, nonce: int, tensors: list[dict[str, Any]]
) -> list[tuple[list[int], int, list[bytes]]]:
    """The runs of a bucket that lists them, the digest of each, and its rows; raises ValueError
    unless its trailer is right."""
    (count,) = struct.unpack_from("<Q", wire, payload_bytes + 32)
    table = wire[payload_bytes + 32 : payload_bytes + 40 + 40 * count]
    found, at = [], 0
    for run in map(list, struct.iter_unpack("<QQQQQ", table[8:])):
        tensor, first, length, stride, repeats = run
        size = _SIZES[tensors[tensor]["dtype"]]
        begin, row_bytes = first * size, length * size
        if repeats == 1:
            block, end = begin - begin % 256, -(-(begin + row_bytes) // 256) * 256
            content = wire[at : at + end - block]
            digest, rows = wsum64(content, block), [content[begin - block :][:row_bytes]]
        else:
            content = wire[at : at + -(-row_bytes * repeats // 256) * 256]
            rows = [content[row * row_bytes :][:row_bytes] for row in range(repeats)]
            places = [begin + row * stride * size for row in range(repeats)]
            digest = sum(map(wsum64, rows, places)) & _MASK
        found.append((run, digest, rows))
        at += len(content)
    if at != payload_bytes:
        raise ValueError(f"bucket {index} lists {at} bytes")
    _check_trailer(wire, payload_bytes, index, nonce, table + joined(d for _, d, _ in found))
    return found


def put_together(
    tensors: list[dict[str, Any]], found: list[tuple[list[int], int, list[bytes]]]
) -> list[bytes]:
    """The bytes of all tensors, from the runs of all buckets; raises ValueError unless each
    element came once."""
    contents = [bytearray(_num_bytes(tensor)) for tensor in tensors]
    came = [bytearray(len(content)) for content in contents]
    for (tensor, first, _, stride, _), _, rows in found:
        size = _SIZES[tensors[tensor]["dtype"]]
        for number, row in enumerate(rows):
            place = slice(
                (first + number * stride) * size, (first + number * stride) * size + len(row)
            )
            contents[tensor][place] = row
            came[tensor][place] = bytes(n + 1 for n in came[tensor][place])
    if any(set(counts) != {1} for counts in came):
        raise ValueError("not every element came once")
    return list(map(bytes, contents))


def apply_changes(
    payload: bytes, runs: list[list[int]], sizes: list[int], tensors: list[bytearray]
) -> list[int]:
    """Overwrite the elements of tensors that changed; return what the digest of each run changes
    by. Raises ValueError, and writes nothing, unless they are what was compared."""
    headers_at = 8 * len(runs)
    blocks = [
        (nth, first, min(16384, run[2] * run[4] - first))
        for nth, run in enumerate(runs)
        for first in range(0, run[2] * run[4], 16384)
    ]
    at = headers_at + 8 * len(blocks)
    old_sums, changes = [0] * len(runs), [0] * len(runs)
    written = []
    for number, (nth, first, num) in enumerate(blocks):
        header = struct.unpack_from("<4H", payload, headers_at + 8 * number)
        tensor, start, count, stride, _ = runs[nth]
        size = sizes[nth]
        body = payload[at : at + 4 * header[3]]
        at += len(body)
        for p, (step, literal) in _read_body(body, header, num, size).items():
            row, column = divmod(first + p, count)
            begin = (start + row * stride + column) * size
            old = int.from_bytes(tensors[tensor][begin : begin + size], "little")
            new = literal if step is None else (old + step) % 256**size
            word, byte = divmod(begin, 8)
            weight = 2 * split_mix(word // 4096) + 2 * split_mix(2**32 + word % 4096) + 1
            old_sums[nth] += weight * (old << 8 * byte)
            changes[nth] += weight * (new - old << 8 * byte)
            written.append((tensor, begin, new.to_bytes(size, "little")))
    if len(payload) % 256 or len(payload) - at not in range(256) or any(payload[at:]):
        raise ValueError("the payload is not as long as its blocks")
    if [n & _MASK for n in old_sums] != list(struct.unpack_from(f"<{len(runs)}Q", payload)):
        raise ValueError("the changes were made from other weights")
    for tensor, begin, content in written:
        tensors[tensor][begin : begin + len(content)] = content
    return [n & _MASK for n in changes]


def _read_body(
    body: bytes, header: tuple[int, ...], num: int, size: int
) -> dict[int, tuple[int | None, int]]:
    """The step of each element of a block that changed, by position, or None and its new bits."""
    num_near, num_far, num_literal, _ = header
    if num_near == 0xFFFF:
        if (
            num_far
            or num_literal
            or len(body) != -(-num * size // 4) * 4
            or any(body[num * size :])
        ):
            raise ValueError("a raw block of another length")
        return {
            p: (None, int.from_bytes(body[p * size : (p + 1) * size], "little")) for p in range(num)
        }
    bits, at = int.from_bytes(body, "little"), 0

    def take(width: int) -> int:
        nonlocal at
        at += width
        if at > 8 * len(body):
            raise ValueError("a body ends too early")
        return bits >> at - width & (1 << width) - 1

    def positions(remainders: list[int], k: int) -> list[int]:
        found, before = [], -1
        for remainder in remainders:
            zeros = 0
            while not take(1):
                zeros += 1
            before += (zeros << k) + remainder + 1
            found.append(before)
        return found

    near_k, far_k = (
        ((2 * num - c) // (4 * c)).bit_length() if c else 0 for c in (num_near, num_far)
    )
    near = [take(near_k) for _ in range(num_near)]
    steps = [1 - 2 * take(1) for _ in range(num_near)]
    far = [take(far_k) for _ in range(num_far)]
    codes = [take(4) for _ in range(num_far)]
    found: dict[int, tuple[int | None, int]] = {}
    for p, step in zip(positions(near, near_k), steps, strict=True):
        found[p] = step, 0
    far_positions = positions(far, far_k)
    fill = take(-at % 8)
    for p, code in zip(far_positions, codes, strict=True):
        if code == 15:
            raise ValueError("code 15")
        found[p] = (None, take(8 * size)) if code == 7 else (code + 2 if code < 7 else 6 - code, 0)
    fill |= take(-at % 32)
    if fill or at != 8 * len(body) or codes.count(7) != num_literal:
        raise ValueError("a body is not what its header says")
    if len(found) != num_near + num_far or max(found, default=0) >= num:
        raise ValueError("an element twice, or behind the end of its block")
    return found


def _check_trailer(
    wire: bytes, payload_bytes: int, index: int, nonce: int, digested: bytes
) -> None:
    trailer = struct.unpack_from("<QQQQ", wire, payload_bytes)
    if trailer != (xxhash.xxh3_64_intdigest(digested), nonce, index, payload_bytes):
        raise ValueError(f"bucket {index} is not what was sent")


def _num_bytes(tensor: dict[str, Any]) -> int:
    count = 1
    for dim in tensor["dims"]:
        count *= dim
    return count * _SIZES[tensor["dtype"]]


def _block_end(tensor: dict[str, Any]) -> int:
    return tensor["offset_bytes"] + -(-_num_bytes(tensor) // 256) * 256


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
