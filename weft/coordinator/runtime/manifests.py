"""Manifests and references that are known, by content; in memory and bounded."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from typing import Final

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


class ManifestCache:
    """The layouts that were used last. A transfer keeps its own alive itself."""

    def __init__(self) -> None:
        self._layouts: OrderedDict[bytes, Layout] = OrderedDict()
        self._encoded: OrderedDict[bytes, list[types_pb2.ManifestChunk]] = OrderedDict()
        self._num_tensors = 0
        self._num_chars = 0

    def put(self, manifest: Manifest) -> Layout:
        """Add a manifest and drop the least recently used beyond the bounds."""
        known = self.get(manifest.layout_digest)
        if known:
            return known
        layout = Layout.of(manifest)
        self._layouts[layout.digest] = layout
        self._count(manifest, 1)
        while len(self._layouts) > 1 and (
            len(self._layouts) > MAX_MANIFESTS
            or self._num_tensors > MAX_TENSORS_HELD
            or self._num_chars > MAX_CHARS_HELD
        ):
            _, dropped = self._layouts.popitem(last=False)
            assert dropped.manifest is not None
            self._count(dropped.manifest, -1)
        return layout

    def _count(self, manifest: Manifest, sign: int) -> None:
        self._num_tensors += sign * len(manifest.tensors)
        self._num_chars += sign * sum(len(slot.meta.name) for slot in manifest.tensors)

    def get(self, layout_digest: bytes) -> Layout | None:
        """A layout that is still known."""
        layout = self._layouts.get(layout_digest)
        if layout:
            self._layouts.move_to_end(layout_digest)
        return layout

    async def chunks(self, layout: Layout) -> list[types_pb2.ManifestChunk]:
        """A layout as it travels; encoded once for all receivers."""
        known = self._encoded.get(layout.digest)
        if known:
            self._encoded.move_to_end(layout.digest)
            return known
        assert layout.manifest is not None
        made: list[types_pb2.ManifestChunk] = []
        for chunk in manifest_to_chunks(layout.manifest):
            made.append(chunk)
            await asyncio.sleep(0)  # a large manifest must not hold the loop
        self._encoded[layout.digest] = made
        while len(self._encoded) > _MAX_ENCODED:
            self._encoded.popitem(last=False)
        return made


class ReferenceCache:
    """The base models that replicas have described."""

    def __init__(self) -> None:
        self._references: OrderedDict[str, Reference] = OrderedDict()
        self._exceptions: dict[tuple[str, DataType], dict[str, DataType]] = {}

    def put(self, reference: Reference) -> None:
        """Add a reference and drop the oldest beyond the bound."""
        self._references[reference.fingerprint] = reference
        while len(self._references) > _MAX_REFERENCES:
            self._references.popitem(last=False)
        self._exceptions.clear()

    def get(self, fingerprint: str) -> Reference | None:
        """A reference that is known."""
        return self._references.get(fingerprint)

    def dtype_exceptions(self, fingerprint: str, base_dtype: DataType) -> dict[str, DataType]:
        """Tensors of a known reference that are not of the base's element type."""
        key = (fingerprint, base_dtype)
        if key not in self._exceptions:
            reference = self._references[fingerprint]
            self._exceptions[key] = {
                meta.name: meta.dtype for meta in reference.tensors if meta.dtype != base_dtype
            }
        return self._exceptions[key]
