"""A push of the base is exactly what the engine loads, or it is refused."""

import pytest

from weft_rl.contract.errors import InvalidManifestError
from weft_rl.contract.names import AdapterVersions, PolicyVersion, VersionVector
from weft_rl.contract.tensors import (
    DataType,
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
