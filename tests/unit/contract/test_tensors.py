"""A push of the base is exactly what the engine loads, or it is refused."""

import pytest

from weft_rl.contract.errors import InvalidManifestError
from weft_rl.contract.names import AdapterVersions, PolicyVersion, VersionVector
from weft_rl.contract.tensors import (
    DataType,
    LinearModule,
    Reference,
    TensorMeta,
    base_fingerprint,
    check_base,
)

BF16, F32 = DataType.BFLOAT16, DataType.FLOAT32
METAS = (TensorMeta("a.weight", BF16, (4, 2)), TensorMeta("b.weight", BF16, (3,)))
REFERENCE = Reference("Tiny", METAS)


def test_exact_and_castable_pushes_pass():
    check_base(METAS, REFERENCE)
    check_base([TensorMeta(m.name, F32, m.shape) for m in METAS], REFERENCE)


@pytest.mark.parametrize(
    ("metas", "words", "count"),
    [
        (METAS[:1], "'b.weight' is missing", 1),
        ((*METAS, TensorMeta("c.weight", BF16, (1,))), "'c.weight' is not a tensor of Tiny", 1),
        ((*METAS, TensorMeta("lm_head.weight", BF16, (1,))), "is tied to the embedding", 1),
        ((TensorMeta("a.weight", BF16, (2, 4)), METAS[1]), r"shape \(2,4\)", 1),
        ((TensorMeta("a.weight", DataType.INT8, (4, 2)), METAS[1]), "is int8", 1),
        ((TensorMeta("x.weight", BF16, (4, 2)),), r"and 2 more", 3),
    ],
)
def test_anything_else_is_refused_by_name(metas, words, count):
    with pytest.raises(InvalidManifestError, match=words) as caught:
        check_base(metas, REFERENCE)
    assert caught.value.metadata["num_problems"] == str(count)


PLAIN = (TensorMeta("up.weight", BF16, (8, 64)), TensorMeta("up.bias", BF16, (8,)))
AWQ = tuple(
    TensorMeta(f"up.{part}", dtype, shape)
    for part, dtype, shape in (
        ("qweight", DataType.INT32, (64, 1)),
        ("qzeros", DataType.INT32, (2, 1)),
        ("scales", DataType.FLOAT16, (2, 8)),
        ("bias", DataType.FLOAT16, (8,)),
    )
)
FP8 = (
    TensorMeta("up.weight", DataType.FLOAT8_E4M3FN, (8, 64)),
    TensorMeta("up.weight_scale_inv", F32, (1, 1)),
    TensorMeta("up.bias", BF16, (8,)),
)
UP = (LinearModule("up", (8, 64)),)


@pytest.mark.parametrize(
    ("reference", "parts"),
    [
        (Reference("Tiny", AWQ, UP), "qweight, qzeros, scales"),
        (Reference("Tiny", FP8), "weight_scale_inv"),
    ],
)
def test_plain_weights_for_quantised_ones_are_refused_in_one_sentence(reference, parts):
    # A trainer casts to the served dtype, of FP8, too.
    cast = TensorMeta("up.weight", DataType.FLOAT8_E4M3FN, (8, 64))
    for metas in (PLAIN, (cast, PLAIN[1]), PLAIN[:1]):
        with pytest.raises(InvalidManifestError) as caught:
            check_base(metas, reference)
        assert caught.value.message == (
            f"the weights of the served Tiny are quantised ('up' has {parts}), and these are not: "
            "push a base in the served format, or adapters, which are served over it"
        )
    check_base(reference.tensors, reference)
    with pytest.raises(InvalidManifestError, match="is missing"):
        check_base(reference.tensors[:-1], reference)


def test_scales_of_the_kv_cache_are_pushed_with_a_base_that_was_started_with_some():
    scales = tuple(TensorMeta(f"attn.{side}_scale", F32, (1,)) for side in "kv")
    reference = Reference("Tiny", (*METAS, *scales))
    check_base(reference.tensors, reference)
    with pytest.raises(InvalidManifestError) as caught:
        check_base(METAS, reference)
    assert caught.value.message.startswith(
        "the base has no scales of the KV cache ('attn.k_scale' and 1 more), and the served model "
        "was started with some: push them with it by push_tensors"
    )
    assert caught.value.metadata["num_problems"] == "2"
    with pytest.raises(InvalidManifestError, match=r"'b.weight' is missing: .* \(and 2 more\)"):
        check_base(METAS[:1], reference)


def test_modules_are_told_by_tensors_where_no_other_shape_is_given():
    assert Reference("Tiny", METAS).modules == (LinearModule("a", (4, 2)),)
    packed = Reference("Tiny", (TensorMeta("a.weight", DataType.UINT8, (4, 1)), *AWQ), UP)
    assert [module.name for module in packed.modules] == ["a", "up"]
    assert Reference("Tiny", METAS).quantised_modules == {}
    assert packed.quantised_modules == {"up": ("qweight", "qzeros", "scales")}


def test_fingerprint_depends_on_names_and_shapes_alone():
    fingerprint = base_fingerprint("Tiny", METAS)
    as_f32 = [TensorMeta(m.name, F32, m.shape) for m in reversed(METAS)]
    assert base_fingerprint("Tiny", as_f32) == fingerprint
    assert base_fingerprint("Other", METAS) != fingerprint
    assert base_fingerprint("Tiny", METAS[:1]) != fingerprint


def test_vector_lacks_what_is_behind_an_alias_but_not_what_is_retained():
    pool = VersionVector(3, {"math": AdapterVersions((1, 2), 2), "code": AdapterVersions((5,), 5)})
    have = VersionVector(3).with_adapter(PolicyVersion("math", 2))
    assert pool.missing_from(have) == ["code@5"]
    assert pool.missing_from(have.with_adapter(PolicyVersion("code", 5))) == []
    assert pool.missing_from(pool.with_base(2)) == ["base@3"]


def test_vector_follows_pushes_and_retirement():
    vector = VersionVector().with_base(1)
    for number in (1, 2, 3):
        vector = vector.with_adapter(PolicyVersion("math", number))
    assert vector.adapters["math"] == AdapterVersions((1, 2, 3), 3)
    vector = vector.without_adapter(PolicyVersion("math", 1))
    assert not vector.holds(PolicyVersion("math", 1))
    assert vector.holds(PolicyVersion("math", 3))
    assert vector.holds(PolicyVersion("base", 1))
    gone = vector.without_adapter(PolicyVersion("math", 2)).without_adapter(
        PolicyVersion("math", 3)
    )
    assert gone == VersionVector(1)
