"""Tables of the catalog: rows as values, a checksum of each row, a count of each table's rows.

SQLite notices damage to its own structure, but not to a value, and not a row that is
gone. So each row carries a checksum of its values, and ``counts`` how many rows each
table has. Both are written in the transaction that changes the row.
"""

from __future__ import annotations

import enum
import hashlib
import json
import sqlite3
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from typing import Any, Final

from weft_rl.contract.adapter_config import AdapterSpec
from weft_rl.contract.checkpoint import FileDigest
from weft_rl.contract.names import PolicyVersion
from weft_rl.contract.tensors import DataType
from weft_rl.coordinator.decisions.state.effects import Announce, EventKind, SaveEvent
from weft_rl.coordinator.decisions.state.pool import Lease, Policy, TrainerProcess
from weft_rl.coordinator.decisions.state.replica import StandingSleepOrder
from weft_rl.coordinator.decisions.state.values import (
    BoundCheckpoint,
    ContentDigest,
    Failure,
    PolicyKind,
    VersionRecord,
    VersionState,
)

_CHECKSUM_BYTES: Final = 8
#: Longest message of an event that is written.
_MAX_EVENT_CHARS: Final = 2000
_DOUBLE: Final = struct.Struct("<d")
_SQL_TYPES: Final = {int: "INTEGER", float: "REAL", str: "TEXT", bytes: "BLOB"}


@dataclass(frozen=True)
class Table:
    """Columns of a table, each with the type in which SQLite returns its values."""

    name: str
    columns: Mapping[str, type]
    unique: tuple[tuple[str, ...], ...]
    """Columns that no other row has the same values in, the primary key first. They never
    change."""
    row_is: str
    """Content of a row, for error messages."""
    optional_from: str = ""
    """First of the columns that may have no value: it and those after it."""
    kinds: Mapping[str, type[enum.Enum]] = field(default_factory=dict)
    """Enums by column, for columns that hold values of an enum."""

    def values(self, given: Sequence[Any]) -> tuple[Any, ...]:
        """Return the values that will be read back of a row that is written."""
        kinds = zip(given, self.columns.values(), strict=True)
        return tuple(None if value is None else kind(value) for value, kind in kinds)

    def unknown(self, values: Sequence[Any]) -> str:
        """Return the first column with an impossible value, and the value; empty if none."""
        for (name, kind), value in zip(self.columns.items(), values, strict=True):
            known = self.kinds.get(name)
            is_kind = value is None or isinstance(value, kind)
            if not is_kind or (known and value not in [*known]):
                return f"{name} {str(value)[:40]!r}"
        return ""

    def checksum(self, values: Sequence[Any]) -> bytes:
        """Return BLAKE2b over the table's name and every value of a row, with type and length."""
        parts = [self.name.encode()]
        for value in values:
            kind, data = _encode(value)
            parts += kind, len(data).to_bytes(8, "little"), data
        return hashlib.blake2b(b"".join(parts), digest_size=_CHECKSUM_BYTES).digest()

    # Written with every push: made once.

    @cached_property
    def identity(self) -> tuple[str, ...]:
        """Columns that name a row."""
        return tuple(chain.from_iterable(self.unique))

    @cached_property
    def update_query(self) -> str:
        """Query that takes a row with its checksum, then the row's identity."""
        names, marks = self._row
        return f"UPDATE {self.name} SET ({names})=({marks}){_where(self.identity)}"

    @cached_property
    def insert_query(self) -> str:
        """Query that takes a row with its checksum."""
        names, marks = self._row
        return f"INSERT INTO {self.name} ({names}) VALUES ({marks})"

    @property
    def create_query(self) -> str:
        """Query that creates the table."""
        parts, suffix = [], " NOT NULL"
        for name, kind in self.columns.items():
            suffix = "" if name == self.optional_from else suffix
            parts.append(f"{name} {_SQL_TYPES[kind]}{suffix}")
        parts.append("checksum BLOB NOT NULL")
        for index, names in enumerate(self.unique):
            parts.append(f"{'UNIQUE' if index else 'PRIMARY KEY'} ({','.join(names)})")
        return f"CREATE TABLE {self.name} ({','.join(parts)})"

    @property
    def _row(self) -> tuple[str, str]:
        columns = (*self.columns, "checksum")
        return ",".join(columns), ",".join("?" * len(columns))


def _encode(value: Any) -> tuple[bytes, bytes]:
    kind = type(value)
    if kind is str:
        return b"s", value.encode(errors="surrogateescape")
    if kind is int:
        return b"i", b"%d" % value
    if value is None:
        return b"n", b""
    if kind is float:
        return b"f", _DOUBLE.pack(value)
    return b"b", bytes(value)


META: Final = Table(
    "meta",
    {
        "generation": int,
        "epoch": int,
        "fingerprint": str,
        "architecture": str,
        "number_floor": int,
        "token_floor": int,
        "base_checkpoint": str,
        "pool_id": str,
    },
    (),
    "the generation, the epoch, the pool's identity and the base model that it is bound to",
)
POLICIES: Final = Table(
    "policies",
    {
        "name": str,
        "kind": int,
        "last_version": int,
        "fencing_token": int,
        "served_version": int,
        "retain": int,
        "forgotten": int,
        "owner": str,
        "trainer_id": str,
        "session_id": str,
        "lease_token": int,
        "lease_seconds": float,
        "host": str,
        "host_key": str,
        "pid": int,
        "start_time": float,
    },
    (("name",),),
    "the numbers that a policy has reached, which version is served, and who owns it",
    "trainer_id",  # and those after it: of its owner's lease
    {"kind": PolicyKind},
)
#: Columns of ``POLICIES`` once a lease has ended.
NO_LEASE: Final = dict.fromkeys([*POLICIES.columns][8:])
VERSIONS: Final = Table(
    "versions",
    {
        "policy": str,
        "version": int,
        "state": int,
        "trainer_id": str,
        "request_id": str,
        "transfer_id": str,
        "layout_digest": bytes,
        "create_time": float,
        "commit_time": float,
        "digest_algorithm": int,
        "digest_value": bytes,
        "digest_size_bytes": int,
        "adapter_config": str,
        "adapter_config_digest": bytes,
        "adapter_base": str,
        "adapter_trained_on": int,
        "failure_reason": str,
        "failure_message": str,
    },
    (("policy", "version"), ("trainer_id", "request_id"), ("transfer_id",)),
    "what became of a version, and its digest",
    "digest_algorithm",
    {"state": VersionState},
)
PINS: Final = Table(
    "pins", {"policy": str, "version": int}, (("policy", "version"),), "that a version is pinned"
)
WITHDRAWN: Final = Table(
    "withdrawn",
    {"replica_id": str, "reason": str, "no_pushes": int},
    (("replica_id",),),
    "that a replica is kept out of service",
)
AS_STARTED: Final = Table(
    "as_started",
    {"content": bytes},
    (("content",),),
    "that a pushed base holds the bytes of base@0",
)
SLEEPS: Final = Table(
    "sleeps",
    {
        "replica_id": str,
        "trainer_id": str,
        "fencing_token": int,
        "level": int,
        "aborts": int,
        "seconds": float,
    },
    (("replica_id",),),
    "an order to a replica to sleep",
)
EVENTS: Final = Table(
    "events",
    {
        "number": int,
        "time": float,
        "kind": str,
        "subject": str,
        "message": str,
        "policy": str,
        "version": int,
    },
    (("number",),),
    "something that has happened",
    "policy",  # and version: of what a transfer moves
    # Of a later Weft, a kind may be unknown: such events are kept, and told by none but it.
)
TABLES: Final = (
    META,
    POLICIES,
    VERSIONS,
    PINS,
    WITHDRAWN,
    AS_STARTED,
    EVENTS,
    SLEEPS,
)


class Rows:
    """Rows of ``TABLES``, accessed through one connection; transactions are the caller's."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection
        self._execute = connection.execute

    def create(self) -> None:
        """Create every table, and the one row of ``META``."""
        self._execute("CREATE TABLE counts (name TEXT PRIMARY KEY, num_rows INTEGER NOT NULL)")
        for table in TABLES:
            self._execute(table.create_query)
            self._execute("INSERT INTO counts VALUES (?, 0)", (table.name,))
        self.put(META, (0, 0, "", "", 0, 0, "", ""))

    def put(self, table: Table, given: Sequence[Any]) -> None:
        """Write a row in place of the one with its identity, or as a new one.

        Raises:
            sqlite3.IntegrityError: Another row has what must be unique.
        """
        values = table.values(given)
        row = (*values, table.checksum(values))
        own = dict(zip(table.columns, values, strict=True))
        identity = (own[name] for name in table.identity)
        if not self._execute(table.update_query, (*row, *identity)).rowcount:
            self._execute(table.insert_query, row)
            self._count(table, 1)

    def change(self, table: Table, where: Mapping[str, Any], **changes: Any) -> None:
        """Change columns of every row that matches ``where``."""
        for row in self.select(table, where):
            known = dict(zip(table.columns, row, strict=True))
            self.put(table, [*{**known, **changes}.values()])

    def delete(self, table: Table, where: Mapping[str, Any]) -> None:
        """Delete every row that matches ``where``."""
        gone = self._execute(f"DELETE FROM {table.name}{_where(where)}", tuple(where.values()))
        self._count(table, -gone.rowcount)

    def select(self, table: Table, where: Mapping[str, Any]) -> list[tuple[Any, ...]]:
        """Return every row that matches ``where``, without its checksum."""
        names = ",".join(table.columns)
        query = f"SELECT {names} FROM {table.name}{_where(where)}"
        return self._execute(query, tuple(where.values())).fetchall()

    def _count(self, table: Table, more: int) -> None:
        if more:
            query = "UPDATE counts SET num_rows = num_rows + ? WHERE name=?"
            self._execute(query, (more, table.name))

    def problems(self) -> Iterator[str]:
        """Yield the problems found in the tables, for error messages."""
        counts = dict(self._execute("SELECT name, num_rows FROM counts").fetchall())
        counts[META.name] = 1
        for table in TABLES:
            count = 0
            for checksum, *values in self._all(table):
                count += 1
                if checksum != table.checksum(values):
                    yield f"{_shown(table, values)} ({table.row_is})"
                elif unknown := table.unknown(values):
                    yield f"{_shown(table, values)}, whose {unknown} means nothing"
            if count != counts.get(table.name, -1):
                yield (
                    f"{table.name} has {count} rows and was left with "
                    f"{counts.get(table.name, 'no count')} (a row of it: {table.row_is})"
                )

    def _all(self, table: Table) -> Iterator[Sequence[Any]]:
        names = ",".join(table.columns)
        self._connection.text_factory = _text
        try:
            yield from self._execute(f"SELECT checksum,{names} FROM {table.name}")
        finally:
            self._connection.text_factory = str


def _text(data: bytes) -> str:
    """Decode text that may be damaged."""
    return data.decode(errors="surrogateescape")


def _where(names: Iterable[str]) -> str:
    wanted = " AND ".join(f"{name}=?" for name in names)
    return f" WHERE {wanted}" if wanted else ""


def _shown(table: Table, values: Sequence[Any]) -> str:
    key = [str(value)[:80] for value in values[: min(2, len(table.identity))]]
    return f"{table.name} {'@'.join(key)}".strip()


def version_to_row(record: VersionRecord) -> tuple[Any, ...]:
    """Encode a version's record as the values of its row, in the order of the columns."""
    return (
        record.version.policy,
        record.version.version,
        int(record.state),
        record.trainer_id,
        record.request_id,
        record.transfer_id,
        record.layout_digest,
        record.create_time,
        record.commit_time,
        *_parts(record.content_digest, "algorithm", "value", "size_bytes"),
        *_parts(
            record.adapter,
            "config_json",
            "config_digest",
            "base_fingerprint",
            "trained_on_base_version",
        ),
        *_parts(record.failure, "reason", "message"),
    )


def _parts(value: object, *names: str) -> tuple[Any, ...]:
    """Return fields of a value as columns, which have no values where it is None."""
    return tuple(None if value is None else getattr(value, name) for name in names)


def version_from_row(row: Sequence[Any]) -> VersionRecord:
    """Decode a version's record from the values of a row; further values are ignored."""
    return VersionRecord(
        version=PolicyVersion(row[0], row[1]),
        state=VersionState(row[2]),
        trainer_id=row[3],
        request_id=row[4],
        transfer_id=row[5],
        layout_digest=row[6],
        create_time=row[7],
        commit_time=row[8],
        content_digest=ContentDigest(*row[9:12]) if row[9] is not None else None,
        adapter=AdapterSpec(row[12], *row[14:16]) if row[12] is not None else None,
        failure=Failure(row[16], row[17]) if row[16] is not None else None,
    )


def policy_to_row(policy: Policy) -> tuple[Any, ...]:
    """Encode a policy as the values of its row, in the order of the columns."""
    lease = policy.lease
    return (
        policy.name,
        policy.kind,
        policy.last_version,
        policy.fencing_token,
        policy.served_version,
        policy.retain,
        policy.forgotten,
        policy.owner,
        *_parts(lease, "trainer_id", "session_id", "fencing_token", "time_to_live"),
        *_parts(lease and lease.process, "host", "host_key", "pid", "start_time"),
    )


def policy_from_row(row: Sequence[Any]) -> Policy:
    """Decode a policy from the values of its row, without what is known of its versions. Its lease
    has no expiry yet."""
    name, kind, last, token, served, retain, forgotten, owner, *held = row
    lease = None
    if held[0] is not None:
        trainer_id, session_id, lease_token, seconds, *process = held
        started = TrainerProcess(*process)
        lease = Lease(trainer_id, session_id, lease_token, 0.0, started, time_to_live=seconds)
    return Policy(
        name,
        PolicyKind(kind),
        last,
        token,
        served,
        lease=lease,
        retain=retain,
        forgotten=bool(forgotten),
        owner=owner,
    )


def sleep_to_row(replica_id: str, order: StandingSleepOrder) -> tuple[Any, ...]:
    """Encode an order to sleep as the values of its row, in the order of the columns."""
    how = (order.level, order.aborts, order.seconds)
    return (replica_id, order.trainer_id, order.fencing_token, *how)


def sleep_from_row(row: Sequence[Any]) -> StandingSleepOrder:
    """Decode an order to sleep from the values of its row."""
    _, trainer_id, token, level, aborts, seconds = row
    return StandingSleepOrder(
        trainer_id=trainer_id,
        fencing_token=token,
        level=level,
        aborts=bool(aborts),
        seconds=seconds,
    )


def event_to_row(number: int, past: SaveEvent) -> tuple[Any, ...]:
    """Encode an event as the values of its row, in the order of the columns."""
    event, concerns = past.event, past.event.concerns
    version = (concerns.policy, concerns.version) if concerns else (None, None)
    message = event.message[:_MAX_EVENT_CHARS]
    return (number, past.time, event.kind.value, event.subject, message, *version)


def event_from_row(row: Sequence[Any]) -> SaveEvent | None:
    """Decode an event from the values of its row; None if a later Weft wrote its kind."""
    _, time, kind, subject, message, policy, version = row
    if kind not in [*EventKind]:
        return None
    concerns = PolicyVersion(policy, version) if policy is not None else None
    return SaveEvent(time, Announce(EventKind(kind), subject, message, concerns))


def checkpoint_to_text(bound: BoundCheckpoint) -> str:
    """Encode the checkpoint of base@0 as the catalog holds it: JSON."""
    return json.dumps(
        {
            "digest": bound.digest.hex(),
            "base_dtype": int(bound.base_dtype),
            "quantization": bound.quantization,
            "replica_id": bound.replica_id,
            "files": [(file.name, file.digest.hex()) for file in bound.files],
        },
        separators=(",", ":"),
    )


def checkpoint_from_text(text: str) -> BoundCheckpoint | None:
    """Decode what ``checkpoint_to_text`` wrote; None for empty text."""
    if not text:
        return None
    known = json.loads(text)
    return BoundCheckpoint(
        digest=bytes.fromhex(known["digest"]),
        base_dtype=DataType(known["base_dtype"]),
        quantization=known["quantization"],
        replica_id=known["replica_id"],
        files=tuple(FileDigest(name, bytes.fromhex(digest)) for name, digest in known["files"]),
    )
