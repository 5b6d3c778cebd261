"""Durable catalog: all versions ever assigned, and what became of them.

SQLite with a rollback journal and ``synchronous=EXTRA``: a transaction that has returned is
in the file itself, and survives a power cut. One coordinator owns a catalog: its file is
locked as long as it is open. All of it is checked at the start, and nothing is repaired.
There is one connection, and once it is open one thread that uses it: the driver's writer.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sqlite3
import time
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import itemgetter
from pathlib import Path
from typing import Any, Final, TypeVar

from weft_rl import descriptors
from weft_rl.contract.errors import WeftError
from weft_rl.contract.names import BASE_POLICY, PolicyVersion
from weft_rl.contract.replica_report import OutOfService
from weft_rl.coordinator.decisions.state.effects import (
    Save,
    SaveAsStarted,
    SaveCheckpoint,
    SaveCommitted,
    SaveEpoch,
    SaveEvent,
    SaveGeneration,
    SaveLeaseEnded,
    SaveNumberFloor,
    SaveOutOfService,
    SavePin,
    SavePolicy,
    SavePolicyDropped,
    SavePool,
    SavePoolId,
    SaveRetired,
    SaveSleep,
    SaveVersion,
)
from weft_rl.coordinator.decisions.state.event_kinds import KEPT_WITH, MAX_KEPT
from weft_rl.coordinator.decisions.state.pool import MAX_BASE_CONTENTS, Policy
from weft_rl.coordinator.decisions.state.replica import StandingSleepOrder
from weft_rl.coordinator.decisions.state.values import (
    BoundCheckpoint,
    ContentDigest,
    VersionRecord,
    VersionState,
    base_content,
)
from weft_rl.coordinator.runtime.catalog.errors import (
    SHORTAGE,
    STRUCTURE,
    CatalogError,
    damaged,
    from_sqlite,
)
from weft_rl.coordinator.runtime.catalog.file import CatalogFile
from weft_rl.coordinator.runtime.catalog.schema import (
    APPLICATION_ID,
    SCHEMA_VERSION,
    check,
    connect,
    create,
)
from weft_rl.coordinator.runtime.catalog.tables import (
    AS_STARTED,
    CHECKPOINT,
    EVENTS,
    META,
    NO_LEASE,
    PINS,
    POLICIES,
    SLEEPS,
    VERSIONS,
    WITHDRAWN,
    Rows,
    event_from_row,
)
from weft_rl.v1 import inspect_pb2

__all__ = ["APPLICATION_ID", "SCHEMA_VERSION", "Catalog", "CatalogError", "Snapshot"]

_T = TypeVar("_T")
_log = logging.getLogger(__name__)

#: Longest that an open catalog waits for another program: who reads it keeps us from writing.
BUSY_SECONDS: Final = 60.0
#: Longest message of an event that is written.
_MAX_EVENT_CHARS: Final = 2000
#: What events of unknown kinds are kept with: another Weft wrote them, and they grow no more.
_UNKNOWN: Final = ""
_RESTARTED: Final = "the coordinator restarted while the push was under way"
# SQLite opens its journal for each transaction, and to see whether another left one; beside it the
# directory.
_NUM_SPARE: Final = 4
_WAIT_SECONDS: Final = 0.1
# Attempts where a file cannot be opened though descriptors are free.
_MAX_OTHER: Final = 3


@dataclass(frozen=True)
class Snapshot:
    """State that a coordinator starts from."""

    generation: int
    epoch: int
    fingerprint: str
    architecture: str
    number_floor: int
    policies: tuple[Policy, ...]
    """Policies, sorted by name; their leases have no expiry here."""
    out_of_service: Mapping[str, OutOfService]
    checkpoint: BoundCheckpoint | None = None
    token_floor: int = 0
    base_contents: Mapping[int, bytes] = field(default_factory=dict)
    as_started: frozenset[bytes] = frozenset()
    events: tuple[SaveEvent, ...] = ()
    """Events of former coordinators, oldest first."""
    sleeps: Mapping[str, StandingSleepOrder] = field(default_factory=dict)
    """Orders to sleep, by replica."""
    pool_id: str = ""


class Catalog:
    """Catalog that is open; close it to let another coordinator have it. Used by one thread at
    a time."""

    def __init__(self, file: CatalogFile) -> None:
        self._file = file
        self._connection = connect(file.path)
        self._execute = self._connection.execute
        self._rows = Rows(self._connection)
        self._kept: dict[str, deque[int]] | None = None
        """Numbers of the events that are kept, ascending, by what they are kept with; None if they
        are to be read."""
        self._last_event = 0
        self._spare = _SpareFiles()

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> Catalog:
        """Open or create a catalog, check all of it, and begin a new generation.

        Blocks for a few fsyncs, and for 2 s of work per 100,000 versions.

        Versions that were on their way become ABORTED: their bytes are gone.

        Raises:
            CatalogError: Another coordinator has it, it is something else, damaged, cannot
                be written, or is of another schema. Nothing was changed.
        """
        catalog: Catalog | None = None
        try:
            file = CatalogFile.take(path, create)
        except sqlite3.Error as error:
            raise from_sqlite(Path(path), error) from error
        try:
            catalog = cls(file)
            check(catalog._connection, file.path)
            catalog._begin_generation()
            catalog._kept = catalog._read_kept()
            catalog._execute(f"PRAGMA busy_timeout={BUSY_SECONDS * 1000:.0f}")
        except BaseException as error:
            if catalog is not None:
                catalog._connection.close()
                catalog._spare.close()
            file.release()
            if isinstance(error, sqlite3.Error):
                raise from_sqlite(file.path, error) from error
            if isinstance(error, UnicodeDecodeError):  # SQLite's own text about the schema
                raise damaged(file.path, [STRUCTURE]) from error
            raise
        return catalog

    def _begin_generation(self) -> None:
        # Journals are truncated, so that no directory has to be written at a commit.
        self._execute("PRAGMA journal_mode=TRUNCATE")
        rows = self._rows
        with _Transaction(self._connection):
            ((generation, *_),) = rows.select(META, {})
            rows.change(META, {}, generation=generation + 1)
            rows.change(
                VERSIONS,
                {"state": VersionState.STAGING},
                state=VersionState.ABORTED,
                failure_reason="TRANSFER_ABORTED",
                failure_message=_RESTARTED,
            )
            # A base has one version; a restart can come before the older one is marked.
            for served in [row[4] for row in rows.select(POLICIES, {"name": BASE_POLICY})]:
                held = {"policy": BASE_POLICY, "state": VersionState.COMMITTED}
                for version in [row[1] for row in rows.select(VERSIONS, held)]:
                    if version != served:
                        self._set_state(PolicyVersion(BASE_POLICY, version), VersionState.RETIRED)

    def snapshot(self) -> Snapshot:
        """Return the state that a coordinator starts from."""
        (meta,) = self._rows.select(META, {})
        generation, epoch, fingerprint, architecture, number_floor, *others = meta
        token_floor, checkpoint, pool_id = others
        held: dict[str, list[int]] = {}
        trained_on: dict[str, dict[int, int]] = {}
        for name, version, base in self._execute(
            "SELECT policy, version, adapter_trained_on_base_version FROM versions WHERE state=? "
            "ORDER BY version",
            (VersionState.COMMITTED,),
        ):
            held.setdefault(name, []).append(version)
            if base is not None:
                trained_on.setdefault(name, {})[version] = base
        pins: dict[str, list[int]] = {}
        for name, version in self._execute("SELECT policy, version FROM pins ORDER BY version"):
            pins.setdefault(name, []).append(version)
        policies = tuple(
            replace(
                POLICIES.read(row),
                versions=tuple(held.get(row[0], ())),
                pinned=tuple(pins.get(row[0], ())),
                trained_on=trained_on.get(row[0], {}),
            )
            for row in sorted(self._rows.select(POLICIES, {}))
        )
        out_of_service = {
            row[0]: WITHDRAWN.read(row) for row in sorted(self._rows.select(WITHDRAWN, {}))
        }
        return Snapshot(
            generation,
            epoch,
            fingerprint,
            architecture,
            number_floor,
            policies,
            out_of_service,
            _checkpoint(checkpoint),
            token_floor,
            self._base_contents(),
            frozenset(content for (content,) in self._rows.select(AS_STARTED, {})),
            tuple(past for row in self._events() if (past := event_from_row(row)) is not None),
            {row[0]: SLEEPS.read(row) for row in self._rows.select(SLEEPS, {})},
            pool_id,
        )

    def _events(self) -> list[tuple[Any, ...]]:
        """Return the rows of the events that are kept, oldest first."""
        return sorted(self._rows.select(EVENTS, {}), key=itemgetter(0))

    def _read_kept(self) -> dict[str, deque[int]]:
        kept = defaultdict[str, deque[int]](deque)
        for row in self._events():
            past = event_from_row(row)
            kept[KEPT_WITH[past.event.kind] if past else _UNKNOWN].append(row[0])
            self._last_event = row[0]
        return kept

    def _base_contents(self) -> dict[int, bytes]:
        """Return the contents of the newest versions of the base that were ever served."""
        rows = self._execute(
            "SELECT version, layout_digest, content_digest_value FROM versions WHERE policy=? "
            "AND state IN (?, ?) AND content_digest_value IS NOT NULL "
            "ORDER BY version DESC LIMIT ?",
            (BASE_POLICY, VersionState.COMMITTED, VersionState.RETIRED, MAX_BASE_CONTENTS),
        )
        return {
            version: base_content(layout, ContentDigest(0, value, 0))
            for version, layout, value in rows
        }

    def apply(self, saves: Sequence[Save]) -> None:
        """Write all of ``saves`` in one transaction; on disk when it returns.

        Raises:
            CatalogError: None of it was written, or it was written to a file that nobody will
                find. Nothing more may be decided, for it could not be kept.
        """
        try:
            self._spare.lend(lambda: self._write(saves))
        except sqlite3.Error as error:
            self._file.check()  # SQLite writes no file that was moved, and says less about it
            raise from_sqlite(self._file.path, error) from error
        self._file.check()

    def _write(self, saves: Sequence[Save]) -> None:
        try:
            with _Transaction(self._connection):
                for save in saves:
                    self._apply_one(save)
        except BaseException:
            self._kept = None  # it has numbers of rows that were not written
            raise

    def check(self) -> None:
        """Check that the catalog is where it was opened; see ``CatalogFile.check``."""
        self._file.check()

    def _apply_one(self, save: Save) -> None:
        rows = self._rows
        match save:
            case SavePool():
                model = {"fingerprint": save.fingerprint, "architecture": save.architecture}
                rows.change(META, {}, **model, base_checkpoint=b"")
                rows.delete(AS_STARTED, {})
            case SavePoolId(pool_id=pool_id):
                rows.change(META, {}, pool_id=pool_id)
            case SaveCheckpoint():
                known = CHECKPOINT.encode(save.checkpoint).SerializeToString()
                rows.change(META, {}, base_checkpoint=known)
            case SaveAsStarted():
                rows.put(AS_STARTED, (save.content,))
            case SaveGeneration():
                rows.change(META, {}, generation=save.generation)
            case SaveNumberFloor():
                rows.change(META, {}, number_floor=save.number_floor)
            case SaveEpoch():
                rows.change(META, {}, epoch=save.epoch)
            case SavePolicy():
                rows.put(POLICIES, POLICIES.row(save.policy))
            case SavePolicyDropped(name=name, token_floor=floor):
                rows.delete(POLICIES, {"name": name})
                rows.change(META, {}, token_floor=floor)
            case SaveVersion():
                rows.put(VERSIONS, VERSIONS.row(save.record))
            case SaveRetired(version=v):
                self._set_state(v, VersionState.RETIRED)
            case SaveCommitted(version=v):
                self._set_state(v, VersionState.COMMITTED)
            case SavePin(version=v, pinned=True):
                rows.put(PINS, PINS.row(v))
            case SavePin(version=v):
                rows.delete(PINS, {"policy": v.policy, "version": v.version})
            case SaveOutOfService(replica_id=name, order=None):
                rows.delete(WITHDRAWN, {"replica_id": name})
            case SaveOutOfService(replica_id=name, order=OutOfService() as order):
                rows.put(WITHDRAWN, WITHDRAWN.row(order, name))
            case SaveLeaseEnded(name=name):
                rows.change(POLICIES, {"name": name}, **NO_LEASE)
            case SaveSleep(replica_id=name, order=None):
                rows.delete(SLEEPS, {"replica_id": name})
            case SaveSleep(replica_id=name, order=StandingSleepOrder() as order):
                rows.put(SLEEPS, SLEEPS.row(order, name))
            case SaveEvent():
                self._put_event(save)

    def _put_event(self, save: SaveEvent) -> None:
        """Write an event as the newest, and drop the oldest of those that it is kept with."""
        if self._kept is None:
            self._kept = self._read_kept()
        self._last_event += 1
        event = replace(save.event, message=save.event.message[:_MAX_EVENT_CHARS])
        self._rows.put(EVENTS, EVENTS.row(replace(save, event=event), self._last_event))
        kept = self._kept[KEPT_WITH[save.event.kind]]
        kept.append(self._last_event)
        while len(kept) > MAX_KEPT:
            self._rows.delete(EVENTS, {"number": kept.popleft()})

    def _set_state(self, version: PolicyVersion, state: VersionState) -> None:
        key = {"policy": version.policy, "version": version.version}
        self._rows.change(VERSIONS, key, state=state)

    def find_request(self, trainer_id: str, request_id: str) -> VersionRecord | None:
        """Find the version that a trainer's request made, if any."""
        return self._find("trainer_id=? AND request_id=?", (trainer_id, request_id))

    def find_version(self, version: PolicyVersion) -> VersionRecord | None:
        """Find a version's record, if any."""
        found = self.list_versions(version.policy, version.version + 1, 1)
        return found[0] if found and found[0].version == version else None

    def find_transfer(self, transfer_id: str) -> VersionRecord | None:
        """Find the version that a transfer brought, if any."""
        return self._find("transfer_id=?", (transfer_id,))

    def _find(self, where: str, values: tuple[str, ...]) -> VersionRecord | None:
        found = self._select(where, values)
        return found[0] if found else None

    def list_versions(self, policy: str, before: int, limit: int) -> list[VersionRecord]:
        """List versions of a policy below ``before``, newest first."""
        where = "policy=? AND version<? ORDER BY version DESC LIMIT ?"
        return self._select(where, (policy, before, limit))

    def _select(self, where: str, values: tuple[str | int, ...]) -> list[VersionRecord]:
        try:
            rows = self._spare.lend(
                lambda: self._execute(f"SELECT * FROM versions WHERE {where}", values).fetchall()
            )
        except sqlite3.Error as error:
            raise WeftError(
                f"the catalog cannot be read: {error}. Look at the disk of {self._file.path}, and "
                "at other programs that have it open (fuser names them)"
            ) from error
        return [VERSIONS.read(row) for row in rows]

    def close(self) -> None:
        """Close the catalog and release its lock; the writer thread must be idle."""
        self._connection.close()
        self._spare.close()
        self._file.release()


class _Transaction:
    """Context of a transaction: BEGIN IMMEDIATE, then COMMIT, or ROLLBACK if the body raises."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection

    def __enter__(self) -> None:
        self._connection.execute("BEGIN IMMEDIATE")

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if kind is None:
            try:
                self._connection.execute("COMMIT")
            except sqlite3.Error:
                self._roll_back()
                raise
        else:
            self._roll_back()

    def _roll_back(self) -> None:
        """Roll back, unless SQLite has done so already, as after a full disk."""
        if self._connection.in_transaction:
            self._connection.execute("ROLLBACK")


class _SpareFiles:
    """Descriptors that SQLite finds whatever else the process has open; used by one thread at a
    time."""

    def __init__(self) -> None:
        self._held: list[int] = []
        self._take()

    def lend(self, work: Callable[[], _T]) -> _T:
        """Return what ``work`` returns, which is called again where it lacked a descriptor.

        It must have changed nothing where it raises. Blocks as long as the process has no
        descriptor left beside those that are held.

        Raises:
            sqlite3.Error: Another error than that.
        """
        num_other, is_said = 0, False
        try:
            while True:
                try:
                    return work()
                except sqlite3.Error as error:
                    is_short = descriptors.is_short()
                    num_other += not is_short
                    if not _cannot_open(error) or num_other >= _MAX_OTHER:
                        raise
                if is_short and self._held:
                    self.close()
                    continue
                if is_short and not is_said:
                    is_said = True
                    _log.error("%s: nothing is decided until the catalog can be used", SHORTAGE)
                time.sleep(_WAIT_SECONDS)
        finally:
            self._take()

    def close(self) -> None:
        """Let others have them."""
        while self._held:
            os.close(self._held.pop())

    def _take(self) -> None:
        with contextlib.suppress(OSError):
            while len(self._held) < _NUM_SPARE:
                self._held.append(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))


def _checkpoint(told: bytes) -> BoundCheckpoint | None:
    return CHECKPOINT.decode(inspect_pb2.BoundCheckpoint.FromString(told)) if told else None


def _cannot_open(error: sqlite3.Error) -> bool:
    return getattr(error, "sqlite_errorcode", 0) & 0xFF == sqlite3.SQLITE_CANTOPEN
