"""What becomes of a prompt whose request failed: decisions alone."""

from __future__ import annotations

import enum

from weft_rl.contract.errors import (
    CapacityError,
    InvalidRequestError,
    NotAllowedError,
    NotFoundError,
    PeerUnavailableError,
    UnsupportedError,
    VersionChangedError,
    WeftError,
)


class Next(enum.Enum):
    """What is done next."""

    END = "end"
    """It fails."""
    ASK_OTHERS = "ask others"
    """This replica will never have it; another one may."""
    WAIT = "wait"
    """The replica is well; it is asked, or another one, a moment later."""
    AGAIN = "again"
    """The replica is well, and ended what ran: it starts again, wherever there is room."""
    LEAVE = "leave"
    """It starts again elsewhere; the replica is left alone for a while."""
    RESTART = "restart"
    """The same, and the prompt may be what the replica failed over: that is counted."""


_FINAL = (
    InvalidRequestError,
    NotAllowedError,
    UnsupportedError,
)


def after(error: WeftError, *, strict: bool, has_begun: bool, was_failing: bool) -> Next:
    """What follows from a failed request.

    Args:
        strict: Whether it was to end when the base changes.
        has_begun: Whether the replica had begun to answer.
        was_failing: Whether its last request had failed, too.
    """
    if isinstance(error, _FINAL):
        return Next.END
    if isinstance(error, VersionChangedError):
        return Next.END if strict else Next.AGAIN
    if isinstance(error, NotFoundError):
        return Next.ASK_OTHERS
    if error.reason == "VERSION_AHEAD":
        return Next.WAIT
    if error.reason == "REFUSING" or isinstance(error, CapacityError):
        return Next.LEAVE
    if isinstance(error, PeerUnavailableError) and was_failing and not has_begun:
        return Next.LEAVE  # nobody was there to fail over it
    return Next.RESTART
