"""Lanes over TLS, with the certificates that members have announced."""

from __future__ import annotations

import dataclasses
import gc
import socket
import struct
from contextlib import closing

import pytest
import torch

from tests.doubles.certificates import Authority
from tests.doubles.wires import Wires
from tests.unit.transport.stream.chain import SIZE, Group, content, finish
from tests.waits import until
from weft_rl.rpc.security.credentials import Credentials
from weft_rl.transport.stream.lane import Lane, LaneTls
from weft_rl.transport.stream.messages import StreamError


@pytest.fixture
def shown(authority: Authority) -> list[Credentials]:
    return [authority.credentials(f"member-{rank}") for rank in range(3)]


def pushed(group: Group, seed: int = 1) -> None:
    group.send(seed)
    for work, memory in [group.post(rank) for rank in (1, 2)]:
        finish(work)
        assert torch.equal(memory, content(seed))


def carried(wires: Wires) -> bytes:
    return b"".join(bytes(cable.to_near) for all_ in wires.cables.values() for cable in all_)


@pytest.mark.parametrize("is_encrypted", [True, False])
def test_certificates_hide_what_is_sent(
    wires: Wires, shown: list[Credentials], is_encrypted: bool
) -> None:
    with closing(Group(3, shown if is_encrypted else ())) as group:
        pushed(group)
    seen = bytes(content(1)[SIZE // 2 :][:64].numpy()) in carried(wires)
    assert seen is not is_encrypted


def test_a_trainer_with_a_token_only_sends_encrypted(
    wires: Wires, shown: list[Credentials]
) -> None:
    token = Credentials(tls_ca=shown[0].tls_ca, token="t")
    with closing(Group(3, [token, *shown[1:]])) as group:
        pushed(group)
    assert bytes(content(1)[SIZE // 2 :][:64].numpy()) not in carried(wires)


def test_a_certificate_that_was_not_announced_is_refused(
    shown: list[Credentials], authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though the same authority has signed it: a receiver that shows another one gets nothing."""
    other = LaneTls.of(authority.credentials("member-1", file="other"))
    announced = LaneTls.of(shown[1])
    changed = dataclasses.replace(announced, server=other.server)
    made = LaneTls.of
    monkeypatch.setattr(LaneTls, "of", lambda given: changed if given is shown[1] else made(given))
    with closing(Group(3, shown)) as group:
        until(lambda: group.receivers[0].error, 20)
        with pytest.raises(StreamError, match=r"no member sends this one what it lacks"):
            group.post(1)


def test_a_sender_that_shows_another_certificate_is_refused(
    shown: list[Credentials], authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = LaneTls.of(authority.credentials("member-0", file="other"))
    changed = dataclasses.replace(LaneTls.of(shown[0]), client=other.client)
    made = LaneTls.of
    monkeypatch.setattr(LaneTls, "of", lambda given: changed if given is shown[0] else made(given))
    with closing(Group(3, shown)) as group:
        until(lambda: group.receivers[0].error, 20)
        with pytest.raises(StreamError, match=r"rank 0 at .* shows another certificate than it"):
            group.post(1)


@pytest.mark.parametrize("as_server", [True, False])
def test_a_socket_is_closed_whose_peer_is_gone_before_they_meet(
    shown: list[Credentials], as_server: bool
) -> None:
    """Else Python warns of it when it is collected: this fails then."""
    tls = LaneTls.of(shown[1])
    context = tls.server if as_server else tls.client
    assert context is not None
    with socket.create_server(("127.0.0.1", 0)) as listener:
        lane = Lane(socket.create_connection(listener.getsockname()), "rank 1")
        peer = listener.accept()[0]
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        peer.close()  # resets the connection
        with pytest.raises(StreamError, match="rank 1 could not be met over TLS"):
            lane.encrypt(context, as_server=as_server)
        lane.close()
    del lane
    gc.collect()
