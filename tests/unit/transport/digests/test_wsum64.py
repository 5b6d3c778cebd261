"""The weighted sum of tensors and of their parts: all ways to it are what the definition says."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.transport.digests.reference import MASK, ROW, by_definition
from weft_rl.transport.digests import wsum64 as module
from weft_rl.transport.digests.wsum64 import Part, content_digest, part_digests, tensor_digest

BLOCK = 32
MANY_ROWS = 2**30 // 8


def random_words(count: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-(2**62), 2**62, (count,), generator=generator)


def as_bytes(words: torch.Tensor) -> torch.Tensor:
    return words.view(torch.uint8)


def weighed(words: torch.Tensor, places: list[int]) -> int:
    """Words at their places, by the definition."""
    return by_definition([w & MASK for w in words.tolist()], places)


@pytest.mark.parametrize("count", [32, ROW, ROW + 32, 3 * ROW + 64, 70 * ROW + 5])
def test_it_is_what_the_protos_define(count: int) -> None:
    words = random_words(count)
    assert tensor_digest(as_bytes(words)) == by_definition([w & MASK for w in words.tolist()])


@given(st.integers(0, 40), st.integers(0, 3 * ROW))
def test_the_last_word_is_filled_up_with_zeros(num_bytes: int, before: int) -> None:
    content = as_bytes(random_words(5))[:num_bytes]
    full = torch.zeros(40, dtype=torch.uint8)
    full[:num_bytes] = content
    words = full.view(torch.int64)
    expected = weighed(words, list(range(before, before + 5)))
    assert tensor_digest(content, first_byte=8 * before) == expected


@given(st.integers(0, 2 * ROW + 31), st.integers(1, MASK))
def test_one_wrong_word_is_found(where: int, change: int) -> None:
    words = random_words(2 * ROW + 32)
    before = tensor_digest(as_bytes(words))
    words[where] ^= change - 2**64 if change >= 2**63 else change
    assert tensor_digest(as_bytes(words)) != before


@given(st.integers(0, 2 * ROW + 31), st.integers(0, 2 * ROW + 31))
def test_words_that_were_exchanged_are_found(one: int, other: int) -> None:
    words = random_words(2 * ROW + 32)
    before = tensor_digest(as_bytes(words))
    a, b = words[one].clone(), words[other].clone()
    words[one], words[other] = b, a
    assert (tensor_digest(as_bytes(words)) == before) == bool(a == b)


def test_rows_that_were_exchanged_are_found() -> None:
    words = random_words(4 * ROW)
    flipped = words.view(4, ROW).flip(0).reshape(-1)
    assert tensor_digest(as_bytes(flipped)) != tensor_digest(as_bytes(words))


@given(st.lists(st.integers(0, 2 * ROW), min_size=1, max_size=5), st.integers(0, 2 * ROW))
def test_the_digests_of_parts_add_up_wherever_it_is_cut(counts: list[int], before: int) -> None:
    words = random_words(before + sum(counts))
    at, total = before, tensor_digest(as_bytes(words[:before]))
    for count in counts:
        total += tensor_digest(as_bytes(words[at : at + count]), first_byte=8 * at)
        at += count
    assert total & MASK == tensor_digest(as_bytes(words))


def test_a_row_whose_weights_are_in_another_table_counts_as_defined() -> None:
    """Of tensors beyond 1 GiB."""
    words, first = random_words(3 * ROW), MANY_ROWS - ROW
    expected = weighed(words, list(range(first, first + 3 * ROW)))
    assert tensor_digest(as_bytes(words), first_byte=8 * first) == expected
    assert part_digests(as_bytes(words), [Part(0, 24 * ROW, 8 * first)]) == [expected]


# -- parts of a payload, whichever way they are summed ---------------------------------------


@pytest.fixture(params=[module._BATCH_WORDS, 96], ids=["many at once", "few at once"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """How many words of a slice get their weights at a time."""
    monkeypatch.setattr(module, "_BATCH_WORDS", request.param)


def placed(words: torch.Tensor, part: Part) -> int:
    """The digest of a part, by the definition."""
    at, num, first, count, stride = (n // 8 for n in part)
    own = words[at : at + num]
    if not count:
        return weighed(own, list(range(first, first + num)))
    return weighed(own, [first + i // count * stride + i % count for i in range(num)])


@st.composite
def parts(draw: st.DrawFn) -> tuple[list[Part], int]:
    """Parts one behind the other, with gaps; and how many words they lie in."""
    found, at = [], 0
    for _ in range(draw(st.integers(1, 6))):
        at += BLOCK * draw(st.integers(0, 2))
        if draw(st.booleans()):
            num = BLOCK * draw(st.integers(1, 300))
            first = BLOCK * draw(st.sampled_from([0, 1, 127, 128, 200, 4_194_303]))
            found.append(Part(8 * at, 8 * num, 8 * first))
        else:
            unit = draw(st.sampled_from([1, 2, 8, 32]))
            count = unit * draw(st.integers(1, 40))
            stride = count + unit * draw(st.integers(1, 200))
            repeats = draw(st.integers(2, 40))
            num = -(-count * repeats // BLOCK) * BLOCK
            first = unit * draw(st.integers(0, 5000))
            found.append(Part(8 * at, 8 * num, 8 * first, 8 * count, 8 * stride))
        at += num
    return found, at


@pytest.mark.usefixtures("way")
@given(parts())
def test_parts_of_all_kinds_digest_as_defined(given_parts) -> None:
    found, num_words = given_parts
    words = random_words(num_words)
    digests = part_digests(as_bytes(words), found)
    assert digests == [placed(words, part) for part in found]


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize(
    "part",
    [
        Part(256, 8 * 3 * ROW, 8 * BLOCK),
        Part(0, 8 * 64 * 512, 0, 8 * 64, 8 * 1024),
        Part(0, 8 * 96 * 500 // 256 * 256, 8 * 160, 8 * 96, 8 * 3584),
        Part(0, 8 * 64 * 512, 8 * 2**28, 8 * 64, 8 * 1024),
        Part(256, 8 * 8 * 640, 8 * 8, 8 * 8, 8 * 64),
        Part(0, 8 * 5000 * 3 // 256 * 256 + 256, 8 * 40, 8 * 5000, 8 * 9000),
    ],
    ids=["rows", "columns", "uneven columns", "far columns", "thin columns", "long rows"],
)
def test_what_is_large_digests_as_defined(part: Part) -> None:
    words = random_words((part.at + part.num_bytes) // 8)
    assert part_digests(as_bytes(words), [part]) == [placed(words, part)]


def test_no_part_has_no_digest() -> None:
    assert part_digests(torch.zeros(256, dtype=torch.uint8), []) == []
    assert tensor_digest(torch.zeros(0, dtype=torch.uint8)) == 0


def test_a_version_is_digested_by_its_tensors_in_order() -> None:
    assert content_digest([1, 2]) != content_digest([2, 1])
    assert len(content_digest([])) == 8
