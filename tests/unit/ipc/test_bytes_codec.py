"""Codecs derived from dataclasses: what they keep, what they cut, and what they refuse."""

from __future__ import annotations

import contextlib
import struct
from dataclasses import dataclass
from typing import Annotated, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft_rl.ipc.bytes_codec import U32, bytes_codec


@dataclass(frozen=True)
class Point:
    x: U32
    name: str = ""


@dataclass(frozen=True)
class Line:
    points: tuple[Point, ...]


@dataclass(frozen=True, kw_only=True)
class Everything:
    value: int
    content: Annotated[bytes, 8]
    end: Annotated[bytes, "4s"]
    text: Annotated[str, 8]
    is_true: bool
    seconds: float
    lines: Annotated[tuple[Line | Point, ...], 3]
    numbers: Annotated[tuple[U32, ...], 4]
    last: Point | None


CODEC = bytes_codec(Everything)
VALUES = st.builds(
    Everything,
    value=st.integers(0, 2**64 - 1),
    content=st.binary(max_size=8),
    end=st.binary(min_size=4, max_size=4),
    text=st.text(st.characters(max_codepoint=127), max_size=8),
    is_true=st.booleans(),
    seconds=st.floats(allow_nan=False),
    lines=st.lists(
        st.one_of(
            st.builds(Point, st.integers(0, 2**32 - 1), st.text(max_size=9)),
            st.builds(Line, st.lists(st.builds(Point, st.just(7))).map(tuple)),
        ),
        max_size=3,
    ).map(tuple),
    numbers=st.lists(st.integers(0, 2**32 - 1), max_size=4).map(tuple),
    last=st.none() | st.builds(Point, st.just(1)),
)
ONE = Everything(
    value=1, content=b"c", end=b"endx", text="t", is_true=True, seconds=0.5,
    lines=(Line((Point(1, "a"),)), Point(2)), numbers=(3, 4), last=Point(5),
)  # fmt: skip


@given(value=VALUES)
def test_a_value_comes_as_it_was(value: Everything) -> None:
    assert CODEC.unpack(CODEC.pack(value)) == value


def test_bytes_that_end_early_or_go_on_are_refused() -> None:
    packed = CODEC.pack(ONE)
    for odd in (*(packed[:end] for end in range(len(packed))), packed + b"\0"):
        with pytest.raises((ValueError, struct.error)):
            CODEC.unpack(odd)


@given(content=st.binary(max_size=200))
def test_made_up_bytes_are_a_value_or_a_typed_error(content: bytes) -> None:
    with contextlib.suppress(ValueError, struct.error):
        CODEC.unpack(content)


@given(at=st.integers(0, len(CODEC.pack(ONE)) - 1), byte=st.integers(0, 255))
def test_a_byte_that_has_changed_is_another_value_or_a_typed_error(at: int, byte: int) -> None:
    packed = bytearray(CODEC.pack(ONE))
    was, packed[at] = packed[at], byte
    with contextlib.suppress(ValueError, struct.error):
        # Any byte that is not 0 is true.
        assert CODEC.unpack(bytes(packed)) != ONE or was == byte or at == 16


@dataclass(frozen=True)
class Long:
    text: Annotated[str, 4] = ""
    content: Annotated[bytes, 4] = b""
    numbers: Annotated[tuple[int, ...], 2] = ()
    points: Annotated[tuple[Point, ...], 2] = ()


def test_a_text_is_cut_between_its_characters() -> None:
    assert bytes_codec(Long).unpack(bytes_codec(Long).pack(Long("ab€"))).text == "ab"


@pytest.mark.parametrize(
    "value", [Long(content=b"12345"), Long(numbers=(1, 2, 3)), Long(points=(Point(1),) * 3)]
)
def test_more_than_a_bound_is_neither_said_nor_heard(value: Long) -> None:
    @dataclass(frozen=True)
    class Unbounded:
        text: Annotated[str, 2_000]
        content: Annotated[bytes, 2_000]
        numbers: Annotated[tuple[int, ...], 100]
        points: tuple[Point, ...]

    with pytest.raises(ValueError, match=r"above|more than"):
        bytes_codec(Long).pack(value)
    head = struct.Struct("<HHHI")
    points = bytes_codec(Line).pack(Line(value.points))[4:]
    numbers = struct.pack(f"<{len(value.numbers)}Q", *value.numbers)
    said = head.pack(0, len(value.content), len(numbers), len(points))
    with pytest.raises((ValueError, struct.error)):
        bytes_codec(Long).unpack(said + value.content + numbers + points)


def test_the_largest_size_is_that_of_the_bounds() -> None:
    assert bytes_codec(Point).max_bytes == 2**32 - 1

    @dataclass(frozen=True)
    class Bounded:
        numbers: Annotated[tuple[U32, ...], 10]
        text: Annotated[str, 100]
        one: Annotated[bytes, "16s"]

    codec: Any = bytes_codec(Point)
    assert codec is bytes_codec(Point)
    bounded = Bounded((1,) * 10, "x" * 100, b"y" * 16)
    assert (
        len(bytes_codec(Bounded).pack(bounded))
        == bytes_codec(Bounded).max_bytes
        == 2 + 40 + 2 + 100 + 16
    )


def test_a_field_of_another_kind_is_found_at_once() -> None:
    @dataclass(frozen=True)
    class Odd:
        names: dict[str, int]

    with pytest.raises(TypeError, match="no bytes are known of dict"):
        bytes_codec(Odd)
