"""How this backend fails."""

from __future__ import annotations


class OneSidedError(RuntimeError):
    """A peer is gone, or is not who or what it should be; a ``SideGroup`` makes its own typed
    error of it, as it does of other libraries' RuntimeErrors."""
