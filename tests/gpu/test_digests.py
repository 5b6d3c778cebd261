"""Digests of what lies on a GPU are those of the same bytes on the host."""

from __future__ import annotations

import os

import pytest
import torch

from weft_rl.transport.digests import kernel
from weft_rl.transport.digests.copies import PlacedRange, copied_words, copy_words, pack_tensors
from weft_rl.transport.digests.wsum64 import Part, digests_of, part_digests, tensor_digest

DRY = "WEFT_GPU_DRY_RUN" in os.environ  # the same on the CPU: for writing this file
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available() and not DRY, reason="needs an NVIDIA GPU"),
]

MIB = 2**20


def test_a_kernel_of_our_own_is_what_digests() -> None:
    """Without it a push is several times as slow, and right."""
    assert DRY or kernel.works(torch.device("cuda"))


def test_parts_are_copied_as_they_are_digested() -> None:
    if DRY:
        pytest.skip("needs the kernel")
    parts = [Part(0, 256 * 70, 512), Part(256 * 70, 33 * MIB, 12 * MIB + 256), Part(40 * MIB, 256)]
    places = [
        PlacedRange(8 * MIB, 520, 512 + 256 * 70 - 16),
        PlacedRange(16 * MIB, 0, 2**62),
        PlacedRange(64, 8, 16),
    ]
    payload = torch.randint(0, 256, (41 * MIB,), dtype=torch.uint8, device="cuda")
    target = torch.full((64 * MIB,), 7, dtype=torch.uint8, device="cuda")
    wanted = target.cpu()
    for part, place in zip(parts, places, strict=True):
        first, end = max(part.first_byte, place.begin), part.first_byte + part.num_bytes
        end = min(end, place.end)
        moved = part.at - part.first_byte
        own = payload[moved + first : moved + end].cpu()
        wanted[place.at + first : place.at + end] = own
    copied = copy_words(payload, copied_words(parts, places), target)
    assert copied is not None
    assert copied.wait() == part_digests(payload.cpu(), parts)
    assert torch.equal(target.cpu(), wanted)
    odd = [place._replace(begin=place.begin + 1) for place in places]
    assert copy_words(payload, copied_words(parts, odd), target) is None
    assert torch.equal(target.cpu(), wanted)


def test_tensors_are_packed_as_they_are_digested() -> None:
    if DRY:
        pytest.skip("needs the kernel")
    source = torch.randint(0, 256, (48 * MIB,), dtype=torch.uint8, device="cuda")
    # Wherever a tensor lies, and whichever of its elements this is.
    tensors = [source[8 : 8 + 33 * MIB], source[:0], source[34 * MIB + 24 : 34 * MIB + 24 + 4096]]
    places = [PlacedRange(-512, 512, 512 + 33 * MIB), PlacedRange(0, 0, 0)]
    places.append(PlacedRange(40 * MIB - 12 * MIB, 12 * MIB + 264, 12 * MIB + 264 + 4096))
    payload = torch.zeros(41 * MIB, dtype=torch.uint8, device="cuda")
    packed = pack_tensors(tensors, places, payload)
    assert packed is not None
    digests = packed.wait()
    wanted = torch.zeros(41 * MIB, dtype=torch.uint8)
    for tensor, place, digest_ in zip(tensors, places, digests, strict=True):
        wanted[place.at + place.begin : place.at + place.end] = tensor.cpu()
        # At a place within a block, the digest is that of a block that begins with zeros.
        begin = place.begin // 256 * 256
        content = torch.zeros(place.begin - begin + tensor.numel(), dtype=torch.uint8)
        content[place.begin - begin :] = tensor.cpu()
        assert digest_ == tensor_digest(content, first_byte=begin)
    assert torch.equal(payload.cpu(), wanted)
    odd = [place._replace(at=place.at + 4) for place in places]
    assert pack_tensors(tensors, odd, payload) is None
    assert pack_tensors([source[1:9]], [PlacedRange(0, 0, 8)], payload) is None
    assert pack_tensors([source[:8].cpu()], [PlacedRange(0, 0, 8)], payload) is None
    assert torch.equal(payload.cpu(), wanted)


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
    assert part_digests(there, parts) == on_host
    for part in parts[:3] + parts[300:302]:
        own = there[part.at : part.at + part.num_bytes - 3]
        here = payload[part.at : part.at + part.num_bytes - 3]
        expected = tensor_digest(here, first_byte=part.first_byte)
        assert tensor_digest(own, first_byte=part.first_byte) == expected
    monkeypatch.setattr(kernel, "works", lambda device: False)  # as without a C compiler
    assert part_digests(there, parts) == on_host
    assert tensor_digest(there[:4096]) == tensor_digest(payload[:4096])
    assert digests_of([there[:512], there[1:4096]]) == digests_of([payload[:512], payload[1:4096]])
    assert copy_words(there, copied_words(parts[:2], [PlacedRange(0, 0, 8)] * 2), there) is None
