"""File of a catalog: created whole, locked by its inode and by its path.

The lock of the inode is one byte of the database itself, held by an open file description.
So every name of the file leads to it: its path, a symbolic link, a bind mount. SQLite never
locks that byte, since on network file systems every kind of lock is one of bytes.

Somebody may remove the file, or put another in its place. The lock of the path, a file
beside it, then keeps a second coordinator from starting there, until ``check`` finds out.

SQLite's own locks belong to the process, and end when it closes *any* descriptor of the
file. So none is opened for a file that this process has open. The descriptor that holds the
lock is closed after SQLite's connections.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from weft_rl.coordinator.runtime.catalog.errors import (
    CatalogError,
    damaged,
    gone,
    in_use,
    unwritable,
)

#: How long another coordinator may take to create the file.
_CREATE_SECONDS: Final = 10.0


#: SQLite's own are at 2**30.
_LOCKED_BYTE: Final = 2**62
#: ``struct flock``: type, whence, start, length, and no process.
_LOCK: Final = struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, _LOCKED_BYTE, 1, 0)

#: Inodes that this process has open, and the lock that guards the set.
_open_inodes: set[tuple[int, int]] = set()
_guard = threading.Lock()


class CatalogFile:
    """File of a catalog, locked until ``release``."""

    def __init__(self, path: Path, inode: tuple[int, int], descriptor: int) -> None:
        self.path = path
        """Path without symbolic links: SQLite names its other files after it."""
        self._inode = inode
        self._descriptor = descriptor
        self._path_lock = -1

    @classmethod
    def take(cls, path: str | os.PathLike[str], create: Callable[[Path], None]) -> CatalogFile:
        """Lock the file that ``path`` leads to; it is created first if there is none.

        Args:
            create: Makes a new catalog at the path that it is given; the file is moved to
                where it belongs when it is whole.

        Raises:
            CatalogError: Another coordinator has it, it has a second name, is empty, or
                cannot be made or opened.
        """
        real = Path(os.path.realpath(path))
        try:
            with _guard:
                if real.is_symlink():
                    raise unwritable(real, "its symbolic links lead in a circle")
                real.parent.mkdir(parents=True, exist_ok=True)
                path_lock = _lock_path(real)
                try:
                    if not real.exists():
                        _create(real, create)
                    taken = cls._lock(real)
                except BaseException:
                    _unlock_path(real, path_lock)
                    raise
                taken._path_lock = path_lock
                return taken
        except OSError as error:
            what = error.strerror or str(error)
            raise unwritable(real, f"{what} ({error.filename or real})") from error

    @classmethod
    def _lock(cls, real: Path) -> CatalogFile:
        known = real.stat()
        inode = known.st_dev, known.st_ino
        if not stat.S_ISREG(known.st_mode):
            raise CatalogError(f"{real} is no file")
        if inode in _open_inodes:
            raise in_use(real)
        descriptor = os.open(real, os.O_RDWR | os.O_CLOEXEC)
        try:
            _lock_byte(descriptor)
            now = os.fstat(descriptor)
            if (now.st_dev, now.st_ino) != inode:
                raise in_use(real)  # replaced since we looked
            if now.st_nlink > 1:
                raise CatalogError(
                    f"{real} has {now.st_nlink} names (hard links): SQLite keeps its journal "
                    "beside one of them, so what a crash left half-written could not be undone by "
                    "another; remove all but one (find -samefile lists them)",
                    reason="CATALOG_LINKED",
                )
            if not now.st_size:
                raise damaged(real, ["the file is empty, and no catalog ever was"])
        except BaseException as error:
            os.close(descriptor)
            if isinstance(error, BlockingIOError):
                raise in_use(real) from None
            raise
        _open_inodes.add(inode)
        return cls(real, inode, descriptor)

    def check(self) -> None:
        """Check that the catalog's path still leads to what is written.

        Raises:
            CatalogError: ``CATALOG_GONE``, or it cannot be looked at.
        """
        try:
            found = _inode_of(self.path)
        except OSError as error:
            raise unwritable(self.path, error.strerror or str(error)) from error
        if found != self._inode:
            raise gone(self.path, is_replaced=found is not None)

    def release(self) -> None:
        """Unlock the file for another coordinator; SQLite's connections must be closed."""
        with _guard:
            _unlock_path(self.path, self._path_lock)
            os.close(self._descriptor)
            _open_inodes.discard(self._inode)


def _inode_of(path: Path) -> tuple[int, int] | None:
    try:
        known = path.stat()
    except FileNotFoundError:
        return None
    return known.st_dev, known.st_ino


def _lock_beside(real: Path) -> Path:
    """Return the file whose lock takes a path."""
    return Path(f"{real}.lock")


def _lock_path(real: Path) -> int:
    """Return a descriptor that holds a path's lock."""
    beside = _lock_beside(real)
    while True:
        descriptor = os.open(beside, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            _flock(descriptor)
            if os.fstat(descriptor).st_ino == beside.stat().st_ino:
                return descriptor
        except FileNotFoundError:
            pass  # who had it has just removed it
        except BaseException as error:
            os.close(descriptor)
            if isinstance(error, BlockingIOError):
                raise in_use(real) from None
            raise
        os.close(descriptor)


def _unlock_path(real: Path, descriptor: int) -> None:
    beside = _lock_beside(real)
    if _inode_of(beside) == (os.fstat(descriptor).st_dev, os.fstat(descriptor).st_ino):
        beside.unlink()
    os.close(descriptor)


def _create(real: Path, create: Callable[[Path], None]) -> None:
    with _creating(real):
        if real.exists():
            return
        # SQLite would play it into the new file. An empty journal is what a catalog leaves.
        left = Path(f"{real}-journal")
        if left.exists() and left.stat().st_size:
            raise damaged(real, [f"the file is gone, and {left.name} beside it is there"])
        unfinished = real.with_name(f"{real.name}.new")
        for left in (unfinished, Path(f"{unfinished}-journal")):
            left.unlink(missing_ok=True)  # by one that was killed
        try:
            create(unfinished)
            unfinished.rename(real)
        except BaseException:
            unfinished.unlink(missing_ok=True)
            raise
        _sync(real.parent)


@contextmanager
def _creating(real: Path) -> Iterator[None]:
    """Keep other processes from creating the file meanwhile, by a lock file removed afterwards."""
    path = Path(f"{real}.creating")
    give_up_at = time.monotonic() + _CREATE_SECONDS
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            _flock(descriptor)
            if os.fstat(descriptor).st_ino == path.stat().st_ino:
                break
        except (BlockingIOError, FileNotFoundError):
            pass  # somebody else's turn, or it is just over
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)
        if time.monotonic() > give_up_at:
            raise in_use(real)
        time.sleep(0.02)
    try:
        yield
    finally:
        path.unlink(missing_ok=True)
        os.close(descriptor)


def _sync(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _lock_byte(descriptor: int) -> None:
    """Lock one byte of the catalog for an open file description."""
    try:
        fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, _LOCK)
    except OSError as error:
        if error.errno == errno.EACCES:
            raise BlockingIOError from None
        if error.errno != errno.EINVAL:
            raise
        _flock(descriptor)  # a kernel without such locks


def _flock(descriptor: int) -> None:
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
