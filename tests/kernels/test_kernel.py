"""The kernel that digests on GPUs, interpreted: what it says and copies, not how fast.

``make kernels`` runs these, with Triton beside all else: where that is installed, vLLM looks for
a GPU.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import nullcontext

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from weft_rl.transport.digests import kernel, wsum64
from weft_rl.transport.digests.copies import PlacedRange, copied_words, copy_words, pack_tensors
from weft_rl.transport.digests.wsum64 import Part, digests_of, part_digests, tensor_digest

pytestmark = pytest.mark.skipif(
    "TRITON_INTERPRET" not in os.environ, reason="make kernels sets TRITON_INTERPRET"
)

_CPU = torch.device("cpu")
_BLOCK = 256
#: Bytes of some rows of the digest, and a bit: programs sum sixteen at a time.
_ROWS_BYTES = 20 * 64 * 1024 + 8 * _BLOCK


@pytest.fixture(autouse=True, scope="module")
def interpreted() -> Iterator[None]:
    """On the host."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "device", lambda device: nullcontext())
        yield


def drawn(num_bytes: int, seed: int = 1) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (num_bytes,), generator=generator, dtype=torch.uint8)


def test_it_is_what_digests() -> None:
    assert kernel.works(_CPU)


def test_parts_are_weighed_at_their_places() -> None:
    parts = [Part(0, _BLOCK, 512), Part(_BLOCK, _ROWS_BYTES, 7 * _BLOCK)]
    parts.append(Part(_BLOCK + _ROWS_BYTES, _BLOCK))
    payload = drawn(_ROWS_BYTES + 2 * _BLOCK)
    words = tuple(kernel.CopiedWords(*[number // 8 for number in part[:3]]) for part in parts)
    found = kernel.sums(payload.view(torch.int64), words)
    assert [value % 2**64 for value in found.tolist()] == part_digests(payload, parts)


@settings(max_examples=15, deadline=None)
@given(st.data())
def test_slices_are_weighed_row_by_row(data: st.DataObject) -> None:
    """Beside contiguous parts, with rows of any length, over several programs."""
    parts, at = [Part(0, _BLOCK, 512)], _BLOCK
    for _ in range(data.draw(st.integers(1, 3))):
        num = data.draw(st.sampled_from([1, 3, 600])) * _BLOCK
        row = data.draw(st.sampled_from([8, 24, 4096, 40_000]))
        stride = row + 8 * data.draw(st.integers(1, 5000))
        parts.append(Part(at, num, 8 * data.draw(st.integers(0, 9000)), row, stride))
        at += num
    payload = drawn(at)
    expected = part_digests(payload, parts)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(wsum64, "has_kernels", kernel.works)
        assert part_digests(payload, parts) == expected


def test_tensors_are_digested_where_they_lie(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before and behind the first, odd ones, and one that begins within a word."""
    memory = drawn(4 * _ROWS_BYTES)
    tensors = [
        memory[_ROWS_BYTES : 3 * _ROWS_BYTES].view(torch.bfloat16).view(4, -1),
        memory[:_BLOCK].view(torch.float32),
        memory[3 * _ROWS_BYTES :][:24],
        memory[3 * _ROWS_BYTES :][2:9],
        memory[64:72].view(torch.float64).view(()),
    ]
    expected = [tensor_digest(t.reshape(-1).view(torch.uint8).clone()) for t in tensors]
    assert digests_of(tensors) == expected
    monkeypatch.setattr(wsum64, "has_kernels", kernel.works)
    assert digests_of(tensors) == expected
    assert digests_of([]) == []


@settings(max_examples=15, deadline=None)
@given(st.data())
def test_parts_are_copied_as_they_are_digested(data: st.DataObject) -> None:
    parts, places, size, at = list[Part](), list[PlacedRange](), 0, 0
    for _ in range(data.draw(st.integers(1, 4))):
        num = data.draw(st.integers(1, 40)) * _BLOCK
        first = data.draw(st.integers(0, 300)) * _BLOCK
        parts.append(Part(size, num, first))
        begin = first + 8 * data.draw(st.integers(0, num // 16))
        end = data.draw(st.sampled_from([first + num, begin, begin + 8, 2**62]))
        places.append(PlacedRange(at - first, begin, end))
        size, at = size + num, at + num + 8 * data.draw(st.integers(0, 9))
    payload, target = drawn(size, 2), drawn(at, 3)
    wanted = target.clone()
    for part, place in zip(parts, places, strict=True):
        end = min(place.end, part.first_byte + part.num_bytes)
        moved = part.at - part.first_byte
        wanted[place.at + place.begin : place.at + end] = payload[moved + place.begin : moved + end]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(wsum64, "has_kernels", kernel.works)
        found = copy_words(payload, copied_words(parts, places), target)
    assert found is not None
    assert found.wait() == part_digests(payload, parts)
    assert torch.equal(target, wanted)


def test_tensors_are_packed_as_they_are_digested(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever each lies: before the payload in memory, or behind it."""
    payload = drawn(_ROWS_BYTES + 8 * _BLOCK)
    tensors = [drawn(_ROWS_BYTES, 4), drawn(0), drawn(24, 5)]
    places = [PlacedRange(0, 0, _ROWS_BYTES), PlacedRange(0, 0, 0)]
    places.append(PlacedRange(_ROWS_BYTES + _BLOCK - 512, 512, 512 + 24))
    wanted = payload.clone()
    for tensor, place in zip(tensors, places, strict=True):
        wanted[place.at + place.begin : place.at + place.end] = tensor
    expected = [
        tensor_digest(tensor, first_byte=place.begin)
        for tensor, place in zip(tensors, places, strict=True)
    ]
    monkeypatch.setattr(wsum64, "has_kernels", kernel.works)
    found = pack_tensors(tensors, places, payload)
    assert found is not None
    assert torch.equal(payload, wanted)
    assert found.wait() == expected
