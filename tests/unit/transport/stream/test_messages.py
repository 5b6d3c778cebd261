"""Messages of docs/protocol.md, Streams, byte by byte."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from weft_rl.ipc.connection import PeerError
from weft_rl.transport.stream.messages import (
    MESSAGES,
    PIECE_HEAD,
    Challenge,
    Held,
    KeptBucket,
    LaneHello,
    Message,
    PieceHead,
    Proof,
    Serves,
    Wants,
)

KEY, HOP, NONCE, PROOF = b"k" * 16, b"h" * 16, b"n" * 16, b"p" * 32
BYTES: list[tuple[int, Message, bytes]] = [
    (1, LaneHello(KEY, 3, HOP, 1, NONCE), KEY + b"\3\0\0\0" + HOP + b"\1\0\0\0" + NONCE),
    (2, Challenge(NONCE, PROOF), NONCE + PROOF),
    (3, Proof(PROOF), PROOF),
    (
        4,
        Wants(5, (Held(5, b"\x81"),)),
        bytes([5, *[0] * 7, 17, 0, 0, 0, 13, 0, 0, 0, 5, *[0] * 7, 1, 0, 0, 0, 0x81]),
    ),
    (5, Serves(7), bytes([7, *[0] * 7])),
    (6, KeptBucket(9, (1, 2)), bytes([9, *[0] * 7, 8, 0, 0, 0, 1, 0, 0, 0, 2, 0, 0, 0])),
]


@pytest.mark.parametrize(("number", "message", "content"), BYTES)
def test_a_message_has_the_bytes_of_the_protocol(
    number: int, message: Message, content: bytes
) -> None:
    assert MESSAGES.encode(message) == (number, content)
    assert MESSAGES.decode(number, content) == message
    assert MESSAGES.pack_head(number) == b"WSTR" + bytes([2, 0, number, 0])
    with pytest.raises(PeerError):
        MESSAGES.decode(number, content + b"\0")


def test_the_page_has_these_messages() -> None:
    page = (Path(__file__).parents[4] / "docs/protocol.md").read_text()
    section = page[page.index("### Streams") :]
    rows = re.findall(r"^\| (\d+) \| (\w+) \|", section, re.MULTILINE)
    assert rows[: len(BYTES)] == [(str(n), type(m).__name__) for n, m, _ in BYTES]


def test_a_piece_has_a_head_of_twenty_four_bytes() -> None:
    head = bytes([1, *[0] * 7, 2, *[0] * 7, 3, 0, 0, 0, 4, 0, 0, 0])
    assert PIECE_HEAD.pack(*PieceHead(1, 2, 3, 4)) == head
