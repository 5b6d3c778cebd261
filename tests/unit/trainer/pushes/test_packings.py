from __future__ import annotations

from trainer_side.pushes.rank_push import DEVICE_BUCKET_BYTES, bucket_capacity
from weft_rl.contract.manifest import DEFAULT_BUCKET_BYTES


def test_buckets_suit_the_backend():
    for name in ("gloo", "one-sided"):
        assert bucket_capacity(name, None) == DEFAULT_BUCKET_BYTES
    assert bucket_capacity("nccl", None) == DEVICE_BUCKET_BYTES
    assert bucket_capacity("nccl", 2**20) == 2**20
