"""The ranks of one trainer as threads of a test, over their real link."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
import torch.distributed as dist

from trainer_side.ranks.torch_ranks import TorchRanks


@contextmanager
def linked_ranks(size: int, *, seconds: float = 20.0) -> Iterator[list[TorchRanks]]:
    """Ranks that have opened a push which ends after so long."""
    store = dist.HashStore()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GLOO_SOCKET_IFNAME", "lo")
        patch.setattr(dist.distributed_c10d, "_get_default_store", lambda: store)
        patch.setattr(dist, "get_process_group_ranks", lambda group: list(range(size)))
        patch.setattr(dist, "get_world_size", lambda group=None: size)
        patch.setattr(dist, "get_rank", lambda group=None: 0)
        ranks = [TorchRanks(None) for _ in range(size)]
        for number, each in enumerate(ranks):  # each process would count from 0
            each.rank, each._name = number, "linked-ranks"
        deadline = time.monotonic() + seconds
        with ThreadPoolExecutor(size) as pool:
            list(pool.map(lambda each: each.open(deadline), ranks))
        try:
            yield ranks
        finally:
            for each in ranks:
                each.abandon()
