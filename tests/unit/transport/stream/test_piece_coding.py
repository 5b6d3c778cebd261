"""Pieces are coded without loss, and nothing else is taken for one."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from weft_rl.transport.stream.piece_coding import decode_piece, encode_piece


def piece_of(tensor: torch.Tensor) -> memoryview:
    return memoryview(bytearray(tensor.view(torch.uint8).numpy().tobytes()))


def weights(num: int = 2**16, dtype: torch.dtype = torch.bfloat16) -> memoryview:
    torch.manual_seed(0)
    return piece_of((torch.randn(num) * 0.02).to(dtype))


def decoded(coded: bytes, size: int) -> bytes | None:
    memory = bytearray(b"\xcd" * size)
    return bytes(memory) if decode_piece(bytearray(coded), memoryview(memory)) else None


def test_weights_lose_a_third_of_their_bytes_and_nothing_else() -> None:
    piece = weights()
    coded = encode_piece(piece)
    assert coded is not None
    assert 0.6 * len(piece) < len(coded) < 0.7 * len(piece)
    assert decoded(coded, len(piece)) == bytes(piece)


@pytest.mark.parametrize("piece", [
    piece_of(torch.randint(0, 256, (2**16,), dtype=torch.uint8)),
    memoryview(bytearray(4097)),
], ids=["random bytes", "of an odd length"])  # fmt: skip
def test_what_does_not_get_shorter_is_not_coded(piece: memoryview) -> None:
    assert encode_piece(piece) is None


@given(st.binary(max_size=600), st.integers(0, 40))
@settings(deadline=None)
def test_any_bytes_come_out_as_they_went_in(content: bytes, zeros: int) -> None:
    piece = memoryview(bytearray(content + bytes(zeros * 40)))
    coded = encode_piece(piece)
    assert coded is None or decoded(coded, len(piece)) == bytes(piece)


@given(st.data())
@settings(deadline=None)
def test_what_was_damaged_is_refused_or_of_its_size(data: st.DataObject) -> None:
    piece = weights(512)
    coded = encode_piece(piece)
    assert coded is not None
    damaged = bytearray(coded)
    at = data.draw(st.integers(0, len(coded) - 1))
    damaged[at] ^= data.draw(st.integers(1, 255))
    found = decoded(bytes(damaged), len(piece))
    assert found is None or len(found) == len(piece)


@pytest.mark.parametrize("change", [
    lambda coded: coded[:-1], lambda coded: coded + b"\0", lambda coded: b"",
    lambda coded: coded[:512], lambda coded: coded[:512] + encode_piece(weights(4096)),
], ids=["short", "long", "empty", "lower bytes alone", "of a longer piece"])  # fmt: skip
def test_what_is_no_piece_of_that_size_is_refused(change: object) -> None:
    coded = encode_piece(weights(512))
    assert callable(change)
    assert decoded(change(coded), 1024) is None
