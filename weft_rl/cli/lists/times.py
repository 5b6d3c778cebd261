"""Points in time as the tables show them."""

from __future__ import annotations

from datetime import UTC, datetime

from google.protobuf.timestamp_pb2 import Timestamp


def shown_time(time: Timestamp, *, now: datetime | None = None) -> str:
    """Format a time as ``12:31:05`` today, ``2026-11-21 12:31:05`` on another day, in this
    machine's time zone; a dash where it is not set."""
    if not time.seconds:
        return "-"
    here = time.ToDatetime(tzinfo=UTC).astimezone()
    today = (now or datetime.now(UTC)).astimezone().date()
    return here.strftime("%H:%M:%S" if here.date() == today else "%Y-%m-%d %H:%M:%S")
