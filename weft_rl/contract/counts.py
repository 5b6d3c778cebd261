"""Bounds of the numbers that peers tell each other: versions, tokens, epochs, generations.

A process continues above what it is told, so a number near the end of what a message can hold
would leave no room to count. What is told is followed up to ``MAX_FOLLOWED``; counting on from
there stays below ``MAX_COUNTED``, and that below the bound of ``weft.v1``. What is beyond is
refused.
"""

from __future__ import annotations

from typing import Final

from weft_rl.contract.errors import InvalidRequestError

#: Largest number that is followed on a peer's word: nobody counts so far.
MAX_FOLLOWED: Final = 2**52
#: Largest number that a coordinator tells or orders.
MAX_COUNTED: Final = 2**52 + 2**51
#: By how much a number in an order may be above what the coordinator has told in an answer, before
#: it is asked.
HEAD_ROOM: Final = 2**20


def check_followed(who: str, what: str, number: int, counted: int = 0) -> None:
    """Refuse a number that nobody can have counted to.

    Args:
        who: Peer that tells the number, for messages.
        what: Description of the number, for messages.
        number: Number that is told.
        counted: Number that this process has counted to; up to it all are taken.

    Raises:
        InvalidRequestError: It is above ``MAX_FOLLOWED``, and above ``counted``.
    """
    if number > max(MAX_FOLLOWED, counted):
        raise InvalidRequestError(
            f"{who} tells of {what} {number}, to which nobody can have counted (at most "
            f"{MAX_FOLLOWED} is followed): restart it, and look at what it was told by",
            metadata={"field": what, "number": str(number)},
        )


def check_counted(what: str, number: int) -> None:
    """Refuse a number in an order or an answer to which no coordinator can have counted.

    Raises:
        InvalidRequestError: It is above ``MAX_COUNTED``.
    """
    if number > MAX_COUNTED:
        raise InvalidRequestError(
            f"{what} {number} is of no coordinator: none counts above {MAX_COUNTED}",
            metadata={"field": what, "number": str(number)},
        )
