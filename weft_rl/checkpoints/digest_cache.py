"""Digests of files that were read before, kept for the next process of the same user.

A file is known by its real path, size, time of change and inode. One small JSON file each,
written beside and renamed: a reader sees a whole one or none. Nothing here fails: a cache
that cannot be used is as good as an empty one.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path

from weft_rl.contract.checkpoint import StoredTensor

_log = logging.getLogger(__name__)

#: Changes with what is digested, or how.
_FORMAT = 1
#: Files that are remembered; the ones written longest ago go first.
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


class DigestCache:
    """The digests of files that were read before, by what identifies a file.

    Args:
        folder: Made when something is put; None keeps nothing.
    """

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder

    @classmethod
    def of_user(cls) -> DigestCache:
        """Return the user's own cache: ``$XDG_CACHE_HOME/weft/checkpoints``, or below
        ``~/.cache``."""
        root = os.environ.get("XDG_CACHE_HOME", "")
        if not os.path.isabs(root):  # as its specification says
            try:
                root = str(Path.home() / ".cache")
            except RuntimeError:  # a user without a home
                return cls(None)
        return cls(Path(root) / "weft" / "checkpoints")

    def get(self, identity: FileState) -> tuple[StoredTensor, ...] | None:
        """Return the tensors that a file held when it was put in that state; None if not known."""
        if self._folder is None:
            return None
        try:
            entry = json.loads(self._file(identity).read_bytes())
            if entry["format"] != _FORMAT or entry["file"] != list(_fields(identity)):
                return None
            return tuple(
                StoredTensor(str(name), str(dtype), tuple(map(int, shape)), int(digest, 16))
                for name, dtype, shape, digest in entry["tensors"]
            )
        except FileNotFoundError:
            return None
        except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
            _log.info("ignoring the digest cache %s: %s", self._file(identity), error)
            return None

    def put(self, identity: FileState, tensors: tuple[StoredTensor, ...]) -> None:
        """Remember the tensors that a file holds."""
        if self._folder is None:
            return
        entry = {
            "format": _FORMAT,
            "file": _fields(identity),
            "tensors": [(t.name, t.dtype, t.shape, f"{t.digest:016x}") for t in tensors],
        }
        text = json.dumps(entry, separators=(",", ":"))
        if len(text) > _MAX_ENTRY_BYTES:
            return
        try:
            self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            with tempfile.NamedTemporaryFile("w", dir=self._folder, delete=False) as file:
                file.write(text)
            os.replace(file.name, self._file(identity))
            self._forget_oldest()
        except OSError as error:
            _log.info("could not keep the digests of %s: %s", identity.path, error)

    def _forget_oldest(self) -> None:
        assert self._folder is not None
        entries = [(entry.stat().st_mtime_ns, entry.path) for entry in os.scandir(self._folder)]
        for _, path in sorted(entries)[:-MAX_ENTRIES]:
            with contextlib.suppress(OSError):
                os.unlink(path)

    def _file(self, identity: FileState) -> Path:
        assert self._folder is not None
        name = hashlib.sha256(os.fsencode(identity.path)).hexdigest()[:32]
        return self._folder / f"{name}.json"


def _fields(identity: FileState) -> tuple[str, int, int, int, int]:
    path = os.fsencode(identity.path).hex()
    return path, identity.size, identity.mtime_ns, identity.inode, identity.device
