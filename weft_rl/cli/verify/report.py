"""Findings of ``weft verify``, for people and for programs."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.text import Text

from weft_rl.cli.console.output import print_text
from weft_rl.cli.console.table import ColumnSpec, FittedTable, listing_console
from weft_rl.cli.verify.parity import Parity
from weft_rl.cli.verify.tensors import FINE, ComparedTensor, Verdict
from weft_rl.contract.names import PolicyVersion, plural

_DIGEST_CHARS = 12
_MAX_SHOWN = 20


@dataclass
class Row:
    """Findings about one replica."""

    replica_id: str
    digest: bytes = b""
    error: str = ""
    """Reason why the digest is missing."""
    tensors: dict[str, int] = field(default_factory=dict)
    """Number of tensors of each verdict."""
    parity: Parity | None = None
    parity_error: str = ""


@dataclass
class ReportPart:
    """Comparison of one version with local files: the version asked for, or the base below it."""

    version: PolicyVersion
    path: Path
    rows: list[Row] = field(default_factory=list)
    differences: dict[bytes, list[ComparedTensor]] = field(default_factory=dict)
    """Differing tensors and settings, by the digest of what replicas hold."""

    @property
    def wrong(self) -> list[str]:
        """Sentences about what differs; empty if every replica holds the local files' tensors and
        answers like them."""
        is_other = any(self.differences.values()) or any(row.error for row in self.rows)
        answers_otherwise = any(
            row.parity_error or (row.parity and not row.parity.is_fine) for row in self.rows
        )
        return [f"{self.version} is not what {self.path} holds"] * is_other + [
            f"{self.version} does not answer as {self.path} does"
        ] * answers_otherwise


@dataclass
class Report:
    """All findings of one run."""

    parts: list[ReportPart]
    failures: list[str] = field(default_factory=list)
    """Other failures."""
    remarks: list[str] = field(default_factory=list)
    """Notes on what was not compared, or how it was."""

    @property
    def wrong(self) -> list[str]:
        """All that differs or failed; empty if what is served equals the local files."""
        return [*(text for part in self.parts for text in part.wrong), *self.failures]

    def as_dict(self) -> dict[str, Any]:
        """Return the report as an object for programs."""
        return {
            "ok": not self.wrong,
            "wrong": self.wrong,
            "parts": [_part_dict(part) for part in self.parts],
            "remarks": self.remarks,
        }

    def show(self) -> None:
        """Print the report for people."""
        for part in self.parts:
            listing_console().print(_table(part))
            for text in _differences(part):
                print_text(text)
        for remark in self.remarks:
            print_text(Text(remark, "dim"))
        for why in self.wrong:
            print_text(Text(f"differs: {why}", "bold red"))
        if not self.wrong:
            what = f"equal: {self.parts[0].version} is what {self.parts[0].path} holds"
            print_text(Text(what, "bold green"))


def _part_dict(part: ReportPart) -> dict[str, Any]:
    replicas = []
    for row in part.rows:
        known: dict[str, Any] = {"replica_id": row.replica_id, "tensors": row.tensors}
        known |= {"digest": row.digest.hex()} if row.digest else {}
        known |= {"error": row.error} if row.error else {}
        known |= {"parity_error": row.parity_error} if row.parity_error else {}
        if row.parity is not None:
            known["parity"] = {**dataclasses.asdict(row.parity), "ok": row.parity.is_fine}
        replicas.append(known)
    return {
        "version": str(part.version),
        "path": str(part.path),
        "ok": not part.wrong,
        "replicas": replicas,
        "differences": [
            {"digest": digest.hex(), "name": c.name, "verdict": c.verdict.value, "says": c.says}
            for digest, found in part.differences.items()
            for c in found
        ],
    }


_COLUMNS = (
    ColumnSpec("replica"),
    ColumnSpec("digest"),
    ColumnSpec("tensors", is_prose=True),
    ColumnSpec("log-probabilities", is_prose=True),
)


def _table(part: ReportPart) -> FittedTable:
    has_parity = any(row.parity or row.parity_error for row in part.rows)
    columns = _COLUMNS if has_parity else _COLUMNS[:-1]
    table = FittedTable(f"{part.version} and {part.path}", columns)
    for row in part.rows:
        cells = [Text(row.replica_id), Text(row.digest.hex()[:_DIGEST_CHARS] or "-"), _tensors(row)]
        table.add_row(*cells, *([_parity(row)] if has_parity else []))
    return table


def _tensors(row: Row) -> Text:
    if row.error:
        return Text(row.error, "red")
    return Text(", ").join(
        Text(f"{count} {verdict}", "green" if Verdict(verdict) in FINE else "red")
        for verdict, count in row.tensors.items()
    )


def _parity(row: Row) -> Text:
    if row.parity is None:
        return Text(row.parity_error or "-", "red" if row.parity_error else "")
    found = row.parity
    bound = f"bound {found.bound:.2g}" if found.bound else "no bound is known"
    return Text(
        f"of {plural(found.num_tokens, 'token')} at most {found.largest:.2g} apart, mean "
        f"{found.mean:.2g} ({bound})",
        "green" if found.is_fine else "red",
    )


def _differences(part: ReportPart) -> Iterator[Text]:
    several = len([found for found in part.differences.values() if found]) > 1
    for digest, found in part.differences.items():
        for compared in found[:_MAX_SHOWN]:
            where = f" at {digest.hex()[:_DIGEST_CHARS]}" if several else ""
            yield Text(
                f"  {compared.verdict.value}{where}: {compared.name}: {compared.says}", "red"
            )
        if (more := len(found) - _MAX_SHOWN) > 0:
            yield Text(f"  and {more} more: --json lists all", "red")
