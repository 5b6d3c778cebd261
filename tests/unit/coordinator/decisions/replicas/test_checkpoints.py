"""base@0 is one model: whoever brings another is not in service while it is served."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.unit.coordinator.decisions.machine import CAPABILITIES, Machine
from weft_rl.contract.checkpoint import (
    DUMMY,
    READING,
    Checkpoint,
    CheckpointState,
    FileDigest,
    not_compared,
)
from weft_rl.contract.names import VersionVector
from weft_rl.coordinator.decisions.state import effects, events
from weft_rl.coordinator.decisions.state.replica_state import (
    eligible_targets,
)
from weft_rl.coordinator.decisions.state.values import Phase, ReplicaState
from weft_rl.coordinator.runtime.catalog.database import Catalog


def checkpoint(*files: str) -> Checkpoint:
    """Of files whose content is told by their names: ``a:1``."""
    told = tuple(FileDigest(f.partition(":")[0], f.encode().ljust(32)) for f in files)
    return Checkpoint(CheckpointState.DIGESTED, "".join(files).encode().ljust(32)[:32], told)


OURS = checkpoint("m-1:x", "m-2:x")
OTHER = checkpoint("m-1:x", "m-2:y")


def _pool(**checkpoints: Checkpoint) -> Machine:
    m = Machine()
    for replica_id, told in checkpoints.items():
        m.register(replica_id, checkpoint=told)
    m.do(events.ReferenceKnown(CAPABILITIES.base_fingerprint))
    return m


def _report(m: Machine, replica_id: str, told: Checkpoint, incarnation: str = "i1") -> int:
    ticket = next(m.ids)
    m.do(events.ReportCheckpoint(ticket, replica_id, incarnation, told))
    return ticket


def test_other_weights_of_the_same_shapes_are_not_in_service() -> None:
    m = _pool(r0=OURS, r1=OTHER)
    assert m.standing("r0")[0] is ReplicaState.READY
    where, why = m.standing("r1")
    assert where is ReplicaState.PENDING_WEIGHTS
    assert "m-2 differ from those of r0" in why


def test_the_same_weights_are() -> None:
    m = _pool(r0=OURS, r1=OURS)
    assert m.standing("r1") == (ReplicaState.READY, "")
    assert len(m.ever(effects.SaveCheckpoint)) == 1


def test_readiness_waits_for_the_digest_and_registration_does_not() -> None:
    m = _pool(r0=READING)
    assert m.standing("r0")[0] is ReplicaState.PENDING_WEIGHTS
    m.answer(_report(m, "r0", OURS))
    assert m.standing("r0") == (ReplicaState.READY, "")
    assert [e.kind for e in m.ever(effects.Announce)][-1] == "replica_ready"


def test_what_cannot_be_compared_is_no_mismatch() -> None:
    m = _pool(r0=OURS, r1=not_compared("no files"))
    m.register("r2")  # says nothing
    assert m.standing("r1") == m.standing("r2") == (ReplicaState.READY, "")


def test_dummy_weights_are_nobodys_base() -> None:
    m = _pool(r0=DUMMY, r1=OURS)
    assert m.standing("r0")[0] is ReplicaState.PENDING_WEIGHTS
    assert m.state.checkpoint is not None
    assert m.state.checkpoint.replica_id == "r1"  # dummies bind nothing


def test_it_matters_only_while_base_0_is_served() -> None:
    m = _pool(r0=OURS, r1=OTHER, r2=DUMMY)
    assert {r.replica_id for r in eligible_targets(m.state)} == {
        "r0",
        "r1",
        "r2",
    }  # pushes go there
    m.acquire("base")
    m.run_to(Phase.COMMITTED, "base")
    for replica_id in ("r0", "r1", "r2"):
        assert m.standing(replica_id) == (ReplicaState.READY, "")
    m.register("r3", checkpoint=READING, vector=VersionVector())
    assert "lacks base@1" in m.standing("r3")[1]  # it gets base@1 as ever
    assert "being read" not in m.standing("r3")[1]


def test_an_adapter_makes_nobody_ready_whose_base_is_another() -> None:
    m = _pool(r0=OURS, r1=OTHER)
    m.acquire("math")
    m.run_to(Phase.COMMITTED)
    assert m.standing("r0")[0] is ReplicaState.READY
    assert m.standing("r1")[0] is ReplicaState.PENDING_WEIGHTS


@pytest.mark.parametrize("told", [OTHER, READING, DUMMY])
def test_nobody_goes_back_to_a_base_0_that_is_not_one_model(told: Checkpoint) -> None:
    m = Machine()
    m.register("r0", checkpoint=OURS, retained=(0,))
    m.register("r1", checkpoint=told, retained=(0,))
    m.do(events.ReferenceKnown(CAPABILITIES.base_fingerprint))
    m.acquire("base")
    m.base_copies = 2
    m.run_to(Phase.COMMITTED, "base")
    error = m.error(m.roll_back("base", 0))
    assert error.reason == "BASE_MISMATCH"
    assert error.metadata == {"member": "r1"}


def test_a_report_of_a_process_that_is_not_registered() -> None:
    m = _pool(r0=READING)
    assert m.error(_report(m, "r0", OURS, "i2")).reason == "REPLICA_UNKNOWN"
    assert m.error(_report(m, "r9", OURS)).reason == "REPLICA_UNKNOWN"
    assert m.state.checkpoint is None


def test_files_are_named_briefly() -> None:
    ours = checkpoint(*(f"m-{i}:x" for i in range(9)))
    other = checkpoint(*(f"m-{i}:y" for i in range(9)))
    m = _pool(r0=ours, r1=other)
    assert "m-0, m-1, m-2 and 6 more differ from those of r0" in m.standing("r1")[1]


def test_a_wrong_first_model_does_not_stand_for_ever() -> None:
    m = _pool(r0=OTHER)
    m.do(events.Leave(next(m.ids), "r0", "i1"))
    m.register("r1", checkpoint=OURS)
    m.register("r2", checkpoint=OURS)
    assert m.standing("r1")[0] is ReplicaState.PENDING_WEIGHTS
    m.pass_time(5.0)
    assert m.standing("r1")[0] is ReplicaState.PENDING_WEIGHTS  # r0 may be about to come back
    m.pass_time(2.0)
    assert m.standing("r1") == m.standing("r2") == (ReplicaState.READY, "")
    m.register("r0", "i3", checkpoint=OTHER)
    assert "of r1, which bound it" in m.standing("r0")[1]


def test_it_stands_where_somebody_has_it_or_something_was_pushed() -> None:
    m = _pool(r0=OURS, r1=OTHER)
    m.pass_time(20.0)
    assert m.standing("r1")[0] is ReplicaState.PENDING_WEIGHTS
    m.acquire("math")
    m.run_to(Phase.COMMITTED)
    m.do(events.Leave(next(m.ids), "r0", "i1"))
    m.pass_time(20.0)
    assert m.standing("r1")[0] is ReplicaState.PENDING_WEIGHTS


def test_it_is_durable(catalog_path: Path) -> None:
    m = _pool(r0=OURS)
    catalog = Catalog.open(catalog_path)
    catalog.apply([*m.ever(effects.SavePool), *m.ever(effects.SaveCheckpoint)])
    catalog.close()
    catalog = Catalog.open(catalog_path)
    known = catalog.snapshot()
    assert known.checkpoint == m.state.checkpoint
    catalog.apply([effects.SavePool("e" * 64, "Other")])  # another model: nothing is known of it
    assert catalog.snapshot().checkpoint is None
    catalog.close()


def test_one_that_still_reads_its_checkpoint_may_have_the_bound_one() -> None:
    m = _pool(r0=OURS, r1=OTHER)
    m.state = replace(m.state, replicas={"r1": m.state.replicas["r1"]})
    m.register("r2", checkpoint=READING)
    m.pass_time(20)
    assert m.state.checkpoint is not None
    assert m.state.checkpoint.digest == OURS.digest
    _report(m, "r2", OTHER)
    m.pass_time(20)
    assert m.state.checkpoint.digest == OTHER.digest
