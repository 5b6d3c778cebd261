"""The coordinator's cache of what replicas' bases and drafts consist of."""

from __future__ import annotations

from dataclasses import replace

from weft_rl.contract.tensors import DataType, Reference, TensorMeta
from weft_rl.coordinator.runtime.manifests import ReferenceCache

BASE = Reference("Tiny", (TensorMeta("a", DataType.INT8, (1,)),))


def _drafted(number: int) -> Reference:
    draft = (TensorMeta("draft_model.a", DataType.INT8, (number,)),)
    return replace(BASE, draft=draft, draft_prefixes=("draft_model.t2d",))


def test_no_draft_is_forgotten_that_the_pool_knows() -> None:
    cache = ReferenceCache()
    for number in range(1, 40):
        cache.put(_drafted(number))
    found = cache.get(BASE.fingerprint, _drafted(1).draft_fingerprint)
    assert found == _drafted(1)
    assert cache.get(BASE.fingerprint, "other") is None
    assert cache.get(BASE.fingerprint) == BASE


def test_of_unlike_replicas_the_widest_floats_are_sent() -> None:
    def described(*dtypes: DataType) -> Reference:
        metas = [TensorMeta(name, d, (1,)) for name, d in zip("abc", dtypes, strict=True)]
        return Reference("Tiny", tuple(metas))

    one = described(DataType.BFLOAT16, DataType.FLOAT32, DataType.INT8)
    other = described(DataType.FLOAT32, DataType.BFLOAT16, DataType.INT8)
    cache = ReferenceCache()
    for reference in (one, other):
        cache.put(reference)
    assert one.fingerprint == other.fingerprint
    digests = (one.details_digest, other.details_digest)
    assert cache.get(one.fingerprint, digests=digests[:1]) == one
    assert cache.get(one.fingerprint, digests=digests[1:]) == other
    widest = described(DataType.FLOAT32, DataType.FLOAT32, DataType.INT8)
    for several in (digests, ("",), (digests[0], "unknown"), ()):
        assert cache.get(one.fingerprint, digests=several) == widest
    for number, sent in ((0, {"b"}), (1, {"a"})):
        found = cache.dtype_exceptions(one.fingerprint, digests[number:][:1], DataType.BFLOAT16)
        assert found.by_name.keys() == sent
    found = cache.dtype_exceptions(one.fingerprint, digests, DataType.BFLOAT16)
    assert found.by_name.keys() == {"a", "b"}


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
