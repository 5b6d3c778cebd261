"""A replica is killed in the middle of a push: the survivors go on, or it fails, as asked."""

import os
import signal
import time

import pytest

from tests.doubles.replica_weights import BUCKET_BYTES, ELEMENTS, NUM_TENSORS, STRIDE, model
from tests.integration.processes import start_coordinator
from tests.waits import until
from trainer_side import Publisher
from weft_rl.cli.demo.processes import Process
from weft_rl.contract.errors import PeerUnavailableError

KILL_AT = 8


class Replicas:
    """Three replica processes and the coordinator.

    Args:
        without_copies: Numbers of those that can take no delta.
    """

    def __init__(self, work, without_copies=()):
        self.coordinator, self.target = start_coordinator(work)
        self.processes = {
            f"replica-{i}": Process(
                f"replica-{i}",
                ("-m", "tests.doubles.replica_process", self.target, f"replica-{i}",
                 str(NUM_TENSORS), str(ELEMENTS), "--keep",
                 *(["--no-copies"] if i in without_copies else [])),
                work,
                {},
            )
            for i in range(3)
        }  # fmt: skip
        for process in self.processes.values():
            process.line(lambda text: text == "ready", 60)

    def ask(self, name):
        self.processes[name].tell("?")
        return self.processes[name].answer(20)

    def close(self):
        for process in (*self.processes.values(), self.coordinator):
            process.send_signal(signal.SIGCONT)
            process.stop()


@pytest.fixture
def replicas(tmp_path):
    running = Replicas(tmp_path)
    yield running
    running.close()


def publisher_that_loses(replicas, victim, signum, **settings):
    """A publisher whose push loses ``victim`` once some buckets were verified."""

    def strike(version, done, total):
        if done >= KILL_AT and victim in pending:
            pending.discard(victim)
            os.kill(replicas.processes[victim].pid, signum)

    pending = {victim}
    return Publisher(
        replicas.target, trainer_id="trainer-a", bucket_bytes=BUCKET_BYTES,
        progress=strike, timeout_seconds=60, **settings,
    )  # fmt: skip


@pytest.mark.parametrize("victim", ["replica-0", "replica-2"])  # a relay of gloo's tree, a leaf
def test_survivors_go_on_after_a_kill(replicas, victim):
    survivors = sorted(set(replicas.processes) - {victim})
    with publisher_that_loses(replicas, victim, signal.SIGKILL, require=2) as publisher:
        version, report = publisher.push_base(model(1.0))
        assert str(version) == "base@1"
        assert report.num_replicas == 2
        (remark,) = report.remarks
        assert remark.startswith(f"{victim} does not serve it: it was lost before the commit")
        for name in survivors:
            served = replicas.ask(name)
            assert (served["base"], served["firsts"], served["is_whole"]) == (1, [1.0], True)
        # The group of the survivors is kept; nothing of the old one is left behind.
        epoch = publisher._pushing._client._sender.ticket.epoch
        assert str(publisher.push_base(model(2.0)).version) == "base@2"
        assert publisher._pushing._client._sender.ticket.epoch == epoch
        for name in survivors:
            served = replicas.ask(name)
            assert (served["firsts"], served["staging_bytes"]) == ([2.0], 0)


def test_require_all_fails_by_name_and_the_next_push_succeeds(replicas):
    with publisher_that_loses(replicas, "replica-1", signal.SIGKILL, require="all") as publisher:
        began = time.monotonic()
        with pytest.raises(PeerUnavailableError, match="replica-1") as caught:
            publisher.push_base(model(1.0))
        assert time.monotonic() - began < 20
        assert caught.value.metadata["member"] == "replica-1"
        for name in ("replica-0", "replica-2"):
            assert replicas.ask(name)["base"] == 0
        assert str(publisher.push_base(model(2.0)).version) == "base@2"
        for name in ("replica-0", "replica-2"):
            served = replicas.ask(name)
            assert (served["firsts"], served["staging_bytes"]) == ([2.0], 0)


def test_survivors_go_on_without_a_replica_that_stopped(replicas):
    """SIGSTOP breaks no connection: silence is what tells."""
    with publisher_that_loses(replicas, "replica-1", signal.SIGSTOP) as publisher:  # the default
        assert str(publisher.push_base(model(1.0)).version) == "base@1"
        for name in ("replica-0", "replica-2"):
            served = replicas.ask(name)
            assert (served["base"], served["firsts"], served["is_whole"]) == (1, [1.0], True)
        os.kill(replicas.processes["replica-1"].pid, signal.SIGCONT)
        stale = replicas.ask("replica-1")
        assert (stale["base"], stale["firsts"]) == (0, [0.0])
        # It takes part again, or, heard too late for this push, catches up with it.
        assert str(publisher.push_base(model(2.0)).version) == "base@2"
        until(lambda: replicas.ask("replica-1")["firsts"] == [2.0], every_seconds=0.1)


@pytest.fixture
def unlike(tmp_path):
    """Replicas of which the last two can take no delta."""
    running = Replicas(tmp_path, without_copies=(1, 2))
    yield running
    running.close()


@pytest.mark.parametrize("backend", ["gloo", "one-sided"])
@pytest.mark.parametrize("victim", ["replica-0", "replica-1"])
@pytest.mark.parametrize("is_behind", [False, True])
def test_a_mixed_push_goes_on_after_a_kill(unlike, victim, backend, *, is_behind):
    """The only one that takes the delta, or another; while that is sent, or all elements."""
    struck, survivors = [], sorted(set(unlike.processes) - {victim})

    def strike(version, done, total):
        at = NUM_TENSORS if is_behind else 1
        if version == "base@2" and done >= at and not struck:
            struck.append((done, total))
            os.kill(unlike.processes[victim].pid, signal.SIGKILL)

    with Publisher(
        unlike.target, trainer_id="trainer-a", bucket_bytes=BUCKET_BYTES, progress=strike,
        timeout_seconds=60, delta="always", backend=backend,
    ) as publisher:  # fmt: skip
        publisher.push_base(model(1.0, STRIDE))
        version, report = publisher.push_base(model(2.0, STRIDE))
        assert str(version) == "base@2"
        assert struck
        assert report.delta.is_delta, report.delta
        assert report.num_replicas == 2
        assert report.delta.num_whole_replicas == len(set(survivors) - {"replica-0"})
        for name in survivors:
            served = unlike.ask(name)
            assert (served["base"], served["firsts"]) == (2, [2.0])
        publisher.push_base(model(3.0, STRIDE))
        for name in survivors:
            assert unlike.ask(name)["firsts"] == [3.0]
