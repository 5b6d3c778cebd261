"""A push from call to served: real coordinator, real gRPC, real gloo, engine double."""

import asyncio
import contextlib
import gc
import logging
import os
import threading
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file

from rollout_side.receive import incoming_buckets as transfers
from rollout_side.receive.incoming_buckets import ReceiveRing
from tests.doubles.engine import EngineDouble
from tests.doubles.pool import running_pool
from tests.integration.models import Model, lora, peft_of, same, until, weights
from tests.waits import stays
from trainer_side import Publisher
from trainer_side.packing import packer
from trainer_side.pool.client import PoolClient
from weft_rl import progress
from weft_rl.checkpoints.digest_cache import DigestCache
from weft_rl.checkpoints.reader import read_checkpoint
from weft_rl.contract.checkpoint import Checkpoint
from weft_rl.contract.errors import (
    BaseMismatchError,
    LeaseFencedError,
    NotReadyError,
    PolicyOwnedError,
)
from weft_rl.contract.names import AdapterVersions, PolicyVersion
from weft_rl.rpc.channel import open_channel
from weft_rl.rpc.pool_listing import get_pool
from weft_rl.transport import member
from weft_rl.transport.stream.lane import Lane
from weft_rl.v1.inspect_pb2_grpc import InspectServiceStub


def test_adapters_and_bases_arrive_bitwise_on_every_replica(pool, engines, publisher):
    model = peft_of(Model())
    first = lora(model)
    assert str(publisher.push_adapter(model, "math").version) == "math@1"
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.add_(1)
    assert str(publisher.push_adapter(model, "math").version) == "math@2"
    base = Model(seed=5)
    version, report = publisher.push_base(base)
    assert str(version) == "base@1"
    for engine in engines:
        assert same(engine.adapter("math@1"), first)
        assert same(engine.adapter("math@2"), lora(model))
        assert same(engine.base, weights(base))
    for agent in pool.agents.values():
        assert agent.serving.vector.base == 1
        assert agent.serving.vector.adapters == {"math": AdapterVersions((1, 2), 2)}
    assert report.num_replicas == 2
    assert report.total_bytes > 0
    assert not dist.is_initialized()


@pytest.mark.parametrize(("number", "ahead"), [(1, 1), (5, 3)])
def test_receives_are_posted_as_the_sender_announces(pool, engines, monkeypatch, number, ahead):
    """And no more than a receiver has a use for."""
    posted = []

    class Watched(ReceiveRing):
        def __init__(self, *args, **options):
            super().__init__(*args, **options)
            posted.append(self.ahead)

    monkeypatch.setattr(transfers, "ReceiveRing", Watched)
    for module in (packer, member):
        monkeypatch.setattr(module, "window", lambda device, backend: number)
    with Publisher(pool.target, trainer_id="trainer-a", bucket_bytes=2048) as publisher:
        publisher.push_base(base := Model(seed=3))
    assert posted == [ahead, ahead]
    assert all(same(engine.base, weights(base)) for engine in engines)


def test_many_buckets_are_released_in_turn_and_reported(pool, engines, tmp_path):
    seen = []
    with Publisher(
        pool.target,
        trainer_id="trainer-a",
        bucket_bytes=2048,
        progress=lambda version, done, total: seen.append((version, done, total)),
    ) as publisher:
        base = Model(seed=3)
        publisher.push_base(base)
        peak = sum(
            b.numel() for b in publisher._pushing._client._sender._packers._packers[0].buffers
        )
        largest = max(p.numel() * 4 for p in base.parameters())
    assert same(engines[0].base, weights(base))
    assert same(engines[1].base, weights(base))
    total = seen[-1][2]
    assert total > 5
    assert seen[-1] == ("base@1", total, total)
    assert [done for _, done, _ in seen] == sorted(done for _, done, _ in seen)
    assert peak <= 2 * (max(2048, largest) + 512)


def test_group_is_kept_across_pushes_and_rebuilt_when_membership_changes(pool, engines, publisher):
    publisher.push_base(Model(1))
    epoch = publisher._pushing._client._sender.ticket.epoch
    publisher.push_base(Model(2))
    assert publisher._pushing._client._sender.ticket.epoch == epoch
    late = EngineDouble(weights(Model()))
    pool.add_replica("replica-9", late)
    publisher.push_base(Model(3))
    assert publisher._pushing._client._sender.ticket.epoch > epoch
    assert same(late.base, weights(Model(3)))
    pool.remove_replica("replica-0")
    publisher.push_base(Model(4))
    assert same(late.base, weights(Model(4)))
    assert same(engines[1].base, weights(Model(4)))
    assert same(engines[0].base, weights(Model(3)))


def backend_threads(backend):
    """In this process: the trainer's and both replicas'."""
    if backend == "one-sided":
        return sum(thread.name == "weft-one-sided" for thread in threading.enumerate())
    names = []
    for task in os.listdir("/proc/self/task"):
        with contextlib.suppress(OSError):  # it ended meanwhile
            names.append(Path(f"/proc/self/task/{task}/comm").read_text().strip())
    return sum("gloo" in name for name in names)


@pytest.mark.parametrize("backend", ["one-sided", "gloo"])
def test_a_publisher_that_leaves_takes_its_group_with_it(pool, engines, backend):
    gc.collect()
    before = backend_threads(backend)
    gc.disable()  # groups must not wait for the collector: it may come late
    try:
        with Publisher(
            pool.target, trainer_id="trainer-a", timeout_seconds=20, backend=backend
        ) as publisher:
            report = publisher.push_base(Model(seed=1)).report
            assert report.backend == backend
            assert report.backend_reason == "chosen by the trainer"
            assert backend_threads(backend) > before
        until(lambda: backend_threads(backend) <= before)
    finally:
        gc.enable()


def test_a_pool_on_one_host_is_read_from_by_its_replicas(pool, engines, publisher):
    report = publisher.push_base(Model(seed=1)).report
    assert (report.backend, report.backend_reason) == (
        "one-sided",
        "every replica reads this process's memory",
    )
    assert all(same(engine.base, weights(Model(1))) for engine in engines)


def test_who_cannot_be_read_is_sent_to_by_streams(pool, engines, publisher):
    """In the same push, and with the same bytes."""
    engines[1].trials.close()  # as a replica on another host, whose socket is not there
    report = publisher.push_base(Model(seed=1)).report
    assert report.backend == "stream"
    assert "not one-sided: the peer has no socket in" in report.backend_reason
    assert all(same(engine.base, weights(Model(1))) for engine in engines)
    with (
        Publisher(pool.target, trainer_id="b", backend="one-sided", takeover=True) as forced,
        pytest.raises(NotReadyError, match="the peer has no socket") as caught,
    ):
        forced.push_base(Model(seed=2))
    assert caught.value.reason == "BACKEND_MISMATCH"


def test_who_garbles_what_it_passes_on_costs_nobody_the_push(pool, engines, monkeypatch, caplog):
    """The next replica finds it out, asks the trainer again, and says who it was."""
    send, garbled = Lane.send_piece, []

    def send_badly(lane, piece, content):
        if lane.peer.startswith("rank 2") and not garbled:
            garbled.append(piece.sequence)
            content = memoryview(bytes(len(content)))
        send(lane, piece, content)

    monkeypatch.setattr(Lane, "send_piece", send_badly)
    with Publisher(pool.target, trainer_id="trainer-a", backend="stream") as publisher:
        report = publisher.push_base(Model(seed=1)).report
    assert garbled
    assert (report.num_replicas, report.remarks) == (2, ())
    assert "came garbled from rank 1 at " in caplog.text
    assert all(same(engine.base, weights(Model(1))) for engine in engines)


def test_a_replica_that_comes_between_trial_and_begin_is_not_left_out(
    pool, engines, publisher, monkeypatch
):
    tried = PoolClient.describe

    def describe(self, deadline, *rest):
        target = tried(self, deadline, *rest)
        self._offered.trial_names.pop()  # as if one had registered since
        return target

    monkeypatch.setattr(PoolClient, "describe", describe)
    report = publisher.push_base(Model(seed=1)).report
    assert report.backend == "stream"
    assert report.num_replicas == 2
    assert "this push has found" in report.backend_reason


def test_versions_go_on_counting_after_the_coordinator_restarts(pool, engines, publisher):
    assert str(publisher.push_base(Model(1)).version) == "base@1"
    pool.stop_coordinator()
    pool.start_coordinator()
    assert str(publisher.push_base(Model(2)).version) == "base@2"
    assert same(engines[0].base, weights(Model(2)))


def test_out_of_contact_bare_names_are_refused_until_the_coordinator_is_back(
    pool, engines, publisher
):
    publisher.push_base(Model(1))
    until(lambda: pool.agents["replica-0"].is_ready)
    pool.stop_coordinator()
    until(lambda: engines[0].refused_aliases.is_away)
    assert not pool.agents["replica-0"].is_ready
    pool.start_coordinator()
    until(lambda: not engines[0].refused_aliases.is_away)
    until(lambda: pool.agents["replica-0"].is_ready)


def test_a_push_into_an_empty_pool_waits_for_a_replica(pool, publisher):
    result = {}
    pusher = threading.Thread(target=lambda: result.update(v=publisher.push_base(Model(1)).version))
    pusher.start()
    stays(pusher.is_alive, 0.3)
    engine = EngineDouble(weights(Model()))
    pool.add_replica("replica-0", engine)
    pusher.join(20)
    assert str(result["v"]) == "base@1"
    assert same(engine.base, weights(Model(1)))


def test_who_waits_for_a_push_reads_what_it_waits_for(pool, publisher, capfd, monkeypatch):
    monkeypatch.setattr(progress.LineView, "first_seconds", 0.02)
    monkeypatch.setattr(progress.LineView, "every_seconds", 0.02)
    told = ""

    def reads(text):
        nonlocal told
        told += capfd.readouterr().err
        return text in told

    pusher = threading.Thread(target=publisher.push_base, args=(Model(1),))
    pusher.start()
    waits = "push of base: waiting for a replica that has described its base model ("
    until(lambda: reads(waits))
    engine, switch, go_on = EngineDouble(weights(Model())), EngineDouble.apply_base, asyncio.Event()

    async def slow(*args):
        await go_on.wait()
        return await switch(engine, *args)

    monkeypatch.setattr(engine, "apply_base", slow)
    pool.add_replica("replica-0", engine)
    until(lambda: reads("push of base@1: waiting for the replicas to switch ("))
    pool.call(go_on.set)
    pusher.join(20)
    assert same(engine.base, weights(Model(1)))
    assert "\x1b" not in told


def test_the_second_trainer_is_told_who_owns_the_policy(pool, engines, publisher):
    publisher.push_base(Model(1))
    with Publisher(pool.target, trainer_id="trainer-b") as other:
        with pytest.raises(PolicyOwnedError, match="trainer-a") as caught:
            other.push_base(Model(2))
        assert caught.value.metadata["holder"] == "trainer-a"
        assert float(caught.value.metadata["expires_in_seconds"]) > 0
        publisher.close()
        assert str(other.push_base(Model(2)).version) == "base@2"
    assert same(engines[0].base, weights(Model(2)))


def test_a_second_live_publisher_of_one_trainer_is_told_at_once_and_may_take_over(
    pool, engines, publisher
):
    publisher.push_base(Model(1))
    here = f"process {os.getpid()} on "
    with Publisher(pool.target, trainer_id="trainer-a", timeout_seconds=60) as second:
        with pytest.raises(PolicyOwnedError, match="another Publisher of this very process") as e:
            second.push_base(Model(2))
        assert here in e.value.message
        assert "takeover=True" in e.value.message
    with Publisher(pool.target, trainer_id="trainer-a", takeover=True) as third:
        assert str(third.push_base(Model(2)).version) == "base@2"
        for _ in range(2):  # and it does not take it back
            with pytest.raises(LeaseFencedError, match=here):
                publisher.push_base(Model(3))
    assert same(engines[0].base, weights(Model(2)))
    assert str(publisher.push_base(Model(3)).version) == "base@3"  # the other one has ended


def test_an_adapter_that_the_trainer_does_not_compute_with_is_remarked_on(pool, engines, publisher):
    model = peft_of(Model())
    report = publisher.push_adapter(model, "math", base="base@0").report
    assert report.remarks == ()
    model.add_adapter("other", model.peft_config["default"])
    model.set_adapter("other")
    report = publisher.push_adapter(model, "math", base="base@0").report
    (remark,) = report.remarks
    assert "'default' was pushed, but the trainer computes with 'other'" in remark
    report = publisher.push_adapter(model, "math", adapter_name="other", base="base@0").report
    assert report.remarks == ()
    with model.disable_adapter():
        report = publisher.push_adapter(model, "math", adapter_name="other", base="base@0").report
        (remark,) = report.remarks
        assert "adapters are disabled in the trainer" in remark
        report = publisher.push_merged(model, adapter_name="other").report
        assert report.remarks == (remark,)


def _checkpoint(model: Model, path: Path) -> Checkpoint:
    """Return what a replica tells that was started with this model, which says where it lies."""
    path.mkdir()
    save_file(dict(model.state_dict()), path / "model.safetensors")
    model.name_or_path = str(path)
    return read_checkpoint([path / "model.safetensors"], DigestCache(None), threading.Event())


def test_the_very_bytes_of_base_0_pushed_again_are_no_other_base(
    pool, publisher, tmp_path, monkeypatch
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    base = Model(1)
    engine = EngineDouble(weights(Model(1)), base_copies=1)
    engine.checkpoint = _checkpoint(base, tmp_path / "checkpoint")
    pool.add_replica("told", engine)
    model = peft_of(base)

    def is_over_another_base() -> bool:
        with open_channel(pool.target) as channel:
            listed = get_pool(InspectServiceStub(channel), 5.0).policies
        return next(p for p in listed if p.policy == "math").over_another_base

    with Publisher(pool.target, trainer_id="other", timeout_seconds=30) as other:
        publisher.push_adapter(model, "math", base="same")  # waits for the digest
        other.push_base(Model(2))
        assert is_over_another_base()
        assert str(other.push_base(Model(1)).version) == "base@2"
        assert not is_over_another_base()
        report = publisher.push_adapter(model, "math", base="same").report
        assert report.remarks == ()
        other.push_base(Model(3))
        assert is_over_another_base()
        report = publisher.push_adapter(model, "math").report
        assert report.remarks == ("trained on base@0, served over base@3",)
        # In place of a base that was pushed, too: base@4 is base@1 again.
        publisher.push_adapter(model, "math", base="base@1")
        assert is_over_another_base()
        other.push_base(Model(2))
        assert not is_over_another_base()


def test_which_base_an_adapter_was_trained_on_is_said_and_refused_where_that_is_asked(
    pool, publisher, tmp_path, monkeypatch
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    base = Model(1)
    engine = EngineDouble(weights(Model(1)))
    engine.checkpoint = _checkpoint(base, tmp_path / "checkpoint")
    pool.add_replica("told", engine)  # it binds what base@0 is
    model = peft_of(base)
    with Publisher(pool.target, trainer_id="other", timeout_seconds=30) as other:
        report = publisher.push_adapter(model, "math", base="same").report  # waits for the digest
        assert report.remarks == ()
        other.push_base(Model(2))
        report = publisher.push_adapter(model, "math").report
        (remark,) = report.remarks
        assert remark == "trained on base@0, served over base@1"
        report = publisher.push_adapter(model, "math", base="any").report
        assert report.remarks == ()
        with pytest.raises(BaseMismatchError, match="trained on base@0, the pool serves base@1"):
            publisher.push_adapter(model, "math", base="same")
        with pytest.raises(BaseMismatchError, match="say base="):
            publisher.push_adapter(peft_of(Model()), "math", base="same")
        report = publisher.push_adapter(peft_of(Model()), "math", base="only base@1").report
        assert report.remarks == ()
        report = publisher.push_adapter(peft_of(Model()), "math").report
        (remark,) = report.remarks
        assert remark.startswith("trained on base@?, served over base@1: its base does not say")
    merged = peft_of(Model(4))
    with Publisher(pool.target, trainer_id="other", timeout_seconds=30) as other:
        other.push_merged(merged)  # base@2: of which no module is a version
        with pytest.raises(BaseMismatchError, match="not known which base"):
            other.push_adapter(merged, "more", base="same")


def test_versions_beyond_the_retention_are_dropped_unless_in_use(tmp_path):
    with running_pool(tmp_path / "weft.db", retain_versions=2) as pool:
        engine = EngineDouble(weights(Model()))
        agent = pool.add_replica("replica-0", engine)
        engine.in_use.add(PolicyVersion("math", 1))
        model = peft_of(Model())
        with Publisher(pool.target, trainer_id="trainer-a") as publisher:
            for _ in range(4):
                publisher.push_adapter(model, "math")
        until(lambda: agent.serving.vector.adapters["math"] == AdapterVersions((3, 4), 4))
        assert engine.store.adapter(PolicyVersion("math", 1)) is not None
        assert engine.store.adapter(PolicyVersion("math", 2)) is None
        engine.in_use.clear()
        until(lambda: engine.store.adapter(PolicyVersion("math", 1)) is None)


def test_threads_end_with_their_owners(pool, engines):
    before = {t.name for t in threading.enumerate()}
    with Publisher(pool.target, trainer_id="trainer-a") as publisher:
        publisher.push_base(Model(1))
    for replica_id in list(pool.agents):
        pool.remove_replica(replica_id)
    ours = [t for t in threading.enumerate() if t.name.startswith("weft-") and t.name not in before]
    until(lambda: not any(t.is_alive() for t in ours))


def test_a_normal_end_logs_nothing_of_fences(pool, engines, caplog):
    """Groups end when their trainer closes, when another takes their place, and after a clone."""
    caplog.set_level(logging.INFO)
    model = peft_of(Model())
    with Publisher(pool.target, trainer_id="trainer-a", timeout_seconds=20) as publisher:
        publisher.push_adapter(model, "math", base="base@0")
        late = EngineDouble(weights(Model()), logprobs_mode="processed_logprobs")
        agent = pool.add_replica("late", late)
        until(lambda: agent.is_ready)
        publisher.push_adapter(model, "math", base="base@0", require="all")
    # One of the clone, three of the last group; the first one's replicas may hear of the second
    # before they hear of its end.
    until(lambda: sum("has ended" in record.getMessage() for record in caplog.records) >= 4)
    pool.remove_replica("late")
    told = [record.getMessage() for record in caplog.records]
    assert not [text for text in told if "FENCED" in text or "dropped" in text], told
    assert not [record for record in caplog.records if record.levelno > logging.INFO], told
