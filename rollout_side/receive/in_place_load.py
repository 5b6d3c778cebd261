"""Thread that loads a base in place, from the hand-off queue that the receiving thread fills."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from rollout_side.memory.handoff import Handoff
from weft_rl.contract.errors import (
    DigestMismatchError,
    LoadFailedError,
    NotReadyError,
    TransferAbortedError,
    WeftError,
)

_log = logging.getLogger(__name__)

# A loader ends when it asks for the next bucket: as long as one may take to load.
_END_SECONDS = 20.0


class InPlaceLoad:
    """Thread that loads a hand-off's buckets on one rank; it begins at once.

    Args:
        handoff: Hand-off to load from.
        load: Called once on that thread, with the hand-off. If it has changed nothing, it raises
            what the hand-off raised, or any typed error. If weights may be mixed, it raises
            LoadFailedError with metadata ``dirty`` "true". Any other error counts as that.
    """

    def __init__(self, handoff: Handoff, load: Callable[[Handoff], None]) -> None:
        self.handoff = handoff
        self.seconds = 0.0
        """Seconds that the load took, once it has ended."""
        self._load = load
        self._changed = False
        self._thread = threading.Thread(
            target=self._run, name=f"weft-load-{handoff.version}", daemon=True
        )
        self._thread.start()

    @property
    def thread(self) -> threading.Thread:
        """Thread that loads."""
        return self._thread

    @property
    def transfer_id(self) -> str:
        """Transfer that brings the buckets."""
        return self.handoff.transfer_id

    @property
    def is_running(self) -> bool:
        """True if the thread may still touch the weights."""
        return self._thread.is_alive()

    @property
    def is_complete(self) -> bool:
        """True if all was loaded; on the receiving rank, by every rank."""
        return self.handoff.is_complete

    @property
    def is_void(self) -> bool:
        """True if the load has ended before it was given anything."""
        return self.handoff.error is not None and not self.handoff.is_begun

    def check(self) -> None:
        """Check that the load has not ended with an error.

        Raises:
            NotReadyError: The load has ended; says why.
        """
        if (error := self.handoff.error) is not None:
            raise NotReadyError(f"transfer {self.transfer_id} has ended here: {error.message}")

    def end(self, timeout_seconds: float = _END_SECONDS) -> bool:
        """End the load, unless it is complete; block until the thread has ended.

        Returns:
            Whether the weights are no longer what they were: loaded whole, or mixed.
        """
        self.handoff.fail(TransferAbortedError("loading in place was given up"))
        self._thread.join(timeout_seconds)
        return self._changed or self._thread.is_alive()

    def confirm(self, expected_digest: bytes) -> float:
        """Check that what is to be committed was loaded; return the seconds that it took.

        Raises:
            LoadFailedError: With metadata ``dirty``: other bytes, or not all, are loaded.
            NotReadyError: The load is not complete, and nothing was changed. It is ended.
        """
        if not self.is_complete:
            changed = self.end()
            what = f"{self.handoff.version} was to be committed, but was not loaded whole"
            if changed:
                raise LoadFailedError(f"{what}: the weights are mixed", metadata={"dirty": "true"})
            raise NotReadyError(what)
        digest = self.handoff.content_digest
        if digest != expected_digest:
            error = DigestMismatchError(
                f"{self.handoff.version} was loaded with digest {digest.hex()}, the commit is for "
                f"{expected_digest.hex()}"
            )
            raise LoadFailedError(error.message, metadata={"dirty": "true"}) from error
        self._thread.join(_END_SECONDS)
        return self.seconds

    def _run(self) -> None:
        handoff, began = self.handoff, time.perf_counter()
        try:
            self._load(handoff)
            self.seconds, self._changed = time.perf_counter() - began, True
            handoff.complete()
        except WeftError as error:
            self._changed |= error.metadata.get("dirty") == "true"
            self._fail(error)
        except BaseException as error:  # noqa: BLE001 (the edge of a thread)
            _log.exception("loading %s in place failed", handoff.version)
            self._changed = True
            self._fail(
                LoadFailedError(
                    f"loading {handoff.version} in place failed: {type(error).__name__}: {error}",
                    metadata={"dirty": "true"},
                )
            )

    def _fail(self, error: WeftError) -> None:
        _log.warning("%s was not loaded in place: %s", self.handoff.version, error)
        self.handoff.fail(error)
