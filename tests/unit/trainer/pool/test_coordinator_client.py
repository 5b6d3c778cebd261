"""Calls with a lease: acquired anew once where it has run out, and never from somebody else."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from trainer_side.pool.coordinator_client import CoordinatorClient
from weft_rl.contract.errors import LeaseFencedError, TransferTimeoutError
from weft_rl.v1 import publish_pb2 as pb
from weft_rl.v1 import types_pb2


class _Leases:
    """Gives another token each time that the former one is forgotten."""

    def __init__(self) -> None:
        self.last = 1

    def token(self, policy: str, kind: object, deadline: float) -> int:
        return self.last

    def forget(self, policy: str, token: int = 0) -> None:
        if token in (0, self.last):
            self.last += 1

    def held_token(self, policy: str) -> int:
        return self.last

    def close(self) -> None:
        pass


@pytest.fixture
def client() -> Iterator[CoordinatorClient]:
    client = CoordinatorClient("127.0.0.1:1", "trainer-a", connect_seconds=1.0)
    client.leases.close()
    client.leases = _Leases()  # type: ignore[assignment]
    client._contact.was_reached = True
    yield client
    client.close()


def _call(client: CoordinatorClient, fenced: set[int], **metadata: str) -> int:
    def call(token: int, left: float) -> int:
        assert 0 < left <= 5
        if token in fenced:
            raise LeaseFencedError("it has run out", metadata=metadata)
        return token

    kind: Any = types_pb2.POLICY_KIND_BASE
    return client.with_lease("base", kind, call, time.monotonic() + 5, "its turn")


def test_a_lease_that_ran_out_is_acquired_anew_once(client: CoordinatorClient) -> None:
    assert _call(client, {1}) == 2
    with pytest.raises(LeaseFencedError):
        _call(client, {2, 3})


def test_one_that_somebody_holds_is_left_to_them(client: CoordinatorClient) -> None:
    with pytest.raises(LeaseFencedError):
        _call(client, {1}, holder="trainer-b")


def test_one_that_this_process_acquired_anew_beside_is_used(client: CoordinatorClient) -> None:
    """Its renewals run beside: after a stop of the process they may come first, or not yet."""
    assert _call(client, {1}, holder="trainer-a") == 2
    leases: Any = client.leases

    def call(token: int, left: float) -> int:
        if token == 2:
            leases.last = 3  # noted while the call was under way
            raise LeaseFencedError("superseded", metadata={"holder": "trainer-a"})
        return token

    kind: Any = types_pb2.POLICY_KIND_BASE
    assert client.with_lease("base", kind, call, time.monotonic() + 5, "its turn") == 3
    with pytest.raises(LeaseFencedError):
        _call(client, {3, 4}, holder="trainer-a")


def test_nothing_is_called_after_the_deadline(client: CoordinatorClient) -> None:
    with pytest.raises(
        TransferTimeoutError, match="the deadline passed while waiting for a verdict"
    ):
        client.call(lambda left: pytest.fail("it was called"), time.monotonic() - 1, "a verdict")


def test_a_call_that_is_not_answered_in_time_says_what_it_waited_for() -> None:
    """The coordinator of a busy machine, which takes the call and does not come to answer it."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        client = CoordinatorClient(
            f"127.0.0.1:{silent.getsockname()[1]}", "trainer-a", connect_seconds=1.0
        )
        client._contact.was_reached = True
        try:
            with pytest.raises(TransferTimeoutError) as caught:
                client.describe(time.monotonic() + 0.3)
        finally:
            client.close()
    assert caught.value.message.startswith(
        "the deadline passed while waiting for a replica that has described its base model"
    )


def test_a_transfer_whose_push_was_interrupted_as_it_was_begun_is_aborted(
    client: CoordinatorClient,
) -> None:
    aborted: list[pb.AbortTransferRequest] = []
    client.stub = SimpleNamespace(  # type: ignore[assignment]
        AbortTransfer=lambda request, timeout: aborted.append(request)
    )
    version = types_pb2.PolicyVersion(policy="base", version=3)
    client._give_up_late(pb.BeginTransferResponse(transfer_id="t", version=version))
    client._give_up_late(pb.DescribeTargetResponse())
    assert [(a.policy, a.transfer_id, a.fencing_token) for a in aborted] == [("base", "t", 1)]
