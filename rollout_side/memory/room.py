"""Bounds of the memory that a worker holds versions in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from weft.contract.errors import CapacityError
from weft.contract.names import PolicyVersion


@dataclass
class Usage:
    """Bytes a worker holds for Weft; on the host, but for bases staged on a device."""

    adapter_bytes: int = 0
    staging_bytes: int = 0
    """Staged or retained; retained copies give way to a push."""
    free_bytes: int = 0
    pinned_bytes: int = 0
    """Of the retained copies, what no push may take."""
    transfer_ids: tuple[str, ...] = ()
    """Transfers of which bytes are staged, whole or in part, or loaded in place."""


def check_adapter_room(
    num_bytes: int, capacity: int, held: Mapping[PolicyVersion, int], waiting: int
) -> None:
    """Refuse an adapter that the store has no room for.

    Args:
        held: Bytes of each adapter that can be served.
        waiting: Bytes that wait for their commit.

    Raises:
        CapacityError: Says what holds the memory.
    """
    in_use = sum(held.values())
    if in_use + waiting + num_bytes > capacity:
        names = ", ".join(map(str, sorted(held)))
        raise CapacityError(
            f"the adapter store holds {in_use:,} of {capacity:,} bytes "
            f"({names or 'nothing'}) and {waiting:,} wait for their commit: no room for "
            f"{num_bytes:,} more; retire versions or start the replica with a larger "
            "--adapter-memory-gib"
        )


def check_base_room(
    num_bytes: int, capacity: int, in_use: int, pinned: Sequence[PolicyVersion]
) -> None:
    """Refuse a base that there is no room to stage.

    Args:
        in_use: Bytes that are staged or retained.
        pinned: Versions among them that no push may take.

    Raises:
        CapacityError: Says what holds the memory.
    """
    if in_use + num_bytes > capacity:
        names = ", ".join(sorted(map(str, pinned)))
        text = f", {names} pinned" if names else ""
        raise CapacityError(
            f"staging holds {in_use:,} of {capacity:,} bytes{text}: no room for {num_bytes:,} "
            "more; start the replica with a larger --staging-memory-gib"
        )
