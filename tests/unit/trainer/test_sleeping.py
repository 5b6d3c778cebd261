"""Whose GPUs a trainer of several ranks tells, and what all of its ranks return."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from trainer_side import sleeping
from trainer_side.ranks.ranks import OneRank
from weft_rl.contract.errors import InvalidRequestError
from weft_rl.v1 import publish_pb2 as pb
from weft_rl.v1 import registry_pb2, types_pb2


class _Ranks(OneRank):
    """One of two ranks, of which the other has said ``said``."""

    size = 2

    def __init__(self, rank: int, said: bytes) -> None:
        self.rank, self.said = rank, said

    def share(self, produce: Callable[[], bytes]) -> bytes:
        return produce() if self.rank == 0 else self.said

    def collect(self, mine: torch.Tensor | None, theirs: Mapping[int, torch.Tensor]) -> None:
        if self.rank == 0:
            (buffer,) = theirs.values()
            buffer.copy_(
                torch.frombuffer(bytearray(self.said.ljust(len(buffer))), dtype=torch.uint8)
            )
        else:
            assert mine is not None
            self.given = bytes(mine.numpy())


class _Coordinator:
    """Keeps what is asked for."""

    def __init__(self) -> None:
        self.stub, self.leases = self, SimpleNamespace(session_id="session")

    def with_lease(
        self, policy: str, kind: object, call: Callable[[int, float], Any], deadline: float
    ) -> Any:
        assert (policy, kind) == ("base", types_pb2.POLICY_KIND_BASE)
        return call(7, 1.0)

    def SleepRollouts(self, request: pb.SleepRolloutsRequest, timeout: float) -> Any:  # noqa: N802
        self.request = request
        return pb.SleepRolloutsResponse(replica_ids=["r0", "r1"])

    def WakeRollouts(self, request: pb.WakeRolloutsRequest, timeout: float) -> Any:  # noqa: N802
        return pb.WakeRolloutsResponse(replica_ids=["r0"])


def test_the_sender_tells_the_gpus_of_every_rank_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sleeping, "used_gpus", lambda: ["b", "a"])
    coordinator: Any = _Coordinator()
    names = sleeping.sleep(_Ranks(0, b'["c", "a"]'), coordinator, 2, "abort", 3.0)
    assert names == ("r0", "r1")
    assert list(coordinator.request.gpu_uuids) == ["a", "b", "c"]
    assert coordinator.request.when_running == registry_pb2.WHEN_RUNNING_ABORT
    assert coordinator.request.timeout.ToTimedelta().total_seconds() == 3.0
    assert (coordinator.request.fencing_token, coordinator.request.session_id) == (7, "session")
    assert sleeping.wake(_Ranks(0, b""), coordinator, 3.0) == ("r0",)


def test_another_rank_gives_its_own_and_returns_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sleeping, "used_gpus", lambda: ["d"])
    rank = _Ranks(1, b'["r0", "r1"]')
    assert sleeping.sleep(rank, None, 1, "finish", 3.0) == ("r0", "r1")
    assert rank.given.strip() == b'["d"]'


def test_a_process_without_a_gpu_uses_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert sleeping.used_gpus() == []


class _Refusing(sleeping.RolloutSleep):
    def _between_pushes(self, call: str, work: Any, deadline: float) -> Any:
        raise AssertionError("it was ordered")


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"level": 3}, "level=3: use one of 1, 2"),
        ({"level": True}, "level=True: use one of 1, 2"),
        ({"level": "1"}, "level='1'"),
        ({"when_running": "finsh"}, "when_running='finsh': use one of 'finish', 'abort'"),
        ({"timeout_seconds": 0}, "timeout_seconds=0: give seconds"),
    ],
)
def test_what_cannot_be_meant_is_refused_before_anything_is_ordered(
    arguments: dict[str, Any], match: str
) -> None:
    with pytest.raises(InvalidRequestError, match=match):
        _Refusing().sleep_rollouts(**arguments)
