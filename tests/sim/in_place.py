"""A replica's loading in place: a model of ``rollout_side.memory.handoff`` and what drives it.

The first bucket that is loaded makes the weights mixed; only a base that is committed
makes them whole again. Told to load, a replica pauses generation.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.sim.clock import Future
from weft_rl.contract.errors import NotReadyError, TransferAbortedError
from weft_rl.coordinator.decisions.state import effects

if TYPE_CHECKING:
    from tests.sim.replica import SimReplica

#: Buckets that are received before the first must be loaded.
AHEAD = 2


class InPlace:
    """At most one transfer at a time is loaded."""

    def __init__(self, replica: SimReplica) -> None:
        self._replica = replica
        self._transfer_id = ""
        self._version = ""
        self._num_verified = 0
        self._opened = Future()

    @property
    def loading(self) -> bool:
        """Whether one is loaded now."""
        return bool(self._transfer_id) and self._opened.done

    def prepare(self, transfer_id: str) -> bool:
        """A receiver is ready; whether it resumes with what has come of the transfer. What
        has come of another one is gone."""
        if transfer_id == self._transfer_id:
            return True
        self._end()
        self._transfer_id, self._num_verified = transfer_id, 0
        self._opened = Future()
        return False

    def order(self, order: effects.CallLoad) -> None:
        """Generation is paused, and what has come is loaded."""
        if order.transfer_id != self._transfer_id:
            raise NotReadyError(f"{order.transfer_id} was not prepared here", reason="NOT_STAGED")
        if not self._opened.done:
            self._replica.undo.clear()
            self._version = str(order.version)
            self._opened.set()
            self._touch()

    def opened(self, transfer_id: str) -> Future:
        """Done once a transfer's buckets are loaded as they come; fails if they never are."""
        if transfer_id != self._transfer_id:
            gone = Future()
            gone.set(error=TransferAbortedError("it is not loaded any more"))
            return gone
        return self._opened

    def verified(self, transfer_id: str, num_buckets: int) -> None:
        """So many are there."""
        if transfer_id == self._transfer_id:
            self._num_verified = num_buckets
            self._touch()

    def discard(self, transfer_id: str) -> None:
        """What was loaded of it stays where it is."""
        if transfer_id == self._transfer_id:
            self._end()

    def _end(self) -> None:
        self._transfer_id = ""
        self._opened.set(error=TransferAbortedError("it is not loaded any more"))

    def _touch(self) -> None:
        if self._opened.done and self._num_verified:
            self._replica.world.trace(self._replica.name, f"loads {self._version} in place")
            self._replica.store.bases = []  # there is nothing to read back
            self._replica.dirty_reason = f"{self._version} is being loaded in place"
