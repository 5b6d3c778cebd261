"""Manifests and references as streams of chunks.

A manifest's header comes first, so that one that is too large is refused before
its lists are read. A decoded layout must digest to what its header says.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from weft_rl.contract.draft_layers import MAX_DRAFT_PREFIXES, why_too_large
from weft_rl.contract.errors import InvalidManifestError
from weft_rl.contract.manifest import (
    MAX_DIMS,
    MAX_NAME_CHARS,
    Bucket,
    Manifest,
    TensorSlot,
    check_meta,
    check_metas,
    check_names,
    check_num_tensors,
    make_manifest,
)
from weft_rl.contract.tensors import DataType, LinearModule, Reference, TensorMeta
from weft_rl.rpc.codec import CHUNK_ENTRIES, chunk_ranges, dtype_to_proto
from weft_rl.v1 import types_pb2

_DTYPES = {int(dtype): dtype for dtype in DataType}
# With the longest names, 2.3 MiB.
_CHUNK_MODULES = 512
_MAX_OTHER_NAMES = 8


def manifest_to_chunks(manifest: Manifest) -> Iterator[types_pb2.ManifestChunk]:
    """Yield a manifest's header, then buckets, then tensors; at most 4096 entries a chunk."""
    yield types_pb2.ManifestChunk(
        header=types_pb2.ManifestHeader(
            num_tensors=len(manifest.tensors),
            num_buckets=len(manifest.buckets),
            total_bytes=manifest.total_bytes,
            digest_algorithm=types_pb2.DigestAlgorithm.ValueType(manifest.digest_algorithm),
            layout_digest=manifest.layout_digest,
        )
    )
    for part in chunk_ranges(len(manifest.buckets)):
        yield types_pb2.ManifestChunk(
            buckets=[
                types_pb2.Bucket(payload_bytes=b.payload_bytes, num_tensors=b.num_tensors)
                for b in manifest.buckets[part]
            ]
        )
    for part in chunk_ranges(len(manifest.tensors)):
        yield types_pb2.ManifestChunk(
            tensors=[
                types_pb2.TensorSpec(
                    name=slot.meta.name,
                    dtype=dtype_to_proto(slot.meta.dtype),
                    dims=slot.meta.shape,
                    bucket=slot.bucket,
                    offset_bytes=slot.offset_bytes,
                )
                for slot in manifest.tensors[part]
            ]
        )


class ManifestDecoder:
    """Decoder that takes chunks one by one, from a sync or an async stream.

    Raises (both methods):
        InvalidManifestError: No header first, more or fewer entries than it
            says, a layout that cannot be right, or another digest.
        CapacityError: ``MANIFEST_TOO_LARGE``, at the header, or at the first chunk
            that is too much.
    """

    def __init__(self) -> None:
        self._header: types_pb2.ManifestHeader | None = None
        self._slots: list[TensorSlot] = []
        self._buckets: list[Bucket] = []
        self._num_chars = 0

    def add(self, chunk: types_pb2.ManifestChunk) -> None:
        """Take the next chunk, if it fits the header and the bounds of what is taken in all.

        Each tensor is checked before the next one is read.
        """
        _check_chunk(max(len(chunk.tensors), len(chunk.buckets)), chunk.HasField("header"))
        if chunk.HasField("header"):
            if self._header is not None:
                raise InvalidManifestError("a manifest has two headers")
            check_num_tensors(chunk.header.num_tensors)
            if chunk.header.num_buckets > chunk.header.num_tensors:
                raise InvalidManifestError("a manifest has more buckets than tensors")
            self._header = chunk.header
        header = self._header
        if header is None:
            raise InvalidManifestError("the first chunk of a manifest has no header")
        if (
            len(self._slots) + len(chunk.tensors) > header.num_tensors
            or len(self._buckets) + len(chunk.buckets) > header.num_buckets
        ):
            raise InvalidManifestError("a manifest holds more than its header says")
        self._buckets += [Bucket(b.payload_bytes, b.num_tensors) for b in chunk.buckets]
        for spec in chunk.tensors:
            slot = _slot(spec)
            check_meta(slot.meta)
            self._num_chars += len(spec.name)
            check_names(self._num_chars)
            self._slots.append(slot)

    def finish(self) -> Manifest:
        """Return the manifest, once the stream has ended; O(tensors), one second for 200,000."""
        header = self._header
        if header is None:
            raise InvalidManifestError("an empty stream: a manifest begins with its header")
        if (len(self._slots), len(self._buckets)) != (header.num_tensors, header.num_buckets):
            raise InvalidManifestError(
                f"the header says {header.num_tensors} tensors in {header.num_buckets} buckets, "
                f"{len(self._slots)} in {len(self._buckets)} came"
            )
        manifest = make_manifest(self._slots, self._buckets, header.digest_algorithm)
        if manifest.layout_digest != header.layout_digest:
            raise InvalidManifestError("the layout digest in the header is not of this content")
        if manifest.total_bytes != header.total_bytes:
            raise InvalidManifestError(
                f"the header says {header.total_bytes} bytes, the buckets hold "
                f"{manifest.total_bytes}"
            )
        return manifest


def _check_chunk(num_entries: int, has_header: bool) -> None:
    if num_entries > CHUNK_ENTRIES:
        raise InvalidManifestError(f"a chunk of {num_entries} entries; at most {CHUNK_ENTRIES}")
    if not num_entries and not has_header:
        raise InvalidManifestError("a chunk that holds nothing")


def _slot(spec: types_pb2.TensorSpec) -> TensorSlot:
    dtype = _DTYPES.get(spec.dtype)
    if dtype is None:
        raise InvalidManifestError(f"tensor {spec.name[:80]!r} has no known dtype ({spec.dtype})")
    # One dim too many is enough to be refused.
    meta = TensorMeta(spec.name, dtype, tuple(spec.dims[: MAX_DIMS + 1]))
    return TensorSlot(meta, spec.bucket, spec.offset_bytes)


def manifest_from_chunks(chunks: Iterable[types_pb2.ManifestChunk]) -> Manifest:
    """Read a whole stream; see ``ManifestDecoder`` for what is refused."""
    decoder = ManifestDecoder()
    for chunk in chunks:
        decoder.add(chunk)
    return decoder.finish()


def reference_to_chunks(reference: Reference) -> Iterator[types_pb2.ReferenceChunk]:
    """Yield chunks of at most 4096 tensors, then of at most 512 modules; the first has fingerprint
    and architecture.

    Tensors of a draft are beside others: who does not know them refuses a chunk that holds nothing
    else. Both lists of a chunk may be full: the names of a draft are short (see
    ``MAX_DRAFT_NAME_BYTES``).
    """
    first, draft = True, reference.draft
    num_chunks = max(1, -(-len(draft) // CHUNK_ENTRIES))
    most = min(CHUNK_ENTRIES, max(1, len(reference.tensors) // num_chunks))
    for part in chunk_ranges(len(reference.tensors), most):
        chunk = types_pb2.ReferenceChunk(
            tensors=map(reference_tensor_to_proto, reference.tensors[part])
        )
        if first:
            chunk.fingerprint = reference.fingerprint
            chunk.architecture = reference.architecture
            chunk.draft_prefixes.extend(reference.draft_prefixes)
            first = False
        chunk.draft_tensors.extend(map(reference_tensor_to_proto, draft[:CHUNK_ENTRIES]))
        draft = draft[CHUNK_ENTRIES:]
        yield chunk
    modules = reference.untold_modules
    for i in range(0, len(modules), _CHUNK_MODULES):
        yield types_pb2.ReferenceChunk(
            modules=[
                types_pb2.ReferenceModule(name=m.name, dims=m.shape, other_names=m.other_names)
                for m in modules[i : i + _CHUNK_MODULES]
            ]
        )
    for part in chunk_ranges(len(draft)):
        yield types_pb2.ReferenceChunk(draft_tensors=map(reference_tensor_to_proto, draft[part]))


def reference_tensor_to_proto(meta: TensorMeta) -> types_pb2.ReferenceTensor:
    """Encode a tensor of a reference."""
    return types_pb2.ReferenceTensor(
        name=meta.name, dtype=dtype_to_proto(meta.dtype), dims=meta.shape
    )


def reference_tensor_from_proto(tensor: types_pb2.ReferenceTensor) -> TensorMeta:
    """Decode a tensor of a reference.

    Raises:
        InvalidManifestError: It cannot be right.
    """
    dtype = _DTYPES.get(tensor.dtype)
    if dtype is None:
        raise InvalidManifestError(f"tensor {tensor.name[:80]!r} has no known dtype")
    meta = TensorMeta(tensor.name, dtype, tuple(tensor.dims[: MAX_DIMS + 1]))
    check_meta(meta)
    return meta


class ReferenceDecoder:
    """Decoder of a reference that takes chunks one by one, like ``ManifestDecoder``.

    Raises (both methods):
        InvalidManifestError: A tensor that cannot be right, or the fingerprint
            is not of this content.
        CapacityError: ``MANIFEST_TOO_LARGE``.
    """

    def __init__(self) -> None:
        self._fingerprint = ""
        self._architecture = ""
        self._tensors: list[TensorMeta] = []
        self._modules: list[LinearModule] = []
        self._draft_prefixes: tuple[str, ...] = ()
        self._draft: list[TensorMeta] = []
        self._draft_bytes = 0
        self._num_chars = 0

    def add(self, chunk: types_pb2.ReferenceChunk) -> None:
        """Take the next chunk, like ``ManifestDecoder.add``."""
        _check_chunk(max(len(chunk.tensors), len(chunk.modules), len(chunk.draft_tensors)), False)
        if not self._tensors:
            if max(len(chunk.fingerprint), len(chunk.architecture)) > MAX_NAME_CHARS:
                raise InvalidManifestError("the fingerprint or the architecture is too long")
            self._fingerprint, self._architecture = chunk.fingerprint, chunk.architecture
            self._draft_prefixes = tuple(chunk.draft_prefixes)
            lengths = [0, *map(len, self._draft_prefixes)]
            if len(lengths) > MAX_DRAFT_PREFIXES + 1 or max(lengths) > MAX_NAME_CHARS:
                raise InvalidManifestError("the prefixes of drafts are too many or too long")
            if not all(self._draft_prefixes):
                raise InvalidManifestError("a prefix of drafts is empty: every tensor has it")
        check_num_tensors(max(1, len(self._tensors) + len(chunk.tensors)))
        self._tensors += map(self._tensor, chunk.tensors)
        self._draft += map(self._tensor, chunk.draft_tensors)
        self._draft_bytes += sum(len(tensor.name.encode()) for tensor in chunk.draft_tensors)
        if why := why_too_large(len(self._draft), self._draft_bytes):
            raise InvalidManifestError(f"a draft {why}")
        check_num_tensors(max(1, len(self._modules) + len(chunk.modules)))
        self._modules += map(self._module, chunk.modules)

    def _tensor(self, given: types_pb2.ReferenceTensor) -> TensorMeta:
        self._num_chars += len(given.name)
        check_names(self._num_chars)
        return reference_tensor_from_proto(given)

    def _module(self, given: types_pb2.ReferenceModule) -> LinearModule:
        if len(given.other_names) > _MAX_OTHER_NAMES or len(given.dims) != 2:
            raise InvalidManifestError(
                f"module {given.name[:80]!r} has {len(given.other_names)} other names and "
                f"{len(given.dims)} dims; at most {_MAX_OTHER_NAMES} and exactly 2 are taken"
            )
        module = LinearModule(given.name, tuple(given.dims), tuple(given.other_names))
        for name in module.names:
            check_meta(TensorMeta(name, DataType.UINT8, module.shape))
            self._num_chars += len(name)
        check_names(self._num_chars)
        return module

    def finish(self) -> Reference:
        """Return the reference, once the stream has ended; O(tensors)."""
        check_metas([*self._tensors, *self._draft])
        reference = Reference(
            self._architecture,
            tuple(self._tensors),
            tuple(self._modules),
            self._draft_prefixes,
            tuple(self._draft),
        )
        if reference.fingerprint != self._fingerprint:
            raise InvalidManifestError("the fingerprint of the reference is not of this content")
        return reference


def reference_from_chunks(chunks: Iterable[types_pb2.ReferenceChunk]) -> Reference:
    """Read a whole stream; see ``ReferenceDecoder`` for what is refused."""
    decoder = ReferenceDecoder()
    for chunk in chunks:
        decoder.add(chunk)
    return decoder.finish()
