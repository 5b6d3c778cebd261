"""Errors of a catalog that cannot be used, each in one line: what is lost, and what to do."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from weft_rl.contract.errors import WeftError
from weft_rl.descriptors import is_short

_NAMED: Final = 3
#: Why a file cannot be opened, where no disk is to blame.
SHORTAGE: Final = "this process has as many open files as it may (ulimit -n)"
#: What is damaged where SQLite cannot follow its own file.
STRUCTURE: Final = "its structure, so that any version may be lost"


class CatalogError(WeftError):
    """Failure to use a catalog: ``NOT_A_CATALOG``, ``CATALOG_OTHER_SCHEMA``, ``CATALOG_LOCKED``,
    ``CATALOG_LINKED``, ``CATALOG_DAMAGED``, ``CATALOG_GONE`` or ``CATALOG_UNWRITABLE``."""

    status = "FAILED_PRECONDITION"
    default_reason = "NOT_A_CATALOG"
    why = ""
    """Cause for which the catalog cannot be written, without advice; empty for other errors."""


def in_use(path: Path) -> CatalogError:
    """Return the error of a catalog whose lock another process has."""
    return CatalogError(
        f"{path} is in use by another coordinator: stop that one, or give this one a catalog "
        "of its own",
        reason="CATALOG_LOCKED",
    )


def damaged(path: Path, problems: Sequence[str]) -> CatalogError:
    """Return the error of a catalog that lost values or rows; names the first few."""
    more = len(problems) - _NAMED
    shown = "; ".join(problems[:_NAMED]) + (f"; and {more} more" if more > 0 else "")
    return CatalogError(
        f"the catalog {path} is damaged: {shown}. Nothing was repaired: move it away with what is "
        "beside it (-journal), and put back a copy that is whole, or begin a new one, which "
        "loses the history of versions",
        reason="CATALOG_DAMAGED",
        metadata={"num_problems": str(len(problems))},
    )


def gone(path: Path, *, is_replaced: bool) -> CatalogError:
    """Return the error of a catalog's file that was removed or replaced while in use."""
    what = "is another file now" if is_replaced else "was removed"
    return CatalogError(
        f"{path} {what}, and the coordinator that had it open ends: what it would write is lost, "
        "so it answers nothing more. Put the catalog back and start it again; without one, "
        "replicas tell the next coordinator what they hold",
        reason="CATALOG_GONE",
    )


def unwritable(path: Path, why: str) -> CatalogError:
    """Return the error of a catalog that cannot be made, opened or written."""
    error = CatalogError(
        f"the catalog {path} cannot be written: {why}. Nothing that was answered is lost: "
        "mend this and start the coordinator again",
        reason="CATALOG_UNWRITABLE",
    )
    error.why = why
    return error


def from_sqlite(path: Path, error: sqlite3.Error) -> CatalogError:
    """Return the catalog's error for an error of SQLite."""
    match getattr(error, "sqlite_errorcode", 0) & 0xFF:
        case sqlite3.SQLITE_NOTADB:
            return CatalogError(
                f"{path} is not a Weft catalog, or the first page of one that is damaged: put back "
                "a copy that is whole, or give --catalog another path"
            )
        case sqlite3.SQLITE_BUSY | sqlite3.SQLITE_LOCKED:
            return CatalogError(
                f"{path} is locked by another program: end it (fuser names it) and start again",
                reason="CATALOG_LOCKED",
            )
        case sqlite3.SQLITE_FULL:
            return unwritable(path, "the disk is full")
        case sqlite3.SQLITE_IOERR:
            return unwritable(path, f"the disk is full, or fails ({error})")
        case sqlite3.SQLITE_CORRUPT | sqlite3.SQLITE_ERROR:
            return damaged(path, [f"{STRUCTURE} ({error})"])
        case sqlite3.SQLITE_CANTOPEN if is_short():
            return unwritable(path, SHORTAGE)
        case _:
            return unwritable(path, str(error))
