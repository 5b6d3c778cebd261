"""A coordinator that is not there: what is said, when, and how long is waited."""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Iterator
from concurrent import futures

import grpc
import pytest

from trainer_side.pool.coordinator_client import (
    CoordinatorConnection,
    data_address,
    why_unreachable,
)
from weft_rl.contract.errors import InvalidRequestError, PeerUnavailableError
from weft_rl.rpc.channel import open_channel


@pytest.fixture
def port() -> Iterator[int]:
    """A port that nobody listens on yet, and that is given to nobody else meanwhile."""
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        holder.bind(("127.0.0.1", 0))
        yield holder.getsockname()[1]


@pytest.fixture
def target(port: int) -> str:
    return f"127.0.0.1:{port}"


def test_one_never_reached_is_named_with_what_was_tried(
    target: str, caplog: pytest.LogCaptureFixture
) -> None:
    channel = open_channel(target)
    try:
        contact = CoordinatorConnection(channel, target, 1.0)
        with pytest.raises(PeerUnavailableError) as caught:
            contact.wait(time.monotonic() + 600)
    finally:
        channel.close()
    assert caught.value.reason == "COORDINATOR_UNREACHABLE"
    assert caught.value.metadata == {"target": target}
    for words in (target, "connection refused", "--listen", "connect_seconds=300"):
        assert words in caught.value.message
    (line,) = [r.message for r in caplog.records if "cannot be reached" in r.message]
    assert "connection refused" in line  # said once, before the time was over


def test_a_coordinator_that_starts_later_is_waited_for_and_then_known(
    target: str, port: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    channel, asked = open_channel(target), threading.Event()
    server = grpc.server(futures.ThreadPoolExecutor(1))

    def probe(_: str) -> str:
        asked.set()
        return "nobody is up yet"

    def start() -> None:
        assert asked.wait(10)
        server.add_insecure_port(target)
        server.start()

    starting = threading.Thread(target=start)
    starting.start()
    try:
        contact = CoordinatorConnection(channel, target, 30.0, probe)
        contact.wait(time.monotonic() + 30)
        assert contact.was_reached
        said = [r.message for r in caplog.records]
        assert "nobody is up yet; trying for another" in said[0]
        assert "reached the coordinator" in said[1]
        # Reached once: an outage is waited for till the push's deadline, and named so.
        server.stop(0).wait()
        with pytest.raises(PeerUnavailableError, match="the push's time is up") as caught:
            contact.wait(time.monotonic() + 0.2)
        assert caught.value.reason == "COORDINATOR_AWAY"
    finally:
        starting.join()
        channel.close()
        server.stop(0)


def test_why_a_connection_fails_is_said_in_words(target: str) -> None:
    assert why_unreachable(target) == "connection refused"
    assert "is not known" in why_unreachable("no-such-host.invalid:50051")
    with socket.create_server(("127.0.0.1", 0)) as other:
        assert why_unreachable(f"127.0.0.1:{other.getsockname()[1]}") == ""


def test_a_listener_that_is_no_coordinator_is_said_to_be_none() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        target = f"127.0.0.1:{other.getsockname()[1]}"
        channel = open_channel(target)
        try:
            with pytest.raises(PeerUnavailableError, match="does not answer as a coordinator"):
                CoordinatorConnection(channel, target, 0.3).wait(time.monotonic() + 60)
        finally:
            channel.close()


def test_a_slow_look_up_does_not_outlast_the_time(target: str) -> None:
    release = threading.Event()

    def probe(_: str) -> str:
        release.wait(30)
        return "never told"

    channel = open_channel(target)
    try:
        with pytest.raises(PeerUnavailableError, match="could not be looked up yet"):
            CoordinatorConnection(channel, target, 0.2, probe).wait(time.monotonic() + 60)
    finally:
        release.set()
        channel.close()


def test_the_data_host_must_be_an_address_of_this_machine(target: str) -> None:
    assert data_address("127.0.0.1", target) == "127.0.0.1"
    assert data_address(None, target) == "127.0.0.1"
    with pytest.raises(InvalidRequestError, match="is no address of this machine"):
        data_address("192.0.2.1", target)
    with pytest.raises(InvalidRequestError, match="is not known here"):
        data_address("no-such-host.invalid", target)
    with pytest.raises(PeerUnavailableError, match="no route to the coordinator") as caught:
        data_address(None, "no-such-host.invalid:1")
    assert caught.value.reason == "COORDINATOR_UNREACHABLE"
