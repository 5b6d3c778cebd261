"""Error of the one-sided backend."""

from __future__ import annotations


class OneSidedError(RuntimeError):
    """Failure of a peer that is gone or is not who it should be, or of memory that cannot be
    shared. A ``SideGroup`` makes its own typed error of it, as it does of other libraries'
    RuntimeErrors."""
