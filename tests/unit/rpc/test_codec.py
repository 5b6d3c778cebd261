"""Values survive the wire; lists travel in bounded chunks."""

from __future__ import annotations

import dataclasses
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft_rl.contract.capabilities import Capabilities
from weft_rl.contract.errors import InvalidManifestError, InvalidRequestError
from weft_rl.contract.manifest import plan_buckets
from weft_rl.contract.names import AdapterVersions, PolicyVersion, VersionVector
from weft_rl.contract.replica_report import (
    DrainNote,
    EngineReport,
    ReplicaReport,
    ReplicaWork,
    Sleep,
)
from weft_rl.contract.tensors import DataType, LinearModule, Reference, TensorMeta
from weft_rl.rpc import codec
from weft_rl.rpc.channel import MAX_MESSAGE_BYTES
from weft_rl.rpc.codec import REPORT
from weft_rl.rpc.manifest_codec import (
    manifest_from_chunks,
    manifest_to_chunks,
    reference_from_chunks,
    reference_to_chunks,
)
from weft_rl.v1 import registry_pb2, types_pb2
from weft_rl.v1.registry_pb2 import ReplicaReport as Message

_metas = st.lists(
    st.builds(
        TensorMeta,
        st.text("abc.0123", min_size=1, max_size=12),
        st.sampled_from(DataType),
        st.lists(st.integers(1, 50), max_size=3).map(tuple),
    ),
    min_size=1,
    max_size=30,
    unique_by=lambda meta: meta.name,
)


@given(_metas, st.integers(256, 20_000))
def test_manifests(metas: list[TensorMeta], capacity: int) -> None:
    manifest = plan_buckets(metas, capacity)
    assert manifest_from_chunks(manifest_to_chunks(manifest)) == manifest


@given(_metas)
def test_references(metas: list[TensorMeta]) -> None:
    reference = Reference("Tiny", tuple(metas), draft_prefixes=("model.layers.2.", "mtp."))
    assert reference_from_chunks(reference_to_chunks(reference)) == reference
    draft = tuple(TensorMeta(f"draft_model.{i}", meta.dtype, meta.shape)
                  for i, meta in enumerate(metas))  # fmt: skip
    drafted = replace(reference, draft=draft)
    assert reference_from_chunks(reference_to_chunks(drafted)) == drafted
    assert drafted.fingerprint == reference.fingerprint


@pytest.mark.parametrize(("num_tensors", "num_drafts", "sizes"), [
    (4000, 50, [(4000, 50)]), (4096, 50, [(4096, 50)]), (5000, 50, [(4096, 50), (904, 0)]),
    (10, 4096, [(10, 4096)]), (10, 9000, [(3, 4096), (3, 4096), (3, 808), (1, 0)]),
])  # fmt: skip
def test_a_draft_is_beside_other_tensors(
    num_tensors: int, num_drafts: int, sizes: list[tuple[int, int]]
) -> None:
    """A coordinator that does not know of drafts takes no chunk without any others."""
    metas = [TensorMeta(f"{i}", DataType.INT8, (1,)) for i in range(num_tensors)]
    draft = tuple(TensorMeta(f"draft_model.{i}", DataType.INT8, (1,)) for i in range(num_drafts))
    reference = Reference("Tiny", tuple(metas), draft=draft)
    chunks = list(reference_to_chunks(reference))
    assert [(len(c.tensors), len(c.draft_tensors)) for c in chunks] == sizes
    assert reference_from_chunks(chunks) == reference


def test_a_draft_of_too_many_tensors_is_refused() -> None:
    own = TensorMeta("a", DataType.INT8, (1,))
    draft = tuple(TensorMeta(f"draft_model.{i}", DataType.INT8, (1,)) for i in range(16_385))
    with pytest.raises(InvalidManifestError, match="more than 16384"):
        reference_from_chunks(reference_to_chunks(Reference("Tiny", (own,), draft=draft)))
    long = tuple(TensorMeta(f"{i:0512}", DataType.INT8, (1,) * 8) for i in range(2049))
    with pytest.raises(InvalidManifestError, match="names of more than 1048576 bytes"):
        reference_from_chunks(reference_to_chunks(Reference("Tiny", (own,), draft=long)))
    twice = Reference("Tiny", (own,), draft=(own,))
    with pytest.raises(InvalidManifestError):
        reference_from_chunks(reference_to_chunks(twice))


@pytest.mark.parametrize("prefixes", [[""], ["mtp.", ""], ["a."] * 65, ["a" * 2000]])
def test_prefixes_that_cannot_be_are_refused(prefixes: list[str]) -> None:
    own = (TensorMeta("a", DataType.FLOAT32, (1,)),)
    (chunk,) = reference_to_chunks(Reference("Tiny", own))
    chunk.draft_prefixes.extend(prefixes)
    with pytest.raises(InvalidManifestError, match="prefix"):
        reference_from_chunks([chunk])


def test_modules_of_a_reference_follow_its_tensors() -> None:
    tensors = tuple(TensorMeta(f"{i}.qweight", DataType.INT32, (1, 2)) for i in range(5000))
    modules = tuple(LinearModule(f"{i}", (8, 2), (f"m.{i}", "n")[: i % 3]) for i in range(700))
    reference = Reference("Tiny", tensors, modules)
    chunks = list(reference_to_chunks(reference))
    assert [(len(c.tensors), len(c.modules)) for c in chunks] == [
        (4096, 0), (904, 0), (0, 512), (0, 188),
    ]  # fmt: skip
    assert reference_from_chunks(chunks) == reference
    assert reference.fingerprint == Reference("Tiny", tensors).fingerprint


@pytest.mark.parametrize(
    ("module", "words"),
    [
        (LinearModule("m", (1, 2, 3)), "3 dims"),
        (LinearModule("m", (1, 0)), "at least 1"),
        (LinearModule("m", (1, 1), tuple("abcdefghi")), "9 other names"),
        (LinearModule("m", (1, 1), ("n" * 513,)), "1 to 512 printable"),
        (LinearModule("", (1, 1)), "1 to 512 printable"),
    ],
)
def test_modules_that_cannot_be_are_refused(module: LinearModule, words: str) -> None:
    reference = Reference("Tiny", (TensorMeta("t", DataType.INT8, (1,)),), (module,))
    with pytest.raises(InvalidManifestError, match=words):
        reference_from_chunks(reference_to_chunks(reference))


def test_chunks_of_the_longest_names_fit_a_message() -> None:
    metas = [TensorMeta(f"{i:0512}", DataType.INT8, (1,) * 8) for i in range(10_000)]
    chunks = list(manifest_to_chunks(plan_buckets(metas, 256)))
    assert len(chunks) == 1 + 3 + 3
    assert max(chunk.ByteSize() for chunk in chunks) < MAX_MESSAGE_BYTES * 0.6
    parts = list(reference_to_chunks(Reference("Tiny", tuple(metas))))
    assert [len(part.tensors) for part in parts] == [4096, 4096, 1808]
    assert [bool(part.fingerprint) for part in parts] == [True, False, False]
    draft = tuple(TensorMeta(f"{i:0256}", DataType.INT8, (2**31,) * 8) for i in range(4096))
    (first, *_) = reference_to_chunks(Reference("Tiny", tuple(metas), draft=draft))
    assert (len(first.tensors), len(first.draft_tensors)) == (4096, 4096)
    assert first.ByteSize() < MAX_MESSAGE_BYTES * 0.95
    modules = [LinearModule("n" * 512, (1, 1), ("n" * 512,) * 8)] * 600
    parts = list(reference_to_chunks(Reference("Tiny", tuple(metas[:1]), tuple(modules))))
    assert max(part.ByteSize() for part in parts) < MAX_MESSAGE_BYTES * 0.6


def test_more_buckets_than_tensors_are_refused_at_the_header() -> None:
    header = types_pb2.ManifestHeader(num_tensors=1, num_buckets=2)
    with pytest.raises(InvalidManifestError, match="more buckets"):
        manifest_from_chunks([types_pb2.ManifestChunk(header=header)])


def test_capabilities() -> None:
    value = Capabilities(
        engine_version="0.26",
        base_fingerprint="f",
        architecture="Tiny",
        base_dtype=DataType.BFLOAT16,
        adapter_dtype=DataType.FLOAT16,
        backends=("nccl", "gloo"),
        num_receivers=2,
        tensor_parallel_size=4,
        lora_enabled=True,
        max_lora_rank=64,
        lora_modules=("q_proj",),
        lora_unapplied=("model.vision_model",),
        base_refusal="its reload would leave mixed weights",
        lora_on_experts=True,
        staging_capacity_bytes=2**40,
        adapter_capacity_bytes=2**30,
        running_requests="keep",
    )
    again = codec.CAPABILITIES.decode(codec.CAPABILITIES.encode(value))
    assert again.running_requests == "keep"
    old = registry_pb2.Capabilities(num_receivers=1, base_dtype=1, adapter_dtype=1)
    assert codec.CAPABILITIES.decode(old).running_requests == "recompute"
    assert codec.CAPABILITIES.decode(codec.CAPABILITIES.encode(value)) == value
    with pytest.raises(InvalidRequestError):
        codec.CAPABILITIES.decode(registry_pb2.Capabilities(num_receivers=1))


def test_versions() -> None:
    vector = VersionVector(3, {"b": AdapterVersions((1, 2), 2), "a": AdapterVersions()})
    message = codec.vector_to_proto(vector)
    assert [entry.policy for entry in message.adapters] == ["a", "b"]
    assert codec.vector_from_proto(message) == vector
    version = PolicyVersion("math", 17)
    assert codec.POLICY_VERSION.decode(codec.POLICY_VERSION.encode(version)) == version


@pytest.mark.parametrize("seconds", [0.0, 0.25, 1.5, 86_400.0])
def test_durations(seconds: float) -> None:
    assert codec.duration_from_proto(codec.duration_to_proto(seconds)) == seconds


def test_durations_are_not_negative() -> None:
    assert codec.duration_from_proto(codec.duration_to_proto(-1.0)) == 0.0


def test_timestamps() -> None:
    message = codec.timestamp_to_proto(1_700_000_000.5)
    assert (message.seconds, message.nanos) == (1_700_000_000, 500_000_000)


TOLD = ReplicaReport(
    version_vector=VersionVector(3, {"math": AdapterVersions((1, 2), 2)}),
    retained_base_versions=(3, 2),
    undo_base_versions=(1, 4),
    takes_deltas=True,
    spilled_versions=frozenset({PolicyVersion("math", 1), PolicyVersion("base", 2)}),
    dirty_reason="a layer failed",
    base_as_started=True,
    refusing="it starts",
    order_number=7,
    sleep=Sleep("trainer-a", weights_awake=True, level=2),
    drain=DrainNote(1.5, "a new kernel"),
    adapter_used_bytes=1 << 40,
    pinned_base_versions=frozenset({2, 3}),
    pinned_base_bytes=1 << 41,
    engine=EngineReport(draft_version=3),
    work=ReplicaWork("loading base@4", 0.25),
)


def test_every_fact_comes_back() -> None:
    said = REPORT.encode(TOLD)
    assert REPORT.decode(Message.FromString(said.SerializeToString())) == TOLD
    for field in dataclasses.fields(ReplicaReport):
        assert getattr(TOLD, field.name) != getattr(ReplicaReport(), field.name), field.name
    assert {field.name for field, _ in said.ListFields()} == set(Message.DESCRIPTOR.fields_by_name)


def test_one_that_says_nothing_is_an_open_replica_of_base_0() -> None:
    assert REPORT.decode(Message()) == ReplicaReport()
