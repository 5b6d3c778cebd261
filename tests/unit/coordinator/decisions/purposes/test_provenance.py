"""Which base an adapter was trained on: recorded, said, and refused where that is asked."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from tests.unit.coordinator.decisions.machine import (
    CAPABILITIES,
    DIGEST,
    OTHER_LAYOUT,
    SPEC,
    Machine,
    saved_versions,
)
from weft_rl.contract.adapter_config import AdapterSpec
from weft_rl.contract.checkpoint import DUMMY, READING, Checkpoint, CheckpointState
from weft_rl.contract.errors import InvalidAdapterError
from weft_rl.contract.names import PolicyVersion, provenance
from weft_rl.coordinator.decisions.state import effects, events, pool
from weft_rl.coordinator.decisions.state.values import Phase, VersionState
from weft_rl.coordinator.runtime.catalog.database import Catalog


def _spec(trained_on: int | None) -> AdapterSpec:
    return dataclasses.replace(SPEC, trained_on_base_version=trained_on)


def _pool() -> Machine:
    m = Machine().pool("r0", "r1")
    m.acquire("math")
    m.acquire("base", "t2")
    return m


def _begin(m: Machine, trained_on: int | None, **changes: Any) -> int:
    return m.begin(adapter=_spec(trained_on), refuse_other_base=True, **changes)


def test_what_is_not_known_is_not_made_up() -> None:
    m = _pool()
    m.run_to(Phase.COMMITTED, adapter=_spec(None))
    m.run_to(Phase.COMMITTED, adapter=_spec(0))
    assert m.state.policies["math"].trained_on == {2: 0}
    assert provenance(None, 3) == "trained on base@?, served over base@3"


def test_another_base_is_refused_at_begin_and_burns_no_version() -> None:
    m = _pool()
    m.run_to(Phase.COMMITTED, "base")
    error = m.error(_begin(m, 0))
    assert error.reason == "BASE_MISMATCH"
    assert error.metadata == {"trained_on_base_version": "0", "base_version": "1"}
    assert m.error(_begin(m, None)).metadata["trained_on_base_version"] == "?"
    assert m.state.policies["math"].last_version == 0
    assert m.transfer(_begin(m, 1)).version == 1


def test_a_base_that_came_meanwhile_is_refused_at_the_commit_point() -> None:
    """A base cannot overtake where replicas are held, so what it would leave is planted."""
    m = Machine().pool("r0")
    m.acquire("math")
    m.acquire("base", "t2")
    ticket = _begin(m, 0)
    m.attend_all(ticket)
    m.prepare_all(ticket)
    served = dataclasses.replace(m.state.policies["base"], served_version=1, last_version=1)
    m.state = dataclasses.replace(m.state, policies={**m.state.policies, "base": served})
    waiter = m.await_end(ticket)
    m.stage_all(ticket)
    assert m.error(waiter).reason == "BASE_MISMATCH"
    assert m.transfer(ticket).phase is Phase.ABORTED
    assert saved_versions(m)[-1].state is VersionState.ABORTED
    assert m.state.policies["math"].served_version == 0


def test_whoever_does_not_refuse_it_hinders_nobody() -> None:
    m = _pool()
    m.run_to(Phase.COMMITTED, "base")
    ticket = m.run_to(Phase.COMMITTED, adapter=_spec(0))
    assert m.transfer(ticket).purpose.served_over == 1
    assert m.transfer(m.run_to(Phase.COMMITTED, "base")).purpose.served_over is None
    assert m.state.vector.base == 2


def test_it_is_durable(catalog_path: Path) -> None:
    m = _pool()
    m.run_to(Phase.COMMITTED, adapter=_spec(None))
    m.run_to(Phase.COMMITTED, adapter=_spec(0))
    catalog = Catalog.open(catalog_path)
    catalog.apply([e for e in m.all if isinstance(e, effects.SavePolicy | effects.SaveVersion)])
    known = {policy.name: policy for policy in catalog.snapshot().policies}
    assert known["math"].trained_on == {2: 0}
    second, first = catalog.list_versions("math", 9, 9)
    assert first.adapter is not None
    assert first.adapter.trained_on_base_version is None
    assert second.adapter is not None
    assert second.adapter.trained_on_base_version == 0
    catalog.close()


def test_a_base_that_never_was_is_refused_at_begin() -> None:
    m = Machine().pool("r0")
    m.acquire("math")
    m.acquire("base")
    m.run_to(Phase.COMMITTED, "base")
    for never in (2, 99):
        error = m.error(m.begin(adapter=_spec(never)))
        assert isinstance(error, InvalidAdapterError)
        assert f"base@{never}, which never was: the newest number of the base is 1" in error.message
    for was in (0, 1):
        m.run_to(Phase.COMMITTED, adapter=_spec(was))


CHECKPOINT = Checkpoint(CheckpointState.DIGESTED, b"c" * 32)
MATH_1 = PolicyVersion("math", 1)


def _started_with_files(checkpoint: Checkpoint = CHECKPOINT) -> Machine:
    m = Machine()
    m.register("r0", checkpoint=CHECKPOINT)
    m.register("r1", checkpoint=checkpoint)
    m.do(events.ReferenceKnown(CAPABILITIES.base_fingerprint))
    m.acquire("math")
    m.acquire("base", "t2")
    return m


def _push_base(m: Machine, content: bytes, *, as_started: bool = False, **changes: Any) -> None:
    m.digest = dataclasses.replace(DIGEST, value=content * 8)
    m.base_as_started = as_started
    m.run_to(Phase.COMMITTED, "base", **changes)


def _tell_as_started(m: Machine, replica_id: str) -> None:
    """A heartbeat, late enough to be believed."""
    m.pass_time(3.0)
    m.beat(replica_id, base_as_started=True)


def test_what_decides_is_the_content_and_not_the_number() -> None:
    m = _pool()
    _push_base(m, b"a")
    m.run_to(Phase.COMMITTED, adapter=_spec(1))
    assert not m.state.is_over_another_base(MATH_1)
    _push_base(m, b"b")
    assert m.state.is_over_another_base(MATH_1)
    assert m.error(_begin(m, 1)).reason == "BASE_MISMATCH"
    _push_base(m, b"a")  # base@3 is base@1 again
    assert not m.state.is_over_another_base(MATH_1)
    assert m.state.is_other_base(2)
    purpose = m.transfer(m.run_to(Phase.COMMITTED, adapter=_spec(1))).purpose
    assert (purpose.served_over, purpose.over_another_base) == (3, False)
    assert m.transfer(_begin(m, 1)).version  # it is not refused


def test_the_same_digest_in_another_layout_is_another_content() -> None:
    m = _pool()
    _push_base(m, b"a")
    m.run_to(Phase.COMMITTED, adapter=_spec(1))
    _push_base(m, b"a", layout=OTHER_LAYOUT)
    assert m.state.is_over_another_base(MATH_1)


def test_the_bytes_of_base_0_pushed_again_are_base_0() -> None:
    m = _started_with_files()
    m.run_to(Phase.COMMITTED, adapter=_spec(0))
    _push_base(m, b"b")
    assert m.state.over_another_base() == [MATH_1]
    _push_base(m, b"a", as_started=True)
    assert not m.state.over_another_base()
    _push_base(m, b"b")
    assert m.state.is_over_another_base(MATH_1)
    _push_base(m, b"a")  # nobody need say it again
    assert not m.state.is_other_base(0)
    assert not m.state.is_other_base(2)
    assert m.transfer(_begin(m, 0)).version  # it is not refused


def test_a_heartbeat_says_it_too_once_the_files_are_read() -> None:
    m = _started_with_files()
    _push_base(m, b"a")
    assert m.state.is_other_base(0)
    _tell_as_started(m, "r0")
    assert not m.state.is_other_base(0)
    assert m.found(effects.RoutesChanged)  # readers of the routes hear of it
    _tell_as_started(m, "r0")
    assert not m.found(effects.SaveAsStarted)


@pytest.mark.parametrize("other", [READING, DUMMY, Checkpoint(CheckpointState.DIGESTED, b"d" * 32)])
def test_who_was_started_with_something_else_does_not_speak_for_base_0(other: Checkpoint) -> None:
    m = _started_with_files(other)
    _push_base(m, b"a")
    _tell_as_started(m, "r1")
    assert m.state.is_other_base(0)


def test_what_is_not_remembered_is_taken_for_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "MAX_BASE_CONTENTS", 2)
    m = _pool()
    for content in (b"a", b"b", b"a"):
        _push_base(m, content)
    assert sorted(m.state.base_contents) == [2, 3]
    assert m.state.is_other_base(1)


def test_contents_are_durable(catalog_path: Path) -> None:
    m = _started_with_files()
    _push_base(m, b"a", as_started=True)
    _push_base(m, b"b")
    saves = effects.SavePool | effects.SavePolicy | effects.SaveVersion | effects.SaveAsStarted
    catalog = Catalog.open(catalog_path)
    catalog.apply([e for e in m.all if isinstance(e, saves)])
    known = catalog.snapshot()
    assert known.base_contents == m.state.base_contents
    assert known.as_started == m.state.as_started == {m.state.base_contents[1]}
    catalog.apply([effects.SavePool("", "")])  # base@0 is another then
    assert catalog.snapshot().as_started == frozenset()
    catalog.close()
