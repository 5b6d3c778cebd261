"""The layout of a version: what is sealed, what is refused."""

import dataclasses
import hashlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft_rl.contract.errors import CapacityError, DigestMismatchError, InvalidManifestError
from weft_rl.contract.manifest import (
    ALIGN_BYTES,
    MAX_TENSORS,
    Bucket,
    TensorSlot,
    align_up,
    check_num_tensors,
    check_trailer,
    layer_of,
    make_manifest,
    pack_trailer,
    plan_buckets,
)
from weft_rl.contract.tensors import DataType, TensorMeta

F32 = DataType.FLOAT32


def meta(name: str, *shape: int, dtype: DataType = F32) -> TensorMeta:
    return TensorMeta(name, dtype, shape)


_shapes = st.lists(st.integers(1, 40), max_size=3).map(tuple)
_metas = st.lists(
    st.builds(
        TensorMeta,
        st.builds("model.layers.{}.{}.weight".format, st.integers(0, 5), st.integers(0, 10**6)),
        st.sampled_from(DataType),
        _shapes,
    ),
    min_size=1,
    max_size=60,
    unique_by=lambda m: m.name,
)


@given(_metas, st.integers(256, 20_000))
def test_plan_keeps_order_alignment_and_whole_tensors(metas, capacity):
    manifest = plan_buckets(metas, capacity)
    assert [slot.meta for slot in manifest.tensors] == metas
    assert sum(b.num_tensors for b in manifest.buckets) == len(metas)
    end = {}
    for slot in manifest.tensors:
        assert slot.offset_bytes % ALIGN_BYTES == 0
        assert slot.offset_bytes == end.get(slot.bucket, 0)
        end[slot.bucket] = slot.offset_bytes + align_up(slot.meta.num_bytes)
    for index, bucket in enumerate(manifest.buckets):
        assert bucket.payload_bytes == end[index]
        assert bucket.payload_bytes <= max(capacity, align_up(max(m.num_bytes for m in metas)))
        assert bucket.payload_bytes <= capacity or bucket.num_tensors == 1


@given(_metas, st.integers(256, 20_000))
def test_a_layer_that_fits_is_never_spread_over_two_buckets(metas, capacity):
    metas = sorted(metas, key=lambda m: layer_of(m.name))
    manifest = plan_buckets(metas, capacity)
    layers = {}
    for slot in manifest.tensors:
        layers.setdefault(layer_of(slot.meta.name), []).append(slot)
    for slots in layers.values():
        if sum(align_up(s.meta.num_bytes) for s in slots) <= capacity:
            assert len({s.bucket for s in slots}) == 1


def test_oversized_tensor_travels_alone():
    metas = [meta("a.weight", 10), meta("big.weight", 5000), meta("c.weight", 10)]
    manifest = plan_buckets(metas, 1024)
    assert [slot.bucket for slot in manifest.tensors] == [0, 1, 2]
    assert manifest.buckets[1].payload_bytes == align_up(20_000)


def test_layer_of():
    assert layer_of("model.layers.3.mlp.up_proj.weight") == "model.layers.3"
    assert layer_of("lm_head.weight") == "lm_head"


def test_layout_digest_is_that_of_the_text_in_the_proto():
    manifest = plan_buckets([meta("a.w", 2, 3), meta("b.w", dtype=DataType.BFLOAT16)])
    text = "2\n512 2\na.w 1 2,3 0 0\nb.w 3  0 256\n"
    assert manifest.layout_digest == hashlib.sha256(text.encode()).digest()


SLOT = TensorSlot(meta("a", 64), 0, 0)
OK = ([SLOT], [Bucket(256, 1)])


@pytest.mark.parametrize(
    ("slots", "buckets", "words"),
    [
        ([SLOT, TensorSlot(meta("a", 64), 0, 256)], [Bucket(512, 2)], "two tensors are named 'a'"),
        ([SLOT, TensorSlot(meta("b", 64), 0, 0)], [Bucket(256, 2)], "overlaps"),
        ([TensorSlot(meta("a", 64), 0, 8)], [Bucket(512, 1)], "multiple of"),
        ([TensorSlot(meta("a", 64), 1, 0)], [Bucket(256, 1)], "bucket 1"),
        ([SLOT], [Bucket(256, 2)], "says it holds 2 tensors"),
        ([TensorSlot(meta("a", 65), 0, 0)], [Bucket(256, 1)], "need a multiple"),
        ([SLOT], [Bucket(512, 1)], "longer than its tensors"),
        ([TensorSlot(meta("a", 0), 0, 0)], [Bucket(256, 1)], "Gather a sharded"),
        ([TensorSlot(meta("a", -4, -16), 0, 0)], [Bucket(256, 1)], "at least 1"),
        ([TensorSlot(meta("", 64), 0, 0)], [Bucket(256, 1)], "tensor name ''"),
        ([TensorSlot(meta("x" * 513, 64), 0, 0)], [Bucket(256, 1)], "512 printable"),
        ([TensorSlot(meta("a\nb", 64), 0, 0)], [Bucket(256, 1)], "printable"),
        ([], [], "no tensors"),
    ],
)
def test_wrong_layouts_are_refused_by_name(slots, buckets, words):
    make_manifest(*OK)
    with pytest.raises(InvalidManifestError, match=words):
        make_manifest(slots, buckets)


def test_unknown_digest_algorithm_is_refused():
    with pytest.raises(InvalidManifestError, match="digest algorithm 9"):
        make_manifest(*OK, digest_algorithm=9)


def test_a_hundred_thousand_tensors_pass_and_ten_million_do_not():
    metas = [meta(f"model.layers.{i // 1000}.experts.{i % 1000}.w", 16) for i in range(100_000)]
    assert len(plan_buckets(metas).tensors) == 100_000
    with pytest.raises(CapacityError, match="10,000,000") as caught:
        check_num_tensors(10_000_000)
    assert caught.value.reason == "MANIFEST_TOO_LARGE"
    check_num_tensors(MAX_TENSORS)


@pytest.mark.parametrize("field", ["digest", "nonce", "bucket", "payload_bytes"])
def test_a_trailer_that_differs_anywhere_is_data_loss(field):
    want = {"digest": 11, "nonce": 22, "bucket": 3, "payload_bytes": 256}
    check_trailer(pack_trailer(*want.values()), **want)
    with pytest.raises(DigestMismatchError):
        check_trailer(pack_trailer(*(want | {field: 99}).values()), **want)


def test_two_layouts_that_differ_have_other_digests():
    base = plan_buckets([meta("a", 4), meta("b", 4)])
    assert base.layout_digest != plan_buckets([meta("b", 4), meta("a", 4)]).layout_digest
    assert base.layout_digest == plan_buckets([meta("a", 4), meta("b", 4)]).layout_digest
    assert dataclasses.replace(base) == base
