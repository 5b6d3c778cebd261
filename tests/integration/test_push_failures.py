"""Pushes that fail on their way: what the trainer is told, and what is served afterwards."""

import collections
import contextlib
import functools
import logging
import os
import random
import re
import select
import signal
import threading
import time
import traceback

import pytest
import torch
from torch import nn

import trainer_side.packing.packer
import trainer_side.pool.client
import weft_rl.transport.member
from rollout_side.memory.store import WorkerStore
from tests.doubles.engine import EngineDouble
from tests.integration.models import Model, peft_of, same, until, weights
from trainer_side import Publisher, PushOptions
from weft_rl.contract.errors import (
    DigestMismatchError,
    InvalidRequestError,
    LoadFailedError,
    NotFiniteError,
    PeerUnavailableError,
    TransferTimeoutError,
    WeftError,
)

FINITE = PushOptions(check_finite=True)


@pytest.mark.parametrize("late", ["before it forms", "as it attends"])
def test_a_replica_lost_before_the_sender_comes_does_not_hold_the_push(
    late, pool, engines, publisher, monkeypatch
):
    """The group is formed anew while nobody can tell its sender, who is not there yet."""
    lost = []

    def lose_one():
        if not lost:
            lost.append("replica-1")
            pool.remove_replica("replica-1")

    real = trainer_side.pool.client.PushSender

    def slow(ticket, device, credentials):
        if late == "before it forms":
            lose_one()
            return real(ticket, device, credentials)
        sender = object.__new__(real)
        attend = weft_rl.transport.member.AttendStream

        def attendance(*args, **kwargs):
            lose_one()
            return attend(*args, **kwargs)

        with monkeypatch.context() as patch:
            patch.setattr(weft_rl.transport.member, "AttendStream", attendance)
            sender.__init__(ticket, device)
        return sender

    monkeypatch.setattr(trainer_side.pool.client, "PushSender", slow)
    version, report = publisher.push_base(Model(1), require=1)
    assert str(version) == "base@1"
    assert lost
    assert report.num_replicas == 1
    assert same(engines[0].base, weights(Model(1)))


def _nan(model):
    with torch.no_grad():
        model.layers[1]["v_proj"].bias[3] = float("nan")
    return model


def test_replicas_that_are_lost_in_turn_at_the_last_bucket_hold_up_no_push(
    pool, engines, publisher, monkeypatch
):
    """All is verified when the first is lost: in the groups after it nothing is left to send."""
    pool.add_replica("replica-2", EngineDouble(weights(Model())))
    put_staged, failing = WorkerStore.put_staged, [id(e.store) for e in engines]

    def fail(store, staged):
        if id(store) in failing:
            raise WeftError("a bug")
        put_staged(store, staged)

    monkeypatch.setattr(WorkerStore, "put_staged", fail)
    report = publisher.push_base(Model(1), require=1).report
    assert report.num_replicas == 1
    assert report.seconds < 5


def test_a_base_that_holds_nan_is_given_up_and_nothing_changes(pool, engines, publisher):
    publisher.push_base(Model(1))
    with pytest.raises(NotFiniteError, match=r"'layers.1.v_proj.bias' holds NaN"):
        publisher.push_base(_nan(Model(2)), options=FINITE)
    assert same(engines[0].base, weights(Model(1)))
    publisher.push_base(Model(3), options=FINITE)
    assert same(engines[0].base, weights(Model(3)))
    assert engines[0].store.usage().staging_bytes == 0


def test_corrupted_bytes_are_data_loss_and_are_served_nowhere(
    pool, engines, publisher, monkeypatch
):
    publisher.push_base(Model(1))
    seal = trainer_side.packing.packer.seal_bucket

    def seal_others(*given):
        *before, digests, runs = given
        return seal(*before, [digest ^ 1 for digest in digests], runs)

    monkeypatch.setattr(trainer_side.packing.packer, "seal_bucket", seal_others)
    with pytest.raises(DigestMismatchError):
        publisher.push_base(Model(2))
    monkeypatch.undo()
    for engine in engines:
        assert same(engine.base, weights(Model(1)))
        until(lambda engine=engine: engine.store.usage().staging_bytes == 0)
    # The failed version is never reused.
    assert str(publisher.push_base(Model(3)).version) == "base@3"
    assert same(engines[1].base, weights(Model(3)))


def test_an_interrupted_push_says_where_it_was_called_and_no_more(pool, engines, publisher):
    """Ctrl-C was 40 lines of what a push is made of."""

    class Interrupted(Model):
        def named_parameters(self, *args, **kwargs):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt, match="a push of base was interrupted") as caught:
        publisher.push_base(Interrupted(1))
    assert len(traceback.format_exception(caught.value)) <= 5
    assert str(publisher.push_base(Model(2)).version) == "base@1"


def test_what_a_refused_push_and_a_good_one_log(pool, engines, publisher, caplog):
    caplog.set_level(logging.INFO)
    publisher.push_base(Model(1))  # forms the group
    caplog.clear()
    publisher.push_base(Model(2))
    told = [record for record in caplog.records if record.name != "weft_rl.audit"]
    by_process = collections.Counter(record.name.partition(".")[0] for record in told)
    assert by_process == {"trainer_side": 1, "weft_rl": 1, "rollout_side": len(engines)}
    caplog.clear()
    for engine in engines:
        engine.fail_next_load = LoadFailedError("out of slots")
    with pytest.raises(LoadFailedError):
        publisher.push_base(Model(3))
    assert not [r for r in caplog.records if r.levelno >= logging.ERROR]


def test_a_source_that_fails_midway_fails_the_push_for_all(pool, engines, publisher):
    class Exploding(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = Model(2)

        def named_parameters(self, *args, **kwargs):
            return self.inner.named_parameters(*args, **kwargs)

    model = Exploding()
    publisher.push_base(model)
    read = trainer_side.packing.packer.Packer.pack

    def explode(self, *_, **__):
        raise RuntimeError("the disk burned")

    trainer_side.packing.packer.Packer.pack = explode
    try:
        with pytest.raises(RuntimeError, match="the disk burned"):
            publisher.push_base(model)
    finally:
        trainer_side.packing.packer.Packer.pack = read
    assert str(publisher.push_base(model).version) == "base@3"


def test_a_load_that_fails_everywhere_is_told_to_the_trainer(pool, engines, publisher):
    for engine in engines:
        engine.fail_next_load = LoadFailedError("out of slots")
    with pytest.raises(LoadFailedError, match="out of slots"):
        publisher.push_adapter(peft_of(Model()), "math")
    assert publisher.push_adapter(peft_of(Model()), "math").version.version == 2


def test_a_replica_that_fails_to_load_leaves_service_and_returns_with_the_next_push(
    pool, engines, publisher
):
    engines[0].fail_next_load = LoadFailedError("mixed", metadata={"dirty": "true"})
    publisher.push_base(Model(1))
    assert same(engines[1].base, weights(Model(1)))
    assert pool.agents["replica-0"].serving.dirty_reason == "mixed"
    publisher.push_base(Model(2))
    assert pool.agents["replica-0"].serving.dirty_reason == ""
    assert same(engines[0].base, weights(Model(2)))


# -- what passes is tried again, until the deadline -----------------------------------------


@contextlib.contextmanager
def striking(pool, strike, **settings):
    """A publisher in whose first push ``strike`` is called, once some buckets were verified."""
    pending = [strike]

    def progress(version, done, total):
        if done >= 2 and pending:
            pending.pop()()

    settings = {"timeout_seconds": 30, "bucket_bytes": 2048, **settings}
    with Publisher(pool.target, trainer_id="trainer-a", progress=progress, **settings) as publisher:
        yield publisher


def restart_coordinator(pool):
    """Restart it, and wait until all replicas are back: one that came later would find nobody who
    holds the push."""
    known = [agent.registration for agent in pool.agents.values()]
    before = max(each.coordinator_generation for each in known)
    pool.stop_coordinator()
    pool.start_coordinator()
    until(lambda: all(each.coordinator_generation > before and each.is_known for each in known))


@pytest.mark.parametrize("require", [1, "all"])
def test_a_coordinator_that_is_restarted_in_mid_push_ends_no_push(pool, engines, require):
    with striking(pool, lambda: restart_coordinator(pool), require=require) as publisher:
        version, report = publisher.push_base(Model(1))
        assert version.version > 1, "the first number was used"
        (remark,) = (r for r in report.remarks if "begun again" in r)
        assert "restarted" in remark or "dropped" in remark
    until(lambda: all(same(engine.base, weights(Model(1))) for engine in engines))


def test_a_push_waits_for_a_replica_where_none_is_left(pool):
    pool.add_replica("replica-0", EngineDouble(weights(Model())))
    after = EngineDouble(weights(Model()))

    def lose_the_only_one():
        pool.remove_replica("replica-0")
        later = threading.Timer(1.0, pool.add_replica, ("replica-1", after))
        later.start()
        timers.append(later)

    timers = []
    with striking(pool, lose_the_only_one) as publisher:
        version, report = publisher.push_base(Model(1))
        assert str(version) == "base@2"
        assert report.num_replicas == 1
        (remark,) = report.remarks
        assert remark.startswith("begun again, for replica-0 is gone")
    timers[0].join()
    assert same(after.base, weights(Model(1)))


def test_a_push_that_nobody_comes_for_ends_at_its_deadline_with_what_it_waits_for(pool):
    pool.add_replica("replica-0", EngineDouble(weights(Model())))
    lose = functools.partial(pool.remove_replica, "replica-0")
    with striking(pool, lose, timeout_seconds=2.0) as publisher:
        began = time.monotonic()
        with pytest.raises(PeerUnavailableError) as caught:
            publisher.push_base(Model(1))
        assert 1.0 < time.monotonic() - began < 5.0
        assert caught.value.reason == "POOL_EMPTY"
        assert re.fullmatch(
            r"no replica is in contact .*; before that: replica-0 is gone: .*", caught.value.message
        )


def test_what_cannot_be_read_twice_is_not_begun_twice(pool):
    pool.add_replica("replica-0", EngineDouble(weights(Model())))
    lose = functools.partial(pool.remove_replica, "replica-0")
    with striking(pool, lose) as publisher:
        began = time.monotonic()
        with pytest.raises(PeerUnavailableError, match="replica-0 is gone") as caught:
            publisher.push_tensors(Model(1).named_parameters())
        assert caught.value.reason == "PEER_GONE"
        assert "cannot be read again" in caught.value.message
        assert time.monotonic() - began < 10


def test_what_is_kept_for_deltas_is_begun_again_though_it_cannot_be_read_twice(pool):
    pool.add_replica("replica-0", EngineDouble(weights(Model()), base_copies=1))
    after = EngineDouble(weights(Model()), base_copies=1)

    def lose_the_only_one():
        pool.remove_replica("replica-0")
        pool.add_replica("replica-1", after)

    with striking(pool, lose_the_only_one, delta="always") as publisher:
        report = publisher.push_tensors(Model(1).named_parameters()).report
        assert any("begun again" in remark for remark in report.remarks)
        assert same(after.base, weights(Model(1)))
        assert publisher.push_tensors(Model(1).named_parameters()).report.delta.is_delta
    assert same(after.base, weights(Model(1)))


def test_all_means_all_and_is_final(pool, engines):
    lose = functools.partial(pool.remove_replica, "replica-1")
    with striking(pool, lose, require="all") as publisher:
        with pytest.raises(PeerUnavailableError, match="replica-1 is gone"):
            publisher.push_base(Model(1))
        assert str(publisher.push_base(Model(2)).version) == "base@2"


# -- interrupts ------------------------------------------------------------------------------


class _Interrupts:
    """Ctrl-C in the main thread, so many seconds after ``push`` is called; never outside it."""

    def __init__(self) -> None:
        self._main = threading.main_thread().ident

    def push(self, call, after):
        """Whether the call was interrupted before it returned."""
        done = threading.Event()
        guard = threading.Lock()

        def strike():
            if not done.wait(after):
                with guard:
                    if not done.is_set():
                        signal.pthread_kill(self._main, signal.SIGINT)

        thread = threading.Thread(target=strike)
        try:
            thread.start()
            call()
            with guard:
                done.set()
            thread.join()
            time.sleep(0)  # where one that was sent at the last moment is raised
        except KeyboardInterrupt:
            done.set()
            thread.join()
            return True
        return False


# Interrupted between its making and its first name, a socket is closed by the collector.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("what", ["base", "adapter"])
def test_an_interrupt_at_any_moment_holds_up_nobody(what, pool, engines):
    """The trainer lives on, as in a notebook: its lease does not tell that it left the push."""
    rng, interrupts = random.Random(28), _Interrupts()
    model, peft_model, other = Model(1), peft_of(Model(), 1), peft_of(Model(), 2)
    num_interrupted = 0
    with (
        Publisher(pool.target, trainer_id="trainer-a", timeout_seconds=20) as publisher,
        Publisher(pool.target, trainer_id="trainer-b", timeout_seconds=20) as others,
    ):
        push = (
            functools.partial(publisher.push_base, model)
            if what == "base"
            else functools.partial(publisher.push_adapter, peft_model, "math")
        )
        others.push_adapter(other, "code")
        push()  # once its group is kept, it is quick
        usual = 0.02
        for _ in range(100):
            began = time.monotonic()
            if interrupts.push(push, rng.uniform(0.0, usual)):
                num_interrupted += 1
            else:  # busy machines take longer, and one push not as long as another
                usual = (usual + time.monotonic() - began) / 2
            began = time.monotonic()
            others.push_adapter(other, "code")
            assert time.monotonic() - began < 8.0, "it waited for what was interrupted"
            if num_interrupted == 15:
                break
        assert num_interrupted == 15
        push()
    until(lambda: all(thread.name != "weft-one-sided" for thread in threading.enumerate()))


# -- calls within a push, behind a push, and in another process ---------------------------------


def _nested(publisher, adapter):
    """What a further call says, and how long that took."""
    began = time.monotonic()
    for call in (
        lambda: publisher.push_adapter(adapter, "math"),
        lambda: publisher.push_base_async(Model(2)),
        lambda: publisher.rollouts_asleep().__enter__(),
        publisher.close,
    ):
        with pytest.raises(InvalidRequestError, match="from within a push"):
            call()
    return time.monotonic() - began


@pytest.mark.parametrize("where", ["progress", "progress of a push beside", "tensors", "signal"])
def test_a_push_from_within_a_push_is_refused_at_once(where, pool, engines):
    took, adapter = [], peft_of(Model())

    def nest(*_):
        if not took:
            took.append(_nested(publisher, adapter))

    def tensors():
        for index, pair in enumerate(Model(1).named_parameters()):
            if index == 3:
                nest()
            yield pair

    with Publisher(
        pool.target, trainer_id="a", timeout_seconds=20, bucket_bytes=2048,
        progress=nest if where.startswith("progress") else None,
    ) as publisher:  # fmt: skip
        if where == "progress":
            publisher.push_base(Model(1))
        elif where == "progress of a push beside":
            publisher.push_base_async(Model(1)).result(20)
        elif where == "tensors":
            publisher.push_tensors(tensors)
        else:
            before = signal.signal(signal.SIGUSR1, nest)
            try:

                def signalling():
                    for index, pair in enumerate(Model(1).named_parameters()):
                        if index == 3:
                            os.kill(os.getpid(), signal.SIGUSR1)
                        yield pair

                publisher.push_tensors(signalling)
            finally:
                signal.signal(signal.SIGUSR1, before)
        assert took, "it was tried"
        assert took[0] < 2.0
    assert same(engines[0].base, weights(Model(1)))


def test_a_push_behind_another_has_its_time_from_its_call_on(pool, engines):
    held, go_on, adapter = threading.Event(), threading.Event(), peft_of(Model())

    def hold(*_):
        held.set()
        go_on.wait(20)

    with Publisher(
        pool.target, trainer_id="a", timeout_seconds=20, bucket_bytes=2048, progress=hold
    ) as publisher:
        slow = threading.Thread(target=publisher.push_base, args=(Model(1),))
        slow.start()
        assert held.wait(20)
        for is_beside in (False, True):
            if is_beside:  # one that waits on the publisher's own thread
                beside = publisher.push_base_async(Model(2))
            began = time.monotonic()
            with pytest.raises(TransferTimeoutError, match="still under way"):
                publisher.push_adapter(adapter, "math", timeout_seconds=0.5)
            assert time.monotonic() - began < 2.0
        go_on.set()
        slow.join()
        beside.result(20)
        assert str(publisher.push_adapter(adapter, "math").version) == "math@1"


def _said_by_a_child(publisher):
    """Return what a process forked from this one is told, a byte a call, and how it ended."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        said = []
        for call in (
            lambda: publisher.push_base(Model(2)),
            lambda: publisher.push_base_async(Model(2)),
            lambda: publisher.wanted,
            lambda: publisher.rollouts_asleep().__enter__(),
            publisher.close,
        ):
            try:
                call()
            except InvalidRequestError as error:
                said.append("forked" in error.message)
            except BaseException:
                said.append(False)
        os.write(writing, bytes(said))
        os._exit(0)
    os.close(writing)
    try:
        ready, _, _ = select.select([reading], [], [], 10)
        if not ready:
            os.kill(child, signal.SIGKILL)
        return os.read(reading, 100), os.waitpid(child, 0)[1]
    finally:
        os.close(reading)


def test_a_forked_process_is_told_at_once_that_the_publisher_is_its_parents(pool, engines):
    """And lives: gRPC's own threads, made anew in a child, aborted one in twenty."""
    with Publisher(pool.target, trainer_id="a", timeout_seconds=20) as publisher:
        for _ in range(10):
            publisher.push_base(Model(1))
            assert _said_by_a_child(publisher) == (bytes([1] * 5), 0)
        assert str(publisher.push_base(Model(3)).version) == "base@11"
