"""A saved model as it would arrive from a trainer, without a network."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file

from tests.doubles.packing import SourcePacker
from weft_rl.contract.errors import PeerUnavailableError
from weft_rl.contract.manifest import plan_buckets
from weft_rl.contract.names import PolicyVersion
from weft_rl.contract.tensors import DataType, TensorMeta
from weft_rl.transport.digests.wsum64 import content_digest
from weft_rl.transport.wire.buckets import in_manifest_order

#: Some tensors share a bucket, and the tensors of some layers lie in several.
_BUCKET_BYTES = 96 * 2**10


class FromFile:
    """An ``Arriving``: a file as a trainer packs it, through memory of one bucket."""

    def __init__(self, version: PolicyVersion, file: Path, fail_at: int = -1) -> None:
        self.version = version
        self._tensors = load_file(file)
        self.manifest = plan_buckets(
            [
                TensorMeta(n, DataType[str(t.dtype).removeprefix("torch.").upper()], tuple(t.shape))
                for n, t in self._tensors.items()
            ],
            capacity_bytes=_BUCKET_BYTES,
        )
        self.bucket_digests: list[list[int]] = []
        self._fail_at = fail_at

    def read(self, first: int, count: int, views: Sequence[torch.Tensor] | None) -> None:
        """As the packer's source."""
        tensors = list(self._tensors.values())[first : first + count]
        for view, tensor in zip(views or (), tensors, strict=True):
            view.copy_(tensor)

    def buckets(self) -> Iterator[tuple[int, torch.Tensor]]:
        """Each comes where the last one lay, after garbage."""
        packer = SourcePacker(self, self.manifest)
        memory = torch.empty(max(b.wire_bytes for b in self.manifest.buckets), dtype=torch.uint8)
        for index in range(len(self.manifest.buckets)):
            if index == self._fail_at:
                raise PeerUnavailableError("the trainer of the test has gone")
            digests = list(packer.pack(index).digests)
            wire = packer.wire(index)
            memory.fill_(0x7F)
            memory[: len(wire)].copy_(wire)
            self.bucket_digests.append(digests)
            yield index, memory[: len(wire)]
        memory.fill_(0x7F)

    def report_progress(self) -> None:
        """Report to nobody; see ``Handoff.report_progress``."""

    def buckets_of(self, part: str) -> list[int]:
        """Where the tensors lie whose names have this part."""
        return sorted({s.bucket for s in self.manifest.tensors if part in s.meta.name})


def arriving_digest(file: Path) -> bytes:
    """Content digest of a file that has arrived whole."""
    arriving = FromFile(PolicyVersion("base", 1), file)
    for _ in arriving.buckets():
        pass
    return content_digest(in_manifest_order(arriving.manifest, arriving.bucket_digests))
