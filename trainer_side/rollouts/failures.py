"""Next steps for a prompt whose request failed: decisions alone."""

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
    """Next step for a prompt whose request failed."""

    END = "end"
    """End of the prompt, as a failure."""
    ASK_OTHERS = "ask others"
    """Question to another replica, which may have the version; this one will never have it."""
    WAIT = "wait"
    """Another try a moment later, here or at another replica; the replica is well."""
    AGAIN = "again"
    """Restart of the prompt wherever there is room; the replica is well, and ended what ran."""
    LEAVE = "leave"
    """Restart of the prompt elsewhere; the replica is avoided for a while."""
    RESTART = "restart"
    """Restart as with ``LEAVE``, but counted: the prompt may have made the replica fail."""


_FINAL = (
    InvalidRequestError,
    NotAllowedError,
    UnsupportedError,
)


def after(error: WeftError, *, strict: bool, has_begun: bool, was_failing: bool) -> Next:
    """Return the next step after a failed request.

    Args:
        strict: True if the request was to end when the base changes.
        has_begun: True if the replica had begun to answer.
        was_failing: True if the replica's last request had failed, too.
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
