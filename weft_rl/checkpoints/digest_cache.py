"""Findings about files that were read before, kept for the next process of the same user.

A file is known by its real path, size, time of change and inode. One small JSON file for each
finding, written beside and renamed: a reader sees a whole one or none. Nothing here fails: a cache
that cannot be used is as good as an empty one.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from weft_rl.contract.checkpoint import StoredTensor

_log = logging.getLogger(__name__)

#: Changes with what is digested, or how.
_FORMAT = 2
#: Entries of a folder; the ones written longest ago go first.
MAX_ENTRIES = 512
#: A longer entry is not kept.
_MAX_ENTRY_BYTES = 32 * 2**20


@dataclass(frozen=True)
class FileState:
    """Identity of a file in one state of its content."""

    path: str
    size: int
    mtime_ns: int
    inode: int
    device: int

    @classmethod
    def of(cls, path: Path) -> FileState:
        """Return the identity of a file now; links are followed.

        Raises:
            OSError: There is none.
        """
        real = os.path.realpath(path)
        stat = os.stat(real)
        return cls(real, stat.st_size, stat.st_mtime_ns, stat.st_ino, stat.st_dev)

    def fields(self) -> tuple[str, int, int, int, int]:
        """Return the identity as plain values."""
        path = os.fsencode(self.path).hex()
        return path, self.size, self.mtime_ns, self.inode, self.device


def user_folder(name: str) -> Path | None:
    """Return a folder of the user's own, ``$XDG_CACHE_HOME/weft/NAME`` or below ``~/.cache``.

    None for a user without a home.
    """
    root = os.environ.get("XDG_CACHE_HOME", "")
    if not os.path.isabs(root):  # as its specification says
        try:
            root = str(Path.home() / ".cache")
        except RuntimeError:
            return None
    return Path(root) / "weft" / name


class CacheFolder:
    """Folder of findings by what they were found of.

    Args:
        folder: Made when something is put; None keeps nothing.
    """

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder

    def path(self, name: bytes) -> Path | None:
        """Return the file of what is kept under a name."""
        if self._folder is None:
            return None
        return self._folder / f"{hashlib.sha256(name).hexdigest()[:32]}.json"

    def get(self, name: bytes, of: Sequence[Any], *, format: int) -> Any:
        """Return what was put under a name with the same ``of`` and format; None if nothing was."""
        path = self.path(name)
        if path is None:
            return None
        try:
            entry = json.loads(path.read_bytes())
            if entry["format"] != format or entry["of"] != list(of):
                return None
            return entry["found"]
        except FileNotFoundError:
            return None
        except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
            _log.info("ignoring the cache's %s: %s", path, error)
            return None

    def put(self, name: bytes, of: Sequence[Any], found: Any, *, format: int) -> None:
        """Keep what was found, in the place of what was put under that name before.

        Args:
            of: What ``get`` must be asked for: plain values.
            found: Plain values.
        """
        path = self.path(name)
        if path is None:
            return
        text = json.dumps({"format": format, "of": of, "found": found}, separators=(",", ":"))
        if len(text) > _MAX_ENTRY_BYTES:
            return
        try:
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as file:
                file.write(text)
            os.replace(file.name, path)
            self._forget_oldest(path.parent)
        except OSError as error:
            _log.info("could not keep %s: %s", path, error)

    def _forget_oldest(self, folder: Path) -> None:
        entries = [(entry.stat().st_mtime_ns, entry.path) for entry in os.scandir(folder)]
        for _, path in sorted(entries)[:-MAX_ENTRIES]:
            with contextlib.suppress(OSError):
                os.unlink(path)


class DigestCache:
    """The digests of files that were read before, by what identifies a file.

    Args:
        folder: Made when something is put; None keeps nothing.
    """

    def __init__(self, folder: Path | None) -> None:
        self._folder = CacheFolder(folder)

    @classmethod
    def of_user(cls) -> DigestCache:
        """Return the user's own cache."""
        return cls(user_folder("checkpoints"))

    def get(self, identity: FileState) -> tuple[StoredTensor, ...] | None:
        """Return the tensors that a file held when it was put in that state; None if not known."""
        found = self._folder.get(os.fsencode(identity.path), identity.fields(), format=_FORMAT)
        if found is None:
            return None
        try:
            return tuple(
                StoredTensor(str(name), str(dtype), tuple(map(int, shape)), int(digest, 16))
                for name, dtype, shape, digest in found
            )
        except (ValueError, TypeError) as error:
            _log.info("ignoring the cached digests of %s: %s", identity.path, error)
            return None

    def put(self, identity: FileState, tensors: tuple[StoredTensor, ...]) -> None:
        """Remember the tensors that a file holds."""
        found = [(t.name, t.dtype, t.dims, f"{t.digest:016x}") for t in tensors]
        self._folder.put(os.fsencode(identity.path), identity.fields(), found, format=_FORMAT)
