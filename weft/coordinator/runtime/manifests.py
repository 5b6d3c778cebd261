"""Manifests and references that are known, by content; in memory and bounded."""

from __future__ import annotations

import asyncio
from typing import Final

from weft.contract.lru import Lru
from weft.contract.manifest import Manifest
from weft.contract.reference import Reference
from weft.contract.tensors import DataType
from weft.coordinator.decisions.state.values import Layout
from weft.rpc.manifest_codec import manifest_to_chunks
from weft.v1 import types_pb2

MAX_MANIFESTS: Final = 64
#: About 2 GiB of Python objects at the very most, names included.
MAX_TENSORS_HELD: Final = 4_000_000
MAX_CHARS_HELD: Final = 256 * 2**20
_MAX_ENCODED: Final = 4
_MAX_REFERENCES: Final = 4


class LayoutCache:
    """The layouts that were used last. A transfer keeps its own alive itself."""

    def __init__(self) -> None:
        self._layouts: Lru[bytes, Layout] = Lru(
            MAX_MANIFESTS, lambda layout: self._count(layout, -1)
        )
        self._encoded: Lru[bytes, list[types_pb2.ManifestChunk]] = Lru(_MAX_ENCODED)
        self._num_tensors = 0
        self._num_chars = 0

    def put(self, manifest: Manifest) -> Layout:
        """Add a manifest and drop the least recently used beyond the bounds."""
        known = self.get(manifest.layout_digest)
        if known:
            return known
        layout = Layout.of(manifest)
        self._layouts.put(layout.digest, layout)
        self._count(layout, 1)
        while len(self._layouts) > 1 and (
            self._num_tensors > MAX_TENSORS_HELD or self._num_chars > MAX_CHARS_HELD
        ):
            self._layouts.drop_oldest()
        return layout

    def _count(self, layout: Layout, sign: int) -> None:
        assert layout.manifest is not None
        tensors = layout.manifest.tensors
        self._num_tensors += sign * len(tensors)
        self._num_chars += sign * sum(len(slot.meta.name) for slot in tensors)

    def get(self, layout_digest: bytes) -> Layout | None:
        """A layout that is still known."""
        return self._layouts.get(layout_digest)

    async def chunks(self, layout: Layout) -> list[types_pb2.ManifestChunk]:
        """A layout as it travels; encoded once for all receivers."""
        known = self._encoded.get(layout.digest)
        if known:
            return known
        assert layout.manifest is not None
        made: list[types_pb2.ManifestChunk] = []
        for chunk in manifest_to_chunks(layout.manifest):
            made.append(chunk)
            await asyncio.sleep(0)  # a large manifest must not block the loop
        self._encoded.put(layout.digest, made)
        return made


class ReferenceCache:
    """The base models that replicas have described."""

    def __init__(self) -> None:
        self._references: Lru[str, Reference] = Lru(_MAX_REFERENCES)
        self._exceptions: dict[tuple[str, DataType], dict[str, DataType]] = {}

    def put(self, reference: Reference) -> None:
        """Add a reference and drop the least recently used beyond the bound."""
        self._references.put(reference.fingerprint, reference)
        self._exceptions.clear()

    def get(self, fingerprint: str) -> Reference | None:
        """A reference that is known."""
        return self._references.get(fingerprint)

    def dtype_exceptions(self, fingerprint: str, base_dtype: DataType) -> dict[str, DataType]:
        """Tensors of a known reference that are not of the base's element type."""
        key = (fingerprint, base_dtype)
        if key not in self._exceptions:
            reference = self._references.get(fingerprint)
            assert reference is not None
            self._exceptions[key] = {
                meta.name: meta.dtype for meta in reference.tensors if meta.dtype != base_dtype
            }
        return self._exceptions[key]
