"""The loader's thread of one transfer that is loaded in place."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from rollout_side.memory.incoming import Inflow
from weft.contract.errors import (
    DigestMismatchError,
    LoadFailedError,
    NotReadyError,
    TransferAbortedError,
    WeftError,
)
from weft.transport.digest import content_digest

_log = logging.getLogger(__name__)

# A loader ends when it asks for the next bucket: as long as one may take to load.
_END_SECONDS = 20.0


class InPlaceLoad:
    """Loads an inflow's buckets on a thread of its own, from now on.

    Args:
        inflow: What to load.
        load: Called there, once, with the inflow. It raises what the inflow raised, or
            any typed error, if it has changed nothing; LoadFailedError with metadata
            ``dirty`` "true" if weights may be mixed. Any other error counts as that.
    """

    def __init__(self, inflow: Inflow, load: Callable[[Inflow], None]) -> None:
        self.inflow = inflow
        self.seconds = 0.0
        """How long it took, once it has ended."""
        self._load = load
        self._changed = False
        self._thread = threading.Thread(
            target=self._run, name=f"weft-load-{inflow.version}", daemon=True
        )
        self._thread.start()

    @property
    def thread(self) -> threading.Thread:
        """That loads."""
        return self._thread

    @property
    def transfer_id(self) -> str:
        """Whose buckets it loads."""
        return self.inflow.transfer_id

    @property
    def is_running(self) -> bool:
        """Whether it may still touch the weights."""
        return self._thread.is_alive()

    @property
    def is_complete(self) -> bool:
        """Whether all was loaded."""
        return self.inflow.is_complete

    def check(self) -> None:
        """Refuse what has come to nothing.

        Raises:
            NotReadyError: Why.
        """
        if (error := self.inflow.error) is not None:
            raise NotReadyError(f"transfer {self.transfer_id} has ended here: {error.message}")

    def end(self, timeout_seconds: float = _END_SECONDS) -> bool:
        """End it, unless it is complete; blocks until the thread has ended.

        Returns:
            Whether the weights are no longer what they were: loaded whole, or mixed.
        """
        self.inflow.fail(TransferAbortedError("loading in place was given up"))
        self._thread.join(timeout_seconds)
        return self._changed or self._thread.is_alive()

    def settle(self, expected_digest: bytes) -> float:
        """For the commit: returns how long loading took, if it is what is to be committed.

        Raises:
            LoadFailedError: With metadata ``dirty``: other bytes, or not all, are loaded.
            NotReadyError: It is not complete, and nothing was changed. It is ended.
        """
        if not self.is_complete:
            changed = self.end()
            what = f"{self.inflow.version} was to be committed, but was not loaded whole"
            if changed:
                raise LoadFailedError(f"{what}: the weights are mixed", metadata={"dirty": "true"})
            raise NotReadyError(what)
        digest = content_digest(self.inflow.digests)
        if digest != expected_digest:
            error = DigestMismatchError(
                f"{self.inflow.version} was loaded with digest {digest.hex()}, the commit is for "
                f"{expected_digest.hex()}"
            )
            raise LoadFailedError(error.message, metadata={"dirty": "true"}) from error
        self._thread.join(_END_SECONDS)
        return self.seconds

    def _run(self) -> None:
        inflow, began = self.inflow, time.perf_counter()
        try:
            self._load(inflow)
            self.seconds, self._changed = time.perf_counter() - began, True
            inflow.complete()
        except WeftError as error:
            self._changed |= error.metadata.get("dirty") == "true"
            self._fail(error)
        except BaseException as error:  # noqa: BLE001 (the edge of a thread)
            _log.exception("loading %s in place failed", inflow.version)
            self._changed = True
            self._fail(
                LoadFailedError(
                    f"loading {inflow.version} in place failed: {type(error).__name__}: {error}",
                    metadata={"dirty": "true"},
                )
            )

    def _fail(self, error: WeftError) -> None:
        _log.warning("%s was not loaded in place: %s", self.inflow.version, error)
        self.inflow.fail(error)
