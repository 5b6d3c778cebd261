"""Sites of members in the order of a chain."""

from __future__ import annotations

from contextlib import closing

from tests.doubles.wires import Wires
from tests.unit.transport.stream.chain import Group, finish, host_of


def test_bytes_cross_between_sites_once(wires: Wires) -> None:
    """Receivers 1 and 3 are in the sender's site, 2 and 4 in another."""
    with closing(Group(5, sites=["a", "a", "b", "a", "b"])) as group:
        group.send(1)
        for work, _ in [group.post(rank) for rank in range(1, 5)]:
            finish(work)
    assert wires.cables.keys() == {host_of(rank) for rank in (0, 1, 3, 2)}
