"""Buckets between two threads: order, memory that is used again, and every way to end."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest
import torch

from rollout_side.memory import handoff as handoff_module
from rollout_side.memory.handoff import HandoffQueue, InPlaceLoad
from rollout_side.memory.store import WorkerStore
from tests.waits import in_thread, until
from weft_rl.contract.errors import (
    DigestMismatchError,
    InvalidManifestError,
    LoadFailedError,
    NotReadyError,
    TransferAbortedError,
    TransferTimeoutError,
    WeftError,
)
from weft_rl.contract.manifest import plan_buckets
from weft_rl.contract.names import PolicyVersion
from weft_rl.contract.tensors import DataType, TensorMeta
from weft_rl.transport.digests.wsum64 import content_digest

MANIFEST = plan_buckets([TensorMeta(f"w{i}", DataType.FLOAT32, (64, 8)) for i in range(4)], 2048)
COUNT = len(MANIFEST.buckets)
BASE = PolicyVersion("base", 1)
WAIT_SECONDS = 20.0


def make(seconds: float = WAIT_SECONDS, transfer_id: str = "t") -> HandoffQueue:
    return HandoffQueue(transfer_id, BASE, MANIFEST, time.monotonic() + seconds)


def nothing() -> None:
    """A side group that goes on."""


def wire(index: int) -> torch.Tensor:
    return torch.full((8,), index, dtype=torch.uint8)


def put_all(handoff: HandoffQueue, begin: int = 0) -> None:
    for index in range(begin, COUNT):
        handoff.put(index, wire(index), [index])


def test_a_bucket_s_memory_is_free_when_the_next_one_is_asked_for() -> None:
    handoff = make()
    put_all(handoff)
    buckets = handoff.buckets()
    for index in range(COUNT):
        given, tensor = next(buckets)
        assert (given, int(tensor[0])) == (index, index)
        assert not handoff.is_loaded(index)
        assert index == 0 or handoff.is_loaded(index - 1)
    assert next(buckets, None) is None
    assert handoff.is_loaded(COUNT - 1)
    assert not handoff.is_complete
    handoff.complete()
    handoff.wait_complete(nothing)


def test_each_side_waits_for_the_other() -> None:
    handoff, loaded = make(), []
    load = InPlaceLoad(handoff, lambda flow: loaded.extend(int(w[0]) for _, w in flow.buckets()))
    for index in range(COUNT):
        handoff.put(index, wire(index), [index])
        handoff.wait_loaded(index, nothing)
    handoff.wait_complete(nothing)
    assert loaded == list(range(COUNT))
    assert load.confirm(content_digest(list(range(COUNT)))) >= 0
    assert load.end()


def test_another_group_goes_on_from_what_was_put() -> None:
    handoff = make()
    handoff.put(0, wire(0), [0])
    handoff.put(1, wire(1), [1])
    assert handoff.digests == [[0], [1]]
    handoff.resume(time.monotonic() + 2 * WAIT_SECONDS)
    handoff.put(1, wire(99), [1])  # again, for a slower member
    with pytest.raises(DigestMismatchError, match="other bytes"):
        handoff.put(0, wire(0), [5])
    put_all(handoff, 2)
    assert [int(w[0]) for _, w in handoff.buckets()] == list(range(COUNT))


def wait_for_bucket(handoff: HandoffQueue) -> None:
    next(handoff.buckets())


@pytest.mark.parametrize(
    "wait",
    [
        wait_for_bucket,
        lambda handoff: handoff.wait_loaded(0, nothing),
        lambda handoff: handoff.wait_complete(nothing),
    ],
    ids=["for a bucket", "for its memory", "for the end"],
)
def test_every_wait_ends_with_a_failure_and_at_the_deadline(
    wait: Callable[[HandoffQueue], None],
) -> None:
    handoff = make()
    waiting = in_thread(wait, handoff)
    handoff.fail(TransferAbortedError("given up"))
    handoff.fail(LoadFailedError("later"))
    with pytest.raises(TransferAbortedError, match="given up"):
        waiting.result(WAIT_SECONDS)
    for act in (put_all, wait, HandoffQueue.complete, lambda flow: flow.resume(0.0)):
        with pytest.raises(TransferAbortedError):
            act(handoff)
    with pytest.raises(TransferTimeoutError):
        wait(make(0.0))


def test_a_loader_that_waits_in_vain_ends_the_receiver_too() -> None:
    handoff = make(0.0)
    with pytest.raises(TransferTimeoutError):
        next(handoff.buckets())
    with pytest.raises(TransferTimeoutError):
        handoff.put(0, wire(0), [0])


def test_a_group_that_ends_wakes_its_receiver_and_nobody_else() -> None:
    handoff, ended = make(), threading.Event()

    def check() -> None:
        if ended.is_set():
            raise TransferAbortedError("the group has ended")

    waiting = in_thread(handoff.wait_loaded, 0, check)
    ended.set()
    handoff.wake()
    with pytest.raises(TransferAbortedError, match="group"):
        waiting.result(WAIT_SECONDS)
    assert handoff.error is None


def test_what_is_complete_does_not_fail() -> None:
    handoff = make()
    put_all(handoff)
    list(handoff.buckets())
    handoff.complete()
    handoff.fail(TransferAbortedError("too late"))
    handoff.wait_complete(nothing)


# -- the loader's thread ---------------------------------------------------------


def mixing(handoff: HandoffQueue) -> None:
    """A loader that tells its failures as Weft's does."""
    try:
        for _ in handoff.buckets():
            pass
    except WeftError as error:
        if not handoff.is_begun:
            raise
        raise LoadFailedError(error.message, metadata={"dirty": "true"}) from error


@pytest.mark.parametrize("num_put", [0, 1, COUNT - 1])
def test_the_end_tells_whether_the_weights_have_changed(num_put: int) -> None:
    handoff = make()
    load = InPlaceLoad(handoff, mixing)
    for index in range(num_put):
        handoff.put(index, wire(index), [index])
        if index == 0:
            until(lambda: handoff.is_begun)
    assert load.end() == (num_put > 0)
    assert not load.is_running
    with pytest.raises(NotReadyError, match="was ended"):
        load.check()


def test_one_that_ends_by_itself_tells_why() -> None:
    def refuse(handoff: HandoffQueue) -> None:
        raise InvalidManifestError("a tensor is missing")

    handoff = make()
    load = InPlaceLoad(handoff, refuse)
    with pytest.raises(InvalidManifestError, match="missing"):
        handoff.wait_complete(nothing)
    with pytest.raises(NotReadyError, match="not loaded whole"):
        load.confirm(b"")
    assert not load.end()


def test_an_error_that_nobody_foresaw_leaves_mixed_weights() -> None:
    def burn(handoff: HandoffQueue) -> None:
        raise OSError("the disk burns")

    handoff = make()
    load = InPlaceLoad(handoff, burn)
    with pytest.raises(LoadFailedError, match="OSError: the disk burns") as raised:
        handoff.wait_complete(nothing)
    assert raised.value.metadata["dirty"] == "true"
    with pytest.raises(LoadFailedError, match="mixed"):
        load.confirm(b"")


def test_weights_that_were_loaded_after_the_end_have_changed() -> None:
    """Discarded between the last copy and the word that it is done."""
    handoff, go_on = make(), threading.Event()

    def load_late(flow: HandoffQueue) -> None:
        list(flow.buckets())
        assert go_on.wait(WAIT_SECONDS)

    load = InPlaceLoad(handoff, load_late)
    put_all(handoff)
    until(lambda: handoff.is_loaded(COUNT - 1))
    handoff.fail(TransferAbortedError("discarded"))
    assert load.end(0.0)  # still running: nobody can tell yet
    go_on.set()
    assert load.end()
    assert not load.is_complete


def test_other_bytes_are_not_committed() -> None:
    handoff = make()
    load = InPlaceLoad(handoff, mixing)
    put_all(handoff)
    handoff.wait_complete(nothing)
    with pytest.raises(LoadFailedError, match="the commit is for 00") as raised:
        load.confirm(b"\0")
    assert raised.value.metadata["dirty"] == "true"


# -- in the store ------------------------------------------------------------------


def test_the_store_holds_one_until_it_is_discarded_or_committed() -> None:
    store = WorkerStore(0, 0)
    first, second = make(transfer_id="t1"), make(transfer_id="t2")
    store.put_handoff(first)
    assert store.handoff.of("t1") is first
    assert store.usage().staged_transfer_ids == ("t1",)
    store.put_handoff(second)
    assert isinstance(first.error, TransferAbortedError)
    assert store.handoff.of("t1") is None
    store.discard("t1")
    assert second.error is None
    store.discard("t2")
    assert isinstance(second.error, TransferAbortedError)
    assert store.usage().staged_transfer_ids == ()
    with pytest.raises(TransferAbortedError, match="meanwhile"):
        store.put_handoff(make(transfer_id="t2"))
    third = make(transfer_id="t3")
    store.put_handoff(third)
    assert store.handoff.forget("t3") is third
    assert third.error is None
    assert store.usage().staged_transfer_ids == ()


def test_the_loader_says_what_it_loads_and_the_receiver_does_not_say_it_for_him(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(handoff_module, "PROGRESS_SECONDS", 0.001)
    handoff, said = make(), list[tuple[int, str]]()
    handoff.report_to(lambda bucket: said.append((bucket, threading.current_thread().name)))
    put_all(handoff)
    loaded = handoff.buckets()
    next(loaded)
    handoff.report_progress()  # between two tensors of a bucket
    me = threading.current_thread().name
    assert said == [(0, me), (0, me)]
    waited, num_looks = threading.Event(), 0

    def check() -> None:
        nonlocal num_looks
        num_looks += 1
        if num_looks == 5:
            waited.set()

    receiver = in_thread(handoff.wait_complete, check)
    assert waited.wait(WAIT_SECONDS)
    assert {who for _, who in said} == {me}, "a loader that hangs is silent"
    rest = list(loaded)
    assert [bucket for bucket, who in said if who == me] == [0, 0, *range(1, COUNT)]
    assert len(rest) == COUNT - 1
    finishing = threading.Event()
    handoff.report_to(lambda bucket: finishing.set())
    assert finishing.wait(WAIT_SECONDS), "the engine ends its layers, and cannot report"
    monkeypatch.setattr(handoff_module, "FINISHING_SECONDS", 0.0)
    waited = threading.Event()
    num_looks = 0
    assert waited.wait(WAIT_SECONDS)
    spoke_late = list[int]()
    handoff.report_to(spoke_late.append)
    waited = threading.Event()
    num_looks = 0
    assert waited.wait(WAIT_SECONDS)
    assert not spoke_late, "nor is it spoken for without an end"
    handoff.complete()
    receiver.result(WAIT_SECONDS)
