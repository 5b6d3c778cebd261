"""What a message from outside may hold, and what is made of the rest."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from google.protobuf.descriptor import Descriptor
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message

from weft_rl.contract.errors import InvalidRequestError, WeftError
from weft_rl.rpc import bounds, codec, inbound
from weft_rl.rpc.bounds import check
from weft_rl.rpc.inbound import RefusedMessage, parser
from weft_rl.v1 import (
    admin_pb2,
    generate_pb2,
    inspect_pb2,
    publish_pb2,
    registry_pb2,
    rendezvous_pb2,
    replica_pb2,
    types_pb2,
)

MODULES = (
    admin_pb2,
    generate_pb2,
    inspect_pb2,
    publish_pb2,
    registry_pb2,
    rendezvous_pb2,
    replica_pb2,
)


def _register(**fields: object) -> Message:
    return registry_pb2.RegisterRequest(**fields)  # type: ignore[arg-type]


def _report(**fields: object) -> Message:
    return _register(report=registry_pb2.ReplicaReport(**fields))  # type: ignore[arg-type]


def _beat(dirty_reason: str) -> registry_pb2.HeartbeatRequest:
    report = registry_pb2.ReplicaReport(dirty_reason=dirty_reason)
    return registry_pb2.HeartbeatRequest(report=report)


@pytest.mark.parametrize(
    ("message", "field"),
    [
        (_report(drain=registry_pb2.Drain(time_left=Duration(seconds=10**14))), "time_left"),
        (_report(drain=registry_pb2.Drain(time_left=Duration(seconds=86_401))), "time_left"),
        (_report(drain=registry_pb2.Drain(time_left=Duration(seconds=-1))), "time_left"),
        (_report(drain=registry_pb2.Drain(time_left=Duration(nanos=-1))), "time_left"),
        (replica_pb2.CommitTransferResponse(pause=Duration(seconds=2**62)), "pause"),
        (replica_pb2.SwitchVersionResponse(load=Duration(seconds=2**62)), "load"),
        (_register(address="127.0.0.1"), "address"),
        (_register(address="127.0.0.1:0"), "address"),
        (_register(address="127.0.0.1:65536"), "address"),
        (_register(address="127.0.0.1:+80"), "address"),
        (_register(address="unix:/tmp/x:80"), "address"),
        (_register(address="a" * 254 + ":80"), "address"),
        (_register(http_url="ftp://h:1"), "http_url"),
        (_register(http_url="http://h:99999"), "http_url"),
        (_register(http_url="http://h\n:1"), "http_url"),
        (_register(http_url="http://[::1"), "http_url"),
        (_register(replica_id="r" * 257), "replica_id"),
        (rendezvous_pb2.Prepare(trace_context="0" * 129), "trace_context"),
        (_register(incarnation="a\0b"), "incarnation"),
        (_register(model_name="m" * 4097), "model_name"),
        (_report(retained_base_versions=[1, 2**53]), "retained_base_versions"),
        (_report(retained_base_versions=[-1]), "retained_base_versions"),
        (_report(retained_base_versions=range(65_537)), "retained_base_versions"),
        (_report(version_vector=types_pb2.VersionVector(base=2**63 - 1)), "base"),
        (_register(capabilities=registry_pb2.Capabilities(num_receivers=1025)), "num_receivers"),
        (_register(capabilities=registry_pb2.Capabilities(base_dtype=99)), "base_dtype"),
        (_register(capabilities=registry_pb2.Capabilities(backends=["x"] * 17)), "backends"),
        (_report(pinned_base_bytes=2**63), "pinned_base_bytes"),
        (publish_pb2.RenewLeaseRequest(fencing_token=-1), "fencing_token"),
        (publish_pb2.BeginTransferRequest(layout_digest=b"d" * 65), "layout_digest"),
        (admin_pb2.RetireRequest(version={"version": 2**63 - 1}), "version"),  # type: ignore[arg-type]
        (replica_pb2.JoinGroupRequest(group={"size": 16_385}), "size"),  # type: ignore[arg-type]
        (publish_pb2.DescribeTargetResponse(base_dtype_exceptions={"w": 99}), "value"),  # type: ignore[dict-item]
        (generate_pb2.GenerateRequest(text="t" * (2**20 + 1)), "text"),
        (generate_pb2.TokenIds(ids=[1] * (2**20 + 1)), "ids"),
        (generate_pb2.Sampling(num_samples=1025), "num_samples"),
    ],
)
def test_what_is_out_of_bounds_is_refused_by_name(message: Message, field: str) -> None:
    with pytest.raises(InvalidRequestError) as refused:
        check(message)
    assert refused.value.reason == "INVALID_REQUEST"
    assert refused.value.metadata["field"].endswith(f".{field}")


@pytest.mark.parametrize(
    "message",
    [
        _register(address="[::1]:50051", http_url="https://h/v1"),
        _register(address="pod-0.weft.svc:1"),
        _report(retained_base_versions=[2**53 - 1, 0], drain=registry_pb2.Drain()),
        _register(capabilities=registry_pb2.Capabilities(staging_capacity_bytes=2**63 - 1)),
        rendezvous_pb2.StoreAdd(key="k", amount=-(2**63)),
        publish_pb2.BeginTransferResponse(nonce=2**64 - 1),
        generate_pb2.TokenIds(ids=[1] * 2**20),
        publish_pb2.DescribeTargetResponse(base_dtype_exceptions={"w": types_pb2.DATA_TYPE_INT8}),
    ],
)
def test_what_is_within_them_is_taken(message: Message) -> None:
    before = message.SerializeToString(deterministic=True)
    check(message)
    assert message.SerializeToString(deterministic=True) == before


def test_texts_for_people_are_cut() -> None:
    beat = _beat("d" * 9999)
    said = beat.report
    said.drain.reason = "r" * 9999
    order = admin_pb2.CordonRequest(reason="r" * 9999)
    for message in (beat, order):
        check(message)
    assert (len(said.dirty_reason), len(said.drain.reason)) == (2000, 2000)
    assert len(order.reason) == 500


def test_a_field_may_have_a_reason_of_its_own() -> None:
    page = inspect_pb2.ListVersionsRequest(page_token="9" * 5000)
    config = types_pb2.AdapterSpec(config_json="{" * 2**21)
    for message, reason in ((page, "INVALID_PAGE"), (config, "INVALID_ADAPTER")):
        with pytest.raises(WeftError) as refused:
            check(message)
        assert refused.value.reason == reason


def test_every_field_of_every_message_has_a_bound() -> None:
    seen: set[str] = set()

    def visit(message: Descriptor) -> None:
        if message.full_name in seen:
            return
        seen.add(message.full_name)
        for field in message.fields:
            assert callable(bounds._check_of(field))
            if field.message_type is not None:
                visit(field.message_type)

    for module in MODULES:
        for service in module.DESCRIPTOR.services_by_name.values():
            for method in service.methods:
                visit(method.input_type)
                visit(method.output_type)
    assert "weft.v1.GroupCredential" in seen
    rules = {*bounds._BY_FIELD, *bounds._MAX_ENTRIES}
    names = {path.partition(".")[0] for path in rules}
    assert names <= {name.rpartition(".")[2] for name in seen}


def test_bytes_that_are_no_message_are_refused_not_raised() -> None:
    parse = parser(registry_pb2.RegisterRequest.FromString)
    nested = b""
    for _ in range(2_000):  # deeper than any parser goes
        nested = b"\x0b" + nested + b"\x0c"
    for data in (b"\xff", b"\x0a\x05ab", b"\x0a\x02\xff\xfe", nested):
        refused = parse(data)
        assert isinstance(refused, RefusedMessage)
        assert refused.error.reason == "INVALID_REQUEST"
    assert parse(b"") == registry_pb2.RegisterRequest()


@pytest.mark.parametrize("seconds", [math.inf, -math.inf, math.nan, 1e300, -5.0, 10.0**14])
def test_any_float_can_be_listed(seconds: float) -> None:
    assert 0 <= codec.duration_from_proto(codec.duration_to_proto(seconds)) <= 315_360_000
    assert 0 <= codec.timestamp_to_proto(seconds).seconds < 253_402_300_800


def test_a_large_message_is_cut_each_time_it_comes() -> None:
    parse = parser(registry_pb2.HeartbeatRequest.FromString)
    whole, long = (_beat("d" * count).SerializeToString() for count in (1500, 9000))
    for _ in range(2):
        assert len(parse(whole).report.dirty_reason) == 1500
        assert len(parse(long).report.dirty_reason) == 2000


async def test_a_large_message_is_checked_once_however_many_calls_bring_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    checked: list[object] = []
    monkeypatch.setattr(inbound, "check", checked.append)
    parse = registry_pb2.HeartbeatRequest.FromString
    handler = grpc.unary_unary_rpc_method_handler(lambda *_: None, parse)

    async def find(details: Any) -> Any:
        return handler

    interceptor = inbound.EdgeInterceptor(SimpleNamespace(asks=False))  # type: ignore[arg-type]
    details: Any = SimpleNamespace(method="/weft.v1.RegistryService/Heartbeat")
    beat = _beat("d" * 1500)
    for _ in range(2):
        found = await interceptor.intercept_service(find, details)
        assert found.request_deserializer(beat.SerializeToString()) == beat
    assert checked == [beat]
