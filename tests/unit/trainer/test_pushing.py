"""One push at one rank: what it keeps, whatever becomes of it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.doubles.linked_ranks import linked_ranks
from tests.doubles.shards import held_push
from trainer_side.delta_selection import DeltaSelection
from trainer_side.packing.packer import whole_packing
from trainer_side.params.params import WholeElements
from trainer_side.pool.backend_selection import BackendSelection
from trainer_side.pool.client import PushReporter
from trainer_side.pushes.rank_push import GatheredPush, HeldPush, RankPushFactory
from trainer_side.pushing import PushExecutor
from trainer_side.ranks.ranks import SENDER, OneRank
from trainer_side.ranks.torch_ranks import TorchRanks
from trainer_side.sources.source import CastRule, ParamsSource, Source, tensor_source
from weft_rl.contract.errors import (
    CapacityError,
    InvalidManifestError,
    PeerUnavailableError,
    TransferTimeoutError,
)
from weft_rl.contract.manifest import plan_buckets
from weft_rl.v1 import publish_pb2 as pb


class _Ranks(OneRank):
    """One of two."""

    size = 2

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def share(self, produce: Callable[[], bytes], *, all_wait: bool = False) -> bytes:
        if self.rank != SENDER:
            raise CapacityError("full")
        return produce()


class _Source(Source):
    """Notes that its reading has ended."""

    description, is_collective = "test", True

    def __init__(self) -> None:
        own: ParamsSource = tensor_source({"a": torch.ones(4)}, CastRule(), "test")
        self.metas, self.told = own.metas, list[str]()

    def read(self, first: int, count: int, views: Sequence[torch.Tensor] | None) -> None:
        self.told.append("read")

    def end_reading(self) -> None:
        self.told.append("end")


def _pushing(ranks: OneRank, client: Any = None) -> PushExecutor:
    deltas = DeltaSelection("never", ranks, BackendSelection())
    packings = RankPushFactory(ranks, None)
    return PushExecutor(ranks, client, packings, SimpleNamespace(), deltas)  # type: ignore[arg-type]


class _Sending:
    """The sender's client, which sends by ``send`` alone."""

    def __init__(self, send: Callable[[Any], object] = lambda push: None) -> None:
        self._send = send

    @contextmanager
    def carrying_out(self, begun: Any, push: Any) -> Iterator[None]:
        try:
            yield
        finally:
            push.end_sending()

    def attend(self, *rest: Any) -> None:
        pass

    def begin_sending(self, begun: Any, push: Any, *rest: Any) -> Any:
        return SimpleNamespace(send=self._send), push

    def outcome(self, *rest: Any) -> pb.Transfer:
        return pb.Transfer()


@pytest.mark.parametrize("rank", [0, 1])
def test_the_reading_of_a_push_that_fails_has_ended_at_every_rank(rank: int) -> None:
    def send(push: Any) -> None:
        push.fill(packing.runs[0], [torch.empty(4)])
        raise CapacityError("full")

    ranks, source = _Ranks(rank), _Source()
    packing: Any = whole_packing(plan_buckets(source.metas))
    push = GatheredPush(source, ranks, packing)
    begun = pb.BeginTransferResponse(group=pb.GroupPlan(group_id="g"))
    with pytest.raises(CapacityError):
        _pushing(ranks, _Sending(send))._carry_out(begun, push, False, time.monotonic() + 5)
    assert source.told == ["read", "end"]


class _Shards(_Source):
    """One tensor, that must be brought together; ``fails`` in it."""

    def __init__(self, fails: BaseException | None = None) -> None:
        super().__init__()
        self._fails = fails

    def read(self, first: int, count: int, views: Sequence[torch.Tensor] | None) -> None:
        super().read(first, count, views)
        if self._fails is not None:
            raise self._fails

    def prepare(self) -> None:
        self.told.append("prepare")

    def release(self) -> None:
        self.told.append("release")

    def elements(self, index: int) -> None:
        return None

    def why_gathered(self, index: int) -> str:
        return "it must be"


_ALL = WholeElements(torch.ones(4))


def _shard_push(ranks: Any, source: _Shards, *, gathers: bool = True) -> HeldPush:
    return held_push(source, [None if gathers else _ALL], ranks, plan_buckets(source.metas))


def test_a_push_that_is_refused_brings_nothing_together() -> None:
    def refuse(*rest: Any) -> Any:
        raise InvalidManifestError("refused at begin")

    ranks, source = _Ranks(SENDER), _Shards()
    push, pushing = _shard_push(ranks, source), _pushing(ranks)
    plan = SimpleNamespace(push=push, adapter=None, backend="gloo")
    pushing._agree = lambda *rest: plan  # type: ignore[assignment, return-value]
    pushing._begin = refuse  # type: ignore[method-assign]
    request: Any = SimpleNamespace(timeout_seconds=5, policy="base", arguments={}, beside=0)
    with pytest.raises(InvalidManifestError):
        pushing.push(request, began=0.0)
    assert source.told == []


class _Client:
    """Notes what is given up."""

    def __init__(self) -> None:
        self.given_up: list[tuple[BaseException, bool]] = []

    def attend(self, begun: pb.BeginTransferResponse, deadline: float) -> None:
        pass

    def give_up(
        self, begun: pb.BeginTransferResponse, error: BaseException, *, has_begun: bool = True
    ) -> None:
        self.given_up.append((error, has_begun))


@pytest.fixture
def linked() -> Iterator[list[TorchRanks]]:
    with linked_ranks(2) as ranks:
        yield ranks


@pytest.mark.parametrize("fails", [0, 1])
def test_a_gather_that_fails_at_one_rank_ends_the_push_at_all(
    linked: list[TorchRanks], fails: int
) -> None:
    client = _Client()
    sources = [_Shards(CapacityError("no room") if r == fails else None) for r in range(2)]
    pushings = [_pushing(ranks, None if ranks.rank else client) for ranks in linked]
    left: list[int] = []
    begun = pb.BeginTransferResponse(group=pb.GroupPlan(group_id="g"))

    def push(rank: int) -> None:
        pushings[rank]._peer = SimpleNamespace(close=lambda: left.append(rank))  # type: ignore[assignment]
        own = _shard_push(linked[rank], sources[rank])
        pushings[rank]._carry_out(begun, own, False, time.monotonic() + 5)

    with ThreadPoolExecutor(2) as pool:
        found = [each.exception(10) for each in [pool.submit(push, rank) for rank in range(2)]]
    assert [(type(error), str(error)) for error in found] == [
        (CapacityError, str(CapacityError("no room")))
    ] * 2
    assert client.given_up == [(found[0], False)]
    assert left == [1]
    for source in sources:
        assert source.told == ["prepare", "read", "end", "release"]


def test_a_push_that_has_ended_already_brings_nothing_together(linked: list[TorchRanks]) -> None:
    """Its begin was asked again."""
    sources = [_Shards(), _Shards()]
    client = _Sending()

    def push(rank: int) -> pb.Transfer:
        pushing = _pushing(linked[rank], None if rank else client)
        own = _shard_push(linked[rank], sources[rank])
        return pushing._carry_out(pb.BeginTransferResponse(), own, False, time.monotonic() + 5)

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(push, range(2))) == [pb.Transfer()] * 2
    assert [source.told for source in sources] == [["end", "release"], ["release"]]


class _Counted(_Ranks):
    """Counts agreements."""

    def __init__(self) -> None:
        super().__init__(SENDER)
        self.num_agreed = 0

    def agree(self, error: BaseException | None = None, flags: int = 0, same: bytes = b"") -> int:
        self.num_agreed += 1
        return super().agree(error, flags, same)


@pytest.mark.parametrize(("gathers", "num_agreed"), [(False, 1), (True, 2)])
def test_a_push_that_gathers_nothing_agrees_once_before_it_is_sent(
    gathers: bool, num_agreed: int
) -> None:
    ranks, source = _Counted(), _Shards()
    push = _shard_push(ranks, source, gathers=gathers)
    begun = pb.BeginTransferResponse(group=pb.GroupPlan(group_id="g"))
    _pushing(ranks, _Sending())._carry_out(begun, push, False, time.monotonic() + 5)
    assert ranks.num_agreed == num_agreed


def test_a_push_that_is_given_up_says_why_it_was_begun_again_before() -> None:
    """Each reason once, in order; and what it ended with first."""
    gone = PeerUnavailableError("r0 is gone: it closed its stream", reason="PEER_GONE")
    silent = PeerUnavailableError("r0 is gone: it could not be told to join", reason="PEER_GONE")
    late = TransferTimeoutError("its time was up", metadata={"member": "r0"})
    failures = iter([gone, silent, silent, late])

    def fail(*rest: Any) -> Any:
        raise next(failures)

    pushing = _pushing(OneRank(), SimpleNamespace(end=lambda error: None, reporter=PushReporter()))
    pushing._agree = fail  # type: ignore[method-assign]
    pushing._begin_again = lambda *rest: None  # type: ignore[method-assign]
    request: Any = SimpleNamespace(timeout_seconds=5, policy="base", arguments={}, beside=0)
    with pytest.raises(TransferTimeoutError) as caught:
        pushing.push(request, began=0.0)
    assert caught.value.message == (
        "its time was up; before that: r0 is gone: it closed its stream; "
        "r0 is gone: it could not be told to join"
    )
    assert caught.value.metadata == {"member": "r0"}
