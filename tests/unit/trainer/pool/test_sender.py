from __future__ import annotations

import pytest
import torch

from trainer_side.pool import sender as module
from trainer_side.pool.sender import DEVICE_BUCKET_BYTES, BackendSelection, bucket_settings
from weft.contract.errors import NotReadyError
from weft.contract.manifest import DEFAULT_BUCKET_BYTES, WSUM64, XXH3_64

BOTH = ("nccl", "gloo")


@pytest.fixture
def gpu(monkeypatch):
    """A process that has one."""
    monkeypatch.setattr(module, "available_backends", lambda _: BOTH)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)


def test_without_an_accelerator_bytes_take_gloo():
    assert BackendSelection().backend(BOTH) == "gloo"
    assert BackendSelection().device_of("nccl") == torch.device("cpu")


def test_a_pool_from_before_backends_were_told_takes_gloo():
    assert BackendSelection().backend(()) == "gloo"


def test_with_one_they_take_what_the_pool_likes_best(gpu):
    assert BackendSelection().backend(BOTH) == "nccl"
    assert BackendSelection().backend(("gloo",)) == "gloo"
    assert BackendSelection("gloo").backend(BOTH) == "gloo"


def test_the_device_is_the_current_one_or_as_chosen(gpu):
    assert BackendSelection().device_of("nccl") == torch.device("cuda", 1)
    chosen = BackendSelection(device=torch.device("cuda", 3))
    assert chosen.device_of("nccl") == torch.device("cuda", 3)
    assert chosen.device_of("gloo") == torch.device("cpu")


def test_no_shared_backend_is_refused():
    with pytest.raises(NotReadyError, match="offers nccl, this process has gloo") as caught:
        BackendSelection().backend(("nccl",))
    assert caught.value.reason == "BACKEND_MISMATCH"
    with pytest.raises(NotReadyError, match="may use nccl only"):
        BackendSelection("nccl").backend(BOTH)


def test_buckets_and_digests_suit_the_backend():
    assert bucket_settings("gloo", None) == module.BucketSettings(DEFAULT_BUCKET_BYTES, XXH3_64)
    assert bucket_settings("nccl", None) == module.BucketSettings(DEVICE_BUCKET_BYTES, WSUM64)
    assert bucket_settings("nccl", 2**20).bucket_bytes == 2**20
