"""Digests of what lies on a GPU are those of the same bytes on the host."""

from __future__ import annotations

import os

import pytest
import torch

from weft.transport import digest
from weft.transport.digest import Part, part_digests, tensor_digest

DRY = "WEFT_GPU_DRY_RUN" in os.environ  # the same on the CPU: for writing this file
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available() and not DRY, reason="needs an NVIDIA GPU"),
]

MIB = 2**20


def test_buckets_of_all_kinds_of_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    device = torch.device("cpu" if DRY else "cuda")
    parts: list[Part] = []

    def add(num_bytes: int, *rest: int) -> None:
        at = parts[-1].at + parts[-1].num_bytes if parts else 0
        parts.append(Part(at, num_bytes, *rest))

    for i in range(300):  # as an adapter's
        add(256 * (1 + i * 7 % 1500))
    for first in (0, 256, 40 * MIB + 512):  # large, begun at and within a row
        add(33 * MIB + 768, first)
    add(16 * MIB, 4096, 4096, 8192)  # columns: repeated weights
    add(MIB, 24, 40, 72)  # columns that no block fits
    add(24 * MIB, 0, 12 * MIB, 20 * MIB)  # two long rows
    size = parts[-1].at + parts[-1].num_bytes
    generator = torch.Generator().manual_seed(1)
    payload = torch.randint(0, 256, (size,), generator=generator, dtype=torch.uint8)
    there = payload.to(device)
    on_host = part_digests(payload, parts)
    if DRY:
        monkeypatch.setattr(digest, "_is_host", lambda device: False)
    assert part_digests(there, parts) == on_host
    for part in parts[:3] + parts[300:302]:
        own = there[part.at : part.at + part.num_bytes - 3]
        here = payload[part.at : part.at + part.num_bytes - 3]
        assert tensor_digest(own, first_byte=part.first_byte) == tensor_digest(
            here, first_byte=part.first_byte
        )
