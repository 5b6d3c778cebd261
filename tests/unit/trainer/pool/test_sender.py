from __future__ import annotations

from trainer_side.pool.sender import DEVICE_BUCKET_BYTES, BucketSettings, bucket_settings
from weft.contract.manifest import DEFAULT_BUCKET_BYTES, WSUM64, XXH3_64


def test_buckets_and_digests_suit_the_backend():
    for name in ("gloo", "one-sided"):
        assert bucket_settings(name, None) == BucketSettings(DEFAULT_BUCKET_BYTES, XXH3_64)
    assert bucket_settings("nccl", None) == BucketSettings(DEVICE_BUCKET_BYTES, WSUM64)
    assert bucket_settings("nccl", 2**20).bucket_bytes == 2**20
