from __future__ import annotations

import pytest
import torch

from trainer_side.pushes.rank_push import DEVICE_BUCKET_BYTES, bucket_capacity
from weft_rl.contract.manifest import DEFAULT_BUCKET_BYTES


@pytest.mark.parametrize("has_gpu", [True, False])
def test_buckets_suit_what_the_backend_carries(has_gpu, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    assert bucket_capacity("gloo", None) == DEFAULT_BUCKET_BYTES
    for name in ("nccl", "one-sided") if has_gpu else ():
        assert bucket_capacity(name, None) == DEVICE_BUCKET_BYTES
    assert has_gpu or bucket_capacity("one-sided", None) == DEFAULT_BUCKET_BYTES
    assert bucket_capacity("nccl", 2**20) == 2**20
