"""Tables of the catalog: rows as values, a checksum of each row, a count of each table's rows.

SQLite notices damage to its own structure, but not to a value, and not a row that is
gone. So each row carries a checksum of its values, and ``counts`` how many rows each
table has. Both are written in the transaction that changes the row.
"""

from __future__ import annotations

import enum
import hashlib
import sqlite3
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from functools import cached_property
from itertools import chain
from types import MappingProxyType
from typing import Any, Final, cast, get_origin, get_type_hints

from weft_rl.contract.names import PolicyVersion
from weft_rl.contract.replica_report import OutOfService
from weft_rl.coordinator.decisions.state.effects import SaveEvent
from weft_rl.coordinator.decisions.state.pool import Policy
from weft_rl.coordinator.decisions.state.replica import StandingSleepOrder
from weft_rl.coordinator.decisions.state.values import BoundCheckpoint, VersionRecord
from weft_rl.schema import codec, without_none
from weft_rl.v1 import inspect_pb2

#: Codec of the checkpoint of base@0, which is kept as a message.
CHECKPOINT: Final = codec(BoundCheckpoint, inspect_pb2.BoundCheckpoint)

_CHECKSUM_BYTES: Final = 8
_DOUBLE: Final = struct.Struct("<d")
_SQL_TYPES: Final = {int: "INTEGER", float: "REAL", str: "TEXT", bytes: "BLOB"}


class Columns:
    """Columns of a dataclass: one for each field of a single value.

    Those of a nested dataclass stand in its place; where it is optional, under its name, and they
    have no value where it is None. Fields of several values have no column.

    Args:
        left: Fields without a column, and the values that they are read back with.
    """

    def __init__(self, value: type, left: Mapping[str, Any] = MappingProxyType({})) -> None:
        self._value, self._left = value, {}
        self._parts: dict[str, Any] = {}
        self.types: dict[str, type] = {}
        self.optional: set[str] = set()
        hints = get_type_hints(value)
        for name in (field.name for field in fields(value)):
            hint = without_none(hints[name])
            prefix = f"{name}_" if hint is not hints[name] else ""
            if name in left:
                self._left[name] = left[name]
            elif is_dataclass(hint):
                nested = self._parts[name] = Columns(cast(type, hint), left)
                self.types.update({prefix + inner: kind for inner, kind in nested.types.items()})
                among = nested.types if prefix else nested.optional
                self.optional.update(prefix + inner for inner in among)
            elif get_origin(hint) is None:
                self.types[name] = self._parts[name] = hint
                self.optional.update([name] if prefix else [])

    def encode(self, value: Any) -> Iterator[Any]:
        """Yield the values of the columns; None for each where there is no value."""
        for name, part in self._parts.items():
            one = None if value is None else getattr(value, name)
            yield from part.encode(one) if isinstance(part, Columns) else (one,)

    def decode(self, row: Iterator[Any]) -> Any:
        """Return the value of a row, whose further values are left; None where it has none."""
        read = {
            name: part.decode(row)
            if isinstance(part, Columns)
            else None
            if (one := next(row)) is None
            else part(one)
            for name, part in self._parts.items()
        }
        if all(one is None for one in read.values()):
            return None
        return self._value(**read, **self._left)


@dataclass(frozen=True)
class Table:
    """Columns of a table, each with the type in which SQLite returns its values."""

    name: str
    key: Mapping[str, type]
    """Columns that are of no dataclass, and come first."""
    value: Columns | None
    unique: tuple[tuple[str, ...], ...]
    """Columns that no other row has the same values in, the primary key first. They never
    change."""
    row_is: str
    """Content of a row, for error messages."""

    @cached_property
    def _types(self) -> Mapping[str, type]:
        return {**self.key, **(self.value.types if self.value else {})}

    @cached_property
    def columns(self) -> Mapping[str, type]:
        """Columns, each with the type in which SQLite returns its values."""
        return {
            name: next(one for one in _SQL_TYPES if issubclass(kind, one))
            for name, kind in self._types.items()
        }

    @cached_property
    def _enums(self) -> Mapping[str, list[Any]]:
        return {k: [*kind] for k, kind in self._types.items() if issubclass(kind, enum.IntEnum)}

    def row(self, value: Any, *key: Any) -> tuple[Any, ...]:
        """Return the row of a value."""
        return (*key, *(self.value.encode(value) if self.value else ()))

    def read(self, row: Sequence[Any]) -> Any:
        """Return the value of a row."""
        assert self.value is not None
        return self.value.decode(iter(row[len(self.key) :]))

    def values(self, given: Sequence[Any]) -> tuple[Any, ...]:
        """Return the values that will be read back of a row that is written."""
        kinds = zip(given, self.columns.values(), strict=True)
        return tuple(None if value is None else kind(value) for value, kind in kinds)

    def unknown(self, values: Sequence[Any]) -> str:
        """Return the first column with an impossible value, and the value; empty if none."""
        for (name, kind), value in zip(self.columns.items(), values, strict=True):
            known = self._enums.get(name)
            is_kind = value is None or isinstance(value, kind)
            if not is_kind or (known and value not in known):
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
        optional = self.value.optional if self.value else ()
        parts = [
            f"{name} {_SQL_TYPES[kind]}{'' if name in optional else ' NOT NULL'}"
            for name, kind in self.columns.items()
        ]
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
        "base_checkpoint": bytes,
        "pool_id": str,
    },
    None,
    (),
    "the generation, the epoch, the pool's identity and the base model that it is bound to",
)
POLICIES: Final = Table(
    "policies",
    {},
    Columns(Policy, {"expires_at": 0.0, "num_renewals": 0}),
    (("name",),),
    "the numbers that a policy has reached, which version is served, and who owns it",
)
#: Columns of ``POLICIES`` once a lease has ended.
NO_LEASE: Final = {name: None for name in POLICIES.columns if name.startswith("lease_")}
VERSIONS: Final = Table(
    "versions",
    {},
    Columns(VersionRecord),
    (("policy", "version"), ("trainer_id", "request_id"), ("transfer_id",)),
    "what became of a version, and its digest",
)
PINS: Final = Table(
    "pins", {}, Columns(PolicyVersion), (("policy", "version"),), "that a version is pinned"
)
WITHDRAWN: Final = Table(
    "withdrawn",
    {"replica_id": str},
    Columns(OutOfService),
    (("replica_id",),),
    "that a replica is kept out of service",
)
AS_STARTED: Final = Table(
    "as_started",
    {"content": bytes},
    None,
    (("content",),),
    "that a pushed base holds the bytes of base@0",
)
SLEEPS: Final = Table(
    "sleeps",
    {"replica_id": str},
    Columns(StandingSleepOrder, {"until": float("inf"), "confirmed": False}),
    (("replica_id",),),
    "an order to a replica to sleep",
)
EVENTS: Final = Table(
    "events",
    {"number": int},
    Columns(SaveEvent, {"durable": False}),
    (("number",),),
    "something that has happened",
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
        self.put(META, (0, 0, "", "", 0, 0, b"", ""))

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


def event_from_row(row: Sequence[Any]) -> SaveEvent | None:
    """Decode an event from the values of its row; None if a later Weft wrote its kind."""
    try:
        event: SaveEvent = EVENTS.read(row)
    except ValueError:
        return None
    return event
