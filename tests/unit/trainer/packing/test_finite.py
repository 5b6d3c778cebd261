"""NaN and infinities are found in what is sent, whatever it was before the cast."""

from __future__ import annotations

import pytest
import torch

from tests.doubles.packing import SourcePacker
from trainer_side.sources.source import CastRule, ParamsSource, tensor_source
from weft_rl.contract.errors import NotFiniteError
from weft_rl.contract.manifest import plan_buckets
from weft_rl.contract.tensors import DataType

KEEP = CastRule(enabled=False)
NAN, INF = float("nan"), float("inf")
FLOATS = [torch.float64, torch.float32, torch.float16, torch.bfloat16]


def pack(source: ParamsSource, *, bucket_bytes: int = 2**20) -> None:
    manifest = plan_buckets(source.metas, bucket_bytes)
    packer = SourcePacker(source, manifest)
    for index in range(len(manifest.buckets)):
        packer.pack(index, finite=True)


def refused(source: ParamsSource, *, bucket_bytes: int = 2**20) -> str:
    with pytest.raises(NotFiniteError, match="holds NaN or infinity") as caught:
        pack(source, bucket_bytes=bucket_bytes)
    assert caught.value.reason == "NOT_FINITE"
    return caught.value.metadata["parameter"]


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_the_first_tensor_that_holds_one_is_named(dtype: torch.dtype, bad: float) -> None:
    tensors = {f"l.{i}.w": torch.ones(5, 3, dtype=dtype) for i in range(4)}
    pack(tensor_source(tensors, KEEP, "test"))
    tensors["l.2.w"][4, 2] = bad
    tensors["l.3.w"][0, 0] = NAN
    for bucket_bytes in (256, 512, 2**20):  # alone in its bucket, beside others, with all
        assert refused(tensor_source(tensors, KEEP, "test"), bucket_bytes=bucket_bytes) == "l.2.w"


@pytest.mark.parametrize(
    ("value", "served"),
    [(1e300, DataType.BFLOAT16), (1e300, DataType.FLOAT32), (1e5, DataType.FLOAT16)],
)
def test_what_the_cast_made_infinite_is_found(value: float, served: DataType) -> None:
    tensors = {"w": torch.tensor([1.0, value], dtype=torch.float64)}
    pack(tensor_source(tensors, KEEP, "test"))
    assert refused(tensor_source(tensors, CastRule(served=served), "test")) == "w"


@pytest.mark.parametrize("dtype", FLOATS)
def test_the_largest_numbers_are_numbers(dtype: torch.dtype) -> None:
    """Their sum is not: a test that adds up would refuse them."""
    largest = torch.full((64,), torch.finfo(dtype).max, dtype=dtype)
    pack(tensor_source({"w": largest, "x": -largest}, KEEP, "test"))


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_every_value_of_fp8(dtype: torch.dtype) -> None:
    for byte in range(256):
        content = torch.full((3,), byte, dtype=torch.uint8).view(dtype)
        source = tensor_source({"before": torch.ones(2), "w": content}, KEEP, "test")
        if bool(torch.isfinite(content.float()).all()):
            pack(source)
        else:
            assert refused(source) == "w"


def test_integers_are_left_alone() -> None:
    pack(tensor_source({"w": torch.full((8,), -1, dtype=torch.int16)}, KEEP, "test"))
