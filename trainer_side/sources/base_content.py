"""Content of a base, by the digests of its tensors: what tells one base from another."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch

from trainer_side.params.params import TensorWatcher, WholeParams
from trainer_side.sources.module_source import ModuleSource
from trainer_side.sources.source import CastRule, reading, torch_dtypes
from weft_rl.contract.checkpoint import StoredTensor
from weft_rl.contract.errors import WeftError
from weft_rl.contract.manifest import Manifest
from weft_rl.contract.tensors import DataType
from weft_rl.transport.digests.wsum64 import content_digest, digests_of


@dataclass(frozen=True)
class BaseContent:
    """Content of a base that lies whole in this process, digested when it is asked for."""

    module: torch.nn.Module
    """Base model, which knows the names of its checkpoint."""
    watcher: TensorWatcher
    """Watcher of its parameters and buffers, by its own names."""
    on_reading: Callable[[int, int], None] = lambda read_bytes, total_bytes: None
    """Function that is told before the first tensor and after each the bytes that are read, and the
    bytes in all."""

    def digests(self, dtypes: Mapping[str, DataType]) -> dict[str, StoredTensor]:
        """Digest all tensors by their checkpoint names; empty where they cannot be sent. Reads each
        once, on its own device; extra memory is that of the largest.

        Args:
            dtypes: Dtypes to cast floats to, by checkpoint name; the others stay as they are.
        """
        found: dict[str, StoredTensor] = {}
        steps = self._digests(dtypes, found)
        while True:
            try:
                with reading("the base"):
                    read = next(steps, None)
            except WeftError:  # on the meta device, of a dtype that cannot travel
                return {}
            if read is None:
                return found
            self.on_reading(*read)

    def _digests(
        self, dtypes: Mapping[str, DataType], found: dict[str, StoredTensor]
    ) -> Iterator[tuple[int, int]]:
        """Digest one tensor after the other into ``found``; yield the bytes that are read, and the
        bytes in all."""
        params = WholeParams(self.watcher.tensors, "base")
        own = ModuleSource(self.module, params, CastRule())
        rule = {meta.name: dtypes.get(meta.name, meta.dtype) for meta in own.metas}
        source = ModuleSource(self.module, params, CastRule(exceptions=rule))
        devices = {tensor.device for tensor in self.watcher.tensors.values()}
        device = devices.pop() if len(devices) == 1 else torch.device("cpu")
        read_bytes, total_bytes = 0, sum(meta.num_bytes for meta in source.metas)
        yield read_bytes, total_bytes
        for index, (meta, dtype) in enumerate(
            zip(source.metas, torch_dtypes(source.metas), strict=True)
        ):
            elements = source.elements(index)
            held = None if elements is None else elements.held(0)
            if held is None or held.dtype != dtype or not held.is_contiguous():
                held = torch.empty(meta.shape, dtype=dtype, device=device)
                source.read(index, 1, [held])
            (digest,) = digests_of([held])
            name = meta.dtype.safetensors_name
            found[meta.name] = StoredTensor(meta.name, name, meta.shape, digest)
            read_bytes += meta.num_bytes
            yield read_bytes, total_bytes
        source.end_reading()


@dataclass(frozen=True)
class PushedContent:
    """Content of a version of the base, as it was pushed."""

    manifest: Manifest
    digest: bytes
    """Result of ``content_digest`` for its tensors, in the order of the manifest."""

    @property
    def dtypes(self) -> dict[str, DataType]:
        """Dtypes that its tensors travelled in."""
        return {slot.meta.name: slot.meta.dtype for slot in self.manifest.tensors}

    def equals(self, found: Mapping[str, StoredTensor]) -> bool:
        """Return whether these tensors, cast to ``dtypes``, are all of the content."""
        metas = [slot.meta for slot in self.manifest.tensors]
        if any(
            meta.name not in found
            or found[meta.name].dims != meta.shape
            or found[meta.name].dtype != meta.dtype.safetensors_name
            for meta in metas
        ):
            return False
        return content_digest([found[meta.name].digest for meta in metas]) == self.digest
