"""Whose GPUs a trainer of several ranks tells, and what all of its ranks return."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from trainer_side import rollout_sleep
from trainer_side.ranks.ranks import OneRank
from trainer_side.rollout_sleep import RolloutSleep
from weft_rl.contract.errors import InvalidRequestError, UnsupportedError, WeftError
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

    def __init__(self, failure: WeftError | None = None) -> None:
        self.stub, self.leases = self, SimpleNamespace(session_id="session")
        self.failure, self.num_woken = failure, 0

    def with_lease(
        self,
        policy: str,
        kind: object,
        call: Callable[[int, float], Any],
        deadline: float,
        waits_for: str,
    ) -> Any:
        assert (policy, kind) == ("base", types_pb2.POLICY_KIND_BASE)
        return call(7, 1.0)

    def SleepRollouts(self, request: pb.SleepRolloutsRequest, timeout: float) -> Any:  # noqa: N802
        self.request = request
        return pb.SleepRolloutsResponse(replica_ids=["r0", "r1"])

    def WakeRollouts(self, request: pb.WakeRolloutsRequest, timeout: float) -> Any:  # noqa: N802
        self.num_woken += 1
        if self.failure is not None:
            raise self.failure
        return pb.WakeRolloutsResponse(replica_ids=["r0"])


def test_the_sender_tells_the_gpus_of_every_rank_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rollout_sleep, "used_gpus", lambda: ["b", "a"])
    coordinator: Any = _Coordinator()
    names = rollout_sleep.sleep(
        _Ranks(0, b'["c", "a"]'), coordinator,
        level=2, when_running="abort", timeout_seconds=3.0, deadline=time.monotonic() + 9,
    )  # fmt: skip
    assert names == ("r0", "r1")
    assert list(coordinator.request.gpu_uuids) == ["a", "b", "c"]
    assert coordinator.request.when_running == registry_pb2.WHEN_RUNNING_ABORT
    assert coordinator.request.timeout.ToTimedelta().total_seconds() == 3.0
    assert (coordinator.request.fencing_token, coordinator.request.session_id) == (7, "session")
    assert rollout_sleep.wake(_Ranks(0, b""), coordinator, deadline=time.monotonic() + 9) == ("r0",)


def test_another_rank_gives_its_own_and_returns_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rollout_sleep, "used_gpus", lambda: ["d"])
    rank = _Ranks(1, b'["r0", "r1"]')
    names = rollout_sleep.sleep(
        rank, None, level=1, when_running="finish", timeout_seconds=3.0, deadline=time.monotonic()
    )
    assert names == ("r0", "r1")
    assert rank.given.strip() == b'["d"]'


def test_a_process_without_a_gpu_uses_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert rollout_sleep.used_gpus() == []


def _asleep(coordinator: Any, in_step: Any = None, **arguments: Any) -> rollout_sleep.RolloutSleep:
    settings = {"level": 1, "when_running": "finish", "timeout_seconds": 60.0, **arguments}
    return RolloutSleep(**settings, in_step=in_step, coordinator=coordinator)


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
        _asleep(None, **arguments)


@pytest.mark.parametrize("rank", [0, 1])
def test_after_an_error_the_sender_alone_has_them_woken(rank: int) -> None:
    """Other ranks may be elsewhere: nothing is waited for in step."""
    calls, coordinator = [], _Coordinator()

    def in_step(call: str, work: Any, deadline: float) -> tuple[str, ...]:
        calls.append(call)
        return ("r0",)

    asleep = _asleep(None if rank else coordinator, in_step)
    with pytest.raises(KeyError), asleep:
        raise KeyError("a step")
    assert calls == ["rollouts_asleep"]
    assert coordinator.num_woken == (0 if rank else 1)


def test_what_could_not_begin_is_undone_and_its_error_stays(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    coordinator = _Coordinator(UnsupportedError("the wake fails, too"))

    def fail(*_: Any, **__: Any) -> None:
        raise InvalidRequestError("the sleep fails")

    def in_step(call: str, work: Any, deadline: float) -> Any:
        return work(OneRank(), coordinator)

    monkeypatch.setattr(rollout_sleep, "sleep", fail)
    with pytest.raises(InvalidRequestError, match="the sleep fails"), _asleep(coordinator, in_step):
        pass
    assert coordinator.num_woken == 1


def test_a_call_that_comes_to_nothing_wakes_nobody() -> None:
    """From within a push, say: replicas may be asleep for an outer ``with``."""
    coordinator = _Coordinator()

    def in_step(call: str, work: Any, deadline: float) -> Any:
        raise InvalidRequestError("called from within a push")

    with pytest.raises(InvalidRequestError, match="within a push"), _asleep(coordinator, in_step):
        pass
    assert coordinator.num_woken == 0


def test_a_forked_process_wakes_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    coordinator = _Coordinator()
    asleep = _asleep(coordinator, lambda call, work, deadline: ("r0",))
    asleep.__enter__()
    monkeypatch.setattr(os, "getpid", lambda: -1)  # as a forked child has another
    asleep.__exit__(SystemExit, SystemExit(), None)
    assert coordinator.num_woken == 0
