"""Several ranks load one transfer, over real sockets: order, memory that is used again once all
are done, and every way to end. Each rank but the receiving one maps the buckets."""

from __future__ import annotations

import contextlib
import threading
import time

import pytest
import torch

from rollout_side.memory import handoff as rank_handoff
from rollout_side.memory.handoff import HandoffQueue, InPlaceLoad, RankHandoff, connect
from rollout_side.memory.messages import LoadRequest
from tests.unit.rollout.memory.ranks.members import (
    BASE,
    COUNT,
    MANIFEST,
    WAIT_SECONDS,
    Loader,
    Replica,
    nothing,
)
from tests.waits import in_thread, stays, until
from weft_rl.contract.errors import (
    LoadFailedError,
    NotReadyError,
    PeerUnavailableError,
    TransferAbortedError,
    TransferTimeoutError,
    WeftError,
)
from weft_rl.contract.manifest import plan_buckets
from weft_rl.contract.tensors import DataType, TensorMeta
from weft_rl.ipc import connection as ipc


def test_every_rank_loads_every_bucket_and_one_digest_is_true_for_all() -> None:
    replica = Replica(num_ranks=3)
    loaders = [Loader() for _ in range(3)]
    loads = [InPlaceLoad(replica.queue, loaders[0])]
    loads += [InPlaceLoad(replica.rank(rank), loaders[rank]) for rank in (1, 2)]
    for index in range(COUNT):
        replica.land(index)
    replica.queue.wait_complete(nothing)
    assert [loader.seen for loader in loaders] == [list(range(COUNT))] * 3
    digest = replica.queue.content_digest
    assert all(load.confirm(digest) >= 0 for load in loads)
    assert [load.end() for load in loads] == [True] * 3
    replica.server.close()


def test_memory_is_used_again_once_the_last_rank_is_done(replica: Replica) -> None:
    slow = Loader(stop_at=0)
    InPlaceLoad(replica.queue, Loader())
    load = InPlaceLoad(replica.rank(), slow)
    for index in range(2):
        replica.land(index)
    until(lambda: load.handoff.is_begun)
    assert not replica.queue.is_loaded(0)
    assert not replica.buffers.make_room(2, wait=False)
    slow.gate.set()
    for index in range(2, COUNT):
        replica.land(index)
    replica.queue.wait_complete(nothing)
    assert slow.seen == list(range(COUNT))


def test_no_rank_is_given_a_bucket_before_the_receiving_one(replica: Replica) -> None:
    load = InPlaceLoad(replica.rank(), loader := Loader())
    replica.land(0)
    stays(lambda: not loader.seen, 0.05)
    assert not load.end()  # nothing has changed
    assert load.is_void
    InPlaceLoad(replica.queue, Loader())  # learns of it as the rank's turn comes
    until(lambda: replica.queue.error is not None)


def test_another_group_receives_in_other_buffers(replica: Replica) -> None:
    loaders = [Loader(), Loader()]
    InPlaceLoad(replica.queue, loaders[0])
    InPlaceLoad(replica.rank(), loaders[1])
    replica.land(0)
    replica.land(1)
    replica.queue.resume(time.monotonic() + WAIT_SECONDS)
    replica.buffers = replica.group()
    for index in range(1, COUNT):  # one comes again
        replica.land(index)
    replica.queue.wait_complete(nothing)
    assert [loader.seen for loader in loaders] == [list(range(COUNT))] * 2


@pytest.mark.parametrize("fails", [0, 1])
@pytest.mark.parametrize("at", [0, 1])
def test_a_rank_that_fails_ends_the_load_of_all(replica: Replica, fails: int, at: int) -> None:
    loaders = [Loader(), Loader()]
    loaders[fails] = Loader(at, OSError("the disk burns"))
    loads = [InPlaceLoad(replica.queue, loaders[0]), InPlaceLoad(replica.rank(), loaders[1])]
    replica.land(0)
    if at == 1:
        replica.land(1)
    with pytest.raises(LoadFailedError, match="the disk burns"):
        replica.queue.wait_complete(nothing)
    until(lambda: not any(load.is_running for load in loads))
    assert any(load.end() for load in loads)
    for load in loads:
        with pytest.raises(NotReadyError, match="the disk burns"):
            load.check()
    assert not any(load.is_complete for load in loads)


def test_one_that_is_discarded_ends_on_all_ranks(replica: Replica) -> None:
    loads = [InPlaceLoad(replica.queue, Loader()), InPlaceLoad(replica.rank(), Loader())]
    replica.land(0)
    until(lambda: all(load.handoff.is_begun for load in loads))
    replica.queue.fail(TransferAbortedError("it was discarded"))
    until(lambda: not any(load.is_running for load in loads))
    assert [load.end() for load in loads] == [True, True]
    with pytest.raises(NotReadyError, match="discarded"):
        loads[1].check()


def test_a_rank_that_is_ended_by_its_own_engine_ends_the_others(replica: Replica) -> None:
    loads = [InPlaceLoad(replica.queue, Loader()), InPlaceLoad(replica.rank(), Loader())]
    replica.land(0)
    until(lambda: all(load.handoff.is_begun for load in loads))
    assert loads[1].end()  # it waits for a bucket
    with contextlib.suppress(TransferAbortedError):  # by now, or at the next bucket
        replica.land(1)
    with pytest.raises(TransferAbortedError, match="was ended"):
        replica.queue.wait_complete(nothing)
    assert loads[0].end()


def test_a_rank_that_goes_ends_the_others(replica: Replica) -> None:
    """As a process that is killed: its socket closes, and it says nothing."""
    InPlaceLoad(replica.queue, Loader())
    gone = replica.rank()
    buckets = gone.buckets()
    waiting = in_thread(next, buckets)
    replica.land(0)
    assert waiting.result(WAIT_SECONDS)[0] == 0
    assert gone._connection is not None
    gone._connection.shut()
    with pytest.raises(LoadFailedError, match="a rank of the replica has ended"):
        replica.queue.wait_complete(nothing)


def test_a_rank_that_reads_nothing_has_not_ended_its_load(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is there, and may be stopped: a push that is tried again may find it well."""
    monkeypatch.setattr(ipc, "_FRAME_SECONDS", 0.1)
    names = [f"{'layer' * 40}.{i}" for i in range(4_000)]  # more than a socket holds
    manifest = plan_buckets([TensorMeta(name, DataType.FLOAT32, (1,)) for name in names], 2048)
    replica = Replica()
    replica.queue = HandoffQueue("t", BASE, manifest, time.monotonic() + WAIT_SECONDS, 2)
    connection = connect(replica.secret, 5.0)
    connection.say(LoadRequest("t", 1))
    until(lambda: replica.queue.error is not None)
    error = replica.queue.error
    assert isinstance(error, PeerUnavailableError)
    assert "rank 1 of the replica" in error.message
    assert "read nothing, or too slowly, until the deadline" in error.message
    connection.close()
    replica.server.close()


def test_the_receiving_ranks_deadline_is_that_of_all() -> None:
    replica = Replica(seconds=0.3)
    loads = [InPlaceLoad(replica.queue, Loader()), InPlaceLoad(replica.rank(), Loader())]
    replica.land(0)
    until(lambda: not any(load.is_running for load in loads))
    assert isinstance(replica.queue.error, TransferTimeoutError)
    assert isinstance(loads[1].handoff.error, WeftError)
    assert "deadline" in loads[1].handoff.error.message
    replica.server.close()


def test_what_is_done_here_waits_for_what_is_not_done_there(replica: Replica) -> None:
    slow = Loader(stop_at=COUNT - 1)
    mine = InPlaceLoad(replica.queue, Loader())
    other = InPlaceLoad(replica.rank(), slow)
    for index in range(COUNT):
        replica.land(index)
    until(lambda: not mine.is_running)
    assert not mine.is_complete
    slow.gate.set()
    until(lambda: mine.is_complete)
    assert other.is_complete


def test_what_is_not_loaded_here_is_refused(replica: Replica) -> None:
    with pytest.raises(NotReadyError, match="no longer, loaded in place"):
        _ = replica.rank(transfer_id="another").manifest
    for rank in (0, 2):
        with pytest.raises(NotReadyError, match=f"rank {rank} has no load"):
            next(replica.rank(rank).buckets())
        replica.queue = HandoffQueue("t", BASE, MANIFEST, time.monotonic() + WAIT_SECONDS, 2)


def test_a_rank_that_was_ended_before_it_began_asks_for_nothing(replica: Replica) -> None:
    ended = replica.rank()
    ended.fail(TransferAbortedError("given up"))
    with pytest.raises(TransferAbortedError, match="given up"):
        _ = ended.manifest
    with pytest.raises(TransferAbortedError):
        ended.complete()
    assert replica.queue.error is None


def test_nobody_listens() -> None:
    with pytest.raises(PeerUnavailableError, match="cannot be reached"):
        _ = RankHandoff("none", 1, "t", BASE).manifest


def test_a_rank_that_works_is_heard(replica: Replica, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_handoff, "PROGRESS_SECONDS", 0.0)
    said: list[str] = []
    replica.queue.report_to(lambda bucket: said.append(threading.current_thread().name))
    InPlaceLoad(replica.queue, Loader())
    InPlaceLoad(replica.rank(), Loader())
    for index in range(COUNT):
        replica.land(index)
    replica.queue.wait_complete(nothing)
    assert said.count("weft-rank") >= 2 * COUNT  # as it was given one, and as it loaded it


def test_buckets_are_mapped_not_copied(replica: Replica) -> None:
    taken: list[torch.Tensor] = []
    own = replica.queue.buckets()
    other = replica.rank().buckets()
    replica.land(0)
    taken.append(next(own)[1])
    taken.append(next(other)[1])
    taken[0][0] = 99
    assert int(taken[1][0]) == 99


def test_a_rank_says_itself_that_its_engine_finishes_and_nobody_says_it_for_a_silent_one(
    replica: Replica, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its process may be stopped there: then it says nothing, and the push goes on without."""
    monkeypatch.setattr(rank_handoff, "PROGRESS_SECONDS", 0.01)
    own = InPlaceLoad(replica.queue, Loader())
    handoff = replica.rank()
    buckets = handoff.buckets()
    for index in range(COUNT):
        given = in_thread(next, buckets)
        replica.land(index)
        given.result(WAIT_SECONDS)
    waiting = in_thread(replica.queue.wait_complete, nothing)
    own.thread.join(WAIT_SECONDS)  # until then it is reported for
    said = threading.Event()
    replica.queue.report_to(lambda bucket: said.set())
    assert not said.wait(0.2), "it has the last bucket, and is silent"
    assert next(buckets, None) is None
    assert said.wait(WAIT_SECONDS), "its engine finishes its layers"
    handoff.complete()
    waiting.result(WAIT_SECONDS)
