"""The weighted sum that accelerators verify buckets by; on a CPU it is the same."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.transport.wsum64 import MASK, ROW, by_definition
from weft.contract.errors import UnsupportedError
from weft.contract.manifest import WSUM64, XXH3_64
from weft.transport.digest import payload_digest, run_digest


def digest(words: torch.Tensor) -> int:
    return payload_digest(words.view(torch.uint8), WSUM64)


def random_words(count: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-(2**62), 2**62, (count,), generator=generator)


@pytest.mark.parametrize("count", [32, ROW, ROW + 32, 3 * ROW + 64])
def test_it_is_what_the_protos_define(count: int) -> None:
    words = random_words(count)
    assert digest(words) == by_definition([w & MASK for w in words.tolist()])


@given(st.integers(0, 2 * ROW + 31), st.integers(1, MASK))
def test_one_wrong_word_is_found(where: int, change: int) -> None:
    words = random_words(2 * ROW + 32)
    before = digest(words)
    words[where] ^= change - 2**64 if change >= 2**63 else change
    assert digest(words) != before


@given(st.integers(0, 2 * ROW + 31), st.integers(0, 2 * ROW + 31))
def test_words_that_were_exchanged_are_found(one: int, other: int) -> None:
    words = random_words(2 * ROW + 32)
    before = digest(words)
    a, b = words[one].clone(), words[other].clone()
    words[one], words[other] = b, a
    assert (digest(words) == before) == bool(a == b)


def test_rows_that_were_exchanged_are_found() -> None:
    words = random_words(4 * ROW)
    assert digest(words.view(4, ROW).flip(0).reshape(-1)) != digest(words)


def test_what_cannot_be_computed_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="use wsum64"):
        payload_digest(torch.empty(256, dtype=torch.uint8, device="meta"), XXH3_64)
    with pytest.raises(UnsupportedError, match="algorithm 9"):
        payload_digest(torch.zeros(256, dtype=torch.uint8), 9)


@given(st.lists(st.integers(0, 2 * ROW), min_size=1, max_size=5), st.integers(0, 2 * ROW))
def test_the_digests_of_runs_add_up_wherever_it_is_cut(counts: list[int], before: int) -> None:
    words = random_words(before + sum(counts))
    at, total = before, run_digest(words[:before].view(torch.uint8), 0)
    for count in counts:
        total += run_digest(words[at : at + count].view(torch.uint8), 8 * at)
        at += count
    assert total & MASK == digest(words)
