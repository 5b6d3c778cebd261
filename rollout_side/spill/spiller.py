"""Background writer of a worker's versions to disk, and reader of spilled ones.

There is one writer thread per replica, on the rank that holds every copy. It reads held copies in
place and reserves nothing: if a push needs the memory, it takes it, and the write ends. So spilling
never delays requests or pushes.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Collection, Sequence
from concurrent.futures import Future, InvalidStateError
from pathlib import Path

from rollout_side.engine import SpillOrder
from rollout_side.memory.store import WorkerStore
from rollout_side.memory.versions import StagedVersion, is_adapter
from rollout_side.spill.files import Link, read_into
from rollout_side.spill.folder import SpillFolder, size_bytes
from rollout_side.spill.listing import SpillListing, link_of
from rollout_side.waits import read_within
from weft_rl.contract.errors import (
    CapacityError,
    DigestMismatchError,
    InvalidManifestError,
    NotFoundError,
    NotReadyError,
    TransferAbortedError,
    TransferTimeoutError,
)
from weft_rl.contract.manifest import Manifest
from weft_rl.contract.names import BASE_POLICY, PolicyVersion
from weft_rl.contract.replica_report import HeldVersion

_log = logging.getLogger(__name__)

#: Largest number of versions to list, the newest.
MAX_LISTED = 4096
# Interval at which a directory that others may change is listed.
_LOOK_SECONDS = 10.0
# Wait before a version that could not be written is tried again.
_RETRY_SECONDS = 60.0
_STOP_SECONDS = 2.0
#: A read without progress for so long is given up.
STALL_SECONDS = 10.0
# Largest number of reads that hang; with so many nothing more is read.
_MAX_HUNG = 4


class _SpillReader:
    def __init__(
        self, transfer_id: str, version: PolicyVersion, content_digest: bytes, place: Path
    ) -> None:
        self.transfer_id, self.version = transfer_id, version
        self.content_digest, self.place = content_digest, place
        self.outcome: Future[None] = Future()
        self.thread: threading.Thread | None = None
        self._progress_at = time.monotonic()

    def note_progress(self, done: int = 0, total: int = 0) -> None:
        """Note that the disk has given something, or memory was made; see ``OnProgress``."""
        self._progress_at = time.monotonic()

    @property
    def is_stalled(self) -> bool:
        """True if the read has made no progress for too long."""
        return not self.outcome.done() and time.monotonic() - self._progress_at >= STALL_SECONDS

    def end(self, error: BaseException | None) -> bool:
        """Set the outcome; return False if it has one already."""
        try:
            self.outcome.set_exception(error) if error else self.outcome.set_result(None)
        except InvalidStateError:
            return False
        return True


class Spiller:
    """Spilled versions of one replica; thread-safe.

    Args:
        store: Store of the held copies, and of what is read.
        folder: Opened folder; its versions are listed from the start.
        base_copies: Number of base versions that stay on disk, the served one included.
    """

    def __init__(self, store: WorkerStore, folder: SpillFolder, base_copies: int) -> None:
        self._store, self._folder, self._num_copies = store, folder, base_copies
        self._changed = threading.Condition()
        self._order = SpillOrder()
        self._is_new = False
        self._retired: set[PolicyVersion] = set()
        self._closed = False
        self._refused: dict[str, float] = {}
        self._retry_at: dict[PolicyVersion, float] = {}
        self._restore: _SpillReader | None = None
        #: Threads that read a version from a disk that did not answer, by its directory's name.
        self._hung: dict[str, threading.Thread] = {}
        #: Complete copies in the directory, bases first, then newest first; bounded.
        self.copies: tuple[HeldVersion, ...] = ()
        try:
            read_within(STALL_SECONDS, str(folder.path), self._list)
        except (OSError, TransferTimeoutError) as error:
            _log.warning("the spilled versions are not known yet: %s", error)
        self._thread = threading.Thread(target=self._run, name="weft-spill", daemon=True)
        self._thread.start()

    def follow(self, order: SpillOrder) -> None:
        """Set the versions to spill from now on; returns at once."""
        with self._changed:
            self._order, self._is_new = order, True
            self._retired |= set(order.retired)
            self._changed.notify()

    def close(self) -> None:
        """End the write under way; waits some seconds at most."""
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
                self._free_devices(order)
                self._tidy(order, retired)
                self._write_all(order)
                self._list()
            except OSError as error:
                _log.warning("the spill directory cannot be used, and is tried again: %s", error)
            except Exception:  # noqa: BLE001 (the edge of a thread)
                _log.exception("spilling failed, and is tried again")

    def _free_devices(self, order: SpillOrder) -> None:
        """Bring the changes of held bases to the host: a push does not wait for that."""
        for version in order.keep:
            with contextlib.suppress(NotFoundError):
                changes = self._store.held(version).changes
                changes[:] = [each.on_host() for each in changes]

    def _tidy(self, order: SpillOrder, retired: set[PolicyVersion]) -> None:
        listing = self._folder.listing()
        links = (self._link_of(version, listing) for version in order.keep)
        for path in listing.superseded(
            retired=retired - set(order.keep),
            served_base=order.served_base if order.serves_all else 0,
            base_copies=self._num_copies,
            parents=[link.parent for link in links if link is not None],
        ):
            self._folder.remove(path)
            _log.info("removed %s", path)
        self._list()

    def _link_of(self, version: PolicyVersion, listing: SpillListing) -> Link | None:
        """Return the changes that a version can be written as; None if it is to be whole, is there,
        or is not held any more."""
        try:
            copy = self._store.held(version)
        except NotFoundError:
            return None
        if not copy.changes:
            return None
        usable = [path for path in listing.versions if self._is_usable(path, listing)]
        if self._folder.place_of(version, copy.content_digest) in usable:
            return None
        link = link_of(copy, listing, usable, size_bytes)
        return link if link and self._folder.has_room(link.num_bytes) else None

    def _write_all(self, order: SpillOrder) -> None:
        listing = self._folder.listing()
        for version in order.keep:
            if time.monotonic() < self._retry_at.get(version, 0.0):
                continue
            self._retry_at.pop(version, None)
            try:
                if self._write(version, listing):
                    listing = self._list()
            except (NotFoundError, TransferAbortedError) as error:
                _log.info("spilling %s ended: %s", version, error.message)
            except (OSError, CapacityError) as error:
                _log.warning("%s could not be spilled, and is tried again: %s", version, error)
                self._retry_at = {v: at for v, at in self._retry_at.items() if v in order.keep} | {
                    version: time.monotonic() + _RETRY_SECONDS
                }
            if self._is_new or self._closed:
                return  # a new order may have newer versions to write first

    def _write(self, version: PolicyVersion, listing: SpillListing) -> bool:
        """Write a version unless it is listed; return whether it was written now."""
        copy = self._store.held(version)
        entry = self._store.adapter(version) if is_adapter(version) else None
        place = self._folder.place_of(version, copy.content_digest)
        chain, is_there = listing.chain_of(place), place in listing.versions
        if place.name in self._refused or (is_there and not chain) or self._is_refused(chain):
            self._folder.remove(place)
        elif is_there:
            copy.changes.clear()
            return False
        began, link = time.monotonic(), self._link_of(version, listing)
        config_json = entry.config_json if entry else ""
        if not self._folder.write(
            copy, config_json, going_on=lambda: self._is_held(copy), link=link
        ):
            return False
        self._refused.pop(place.name, None)
        copy.changes.clear()
        listing = self._folder.listing()
        if not (chain := listing.chain_of(place)):  # what it follows from was removed meanwhile
            self._folder.remove(place)
            return False
        for path, held in listing.versions.items():
            if held == version and path not in chain:  # of a former catalog
                self._folder.remove(path)
        _log.info(
            "spilled %s: %s in %.3f s",
            version,
            f"{copy.manifest.total_bytes} bytes"
            if link is None
            else f"{link.num_bytes} bytes of changes of {link.parent.name}",
            time.monotonic() - began,
        )
        return True

    def _is_held(self, copy: StagedVersion) -> bool:
        """Return whether the memory still holds this version: it may be reused once dropped."""
        try:
            return not self._closed and self._store.held(copy.version) is copy
        except NotFoundError:
            return False

    def _list(self) -> SpillListing:
        """Note the copies that are there."""
        found: dict[PolicyVersion, list[bytes]] = {}
        listing = self._folder.listing()
        for path, version in listing.versions.items():
            if self._is_usable(path, listing):
                found.setdefault(version, []).append(self._folder.digest_of(path))
        ordered = sorted(found, key=lambda v: (v.policy != BASE_POLICY, -v.version, v.policy))
        self.copies = tuple(
            HeldVersion(version, digest, spilled=True)
            for version in ordered[:MAX_LISTED]
            for digest in sorted(found[version])
        )
        return listing

    def _is_usable(self, path: Path, listing: SpillListing) -> bool:
        """Return whether all that a version is read from is there, and not refused."""
        chain = listing.chain_of(path)
        hangs = any(self._hangs(each.name) for each in chain)
        return bool(chain) and not hangs and not self._is_refused(chain)

    def _is_refused(self, chain: Sequence[Path]) -> bool:
        now = time.monotonic()
        return any(now < self._refused.get(each.name, 0.0) for each in chain)

    # -- reading, on a thread for each ----------------------------------------------

    def restore(
        self,
        transfer_id: str,
        version: PolicyVersion,
        content_digest: bytes,
        layout_digest: bytes,
    ) -> None:
        """Begin to read a version and stage it as ``transfer_id``; returns at once. ``restored``
        returns the outcome of the last read."""
        if self._restore and self._restore.transfer_id == transfer_id:
            return
        place = self._folder.place_of(version, content_digest)
        restore = self._restore = _SpillReader(transfer_id, version, content_digest, place)
        hanging = [name for name in self._hung if self._hangs(name)]
        if place.name in hanging or len(hanging) >= _MAX_HUNG:
            restore.end(
                NotReadyError(
                    f"{version} cannot be restored: the disk does not answer {len(hanging)} reads "
                    f"of the spill directory, one of them of {hanging[0]}",
                    reason="NOT_RETAINED",
                )
            )
            return

        def run() -> None:
            try:
                self._read(restore, layout_digest)
                restore.end(None)
            except BaseException as error:  # noqa: BLE001 (raised by ``restored``)
                restore.end(error)

        restore.thread = threading.Thread(
            target=run, name=f"weft-restore-{transfer_id}", daemon=True
        )
        restore.thread.start()

    @property
    def ended_restore(self) -> str:
        """Transfer of the last restore once it has ended, with or without success; else empty."""
        restore = self._last_restore()
        return restore.transfer_id if restore is not None and restore.outcome.done() else ""

    def restored(self, transfer_id: str) -> bool:
        """Return whether a restore is staged; False while it is read.

        Raises:
            NotReadyError: ``NOT_RETAINED``: it is not there, cannot be read, or its read made no
                progress for ``STALL_SECONDS``.
            DigestMismatchError: The files are not the requested version, and are no longer listed.
            CapacityError: There is no memory for it.
        """
        restore = self._last_restore()
        if restore is None or restore.transfer_id != transfer_id:
            raise NotReadyError(f"{transfer_id} is not being restored", reason="NOT_RETAINED")
        if not restore.outcome.done():
            return False
        restore.outcome.result()
        return True

    def _last_restore(self) -> _SpillReader | None:
        """Return the last restore. If its disk does not answer, it fails, and its thread is left
        behind with the memory that it may still write to."""
        restore = self._restore
        if restore is None or not restore.is_stalled or restore.thread is None:
            return restore
        self._hung[restore.place.name] = restore.thread
        self.copies = tuple(copy for copy in self.copies if copy.version != restore.version)
        error = NotReadyError(
            f"{restore.version} cannot be restored: the disk of {restore.place} has not answered "
            f"for {STALL_SECONDS:g} s",
            reason="NOT_RETAINED",
        )
        if restore.end(error):
            _log.warning("%s", error.message)
        return restore

    def _hangs(self, name: str) -> bool:
        """Return whether a read of that directory was left behind and still hangs."""
        thread = self._hung.get(name)
        return thread is not None and thread.is_alive()

    def _read(self, restore: _SpillReader, layout_digest: bytes) -> None:
        place, version, began = restore.place, restore.version, time.monotonic()
        try:
            chain = self._folder.listing().chain_of(place)
            if not chain:
                self._refuse(version, float("inf"))  # the listed files are of another catalog
                raise NotFoundError(f"{place} does not exist")
            manifest = self._folder.manifest(place)
            restore.note_progress()
            if manifest.layout_digest != layout_digest:
                raise DigestMismatchError("its layout is another one")
            self._stage(restore, manifest, chain)
        except (InvalidManifestError, DigestMismatchError) as error:
            self._refuse(version, float("inf"), chain)
            raise DigestMismatchError(
                f"{place} is not the committed {version}: {error.message}"
            ) from error
        except (OSError, NotFoundError) as error:
            self._refuse(version, _RETRY_SECONDS)
            raise NotReadyError(
                f"{version} cannot be restored: {error}", reason="NOT_RETAINED"
            ) from error
        _log.info("read %s from %s in %.3f s", version, place, time.monotonic() - began)

    def _stage(self, restore: _SpillReader, manifest: Manifest, chain: Sequence[Path]) -> None:
        transfer_id, version = restore.transfer_id, restore.version
        segment = self._store.reserve(
            transfer_id,
            manifest.wire_bytes,
            adapter=is_adapter(version),
            on_progress=restore.note_progress,
        )
        try:
            found = read_into(chain, manifest, segment.data, restore.note_progress)
            if found != restore.content_digest:
                raise DigestMismatchError(
                    f"its tensors have digest {found.hex()}, not {restore.content_digest.hex()}"
                )
        except BaseException:
            self._store.release(transfer_id, segment)
            raise
        self._store.put_staged(
            StagedVersion(transfer_id, version, manifest, segment, restore.content_digest)
        )
        if restore.outcome.done():  # it was given up meanwhile, so nobody would commit it
            self._store.discard(transfer_id)

    def _refuse(self, version: PolicyVersion, seconds: float, chain: Collection[Path] = ()) -> None:
        """Stop listing a version for ``seconds``, unless it is written anew; and all that it was
        read from, of which any may be damaged."""
        until = time.monotonic() + seconds
        with contextlib.suppress(OSError):
            for path, held in self._folder.listing().versions.items():
                if held == version or path in chain:
                    self._refused[path.name] = max(until, self._refused.get(path.name, 0.0))
            self._list()
