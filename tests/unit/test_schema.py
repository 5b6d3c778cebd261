"""Values and messages have the same fields, and come back from the wire as they were sent."""

from __future__ import annotations

import dataclasses
import enum
import types
import typing
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import rollout_side.agent.servicers  # noqa: F401 (makes the codecs of replicas)
from weft_rl.contract.checkpoint import Checkpoint, CheckpointState, not_compared
from weft_rl.contract.errors import InvalidRequestError
from weft_rl.contract.manifest import SendPlan, WireBucket, make_send_plan
from weft_rl.contract.names import AdapterVersions, PolicyVersion, VersionVector
from weft_rl.contract.replica_report import OutOfService
from weft_rl.contract.sampling import Sampling
from weft_rl.coordinator.decisions.state.pool import TrainerProcess
from weft_rl.coordinator.decisions.state.values import ContentDigest
from weft_rl.coordinator.services.calls import CODECS
from weft_rl.rpc.codec import CAPABILITIES, SLEEP
from weft_rl.schema import MADE, MessageCodec, SchemaError, codec, listing
from weft_rl.v1 import publish_pb2, registry_pb2, types_pb2

_TEXT = st.text("ab0.é", max_size=5)
_NUMBER = st.integers(1, 2**31 - 1)
_QUARTERS = st.integers(0, 2**22).map(lambda number: number / 4)
_VERSIONS = st.builds(
    lambda numbers, alias: AdapterVersions(tuple(sorted(numbers)), alias),
    st.sets(_NUMBER, max_size=3),
    _NUMBER,
)
#: Types that a converter is registered for, and those whose fields depend on each other.
_VALUES: dict[Any, st.SearchStrategy[Any]] = {
    bool: st.booleans(),
    bytes: st.binary(max_size=4),
    float: _QUARTERS,
    int: _NUMBER,
    str: _TEXT.filter(bool),
    VersionVector: st.builds(
        VersionVector, _NUMBER, st.dictionaries(_TEXT.filter(bool), _VERSIONS, max_size=2)
    ),
    OutOfService: st.builds(OutOfService, _TEXT, st.booleans()),
    Checkpoint: st.builds(not_compared, _TEXT)
    | st.builds(Checkpoint, st.just(CheckpointState.DIGESTED), st.binary(min_size=32, max_size=32)),
    SendPlan: st.just(make_send_plan(2, [WireBucket(0, 0, 256, 1), WireBucket(1, 0, 256, 1)])),
    TrainerProcess: st.builds(TrainerProcess, _TEXT, _TEXT, _NUMBER, _QUARTERS),
    Sampling: st.builds(
        Sampling,
        temperature=_QUARTERS,
        top_p=st.sampled_from([0.25, 1.0]),
        seed=st.none() | _NUMBER,
        max_tokens=st.none() | _NUMBER,
        ignore_eos=st.booleans(),
    ),
}


def _strategy(hint: Any) -> st.SearchStrategy[Any]:
    if hint in _VALUES:
        return _VALUES[hint]
    origin, parts = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return st.one_of(*map(_strategy, parts))
    if hint is types.NoneType:
        return st.none()
    if origin is tuple:
        return st.lists(_strategy(parts[0]), max_size=3).map(tuple)
    if origin is frozenset:
        return st.frozensets(_strategy(parts[0]), max_size=3)
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return st.sampled_from(hint)
    return _values(hint, frozenset())


def _values(kind: Any, beside: frozenset[str]) -> st.SearchStrategy[Any]:
    if kind in _VALUES:
        return _VALUES[kind]
    hints = typing.get_type_hints(kind)
    fields = {
        one.name: st.none() if one.name in beside else _strategy(hints[one.name])
        for one in dataclasses.fields(kind)
    }
    return st.builds(kind, **fields)


@pytest.mark.parametrize(
    "made", MADE, ids=lambda made: f"{made.value.__name__}-{made.message.DESCRIPTOR.name}"
)
@settings(max_examples=20, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_values_come_back(made: MessageCodec[Any, Any], data: st.DataObject) -> None:
    value = data.draw(_values(made.value, made.beside))
    received = made.message.FromString(made.encode(value).SerializeToString())
    names = {one.name for one in dataclasses.fields(value)} & made.beside
    assert made.decode(received, **{name: getattr(value, name) for name in names}) == value


@pytest.mark.parametrize("made", MADE, ids=lambda made: made.value.__name__)
def test_every_field_of_either_is_on_the_wire_or_named(made: MessageCodec[Any, Any]) -> None:
    ours = {one.name for one in dataclasses.fields(made.value)} - made.beside
    theirs = {one.name: one for one in made.message.DESCRIPTOR.fields if one.name not in ours}
    lasting = {name: one for name, one in theirs.items() if name not in made.beside}
    assert all(
        one.message_type.full_name == "google.protobuf.Duration" and f"{name}_seconds" in ours
        for name, one in lasting.items()
    )
    assert ours - {f"{name}_seconds" for name in lasting} <= set(
        made.message.DESCRIPTOR.fields_by_name
    )


@dataclass(frozen=True)
class _More:
    policy: str
    version: int
    colour: str


@dataclass(frozen=True)
class _Fewer:
    policy: str


@dataclass(frozen=True)
class _Text:
    policy: str
    version: str


@dataclass(frozen=True)
class _NeverNone:
    policy: str | None
    version: int


@dataclass(frozen=True)
class _List:
    policy: tuple[str, ...]
    version: int


class _Colour(enum.Enum):
    RED = 1


@dataclass(frozen=True)
class _OtherEnum:
    algorithm: _Colour
    value: bytes
    size_bytes: int


@pytest.mark.parametrize(
    ("value", "message", "words"),
    [
        (_More, types_pb2.PolicyVersion, r"_More\.colour is no field of weft\.v1\.PolicyVersion"),
        (_Fewer, types_pb2.PolicyVersion, r"PolicyVersion\.version is no field of _Fewer"),
        (_Text, types_pb2.PolicyVersion, r"PolicyVersion\.version, which is _Text\.version"),
        (_NeverNone, types_pb2.PolicyVersion, "no message lacks it"),
        (_List, types_pb2.PolicyVersion, r"_List\.policy: .* not of the message's kind"),
        (_OtherEnum, types_pb2.ContentDigest, "DIGEST_ALGORITHM_RED is of one enum alone"),
        (str, types_pb2.PolicyVersion, "no dataclass"),
    ],
)
def test_a_difference_is_found_as_the_codec_is_made(value: type, message: Any, words: str) -> None:
    with pytest.raises(SchemaError, match=words):
        codec(value, message)


@pytest.mark.parametrize("more", [{"given": ["colour"]}, {"told": ["colour"]}])
def test_a_field_that_neither_has_is_refused(more: dict[str, Any]) -> None:
    with pytest.raises(SchemaError, match="colour"):
        codec(PolicyVersion, types_pb2.PolicyVersion, **more)


def test_a_field_on_no_wire_has_a_reason_and_its_default() -> None:
    @dataclass(frozen=True)
    class Kept(PolicyVersion):
        why: str = field(default="", metadata={"wire": None})

    with pytest.raises(SchemaError, match="reason"):
        codec(Kept, types_pb2.PolicyVersion)

    @dataclass(frozen=True)
    class Noted(PolicyVersion):
        seen: float = field(default=1.5, metadata={"wire": None, "why": "each side has its own"})

    made = codec(Noted, types_pb2.PolicyVersion)
    MADE.remove(made)
    assert made.decode(made.encode(Noted("math", 3, 7.0))) == Noted("math", 3, 1.5)


def test_an_invariant_holds_of_what_is_decoded() -> None:
    with pytest.raises(InvalidRequestError, match="num_receivers") as refused:
        CAPABILITIES.decode(registry_pb2.Capabilities(base_dtype=1, adapter_dtype=1))
    assert refused.value.metadata["field"] == "Capabilities.num_receivers"
    process = publish_pb2.TrainerProcess(host="h" * 129)
    with pytest.raises(InvalidRequestError, match="128 characters"):
        CODECS["AcquirePolicy"].request.decode(
            publish_pb2.AcquirePolicyRequest(kind=types_pb2.POLICY_KIND_BASE, process=process),
            ticket=1,
            identity="",
        )


@pytest.mark.parametrize(("number", "words"), [(0, "is not set"), (99, "is 99, which means")])
def test_an_enum_s_number_must_be_a_member_s(number: int, words: str) -> None:
    message = registry_pb2.Capabilities(num_receivers=1, adapter_dtype=1)
    message.base_dtype = number  # type: ignore[assignment]
    with pytest.raises(InvalidRequestError, match=f"Capabilities.base_dtype {words}") as refused:
        CAPABILITIES.decode(message)
    assert refused.value.metadata == {"field": "Capabilities.base_dtype"}


def test_zero_is_what_the_field_says() -> None:
    assert SLEEP.decode(registry_pb2.Sleep()).level == 1


@dataclass(frozen=True)
class _Place:
    policy: str
    number: int
    until: float = 0.0

    @property
    def version(self) -> int:
        return self.number + 1


def test_a_listing_reads_fields_and_properties_and_takes_the_others() -> None:
    encode = listing(_Place, types_pb2.PolicyVersion)
    assert encode(_Place("math", 4)) == types_pb2.PolicyVersion(policy="math", version=5)
    told = listing(_Place, types_pb2.PolicyVersion, told=["version"])
    assert told(_Place("math", 4), version=9).version == 9
    assert told(_Place("math", 4)).version == 0
    with pytest.raises(SchemaError, match="PolicyVersion has no field"):
        listing(_Place, types_pb2.PolicyVersion, told=["number"])


@dataclass(frozen=True)
class _Story:
    version: _Place
    pause_seconds: float = 0.0
    content_digest: ContentDigest | None = None


def test_a_listing_leaves_out_a_message_that_its_value_lacks() -> None:
    encode = listing(_Story, publish_pb2.Transfer)
    story = encode(_Story(_Place("math", 4)), epoch=3)
    assert (story.version.version, story.epoch) == (5, 3)
    assert not story.HasField("pause")
    assert not story.HasField("content_digest")
    paused = encode(_Story(_Place("math", 4), 1.5, ContentDigest(1, b"d", 8)))
    assert (paused.pause.seconds, paused.pause.nanos) == (1, 500_000_000)
    assert paused.content_digest.size_bytes == 8


def test_what_is_only_listed_is_not_decoded() -> None:
    listing(_Place, types_pb2.PolicyVersion)

    @dataclass(frozen=True)
    class Held:
        version: _Place
        content_digest: bytes
        spilled: bool

    with pytest.raises(SchemaError, match="encoded only"):
        codec(Held, types_pb2.HeldVersion).decode(types_pb2.HeldVersion())


def test_an_attribute_that_does_not_fit_is_named() -> None:
    with pytest.raises(SchemaError, match=r"PolicyVersion\.version, which is _Text\.version"):
        listing(_Text, types_pb2.PolicyVersion)
