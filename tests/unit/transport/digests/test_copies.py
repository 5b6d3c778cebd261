"""What is copied and digested in one reading on the host: the copy, and its digests."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.transport.digests.reference import ROW
from weft_rl.transport.digests import copies as module
from weft_rl.transport.digests.copies import PIECE_BYTES, copy_digesting, pack_digesting
from weft_rl.transport.digests.wsum64 import Part, part_digests

#: Bytes of parts: of a block, within a piece, of some pieces and a rest.
SIZES = st.sampled_from([32, 4096, 8 * ROW, PIECE_BYTES, PIECE_BYTES + 32, 5 * 2**19 + 8 * ROW])


def random_bytes(count: int) -> torch.Tensor:
    return torch.randint(0, 256, (count,), generator=torch.Generator().manual_seed(count)).byte()


def parts_of(sizes: list[int], first_byte: int) -> list[Part]:
    ends = np.cumsum([0, *sizes]).tolist()
    return [Part(at, size, first_byte) for at, size in zip(ends[:-1], sizes, strict=True)]


@settings(deadline=None, max_examples=40)
@given(
    st.lists(SIZES, min_size=1, max_size=6),
    st.sampled_from([0, 32, 8 * ROW, 10 * ROW]),
    st.integers(1, 9),
)
def test_a_payload_is_copied_whole_and_its_copy_digested(
    sizes: list[int], first: int, num_threads: int
) -> None:
    parts = parts_of(sizes, first)
    payload = random_bytes(sum(sizes))
    target = torch.zeros_like(payload)
    assert copy_digesting(payload, parts, target, num_threads) == part_digests(payload, parts)
    assert torch.equal(target, payload)


def test_what_is_digested_is_the_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever sent the bytes may write to them meanwhile."""
    payload = random_bytes(4 * PIECE_BYTES)
    parts, target = [Part(0, len(payload))], torch.zeros_like(payload)
    copyto = np.copyto

    def then_changed(into: np.ndarray, source: np.ndarray) -> None:
        copyto(into, source)
        source[:] = 7

    monkeypatch.setattr(module.np, "copyto", then_changed)
    found = copy_digesting(payload, parts, target)
    assert found == part_digests(target, parts)
    assert found != part_digests(payload, parts)


@settings(deadline=None, max_examples=40)
@given(
    st.lists(st.tuples(SIZES, st.sampled_from([0, 4, 8, 28])), min_size=1, max_size=6),
    st.sampled_from([0, 32, 8 * ROW]),
)
def test_tensors_are_packed_at_their_places_and_digested(
    tensors: list[tuple[int, int]], first: int
) -> None:
    """A run's first block may begin before the run, its last end behind it: zeros."""
    sizes = [size + 32 for size, _ in tensors]
    parts = parts_of(sizes, first)
    payload = torch.zeros(sum(sizes), dtype=torch.uint8)
    views = [
        payload[part.at + skipped : part.at + size].view(torch.float32)
        for part, (size, skipped) in zip(parts, tensors, strict=True)
    ]
    sources = [random_bytes(view.nbytes).view(torch.float32) for view in views]
    digests = pack_digesting(sources, views, payload, parts)
    assert digests == part_digests(payload, parts)
    for view, source in zip(views, sources, strict=True):
        assert torch.equal(view.view(torch.uint8), source.view(torch.uint8))


@pytest.mark.parametrize("shape", [(), (3, 5), (700, 400)])
def test_a_parameter_of_any_shape_is_packed(shape: tuple[int, ...]) -> None:
    tensor = torch.nn.Parameter(torch.rand(shape))
    num_bytes = -(-tensor.nbytes // 32) * 32
    payload, parts = torch.zeros(num_bytes, dtype=torch.uint8), [Part(0, num_bytes)]
    view = payload[: tensor.nbytes].view(torch.float32).view(shape)
    assert pack_digesting([tensor], [view], payload, parts) == part_digests(payload, parts)
    assert torch.equal(view, tensor)


def test_what_does_not_lie_in_a_row_is_left_to_others() -> None:
    payload = torch.zeros(64, dtype=torch.uint8)
    view = payload.view(torch.float32).view(4, 4)
    assert pack_digesting([torch.rand(4, 4).T], [view], payload, [Part(0, 64)]) is None
    assert not payload.any()
