"""The coordinator's cache of what replicas' bases and drafts consist of."""

from __future__ import annotations

from dataclasses import replace

import pytest

from weft_rl.contract.tensors import DataType, Reference, TensorMeta
from weft_rl.coordinator.runtime.manifests import ReferenceCache, dtype_exceptions

BASE = Reference("Tiny", (TensorMeta("a", DataType.INT8, (1,)),))


def _drafted(number: int) -> Reference:
    draft = (TensorMeta("draft_model.a", DataType.INT8, (number,)),)
    return replace(BASE, draft=draft, draft_prefixes=("draft_model.t2d",))


def test_no_draft_is_forgotten_that_the_pool_knows() -> None:
    cache = ReferenceCache()
    told = {_drafted(number).details_digest for number in range(1, 40)}
    for number in range(1, 40):
        cache.put(_drafted(number), told)
    found = cache.get(BASE.fingerprint, _drafted(1).draft_fingerprint)
    assert found == _drafted(1)
    assert cache.get(BASE.fingerprint, "other") is None
    assert cache.get(BASE.fingerprint) == BASE


def _typed(*dtypes: DataType, prefix: str = "") -> tuple[TensorMeta, ...]:
    return tuple(TensorMeta(prefix + name, d, (1,)) for name, d in zip("abc", dtypes, strict=True))


BF16, F16, F32, I8 = DataType.BFLOAT16, DataType.FLOAT16, DataType.FLOAT32, DataType.INT8


def test_of_unlike_replicas_floats_are_sent_in_what_holds_them_all() -> None:
    one, other = (Reference("Tiny", _typed(*d)) for d in ((BF16, F32, I8), (F32, BF16, I8)))
    cache = ReferenceCache()
    for reference in (one, other):
        cache.put(reference)
    assert one.fingerprint == other.fingerprint
    digests = (one.details_digest, other.details_digest)
    assert cache.get(one.fingerprint, digests=digests[:1]) == one
    assert cache.get(one.fingerprint, digests=digests[1:]) == other
    for several in (digests, (digests[0], "unknown"), ()):
        found = cache.describe(one.fingerprint, digests=several)
        assert found is not None
        assert found.reference == Reference("Tiny", _typed(F32, F32, I8))
        assert dtype_exceptions(found, BF16).by_name.keys() == {"a", "b"}
        assert cache.describe(one.fingerprint, digests=several) is found  # made once
    names = {cache.describe(one.fingerprint, digests=d).name for d in (digests, *zip(digests))}  # type: ignore[union-attr]
    assert len(names) == 3


@pytest.mark.parametrize("order", [1, -1])
def test_neither_of_two_floats_of_one_size_holds_the_other(order: int) -> None:
    cache = ReferenceCache()
    for dtype in (BF16, F16)[::order]:
        cache.put(Reference("Tiny", _typed(dtype, dtype, I8)))
    found = cache.get(Reference("Tiny", _typed(BF16, BF16, I8)).fingerprint)
    assert found == Reference("Tiny", _typed(F32, F32, I8))


def test_drafts_are_sent_in_what_holds_them_all_too() -> None:
    cache = ReferenceCache()
    kinds = [replace(BASE, draft=_typed(dtype, dtype, I8, prefix="mtp.")) for dtype in (F32, BF16)]
    for reference in kinds:
        cache.put(reference)
    draft, digests = kinds[0].draft_fingerprint, [one.details_digest for one in kinds]
    assert cache.get(BASE.fingerprint, draft, digests[1:]) == kinds[1]
    assert cache.get(BASE.fingerprint, draft, digests) == kinds[0]


def test_what_replicas_tell_is_kept_and_of_others_the_newest() -> None:
    cache = ReferenceCache()
    kept = Reference("Tiny", _typed(F32, BF16, I8))
    cache.put(kept)
    floats = [(a, b) for a in (BF16, F16, F32) for b in (BF16, F16, F32) if (a, b) != (F32, BF16)]
    others = [Reference("Tiny", _typed(*pair, I8)) for pair in floats]
    for other in others:
        cache.put(other, {kept.details_digest})
    assert cache.get(kept.fingerprint, digests=[kept.details_digest]) == kept
    assert cache.get(kept.fingerprint, digests=[others[-1].details_digest]) == others[-1]
    everything = Reference("Tiny", _typed(F32, F32, I8))  # where one was dropped: what holds all
    assert cache.get(kept.fingerprint, digests=[others[0].details_digest]) == everything


def test_senders_leave_out_what_any_replicas_files_hold_for_drafts() -> None:
    cache = ReferenceCache()
    for prefixes in (("mtp.",), ()):
        cache.put(replace(BASE, draft_prefixes=prefixes))
    cache.put(_drafted(1))
    known = cache.get(BASE.fingerprint)
    assert known is not None
    assert known.draft_prefixes == ("mtp.",)
    drafted = cache.get(BASE.fingerprint, _drafted(1).draft_fingerprint)
    assert drafted is not None
    assert drafted.draft_prefixes == ("draft_model.t2d", "mtp.")
