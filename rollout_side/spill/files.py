"""Files of one spilled version, which vLLM, PEFT and transformers can read.

An adapter is a PEFT directory; a base is safetensors shards with checkpoint names and their index,
beside which the model that drafts tokens for it has a file of its own.
Two small files of our own hold the version and the layout of its buckets. A base that came as
changes of one that is there has these changes in place of the tensors.

safetensors files are written and read here, not by the library. Its writer copies a whole file in
memory first. Its reader maps files: a network volume that fails would end the engine's process
(SIGBUS) instead of raising an error.
"""

from __future__ import annotations

import contextlib
import json
import os
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch
from google.protobuf.message import DecodeError

from rollout_side.memory.copy_changes import apply_to_copy
from rollout_side.memory.versions import (
    BaseChanges,
    BucketContents,
    StagedVersion,
    bucket_starts,
    is_adapter,
)
from weft_rl.contract.draft_layers import DRAFT_MODEL
from weft_rl.contract.errors import InvalidManifestError, TransferAbortedError, WeftError
from weft_rl.contract.manifest import Manifest, TensorSlot, pack_runs, unpack_runs
from weft_rl.contract.names import PolicyVersion
from weft_rl.rpc.manifest_codec import ManifestDecoder, manifest_to_chunks
from weft_rl.transport.digests.wsum64 import content_digest, part_digests
from weft_rl.transport.wire.buckets import in_manifest_order, whole_parts
from weft_rl.v1 import types_pb2

#: Name of the file with the version and its base model.
FACTS = "weft.json"
#: ``weft.v1.ManifestChunk`` messages, each after its length in 4 bytes, little-endian.
MANIFEST = "weft.manifest"
#: Coded changes of another base, as in a delta's buckets: of each bucket the sizes of the list of
#: its runs and of its payload, in 8 bytes each, little-endian, then both.
CHANGES = "weft.changes"
#: Format of the files; part of the folder's name, so that no other format is read.
FORMAT = 1
#: Payload of one file of a base.
SHARD_BYTES = 5 * 10**9

_CONFIG = "adapter_config.json"
#: File of another model's tensors, which an index of the base does not list.
_DRAFT = "draft_model.safetensors"
_PIECE_BYTES = 32 * 2**20
# Bytes of one read: small, so that a slow disk still shows progress.
_READ_BYTES = 8 * 2**20
_MAX_HEADER_BYTES = 256 * 2**20
_CHANGES_HEAD = struct.Struct("<QQ")


@dataclass(frozen=True)
class Facts:
    """Contents of the ``FACTS`` file."""

    version: PolicyVersion
    fingerprint: str
    """``Reference.fingerprint`` of the base model."""
    content_digest: bytes
    layout_digest: bytes
    changes_of: str
    """Name of the directory of the base that its changes are of; empty where it is whole."""


class Link(NamedTuple):
    """Changes by which a base follows from one that is on disk."""

    parent: Path
    """Directory of that base."""
    changes: Sequence[BaseChanges]

    @property
    def num_bytes(self) -> int:
        """Bytes of the changes."""
        return sum(each.num_bytes for each in self.changes)


def write_version(
    directory: Path,
    copy: StagedVersion,
    config_json: str,
    fingerprint: str,
    *,
    going_on: Callable[[], bool],
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write a held version into an empty directory; every file is on disk afterwards.

    The copy is read where it lies: no tensor is copied.

    Args:
        config_json: PEFT's config, for an adapter.
        going_on: Called between pieces; the write ends once it returns False.
    """
    shards = _shards(copy.manifest, copy.version, shard_bytes)
    for name, slots in shards.items():
        with _synced(directory / name) as file:
            _write_shard(file, copy, slots, going_on)
    if is_adapter(copy.version):
        _write_text(directory / _CONFIG, config_json)
    elif len(shards) > 1:
        own = {name: slots for name, slots in shards.items() if name != _DRAFT}
        weight_map = {slot.meta.name: name for name, slots in own.items() for slot in slots}
        total = sum(slot.meta.num_bytes for slots in own.values() for slot in slots)
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        _write_text(directory / "model.safetensors.index.json", json.dumps(index, indent=1))
    _write_own(directory, copy, fingerprint, "")


def write_changes(
    directory: Path,
    copy: StagedVersion,
    link: Link,
    fingerprint: str,
    *,
    going_on: Callable[[], bool],
) -> None:
    """Write a base into an empty directory as changes, as ``write_version`` does whole."""
    with _synced(directory / CHANGES) as file:
        for bucket in (bucket for each in link.changes for bucket in each.buckets):
            assert bucket.changes is not None, "it came in a delta's bucket"
            table, payload = pack_runs(bucket.runs), bucket.changes.numpy().data
            file.write(_CHANGES_HEAD.pack(len(table), len(payload)) + table)
            _write_pieces(file, payload, copy.version, going_on)
    _write_own(directory, copy, fingerprint, link.parent.name)


def _write_own(directory: Path, copy: StagedVersion, fingerprint: str, changes_of: str) -> None:
    """Write our own files, the facts last, and make all names durable."""
    with _synced(directory / MANIFEST) as file:
        for chunk in manifest_to_chunks(copy.manifest):
            message = chunk.SerializeToString()
            file.write(struct.pack("<I", len(message)) + message)
    facts = {
        "format": FORMAT,
        "version": str(copy.version),
        "base_fingerprint": fingerprint,
        "content_digest": copy.content_digest.hex(),
        "layout_digest": copy.manifest.layout_digest.hex(),
        "total_bytes": copy.manifest.total_bytes,
        **({"changes_of": changes_of} if changes_of else {}),
    }
    _write_text(directory / FACTS, json.dumps(facts, indent=1))
    sync_directory(directory)


def read_facts(directory: Path) -> Facts:
    """Read the facts of the version in a directory."""
    with _as_damage(directory):
        facts = json.loads((directory / FACTS).read_bytes())
        if facts["format"] != FORMAT:
            raise InvalidManifestError(
                f"{directory} has format {facts['format']!r}; this Weft reads format {FORMAT}"
            )
        return Facts(
            PolicyVersion.parse(facts["version"]),
            facts["base_fingerprint"],
            bytes.fromhex(facts["content_digest"]),
            bytes.fromhex(facts["layout_digest"]),
            str(facts.get("changes_of", "")),
        )


def read_config(directory: Path) -> str:
    """Read PEFT's config of the adapter in a directory."""
    return (directory / _CONFIG).read_text()


def read_manifest(directory: Path) -> Manifest:
    """Read the layout that the version was staged in."""
    with _as_damage(directory):
        data = memoryview((directory / MANIFEST).read_bytes())
        decoder, at = ManifestDecoder(), 0
        while at < len(data):
            (size,) = struct.unpack_from("<I", data, at)
            at += 4
            decoder.add(types_pb2.ManifestChunk.FromString(bytes(data[at : at + size])))
            at += size
        return decoder.finish()


def read_into(
    chain: Sequence[Path], manifest: Manifest, data: torch.Tensor, on_progress: Callable[[], None]
) -> bytes:
    """Read a version into the layout of its manifest.

    Args:
        chain: Directory of a version that is whole, then those of changes: each of the version
            before it, the last of the one that is read.
        data: uint8, at least ``manifest.wire_bytes``; written as if it had been
            received, trailers excepted.
        on_progress: Called after each piece that was read.

    Returns:
        The content digest of what was read.

    Raises:
        InvalidManifestError: A file is damaged, or changes are of other elements.
        OSError: The disk cannot be read.
    """
    digests = _read_tensors(chain[0], manifest, data, on_progress)
    for directory in chain[1:]:
        with _as_damage(directory):
            for contents in _read_changes(directory, manifest, on_progress):
                apply_to_copy(contents, manifest, data, digests)
                on_progress()
    return content_digest(digests)


def _read_tensors(
    directory: Path, manifest: Manifest, data: torch.Tensor, on_progress: Callable[[], None]
) -> list[int]:
    """Read the tensors of a whole version; return their digests, in the manifest's order."""
    starts, digests = bucket_starts(manifest), list[list[int]]()
    with contextlib.ExitStack() as stack, _as_damage(directory):
        found = _tensors_in(directory, stack)
        on_progress()
        for index, bucket in enumerate(manifest.buckets):
            payload = data[starts[index] : starts[index] + bucket.payload_bytes]
            end = 0
            for slot in (manifest.tensors[i] for i in manifest.tensors_by_bucket[index]):
                payload[end : slot.offset_bytes].zero_()  # digested with the tensor before it
                end = slot.offset_bytes + slot.meta.num_bytes
                _read_tensor(found, slot, payload[slot.offset_bytes : end], on_progress)
            payload[end:].zero_()
            digests.append(part_digests(payload, whole_parts(manifest, index)))
            on_progress()
    return in_manifest_order(manifest, digests)


def _read_changes(
    directory: Path, manifest: Manifest, on_progress: Callable[[], None]
) -> Iterator[BucketContents]:
    """Read the buckets of changes in a directory, one after the other."""
    with (directory / CHANGES).open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        index = 0
        while head := file.read(_CHANGES_HEAD.size):
            table_bytes, payload_bytes = _CHANGES_HEAD.unpack(head)
            if file.tell() + table_bytes + payload_bytes > size:
                raise InvalidManifestError(f"{file.name} ends within a bucket")
            runs = unpack_runs(file.read(table_bytes), manifest, None, index)
            payload = torch.empty(payload_bytes, dtype=torch.uint8)
            _fill(file, payload, f"bucket {index}", on_progress)
            yield BucketContents(runs, [], payload)
            index += 1


def sync_directory(directory: Path) -> None:
    """Make the names in a directory durable."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _shards(
    manifest: Manifest, version: PolicyVersion, shard_bytes: int
) -> dict[str, list[TensorSlot]]:
    """Assign tensors to files, by file name: one file, or several for a large base."""
    if is_adapter(version):
        return {"adapter_model.safetensors": list(manifest.tensors)}
    parts: list[list[TensorSlot]] = [[]]
    size = 0
    draft = [slot for slot in manifest.tensors if slot.meta.name.startswith(DRAFT_MODEL)]
    more = {_DRAFT: draft} if draft else {}
    for slot in manifest.tensors:
        if slot.meta.name.startswith(DRAFT_MODEL):
            continue
        if parts[-1] and size + slot.meta.num_bytes > shard_bytes:
            parts.append([])
            size = 0
        parts[-1].append(slot)
        size += slot.meta.num_bytes
    if len(parts) == 1:
        return {"model.safetensors": parts[0], **more}
    shards = {
        f"model-{i:05d}-of-{len(parts):05d}.safetensors": part for i, part in enumerate(parts, 1)
    }
    return {**shards, **more}


def _write_shard(
    file: BinaryIO,
    copy: StagedVersion,
    slots: Sequence[TensorSlot],
    going_on: Callable[[], bool],
) -> None:
    # Widest elements first, so that each tensor is aligned to its own.
    slots = sorted(slots, key=lambda slot: -slot.meta.dtype.itemsize_bytes)
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for slot in slots:
        header[slot.meta.name] = {
            "dtype": slot.meta.dtype.safetensors_name,
            "shape": list(slot.meta.shape),
            "data_offsets": [at, at + slot.meta.num_bytes],
        }
        at += slot.meta.num_bytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    file.write(struct.pack("<Q", len(text)) + text)
    starts = bucket_starts(copy.manifest)
    for slot in slots:
        begin = starts[slot.bucket] + slot.offset_bytes
        view = copy.segment.data[begin : begin + slot.meta.num_bytes].cpu().numpy().data
        _write_pieces(file, view, copy.version, going_on)


def _write_pieces(
    file: BinaryIO, view: memoryview, version: PolicyVersion, going_on: Callable[[], bool]
) -> None:
    for piece in range(0, len(view), _PIECE_BYTES):
        if not going_on():
            raise TransferAbortedError(f"{version} was dropped while it was spilled")
        file.write(view[piece : piece + _PIECE_BYTES])


@dataclass(frozen=True)
class _FileRange:
    file: BufferedReader
    at: int
    dtype: str
    shape: tuple[int, ...]


def _tensors_in(directory: Path, stack: contextlib.ExitStack) -> Mapping[str, _FileRange]:
    found: dict[str, _FileRange] = {}
    for path in sorted(directory.glob("*.safetensors")):
        file = stack.enter_context(path.open("rb"))
        (size,) = struct.unpack("<Q", _read(file, 8))
        if size > _MAX_HEADER_BYTES:
            raise InvalidManifestError(f"{path} is damaged: its header has {size} bytes")
        for name, entry in json.loads(_read(file, size)).items():
            if name != "__metadata__":
                at = 8 + size + int(entry["data_offsets"][0])
                found[name] = _FileRange(file, at, entry["dtype"], tuple(entry["shape"]))
    return found


def _read_tensor(
    found: Mapping[str, _FileRange],
    slot: TensorSlot,
    out: torch.Tensor,
    on_progress: Callable[[], None],
) -> None:
    place = found.get(slot.meta.name)
    if place is None or (place.dtype, place.shape) != (
        slot.meta.dtype.safetensors_name,
        slot.meta.shape,
    ):
        raise InvalidManifestError(f"tensor {slot.meta.name!r} is missing or of another shape")
    place.file.seek(place.at)
    host = out if out.device.type == "cpu" else torch.empty_like(out, device="cpu")
    _fill(place.file, host, f"tensor {slot.meta.name!r}", on_progress)
    if host is not out:
        out.copy_(host)


def _fill(
    file: BufferedReader, out: torch.Tensor, what: str, on_progress: Callable[[], None]
) -> None:
    """Read as many bytes as a tensor of the host has."""
    view = out.numpy().data
    for begin in range(0, len(view), _READ_BYTES):
        piece = view[begin : begin + _READ_BYTES]
        if file.readinto(piece) != len(piece):
            raise InvalidManifestError(f"{file.name} ends within {what}")
        on_progress()


def _read(file: BufferedReader, size: int) -> bytes:
    data = file.read(size)
    if len(data) != size:
        raise InvalidManifestError("a safetensors file ends within its header")
    return data


@contextlib.contextmanager
def _as_damage(directory: Path) -> Iterator[None]:
    """Raise a damaged file's other errors as InvalidManifestError; a disk's own errors pass."""
    try:
        yield
    except (OSError, InvalidManifestError):
        raise
    except (ValueError, KeyError, TypeError, struct.error, DecodeError, WeftError) as error:
        raise InvalidManifestError(f"{directory} is damaged: {error!r}") from error


@contextlib.contextmanager
def _synced(path: Path) -> Iterator[BinaryIO]:
    with open(path, "xb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())


def _write_text(path: Path, text: str) -> None:
    with _synced(path) as file:
        file.write(text.encode())
