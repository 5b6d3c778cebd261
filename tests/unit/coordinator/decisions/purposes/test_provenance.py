"""Which base an adapter was trained on: recorded, said, and refused where that is asked."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from tests.unit.coordinator.decisions.machine import SPEC, Machine, saved_versions
from weft.contract.errors import InvalidAdapterError
from weft.contract.names import provenance
from weft.coordinator.decisions import effects
from weft.coordinator.decisions.state.values import AdapterSpec, Phase, VersionState
from weft.coordinator.runtime.catalog.database import Catalog


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
