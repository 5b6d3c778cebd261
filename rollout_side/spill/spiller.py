"""Spilling: what a worker holds, written to disk behind its back; and read again.

One writer thread a replica, on the rank that holds every copy. It reads held copies
where they lie, without a claim on them: a push that needs the memory takes it, and
the write is given up. So spilling never delays or refuses anything that serves.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from concurrent.futures import Future
from pathlib import Path

from rollout_side.engine import SpillOrder
from rollout_side.memory.store import WorkerStore
from rollout_side.memory.versions import StagedVersion, is_adapter
from rollout_side.spill.files import read_into
from rollout_side.spill.folder import SpillFolder, superseded
from weft.contract.errors import (
    CapacityError,
    DigestMismatchError,
    InvalidManifestError,
    NotFoundError,
    NotReadyError,
    TransferAbortedError,
)
from weft.contract.layout.manifest import Manifest
from weft.contract.names import BASE_POLICY, PolicyVersion

_log = logging.getLogger(__name__)

#: Versions that are told of; the newest.
MAX_LISTED = 4096
# Others may write to a shared directory, or remove from it.
_LOOK_SECONDS = 10.0
# Between two attempts at a version that the disk did not take.
_RETRY_SECONDS = 60.0
_STOP_SECONDS = 2.0


class Spiller:
    """The spilled versions of one replica; thread-safe.

    Args:
        store: Where the held copies lie, and what is read goes.
        folder: Opened; its versions are listed from the start.
        retain_base: Versions of the base that stay on disk, the served one included.
    """

    def __init__(self, store: WorkerStore, folder: SpillFolder, retain_base: int) -> None:
        self._store, self._folder, self._retain_base = store, folder, retain_base
        self._changed = threading.Condition()
        self._order = SpillOrder()
        self._is_new = False
        self._retired: set[PolicyVersion] = set()
        self._closed = False
        self._refused: dict[str, float] = {}
        self._retry_at: dict[PolicyVersion, float] = {}
        self._restore: tuple[str, Future[None]] | None = None
        self._listed: tuple[PolicyVersion, ...] = ()
        self._digests: tuple[tuple[PolicyVersion, bytes], ...] = ()
        self._list()
        self._thread = threading.Thread(target=self._run, name="weft-spill", daemon=True)
        self._thread.start()

    @property
    def listed(self) -> tuple[PolicyVersion, ...]:
        """Versions that lie there whole, bases first, then newest first; bounded."""
        return self._listed

    @property
    def digests(self) -> tuple[tuple[PolicyVersion, bytes], ...]:
        """The content digests of those; of one version there may be several."""
        return self._digests

    def follow(self, order: SpillOrder) -> None:
        """Take what is to be spilled from now on; returns at once."""
        with self._changed:
            self._order, self._is_new = order, True
            self._retired |= set(order.retired)
            self._changed.notify()

    def close(self) -> None:
        """Give up what is being written; waits some seconds at most."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join(_STOP_SECONDS)

    # -- writing, on the thread ------------------------------------------------

    def _run(self) -> None:
        while True:
            with self._changed:
                if not self._is_new and not self._closed:
                    self._changed.wait(_LOOK_SECONDS)
                if self._closed:
                    return
                order, self._is_new = self._order, False
                retired, self._retired = self._retired, set()
            try:
                self._tidy(order, retired)
                self._write_all(order)
                self._list()
            except OSError as error:
                _log.warning("the spill directory cannot be used now: %s", error)
            except Exception:  # noqa: BLE001 (the edge of a thread)
                _log.exception("spilling failed; it is tried again")

    def _tidy(self, order: SpillOrder, retired: set[PolicyVersion]) -> None:
        for path in superseded(
            self._folder.complete(),
            retired=retired - set(order.keep),
            served_base=order.served_base if order.serves_all else 0,
            retain_base=self._retain_base,
        ):
            self._folder.remove(path)
            _log.info("removed %s", path)
        self._list()

    def _write_all(self, order: SpillOrder) -> None:
        for version in order.keep:
            if time.monotonic() < self._retry_at.get(version, 0.0):
                continue
            self._retry_at.pop(version, None)
            try:
                if self._write(version):
                    self._list()
            except (NotFoundError, TransferAbortedError) as error:
                _log.info("%s is not spilled: %s", version, error.message)
            except (OSError, CapacityError) as error:
                _log.warning("%s is not spilled: %s", version, error)
                self._retry_at = {v: at for v, at in self._retry_at.items() if v in order.keep} | {
                    version: time.monotonic() + _RETRY_SECONDS
                }
            if self._is_new or self._closed:
                return  # there may be something newer to write first

    def _write(self, version: PolicyVersion) -> bool:
        """Write a version unless it is there; whether it was written now."""
        copy = self._store.held(version)
        entry = self._store.adapter(version) if is_adapter(version) else None
        place = self._folder.place_of(version, copy.content_digest)
        if place.name in self._refused:
            self._folder.remove(place)
        elif place.exists():
            return False
        began = time.monotonic()
        config_json = entry.config_json if entry else ""
        if not self._folder.write(copy, config_json, going_on=lambda: self._is_held(copy)):
            return False
        self._refused.pop(place.name, None)
        for path, held in self._folder.complete().items():
            if held == version and path != place:  # a former catalog's
                self._folder.remove(path)
        _log.info(
            "spilled %s: %d bytes in %.3f s",
            version,
            copy.manifest.total_bytes,
            time.monotonic() - began,
        )
        return True

    def _is_held(self, copy: StagedVersion) -> bool:
        """Whether the memory is still this version's: once dropped, it may be reused."""
        try:
            return not self._closed and self._store.held(copy.version) is copy
        except NotFoundError:
            return False

    def _list(self) -> None:
        now = time.monotonic()
        found: dict[PolicyVersion, list[bytes]] = {}
        for path, version in self._folder.complete().items():
            if now >= self._refused.get(path.name, 0.0):
                found.setdefault(version, []).append(self._folder.digest_of(path))
        ordered = sorted(found, key=lambda v: (v.policy != BASE_POLICY, -v.version, v.policy))
        listed = ordered[:MAX_LISTED]
        self._digests = tuple((v, digest) for v in listed for digest in sorted(found[v]))
        self._listed = tuple(listed)

    # -- reading, on a thread for each ----------------------------------------------

    def restore(
        self,
        transfer_id: str,
        version: PolicyVersion,
        content_digest: bytes,
        layout_digest: bytes,
    ) -> None:
        """Begin to read a version and stage it as ``transfer_id``; returns at once.
        The outcome of the last one is told by ``restored``."""
        if self._restore and self._restore[0] == transfer_id:
            return
        outcome: Future[None] = Future()
        self._restore = transfer_id, outcome

        def run() -> None:
            try:
                self._read(transfer_id, version, content_digest, layout_digest)
                outcome.set_result(None)
            except BaseException as error:  # noqa: BLE001 (handed to who asks)
                outcome.set_exception(error)

        threading.Thread(target=run, name=f"weft-restore-{transfer_id}", daemon=True).start()

    @property
    def ended_restore(self) -> str:
        """Transfer of the last restore, once it has ended, well or not; else empty."""
        last_id, outcome = self._restore or ("", None)
        return last_id if outcome is not None and outcome.done() else ""

    def restored(self, transfer_id: str) -> bool:
        """Whether a restore is staged; False while it is read.

        Raises:
            NotReadyError: ``NOT_RETAINED``: nothing of it is there, or it cannot be read.
            DigestMismatchError: It is not what was asked for, and no longer listed.
            CapacityError: There is no memory for it.
        """
        last_id, outcome = self._restore or ("", None)
        if outcome is None or last_id != transfer_id:
            raise NotReadyError(f"{transfer_id} is not being restored", reason="NOT_RETAINED")
        if not outcome.done():
            return False
        outcome.result()
        return True

    def _read(
        self,
        transfer_id: str,
        version: PolicyVersion,
        content_digest: bytes,
        layout_digest: bytes,
    ) -> None:
        place, began = self._folder.place_of(version, content_digest), time.monotonic()
        try:
            if not place.exists():
                self._refuse(version, float("inf"))  # what is there is of another catalog
                raise NotFoundError(f"{place} is not there")
            manifest = self._folder.manifest(place)
            if manifest.layout_digest != layout_digest:
                raise DigestMismatchError("it lies in another layout")
            self._stage(place, manifest, transfer_id, version, content_digest)
        except (InvalidManifestError, DigestMismatchError) as error:
            self._refuse(version, float("inf"))
            raise DigestMismatchError(
                f"{place} is not {version} as it was committed: {error.message}"
            ) from error
        except (OSError, NotFoundError) as error:
            self._refuse(version, _RETRY_SECONDS)
            raise NotReadyError(
                f"{version} cannot be restored: {error}", reason="NOT_RETAINED"
            ) from error
        _log.info("read %s from %s in %.3f s", version, place, time.monotonic() - began)

    def _stage(
        self,
        place: Path,
        manifest: Manifest,
        transfer_id: str,
        version: PolicyVersion,
        content_digest: bytes,
    ) -> None:
        segment = self._store.reserve(transfer_id, manifest.wire_bytes, adapter=is_adapter(version))
        try:
            found = read_into(place, manifest, segment.data)
            if found != content_digest:
                raise DigestMismatchError(
                    f"its tensors digest to {found.hex()}, not to {content_digest.hex()}"
                )
        except BaseException:
            self._store.release(transfer_id, segment)
            raise
        self._store.put_staged(
            StagedVersion(transfer_id, version, manifest, segment, content_digest)
        )

    def _refuse(self, version: PolicyVersion, seconds: float) -> None:
        """List a version no more for so long, unless it is written anew."""
        until = time.monotonic() + seconds
        with contextlib.suppress(OSError):
            for path, held in self._folder.complete().items():
                if held == version:
                    self._refused[path.name] = max(until, self._refused.get(path.name, 0.0))
            self._list()
