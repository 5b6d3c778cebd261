"""Spill directory: its complete versions, and the rules to write and remove them.

``DIR/<first 16 of the base model's fingerprint>.<format>/<policy>@<version>.<content digest>/``
is one complete version. It is written under a hidden name, synced, then renamed. So a crash leaves
no half version, and several replicas may share DIR (a network volume):

- the hidden directory is a lock: the replica that makes it writes. Others leave the version to it,
  and take it over once nothing was written for ``STALE_SECONDS``;
- the name contains the content's digest, so a complete version need not be written again;
- removing is idempotent: the directory is renamed, then deleted.
"""

from __future__ import annotations

import contextlib
import logging
import re
import secrets
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from rollout_side.engine import VersionFacts
from rollout_side.memory.versions import StagedVersion
from rollout_side.spill.files import (
    FORMAT,
    Facts,
    Link,
    read_config,
    read_facts,
    read_manifest,
    sync_directory,
    write_changes,
    write_version,
)
from rollout_side.spill.listing import SpillListing
from weft_rl.contract.errors import (
    CapacityError,
    InvalidManifestError,
    InvalidNameError,
    NotFoundError,
)
from weft_rl.contract.manifest import Manifest
from weft_rl.contract.names import BASE_POLICY, PolicyVersion
from weft_rl.rpc.codec import content_to_proto
from weft_rl.v1 import types_pb2

_log = logging.getLogger(__name__)

#: A write without progress for so long may be taken over by another replica.
STALE_SECONDS = 600.0
_NAME = re.compile(r"(?P<version>.+)\.(?P<digest>[0-9a-f]{16})")
_PARTIAL = ".partial."
_REMOVED = ".removed."
_OWNER = ".weft-owner"
# Largest number of foreign names in the log.
_MAX_NAMED = 20
# Bound of configs, index and manifest, beside the tensors.
_OVERHEAD_BYTES = 2**20


@dataclass(frozen=True, kw_only=True)
class SpillSettings:
    """Settings of a replica's spill directory; plain values, sent to workers."""

    directory: str
    capacity_bytes: int
    """Bound of all versions of the base model there, of whichever replica."""
    owner: str
    """Id of the replica: its own unfinished writes are taken over at once."""


class SpillFolder:
    """Part of a spill directory that belongs to one base model.

    Args:
        settings: Place of the directory, and how much may lie there.
        fingerprint: Fingerprint of the base model.
    """

    def __init__(self, settings: SpillSettings, fingerprint: str) -> None:
        self.path = Path(settings.directory) / f"{fingerprint[:16]}.{FORMAT}"
        self._settings = settings
        self._foreign: set[str] = set()
        self._fingerprint = fingerprint

    def open(self) -> None:
        """Make the directory, and delete half-written and half-removed versions in it.
        Called once, as the replica starts.

        Raises:
            OSError: The directory cannot be made.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        for path in self.path.glob(f"{_REMOVED}*"):
            shutil.rmtree(path, ignore_errors=True)
        for path in self.path.glob(f"{_PARTIAL}*"):
            if self._is_left_over(path):
                self.remove(path)

    def listing(self) -> SpillListing:
        """Return the versions that are there; blocks for the disk.

        Raises:
            OSError: The directory cannot be read.
        """
        versions, facts = self._versions(), dict[Path, Facts]()
        for path, version in versions.items():
            if version.policy == BASE_POLICY:
                with contextlib.suppress(OSError, InvalidManifestError):
                    facts[path] = read_facts(path)
        mine = {p: own for p, own in facts.items() if own.fingerprint == self._fingerprint}
        return SpillListing(versions, mine)

    def _versions(self) -> dict[Path, PolicyVersion]:
        found, foreign = {}, set[str]()
        for path in self.path.iterdir():
            if path.name.startswith("."):
                continue
            version = _version_of(path.name)
            if version is None:
                foreign.add(path.name)
            else:
                found[path] = version
        self._log_foreign(foreign)
        return found

    def _log_foreign(self, names: set[str]) -> None:
        """Log names that are no version, which are not read, counted or removed."""
        for name in sorted(names - self._foreign)[:_MAX_NAMED]:
            _log.warning("%s is no spilled version and is left alone", self.path / name)
        self._foreign = names

    def num_bytes(self) -> int:
        """Return the bytes of all versions; blocks for the disk.

        Raises:
            OSError: The directory cannot be read.
        """
        return sum(map(size_bytes, self._versions()))

    def digest_of(self, path: Path) -> bytes:
        """Return the content digest in the name of a version's directory; empty if there is
        none."""
        match = _NAME.fullmatch(path.name)
        return bytes.fromhex(match["digest"]) if match else b""

    def facts(self, version: PolicyVersion, content_digest: bytes) -> VersionFacts:
        """Read the facts of a version; blocks for the disk.

        Raises:
            OSError, InvalidManifestError: The version cannot be read, or is damaged.
            NotFoundError: The version is of another base model.
        """
        path = self.place_of(version, content_digest)
        manifest = self.manifest(path)
        config = read_config(path) if version.policy != BASE_POLICY else ""
        return _facts(manifest, content_digest, config)

    def place_of(self, version: PolicyVersion, content_digest: bytes) -> Path:
        """Return the path of a version with that content, whether it exists or not."""
        return self.path / f"{version}.{content_digest.hex()}"

    def manifest(self, path: Path) -> Manifest:
        """Read the layout of the version in ``path``.

        Raises:
            OSError, InvalidManifestError: The layout cannot be read, or is damaged.
            NotFoundError: The version is of another base model.
        """
        if read_facts(path).fingerprint != self._fingerprint:
            raise NotFoundError(f"{path} is of another base model")
        return read_manifest(path)

    def write(
        self,
        copy: StagedVersion,
        config_json: str,
        *,
        going_on: Callable[[], bool],
        link: Link | None = None,
    ) -> bool:
        """Write a held version, unless it is there already; blocks for the disk.

        Args:
            link: Changes that it is written as; None to write it whole.

        Returns:
            Whether it is there now; False while another replica is writing it.

        Raises:
            OSError: The disk is full or gone; the partial write is removed.
            CapacityError: The bound would be exceeded.
            TransferAbortedError: ``going_on`` returned False.
        """
        place = self.place_of(copy.version, copy.content_digest)
        if place.exists():
            return True
        self._check_room(copy, copy.manifest.total_bytes if link is None else link.num_bytes)
        partial = self.path / f"{_PARTIAL}{place.name}"
        token = f"{self._settings.owner} {secrets.token_hex(8)}"
        if not self._lock(partial, token):
            return False
        try:
            if link is None:
                write_version(partial, copy, config_json, self._fingerprint, going_on=going_on)
            else:
                write_changes(partial, copy, link, self._fingerprint, going_on=going_on)
            if _owner(partial) != token:
                return False  # this write was so slow that another replica took it over
            (partial / _OWNER).unlink()
            self._publish(partial, place)
            sync_directory(self.path)
        except BaseException:
            if _owner(partial) in (token, ""):
                self.remove(partial)
            raise
        return True

    def remove(self, path: Path) -> None:
        """Delete a directory of this folder; succeeds if it is gone."""
        gone = self.path / f"{_REMOVED}{secrets.token_hex(8)}"
        with contextlib.suppress(OSError):
            path.rename(gone)
            shutil.rmtree(gone, ignore_errors=True)

    def _publish(self, partial: Path, place: Path) -> None:
        try:
            partial.rename(place)
        except OSError:
            if not place.exists():
                raise
            self.remove(partial)  # another replica was first, with the same content

    def _lock(self, partial: Path, token: str) -> bool:
        try:
            partial.mkdir()
        except FileExistsError:
            if not self._is_left_over(partial):
                return False
            self.remove(partial)
            try:
                partial.mkdir()
            except FileExistsError:
                return False
        (partial / _OWNER).write_text(token)
        return True

    def _is_left_over(self, partial: Path) -> bool:
        """Return whether nobody writes it: it is our own, or has made no progress for long."""
        is_ours = _owner(partial).partition(" ")[0] == self._settings.owner
        return is_ours or _idle_seconds(partial) >= STALE_SECONDS

    def _check_room(self, copy: StagedVersion, num_bytes: int) -> None:
        if not self.has_room(num_bytes):
            raise CapacityError(
                f"{self.path} holds {self.num_bytes():,} of {self._settings.capacity_bytes:,} "
                f"bytes: no room for {copy.version} ({num_bytes + _OVERHEAD_BYTES:,} bytes); start "
                "the replicas with a larger --spill-gib"
            )

    def has_room(self, num_bytes: int) -> bool:
        """Return whether so many bytes of a version fit; blocks for the disk."""
        return self.num_bytes() + num_bytes + _OVERHEAD_BYTES <= self._settings.capacity_bytes


def _facts(manifest: Manifest, digest: bytes, config_json: str) -> VersionFacts:
    """Make the facts of a spilled version; ``config_json`` is empty for a base."""
    adapter = types_pb2.AdapterSpec(config_json=config_json) if config_json else None
    facts = types_pb2.VersionFacts(
        content_digest=content_to_proto(manifest, digest),
        layout_digest=manifest.layout_digest,
        adapter=adapter,
    )
    return VersionFacts(digest, facts.SerializeToString())


def _version_of(name: str) -> PolicyVersion | None:
    """Return the version in the name of its directory; None if it is none."""
    match = _NAME.fullmatch(name)
    if match is None:
        return None
    try:
        version = PolicyVersion.parse(match["version"])
    except InvalidNameError:
        return None
    return version if str(version) == match["version"] else None  # math@007 is none


def size_bytes(path: Path) -> int:
    """Return the bytes of a version's files."""
    with contextlib.suppress(OSError):  # another replica may be removing it
        return sum(file.stat().st_size for file in path.iterdir())
    return 0


def _owner(partial: Path) -> str:
    try:
        return (partial / _OWNER).read_text()
    except OSError:
        return ""


def _idle_seconds(partial: Path) -> float:
    newest = 0.0
    with contextlib.suppress(OSError):
        newest = max(path.stat().st_mtime for path in (partial, *partial.iterdir()))
    return time.time() - newest
