"""Shards that are handed to a rank that sends them: over the real link, ranks as threads."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import chain

import pytest
import torch

from tests.doubles.linked_ranks import linked_ranks
from trainer_side.ranks.torch_ranks import TorchRanks
from trainer_side.sharding import hand_over as module
from trainer_side.sharding.hand_over import GivingRanks, hand_over
from trainer_side.sharding.plan import HandedRuns
from weft_rl.contract.errors import NotFiniteError, PeerUnavailableError, WeftError
from weft_rl.contract.manifest import Run

_DTYPES = [torch.float32, torch.bfloat16, torch.uint8]
_NUM_RANKS = 3
#: What rank 0 sends, bucket by bucket; its own runs among those of two that hand over to it.
_OWN = [Run(0, 0, 5), Run(2, 40, 7)]
_HANDED = {
    1: HandedRuns(0, ((Run(0, 5, 6), Run(1, 0, 3)), (Run(2, 0, 40),))),
    2: HandedRuns(0, ((Run(1, 3, 2, 8, 4),), (Run(2, 47, 3), Run(2, 50, 1)), (Run(2, 60, 9),))),
}
_BUCKETS = [
    [_OWN[0], Run(0, 5, 6), Run(1, 0, 3), Run(1, 3, 2, 8, 4)],
    [Run(2, 0, 40), _OWN[1], Run(2, 47, 3), Run(2, 50, 1)],
    [Run(2, 60, 9)],
]


class _Source:
    """Elements that tell which they are; ``before`` may fail."""

    def __init__(self, before: Callable[[Sequence[Run]], None] = lambda runs: None) -> None:
        self.asked: list[Run] = []
        self._before = before

    def fill(self, runs: Sequence[Run], outs: Sequence[torch.Tensor]) -> None:
        self._before(runs)
        self.asked += runs
        for run, out in zip(runs, outs, strict=True):
            assert out.dtype == _DTYPES[run.tensor]
            assert out.shape == (run.num_elements,)
            out.copy_(torch.arange(run.num_elements) + run.first)


@pytest.fixture
def links() -> Iterator[list[TorchRanks]]:
    with linked_ranks(_NUM_RANKS) as ranks:
        yield ranks


def _give(links: list[TorchRanks], sources: dict[int, _Source]) -> list[Future[None]]:
    pool = ThreadPoolExecutor(2)
    futures = [
        pool.submit(hand_over, sources[rank], _HANDED[rank], _DTYPES, links[rank])
        for rank in _HANDED
    ]
    pool.shutdown(wait=False)
    return futures


def _outs(runs: Sequence[Run]) -> list[torch.Tensor]:
    return [torch.full((run.num_elements,), 99).to(_DTYPES[run.tensor]) for run in runs]


def test_a_rank_fills_its_buckets_with_what_it_is_handed(links: list[TorchRanks]) -> None:
    sources = {rank: _Source() for rank in range(_NUM_RANKS)}
    futures = _give(links, sources)
    givers = GivingRanks(sources[0], _HANDED, _DTYPES, links[0])
    for runs in _BUCKETS:
        outs = _outs(runs)
        givers.fill(runs, outs)
        for run, out in zip(runs, outs, strict=True):
            assert out.tolist() == list(range(run.first, run.first + run.num_elements))
    givers.end()
    for future in futures:
        assert future.result(10) is None
    assert sources[0].asked == _OWN
    for rank, handed in _HANDED.items():  # each read once, in order
        assert sources[rank].asked == list(chain(*handed.runs))


@pytest.mark.parametrize("taken", [0, 1])
def test_nobody_is_left_waiting_when_the_push_ends_before_all_was_sent(
    links: list[TorchRanks], taken: int
) -> None:
    futures = _give(links, {1: _Source(), 2: _Source()})
    givers = GivingRanks(_Source(), _HANDED, _DTYPES, links[0])
    for runs in _BUCKETS[:taken]:
        givers.fill(runs, _outs(runs))
    givers.end()  # with the next messages asked for already, or none
    for future in futures:
        assert future.result(10) is None
    links[0].abandon()


def test_what_a_giver_fails_with_is_the_senders_error(links: list[TorchRanks]) -> None:
    def fail(runs: Sequence[Run]) -> None:
        if Run(2, 47, 3) in runs:
            raise NotFiniteError("NaN in layers.1.weight")

    sources = {1: _Source(), 2: _Source(fail)}
    futures = _give(links, sources)
    givers = GivingRanks(_Source(), _HANDED, _DTYPES, links[0])
    givers.fill(_BUCKETS[0], _outs(_BUCKETS[0]))
    with pytest.raises(NotFiniteError, match=r"NaN in layers\.1\.weight"):
        givers.fill(_BUCKETS[1], _outs(_BUCKETS[1]))
    givers.end()
    for future in futures:
        assert future.result(10) is None


def test_a_giver_that_goes_away_is_gone_for_the_sender(links: list[TorchRanks]) -> None:
    gone = threading.Event()

    def leave(runs: Sequence[Run]) -> None:
        links[2].abandon()
        gone.set()

    futures = _give(links, {1: _Source(), 2: _Source(leave)})
    givers = GivingRanks(_Source(), _HANDED, _DTYPES, links[0])
    with pytest.raises(PeerUnavailableError):
        givers.fill(_BUCKETS[0], _outs(_BUCKETS[0]))
    assert gone.wait(10)  # the sender may have been told before `abandon` has returned
    givers.end()  # says nothing to whom cannot be told
    for future in futures:
        assert future.exception(30) is None or isinstance(future.exception(), WeftError)


def test_messages_use_the_same_memory_again() -> None:
    message = module._Message(_DTYPES)
    message.lay_out([Run(0, 0, 100)])
    first = message.content.data_ptr()
    message.lay_out([Run(1, 0, 3), Run(2, 8, 5)])
    assert message.content.data_ptr() == first
    assert int(message.error_bytes) == 0
    assert [view.numel() for view in message.views] == [3, 5]
    begins = [view.data_ptr() - first for view in message.views]
    assert begins == [16, 32]
