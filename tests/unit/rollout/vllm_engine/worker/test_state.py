"""What a worker may still rely on once a load in place has ended."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

import pytest
import torch

from rollout_side.memory.handoff import HandoffQueue
from rollout_side.memory.segment import HostSegment
from rollout_side.memory.store import WorkerStore
from rollout_side.memory.versions import ServedBase, StagedVersion
from rollout_side.vllm_engine.loading.copy_plan import CopyPlan
from rollout_side.vllm_engine.worker import state as worker_state
from rollout_side.vllm_engine.worker.state import (
    WorkerState,
    loader,
    switch_preparer,
    usable_backends,
)
from weft_rl.contract.errors import (
    LoadFailedError,
    TransferAbortedError,
    UnsupportedError,
    WeftError,
)
from weft_rl.contract.manifest import plan_buckets
from weft_rl.contract.names import PolicyVersion
from weft_rl.contract.tensors import DataType, Reference, TensorMeta

METAS = (TensorMeta("w", DataType.FLOAT32, (4,)),)
MANIFEST = plan_buckets(METAS)
OLD, NEW = cast(CopyPlan, object()), cast(CopyPlan, object())


def _end(monkeypatch: pytest.MonkeyPatch, result: CopyPlan | WeftError) -> WorkerState:
    """A load that ends so; the state that it leaves."""
    store = WorkerStore(2**20, 2**20)
    state = WorkerState(store, Reference("Model", METAS), copy_plans=(OLD,))
    base = ServedBase("t1", PolicyVersion("base", 1), MANIFEST, b"digest", lambda i, out: out)
    store.served.set(base)

    def load(
        worker: Any, handoff: HandoffQueue, reference: Reference, plans: Any, drafted: Any
    ) -> tuple[CopyPlan, ...]:
        assert plans == (OLD,)
        assert drafted is None
        assert not store.served.is_of("t1", b"digest")  # its weights are about to change
        assert state.copy_plans == ()
        if isinstance(result, WeftError):
            raise result
        return (result,)

    monkeypatch.setattr(worker_state, "load_in_place", load)
    handoff = HandoffQueue("t2", PolicyVersion("base", 2), MANIFEST, time.monotonic() + 20)
    run = loader(SimpleNamespace(device=torch.device("cpu")), state)
    if isinstance(result, WeftError):
        with pytest.raises(type(result)):
            run(handoff)
    else:
        run(handoff)
    return state


def test_what_was_loaded_whole_has_its_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    state = _end(monkeypatch, NEW)
    assert state.copy_plans == (NEW,)
    assert state.store.retained_bases() == ()  # until it is committed


def test_where_nothing_has_changed_all_is_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    state = _end(monkeypatch, TransferAbortedError("it never began"))
    assert state.copy_plans == (OLD,)
    assert state.store.served.is_of("t1", b"digest")
    assert not state.store.served.is_of("t1", b"other")
    assert state.store.retained_bases() == (1,)


def test_nothing_is_left_of_what_failed_midway(monkeypatch: pytest.MonkeyPatch) -> None:
    state = _end(monkeypatch, LoadFailedError("a layer burned", metadata={"dirty": "true"}))
    assert state.copy_plans == ()
    assert state.store.retained_bases() == ()


class _Given(NamedTuple):
    """Arguments of ``prepare_base``, which stands for the comparison of the weights."""

    plans: tuple[CopyPlan, ...]
    most_bytes: int


def _prepare(
    monkeypatch: pytest.MonkeyPatch, spare_bytes: int, result: Callable[[], None] | Exception | None
) -> tuple[StagedVersion, list[_Given]]:
    """Have a switch prepared on a GPU with so much to spare."""
    store = WorkerStore(2**20, 2**20)
    state = WorkerState(store, Reference("Model", METAS), copy_plans=(OLD,))
    segment = HostSegment.allocate(MANIFEST.wire_bytes)
    staged = StagedVersion("t2", PolicyVersion("base", 2), MANIFEST, segment, b"")
    given = list[_Given]()

    def prepare(
        worker: Any, staged: StagedVersion, reference: Reference, plans: Any, on_progress: Any,
        drafted: Any, most_bytes: int,
    ) -> Callable[[], None] | None:  # fmt: skip
        assert not store.fall_asleep()  # it reads the weights
        given.append(_Given(plans, most_bytes))
        if isinstance(result, Exception):
            raise result
        return result

    monkeypatch.setattr(worker_state, "spare_bytes", lambda device: spare_bytes)
    monkeypatch.setattr(worker_state, "prepare_base", prepare)
    switch_preparer(SimpleNamespace(device=torch.device("cpu")), state)(staged, lambda: None)
    assert store.fall_asleep()
    return staged, given


def test_a_switch_is_prepared_for_the_weights_of_now(monkeypatch: pytest.MonkeyPatch) -> None:
    written = list[None]()
    staged, given = _prepare(monkeypatch, 2**20, lambda: written.append(None))
    (switch,) = staged.prepared
    switch.write()
    assert written == [None]
    assert given[0].plans == (OLD,)
    assert 0 < given[0].most_bytes <= 2**19


def test_nothing_is_prepared_without_memory_to_spare(monkeypatch: pytest.MonkeyPatch) -> None:
    staged, given = _prepare(monkeypatch, 0, lambda: None)
    assert (staged.prepared, given) == ([], [])


@pytest.mark.parametrize("result", [None, torch.OutOfMemoryError("CUDA out of memory")])
def test_what_cannot_be_prepared_is_loaded_while_paused(
    monkeypatch: pytest.MonkeyPatch, result: Exception | None, caplog: pytest.LogCaptureFixture
) -> None:
    staged, given = _prepare(monkeypatch, 2**20, result)
    assert (staged.prepared, len(given)) == ([], 1)
    assert ("the switch to base@2 is not prepared: CUDA" in caplog.text) is (result is not None)


def test_a_worker_without_the_backend_that_was_chosen_says_what_it_has() -> None:
    cpu = torch.device("cpu")
    assert "gloo" in usable_backends(cpu, "auto")
    assert usable_backends(cpu, "gloo") == ("gloo",)
    with pytest.raises(UnsupportedError, match=r"nccl cannot be used: a worker on cpu has .*gloo;"):
        usable_backends(cpu, "nccl")
