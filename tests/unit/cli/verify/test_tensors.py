"""Tensors that are served beside tensors that lie here."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from weft_rl.cli.verify.tensors import FINE, Compared, Verdict, compare, counts
from weft_rl.contract.checkpoint import StoredTensor
from weft_rl.contract.tensors import DataType


def tensor(
    name: str, digest: int = 1, dtype: str = "BF16", shape: tuple[int, ...] = (2, 3)
) -> StoredTensor:
    return StoredTensor(name, dtype, shape, digest)


def no_cast(name: str, dtype: DataType) -> int:
    raise AssertionError(f"{name} was cast to {dtype}")


def verdicts(found: list[Compared]) -> dict[str, Verdict]:
    return {compared.name: compared.verdict for compared in found}


def test_each_tensor_of_either_side_is_told_of() -> None:
    served = [tensor("a"), tensor("b"), tensor("c"), tensor("d"), tensor("only served")]
    local = [
        tensor("a"),
        tensor("b", 2),
        tensor("c", shape=(3, 2)),
        tensor("d", dtype="I8"),
        tensor("only here"),
    ]
    found = compare(served, local, no_cast)
    assert verdicts(found) == {
        "a": Verdict.EQUAL,
        "b": Verdict.DIFFERENT,
        "c": Verdict.DIFFERENT,
        "d": Verdict.DIFFERENT,
        "only served": Verdict.EXTRA,
        "only here": Verdict.MISSING,
    }
    says = {compared.name: compared.says for compared in found}
    assert says["b"] == "BF16 (2,3) of other values: 0000000000000001, here 0000000000000002"
    assert says["c"] == "served BF16 (2,3), here BF16 (3,2)"
    assert counts(found) == {"equal": 1, "different": 3, "missing": 1, "extra": 1}


def test_floats_of_another_type_are_cast_as_a_push_casts_them() -> None:
    asked = []

    def cast(name: str, dtype: DataType) -> int:
        asked.append((name, dtype))
        return 7

    served = [tensor("same", 7), tensor("other", 8)]
    local = [tensor("same", 1, "F32"), tensor("other", 1, "F32")]
    found = verdicts(compare(served, local, cast))
    assert found == {"same": Verdict.EQUAL_AFTER_CAST, "other": Verdict.DIFFERENT}
    assert asked == [("other", DataType.BFLOAT16), ("same", DataType.BFLOAT16)]


def test_a_type_that_cannot_travel_is_another() -> None:
    found = compare([tensor("a", dtype="BF16")], [tensor("a", dtype="F8_E8M0")], no_cast)
    assert verdicts(found) == {"a": Verdict.DIFFERENT}


def test_a_copy_of_another_tensor_may_be_missing_and_not_be_another() -> None:
    tied = frozenset({"lm_head.weight"})
    head = [tensor("lm_head.weight")]
    assert compare(head, [], no_cast, tied) == compare([], head, no_cast, tied) == []
    other = compare(head, [tensor("lm_head.weight", 9)], no_cast, tied)
    assert verdicts(other) == {"lm_head.weight": Verdict.DIFFERENT}


_TENSORS = st.lists(
    st.builds(
        tensor,
        st.sampled_from("abcdef"),
        st.integers(0, 2),
        st.sampled_from(["I8", "U8"]),
        st.sampled_from([(2,), (3,)]),
    ),
    unique_by=lambda tensor: tensor.name,
)


@given(_TENSORS, _TENSORS)
def test_all_is_fine_only_where_both_sides_are_the_same(
    served: list[StoredTensor], local: list[StoredTensor]
) -> None:
    found = compare(served, local, no_cast)
    assert all(c.verdict in FINE for c in found) == (
        {t.name: t for t in served} == {t.name: t for t in local}
    )
    assert {c.name for c in found} == {t.name for t in [*served, *local]}
