"""Channels between members: what is said of a peer that leaves."""

from __future__ import annotations

import socket

import pytest

from weft_rl.transport.one_sided.errors import OneSidedError
from weft_rl.transport.one_sided.messages import Channel, Taken


@pytest.mark.parametrize("num_unread", [0, 1])
def test_a_peer_that_leaves_has_closed_its_socket_whatever_it_has_not_read(num_unread: int) -> None:
    ours, theirs = map(Channel, socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET))
    for sequence in range(num_unread):  # of which the kernel makes a reset
        ours.send(Taken(sequence))
    theirs.close()
    with pytest.raises(OneSidedError, match="closed its socket"):
        ours.receive(5.0)
    ours.close()
