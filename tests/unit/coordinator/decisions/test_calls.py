"""Every call of the table, in any order and at any time: it is answered, and once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, Final, get_type_hints

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.coordinator.decisions.machine import (
    CAPABILITIES,
    LAYOUT,
    LOAD_FAILED,
    SPEC,
    Machine,
)
from weft_rl.contract.checkpoint import DUMMY
from weft_rl.contract.names import PolicyVersion
from weft_rl.contract.replica_report import ReplicaReport
from weft_rl.coordinator.decisions.state import effects, events
from weft_rl.coordinator.decisions.state.transfer import TransferIds
from weft_rl.coordinator.decisions.state.values import Phase, PolicyKind
from weft_rl.coordinator.decisions.step import CALLS, CallRow

_OTHERS = st.sampled_from([row.call for row in CALLS])
_POLICIES = st.sampled_from(["math", "code", "base", "nobody's"])
#: What is drawn for a field of a call, by its name or else by its type.
_FIELDS: Final[Mapping[str, Callable[[Machine, int], st.SearchStrategy[Any]]]] = {
    "ticket": lambda m, ticket: st.just(ticket),
    "trainer_id": lambda *_: st.sampled_from(["t1", "t2"]),
    "session_id": lambda *_: st.sampled_from(["s1", "s2", ""]),
    "policy": lambda *_: _POLICIES,
    "fencing_token": lambda m, _: st.sampled_from([0, 1, 2, *m.tokens.values()]),
    "pool_id": lambda *_: st.just(""),
    "request_id": lambda *_: st.sampled_from(["q1", "q2", ""]),
    "transfer_id": lambda m, _: st.sampled_from(
        [*m.state.transfers, *m.state.history, "t9999", ""]
    ),
    "replica_id": lambda *_: st.sampled_from(["r0", "r1", "r9"]),
    "incarnation": lambda *_: st.sampled_from(["i1", "i2"]),
    "answer_by": lambda m, _: st.sampled_from([m.now + 1.0, m.now + 20.0]),
    "deadline": lambda m, _: st.sampled_from([m.now + 2.0, m.now + 60.0]),
    "patience": lambda m, _: st.sampled_from([m.now + 1.0, m.now + 20.0]),
    "ids": lambda m, t: st.just(TransferIds(f"t{t}", t, f"g{t}", f"token{t}", f"secret{t}")),
    "layout": lambda *_: st.sampled_from([LAYOUT, None]),
    "layout_digest": lambda *_: st.just(LAYOUT.digest),
    "backend": lambda *_: st.sampled_from(["gloo", "nccl"]),
    "group_id": lambda m, _: st.sampled_from(["", "g9999", *m.state.groups]),
    "adapter": lambda *_: st.sampled_from([SPEC, None]),
    "min_replicas": lambda *_: st.sampled_from([0, 1, 3]),
    "to_version": lambda *_: st.integers(0, 3),
    "capabilities": lambda *_: st.just(CAPABILITIES),
    "base_fingerprint": lambda *_: st.sampled_from([CAPABILITIES.base_fingerprint, "other"]),
    "level": lambda *_: st.sampled_from([1, 2]),
}  # fmt: skip
_TYPES: Final[Mapping[Any, st.SearchStrategy[Any]]] = {
    bool: st.booleans(),
    str: st.sampled_from(["", "why not"]),
    float: st.sampled_from([0.5, 30.0]),
    int: st.integers(0, 3),
    PolicyVersion: st.builds(PolicyVersion, _POLICIES, st.integers(0, 3)),
    PolicyKind: st.sampled_from(PolicyKind),
    ReplicaReport: st.just(ReplicaReport()),
    type(DUMMY): st.just(DUMMY),
    frozenset[str]: st.sampled_from([frozenset(), frozenset({"GPU-0"})]),
}


@pytest.mark.parametrize("row", CALLS, ids=lambda row: row.call.__name__)
@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_each_call_is_answered_once_whatever_else_happens(
    row: CallRow, data: st.DataObject
) -> None:
    m = Machine().pool("r0", "r1")
    for policy in ("math", "base"):
        m.acquire(policy)
        m.run_to(Phase.COMMITTED, policy)
    if phase := data.draw(st.sampled_from([None, Phase.FORMING, Phase.STAGING, Phase.COMMITTING])):
        m.run_to(phase)
    asked: dict[int, str] = {}
    for call in [row.call, *data.draw(st.lists(_OTHERS, max_size=4)), row.call]:
        _go_on(m, data)
        ticket = next(m.ids)
        asked[ticket] = call.__name__
        m.do(_drawn(m, ticket, call, data))
        m.check_fits()
    for _ in range(100):
        m.now += 1.0
        m.do(events.Tick())
    counts = Counter(
        e.ticket for e in m.all if isinstance(e, effects.Reply | effects.Refuse) if e.ticket
    )
    assert {asked[t]: counts[t] for t in asked if counts[t] != 1} == {}


def _drawn(m: Machine, ticket: int, call: type[events.Call], data: st.DataObject) -> events.Call:
    fields: dict[str, Any] = {}
    for name, kind in get_type_hints(call).items():
        if made := _FIELDS.get(name):
            fields[name] = data.draw(made(m, ticket), label=name)
        elif kind in _TYPES:
            fields[name] = data.draw(_TYPES[kind], label=name)
    if "recorded" in get_type_hints(call):
        version = fields.get("version") or PolicyVersion(
            fields["policy"], fields.get("to_version", 0)
        )
        fields["recorded"] = m.record(version)
    return call(**fields)


def _go_on(m: Machine, data: st.DataObject) -> None:
    """Some transfer gets a phase further, or time passes, or neither."""
    active = [t for t in m.state.transfers.values() if t.phase is not Phase.WAITING]
    if not active or data.draw(st.booleans()):
        m.pass_time(data.draw(st.sampled_from([0.0, 0.5, 7.0])), beats=data.draw(st.booleans()))
        return
    transfer = data.draw(st.sampled_from(active))
    ticket = int(transfer.transfer_id[1:])
    if transfer.phase is Phase.FORMING:
        m.attend_all(ticket)
        m.prepare_all(ticket)
    elif transfer.phase is Phase.STAGING:
        m.stage_all(ticket)
    else:
        failure = data.draw(st.sampled_from([None, LOAD_FAILED]))
        m.answer_commits(ticket, **({"r0": failure} if failure else {}))
