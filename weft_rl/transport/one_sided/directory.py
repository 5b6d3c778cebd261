"""The directory of the Unix sockets by which members on one host find each other.

Only its owner may enter it. Both ends must mean the same one: containers must share it. It should
be Weft's alone; where it is not, nothing else in it is touched.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import socket
import stat
import sys
import time
from itertools import islice
from pathlib import Path
from typing import Final

from weft_rl.ipc.connection import close_in_children, connect_unix
from weft_rl.transport.one_sided.messages import OneSidedError

#: Names the directory. The default depends on nothing but the user, so that both ends agree.
DIRECTORY_VARIABLE: Final = "WEFT_ONE_SIDED_DIR"
# What a socket's path may have, by the kernel; and its name here.
_MAX_PATH_BYTES = 107
_NAME_CHARS = 32
# Before a socket that does not listen yet.
_STARTING: Final = "."
# What is removed: sockets of processes that died, so named, so old, and so many at a time. Of
# what is younger one need not ask: few die in their first minute.
_OWN_NAME: Final = re.compile(r"\.?[0-9a-f]{32}")
_SWEPT_SECONDS: Final = 60.0
_MAX_SWEPT: Final = 256


def directory() -> Path:
    """Return the directory, which is made if it is missing, and which nobody else may enter.

    Raises:
        OneSidedError: It cannot be so; says why.
    """
    path = named_directory()
    try:
        path.mkdir(mode=0o700, exist_ok=True)
        check_directory(path)
    except OSError as error:
        raise OneSidedError(f"{path} cannot be used: {error}") from error
    return path


def named_directory() -> Path:
    """Return the path where the directory is, or would be made.

    Raises:
        OneSidedError: It can be nowhere, or not there; says why.
    """
    if sys.platform != "linux":
        raise OneSidedError("memory files are Linux's")
    given = os.environ.get(DIRECTORY_VARIABLE)
    path = Path(given or f"/tmp/weft-{os.geteuid()}")
    if not path.is_absolute():
        raise OneSidedError(f"{DIRECTORY_VARIABLE}={path} is no absolute path")
    if len(os.fsencode(path)) + 2 + _NAME_CHARS > _MAX_PATH_BYTES:
        raise OneSidedError(f"{path} is too long a path for the sockets in it")
    return path


def check_directory(path: Path) -> None:
    """Refuse a directory that others may enter.

    Raises:
        OneSidedError: It is no directory of this user's alone.
        OSError: It is not there.
    """
    status = path.lstat()
    if not stat.S_ISDIR(status.st_mode):
        raise OneSidedError(f"{path} is no directory")
    if status.st_uid != os.geteuid() or status.st_mode & 0o077:
        raise OneSidedError(
            f"{path} must be this user's (uid {os.geteuid()}) with mode 0700: it is "
            f"{status.st_uid}'s with mode {stat.S_IMODE(status.st_mode):04o}"
        )


def why_unavailable() -> str:
    """Return why this process cannot take part; empty if it can."""
    try:
        directory()
    except OneSidedError as error:
        return str(error)
    return ""


def listen(backlog: int = socket.SOMAXCONN) -> tuple[socket.socket, str]:
    """Return a socket that listens under a fresh name in the directory, and that name; its owner
    unlinks it.

    The name is random, and not the group's: who needs it is told it, a path has room for 107 bytes,
    and who answers trials has no group.

    Raises:
        OneSidedError: There is no such directory, or no socket in it.
    """
    folder = directory()
    _sweep(folder)
    name = secrets.token_hex(_NAME_CHARS // 2)
    starting = folder / f"{_STARTING}{name}"
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        close_in_children(listener)
        listener.bind(os.fspath(starting))
        listener.listen(backlog)
        starting.rename(folder / name)
    except BaseException as error:  # an interrupt, too, leaves no socket behind
        listener.close()
        starting.unlink(missing_ok=True)
        (folder / name).unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise OneSidedError(f"no socket can be made in {folder}: {error}") from error
        raise
    return listener, name


def connect(name: str, timeout_seconds: float) -> socket.socket:
    """Connect to the process that listens under ``name``; blocks while it accepts no connection.

    Raises:
        OneSidedError: Nobody listens, in the directory that this process knows; or not in time.
    """
    folder = directory()
    if len(name) != _NAME_CHARS or not name.isalnum():
        raise OneSidedError(f"{name[:40]!r} is no socket's name")
    try:
        return connect_unix(os.fspath(folder / name), socket.SOCK_SEQPACKET, timeout_seconds)
    except BlockingIOError as error:
        raise OneSidedError(
            f"the peer has not accepted a connection for {timeout_seconds:.1f} s: its backlog is "
            "full"
        ) from error
    except OSError as error:
        raise OneSidedError(f"the peer has no socket in {folder}: {error.strerror}") from error


def unlink(name: str) -> None:
    """Remove a socket of this process."""
    with contextlib.suppress(OneSidedError, OSError):
        (directory() / name).unlink()


def _sweep(folder: Path) -> None:
    """Remove sockets of Weft's that nobody listens on any more."""
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        own = (entry for entry in entries if _OWN_NAME.fullmatch(entry.name))
        for entry in [*islice(own, _MAX_SWEPT)]:
            with contextlib.suppress(OSError):  # it is gone by now
                status = entry.stat(follow_symlinks=False)
                is_old = time.time() - status.st_mtime >= _SWEPT_SECONDS
                if stat.S_ISSOCK(status.st_mode) and is_old and _is_dead(entry.path):
                    os.unlink(entry.path)


def _is_dead(path: str) -> bool:
    """Return whether no process has a socket any more.

    A connection of another type is tried first. Where somebody listens, Linux refuses it for its
    type: that occupies no place in the backlog. What is refused without regard to the type is asked
    by a connection of the right one.
    """
    for kind in (socket.SOCK_STREAM, socket.SOCK_SEQPACKET):
        with socket.socket(socket.AF_UNIX, kind) as probe:
            probe.setblocking(False)
            try:
                probe.connect(path)
            except ConnectionRefusedError:
                continue
            except OSError:
                return False
            return False
    return True
