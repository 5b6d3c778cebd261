"""A replica's report over the wire and back."""

from __future__ import annotations

import dataclasses

from weft_rl.contract.names import AdapterVersions, PolicyVersion, VersionVector
from weft_rl.contract.replica_report import Asleep, DrainNote, ReplicaReport, Work
from weft_rl.rpc.report_codec import report_from_proto, report_to_proto
from weft_rl.v1.registry_pb2 import ReplicaReport as Message

REPORT = ReplicaReport(
    vector=VersionVector(3, {"math": AdapterVersions((1, 2), 2)}),
    retained=(3, 2),
    spilled=frozenset({PolicyVersion("math", 1), PolicyVersion("base", 2)}),
    dirty_reason="a layer failed",
    base_as_started=True,
    refusing="it starts",
    order_number=7,
    asleep=Asleep("trainer-a", weights_awake=True, level=2),
    drain=DrainNote(1.5, "a new kernel"),
    adapter_used_bytes=1 << 40,
    pins_obeyed=frozenset({2, 3}),
    pinned_bytes=1 << 41,
    work=Work("loading base@4", 0.25),
)


def test_every_fact_comes_back() -> None:
    said = report_to_proto(REPORT)
    assert report_from_proto(Message.FromString(said.SerializeToString())) == REPORT
    for field in dataclasses.fields(ReplicaReport):
        assert getattr(REPORT, field.name) != getattr(ReplicaReport(), field.name), field.name
    assert {field.name for field, _ in said.ListFields()} == set(Message.DESCRIPTOR.fields_by_name)


def test_one_that_says_nothing_is_an_open_replica_of_base_0() -> None:
    assert report_from_proto(Message()) == ReplicaReport()
