"""Transfers that failed to load here, which are refused from then on."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

from weft.contract.errors import LoadFailedError, NotReadyError, WeftError
from weft.contract.names import PolicyVersion

_MAX_FAILED = 64


class FailedTransfers:
    """The transfers that failed last.

    The coordinator may have undone the commit of what failed: a call that is repeated (gRPC
    does when a connection breaks) must not switch to it after all.
    """

    def __init__(self) -> None:
        self._failed: deque[str] = deque(maxlen=_MAX_FAILED)

    def check(self, transfer_id: str, version: PolicyVersion, advice: str = "") -> None:
        """Refuse what has failed.

        Raises:
            NotReadyError: It has.
        """
        if transfer_id in self._failed:
            raise NotReadyError(f"{version} failed to load here before{advice}")

    @contextmanager
    def noting_failure(self, transfer_id: str) -> Iterator[None]:
        """Note a load that fails inside the ``with``; none where the name is empty."""
        try:
            yield
        except LoadFailedError:
            if transfer_id:
                self._failed.append(transfer_id)
            raise

    @contextmanager
    def noting_refusal(self, transfer_id: str) -> Iterator[None]:
        """Note whatever fails: what was refused once is refused again, the coordinator counts
        on it."""
        try:
            yield
        except WeftError as error:
            if error.reason != "TRANSFER_UNDER_WAY" and transfer_id not in self._failed:
                self._failed.append(transfer_id)
            raise
