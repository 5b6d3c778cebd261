"""A push from call to served: real coordinator, real gRPC, real gloo, engine double."""

import collections
import contextlib
import gc
import logging
import os
import threading
import time
import traceback
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import nn

import trainer_side.packer
import trainer_side.pool_client
import weft.transport.member
from tests.doubles.pool import EngineDouble, running_pool
from tests.integration.models import HIDDEN, Model, lora, peft_of, same, until, weights
from trainer_side import Publisher
from weft.contract.errors import (
    BaseMismatchError,
    CapacityError,
    DigestMismatchError,
    InvalidAdapterError,
    InvalidManifestError,
    InvalidNameError,
    LeaseFencedError,
    LoadFailedError,
    NotFiniteError,
    PeerUnavailableError,
    PolicyOwnedError,
    WeftError,
)
from weft.contract.names import PolicyVersion
from weft.contract.versions import AdapterVersions
from weft.transport.checkpoint import read_checkpoint
from weft.transport.digest_cache import DigestCache


@pytest.fixture
def pool(tmp_path):
    with running_pool(tmp_path / "weft.db") as running:
        yield running


@pytest.fixture
def engines(pool):
    doubles = [EngineDouble(weights(Model())) for _ in range(2)]
    for i, engine in enumerate(doubles):
        pool.add_replica(f"replica-{i}", engine)
    return doubles


@pytest.fixture
def publisher(pool):
    with Publisher(pool.target, trainer_id="trainer-a", timeout_seconds=20) as running:
        yield running


def test_adapters_and_bases_arrive_bitwise_on_every_replica(pool, engines, publisher):
    model = peft_of(Model())
    first = lora(model)
    assert str(publisher.push_adapter(model, "math")) == "math@1"
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.add_(1)
    assert str(publisher.push_adapter(model, "math")) == "math@2"
    base = Model(seed=5)
    assert str(publisher.push_base(base)) == "base@1"
    for engine in engines:
        assert same(engine.adapter("math@1"), first)
        assert same(engine.adapter("math@2"), lora(model))
        assert same(engine.base, weights(base))
    for agent in pool.agents.values():
        assert agent.serving.vector.base == 1
        assert agent.serving.vector.adapters == {"math": AdapterVersions((1, 2), 2)}
    assert publisher.last_report.num_replicas == 2
    assert publisher.last_report.total_bytes > 0
    assert not dist.is_initialized()


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
        peak = sum(b.numel() for b in publisher._delivery._sender._packer.buffers)
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
    epoch = publisher._delivery._sender.ticket.epoch
    publisher.push_base(Model(2))
    assert publisher._delivery._sender.ticket.epoch == epoch
    late = EngineDouble(weights(Model()))
    pool.add_replica("replica-9", late)
    publisher.push_base(Model(3))
    assert publisher._delivery._sender.ticket.epoch > epoch
    assert same(late.base, weights(Model(3)))
    pool.remove_replica("replica-0")
    publisher.push_base(Model(4))
    assert same(late.base, weights(Model(4)))
    assert same(engines[1].base, weights(Model(4)))
    assert same(engines[0].base, weights(Model(3)))


def backend_threads():
    """Of gloo, in this process: the trainer's and both replicas'."""
    names = []
    for task in os.listdir("/proc/self/task"):
        with contextlib.suppress(OSError):  # it ended meanwhile
            names.append(Path(f"/proc/self/task/{task}/comm").read_text().strip())
    return sum("gloo" in name for name in names)


def test_a_publisher_that_leaves_takes_its_group_with_it(pool, engines):
    gc.collect()
    before = backend_threads()
    gc.disable()  # groups must not wait for the collector: it may come late
    try:
        with Publisher(pool.target, trainer_id="trainer-a", timeout_seconds=20) as publisher:
            publisher.push_base(Model(seed=1))
            assert backend_threads() > before
        until(lambda: backend_threads() <= before)
    finally:
        gc.enable()


def test_versions_go_on_counting_after_the_coordinator_restarts(pool, engines, publisher):
    assert str(publisher.push_base(Model(1))) == "base@1"
    pool.stop_coordinator()
    pool.start_coordinator()
    assert str(publisher.push_base(Model(2))) == "base@2"
    assert same(engines[0].base, weights(Model(2)))


def test_out_of_contact_bare_names_are_refused_until_the_coordinator_is_back(
    pool, engines, publisher
):
    publisher.push_base(Model(1))
    until(lambda: pool.agents["replica-0"].is_ready)
    pool.stop_coordinator()
    until(lambda: engines[0].aliases_hidden)
    assert not pool.agents["replica-0"].is_ready
    pool.start_coordinator()
    until(lambda: not engines[0].aliases_hidden)
    until(lambda: pool.agents["replica-0"].is_ready)


def test_a_push_into_an_empty_pool_waits_for_a_replica(pool, publisher):
    result = {}
    pusher = threading.Thread(target=lambda: result.update(v=publisher.push_base(Model(1))))
    pusher.start()
    time.sleep(0.3)
    assert pusher.is_alive()
    engine = EngineDouble(weights(Model()))
    pool.add_replica("replica-0", engine)
    pusher.join(20)
    assert str(result["v"]) == "base@1"
    assert same(engine.base, weights(Model(1)))


def test_an_empty_pool_is_a_typed_error_at_the_deadline(publisher):
    began = time.monotonic()
    with pytest.raises(WeftError) as caught:
        publisher.push_base(Model(1), timeout_seconds=0.5)
    assert caught.value.reason in ("POOL_EMPTY", "DEADLINE")
    assert time.monotonic() - began < 5


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

    real = trainer_side.pool_client.Sender

    def slow(ticket, device):
        if late == "before it forms":
            lose_one()
            return real(ticket, device)
        sender = object.__new__(real)
        attend = weft.transport.member.Attendance

        def attendance(*args, **kwargs):
            lose_one()
            return attend(*args, **kwargs)

        with monkeypatch.context() as patch:
            patch.setattr(weft.transport.member, "Attendance", attendance)
            sender.__init__(ticket, device)
        return sender

    monkeypatch.setattr(trainer_side.pool_client, "Sender", slow)
    assert str(publisher.push_base(Model(1), require=1)) == "base@1"
    assert lost
    assert publisher.last_report.num_replicas == 1
    assert same(engines[0].base, weights(Model(1)))


def test_minimum_number_of_replicas(pool, engines, publisher):
    with pytest.raises(PeerUnavailableError) as caught:
        publisher.push_base(Model(1), require=3, timeout_seconds=0.7)
    assert caught.value.reason == "POOL_EMPTY"
    assert str(publisher.push_base(Model(1), require=2)) == "base@1"


def test_the_second_trainer_is_told_who_owns_the_policy(pool, engines, publisher):
    publisher.push_base(Model(1))
    with Publisher(pool.target, trainer_id="trainer-b") as other:
        with pytest.raises(PolicyOwnedError, match="trainer-a") as caught:
            other.push_base(Model(2))
        assert caught.value.metadata["holder"] == "trainer-a"
        assert float(caught.value.metadata["expires_in_seconds"]) > 0
        publisher.close()
        assert str(other.push_base(Model(2))) == "base@2"
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
        assert str(third.push_base(Model(2))) == "base@2"
        for _ in range(2):  # and it does not take it back
            with pytest.raises(LeaseFencedError, match=here):
                publisher.push_base(Model(3))
    assert same(engines[0].base, weights(Model(2)))
    assert str(publisher.push_base(Model(3))) == "base@3"  # the other one has ended


def test_an_adapter_that_the_trainer_does_not_compute_with_is_remarked_on(pool, engines, publisher):
    model = peft_of(Model())
    publisher.push_adapter(model, "math", base_version=0)
    assert publisher.last_report.remarks == ()
    model.add_adapter("other", model.peft_config["default"])
    model.set_adapter("other")
    publisher.push_adapter(model, "math", base_version=0)
    (remark,) = publisher.last_report.remarks
    assert "'default' was pushed, but the trainer computes with 'other'" in remark
    publisher.push_adapter(model, "math", adapter_name="other", base_version=0)
    assert publisher.last_report.remarks == ()
    with model.disable_adapter():
        publisher.push_adapter(model, "math", adapter_name="other", base_version=0)
        (remark,) = publisher.last_report.remarks
        assert "adapters are disabled in the trainer" in remark
        publisher.push_merged(model, adapter_name="other")
        assert publisher.last_report.remarks == (remark,)


def test_which_base_an_adapter_was_trained_on_is_said_and_refused_where_that_is_asked(
    pool, publisher, tmp_path, monkeypatch
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    base = Model(1)
    path = tmp_path / "checkpoint"
    path.mkdir()
    save_file(dict(base.state_dict()), path / "model.safetensors")
    base.name_or_path = str(path)
    known = read_checkpoint([path / "model.safetensors"], DigestCache(None), threading.Event())
    engine = EngineDouble(weights(Model(1)))
    engine.checkpoint = known
    pool.add_replica("told", engine)  # it binds what base@0 is
    model = peft_of(base)
    with Publisher(pool.target, trainer_id="other", timeout_seconds=30) as other:
        publisher.push_adapter(model, "math", on_base_change="refuse")  # waits for the digest
        assert publisher.last_report.remarks == ()
        other.push_base(Model(2))
        publisher.push_adapter(model, "math")
        (remark,) = publisher.last_report.remarks
        assert remark == "trained on base@0, served over base@1"
        publisher.push_adapter(model, "math", on_base_change="ignore")
        assert publisher.last_report.remarks == ()
        with pytest.raises(BaseMismatchError, match="trained on base@0, the pool serves base@1"):
            publisher.push_adapter(model, "math", on_base_change="refuse")
        with pytest.raises(BaseMismatchError, match="say base_version="):
            publisher.push_adapter(peft_of(Model()), "math", on_base_change="refuse")
        publisher.push_adapter(peft_of(Model()), "math", base_version=1, on_base_change="refuse")
        assert publisher.last_report.remarks == ()
        publisher.push_adapter(peft_of(Model()), "math")
        (remark,) = publisher.last_report.remarks
        assert remark.startswith("trained on base@?, served over base@1: its base does not say")
    merged = peft_of(Model(4))
    with Publisher(pool.target, trainer_id="other", timeout_seconds=30) as other:
        other.push_merged(merged)  # base@2: the same model, as this publisher pushed it
        other.push_adapter(merged, "more", on_base_change="refuse")
        assert other.last_report.remarks == ()


def _without(model):
    del model.layers[2]
    return model


def _reshaped(model):
    model.layers[0]["q_proj"] = nn.Linear(HIDDEN, 8)
    return model


def _extra(model):
    model.more = nn.Linear(2, 2)
    return model


def _integer(model):
    model.embed.weight = nn.Parameter(torch.zeros(50, HIDDEN, dtype=torch.int8), False)
    return model


def _nan(model):
    with torch.no_grad():
        model.layers[1]["v_proj"].bias[3] = float("nan")
    return model


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (_without, "'layers.2.q_proj.weight' is missing"),
        (_reshaped, r"has shape \(8,32\)"),
        (_extra, "'more.weight' is not a tensor of Model"),
        (_integer, "is int8"),
    ],
)
def test_a_base_that_does_not_fit_is_refused_and_nothing_changes(
    pool, engines, publisher, spoil, words
):
    publisher.push_base(Model(1))
    with pytest.raises(InvalidManifestError, match=words):
        publisher.push_base(spoil(Model(2)))
    assert same(engines[0].base, weights(Model(1)))
    assert engines[0].store.usage().staging_bytes == 0
    assert str(publisher.push_base(Model(3))) == "base@2"  # no version was burned


def test_a_base_that_holds_nan_is_given_up_and_nothing_changes(pool, engines, publisher):
    publisher.push_base(Model(1))
    with pytest.raises(NotFiniteError, match=r"'layers.1.v_proj.bias' holds NaN"):
        publisher.push_base(_nan(Model(2)), check_finite=True)
    assert same(engines[0].base, weights(Model(1)))
    publisher.push_base(Model(3), check_finite=True)
    assert same(engines[0].base, weights(Model(3)))
    assert engines[0].store.usage().staging_bytes == 0


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"use_dora": True}, "DoRA"),
        ({"lora_bias": True}, "lora_bias"),
        ({"bias": "all"}, "trained biases"),
        ({"modules_to_save": ["embed"]}, "modules_to_save"),
        ({"init_lora_weights": "olora"}, "changes the base weights"),
    ],
)
def test_adapters_that_vllm_cannot_serve_are_refused_at_begin(
    pool, engines, publisher, settings, words
):
    with pytest.raises(InvalidAdapterError, match=words):
        publisher.push_adapter(peft_of(Model(), **settings), "math")
    assert pool.agents["replica-0"].serving.vector.adapters == {}
    assert str(publisher.push_adapter(peft_of(Model()), "math")) == "math@1"


def test_adapter_for_another_base(pool, engines, publisher):
    with pytest.raises(BaseMismatchError, match="base"):
        publisher.push_adapter(peft_of(_extra(Model())), "math")
    assert pool.agents["replica-0"].serving.vector.adapters == {}


@pytest.mark.parametrize("name", ["a@b", "a/b", "..", "a b", "x" * 300, "", "base"])
def test_names_that_cannot_be_policies(pool, engines, publisher, name):
    with pytest.raises(InvalidNameError):
        publisher.push_adapter(peft_of(Model()), name)


def test_corrupted_bytes_are_data_loss_and_are_served_nowhere(
    pool, engines, publisher, monkeypatch
):
    publisher.push_base(Model(1))
    pack = trainer_side.packer.pack_trailer
    monkeypatch.setattr(
        trainer_side.packer, "pack_trailer", lambda digest, *rest: pack(digest ^ 1, *rest)
    )
    with pytest.raises(DigestMismatchError):
        publisher.push_base(Model(2))
    monkeypatch.undo()
    for engine in engines:
        assert same(engine.base, weights(Model(1)))
        until(lambda engine=engine: engine.store.usage().staging_bytes == 0)
    # The failed version is never reused.
    assert str(publisher.push_base(Model(3))) == "base@3"
    assert same(engines[1].base, weights(Model(3)))


def test_an_interrupted_push_says_where_it_was_called_and_no_more(pool, engines, publisher):
    """Ctrl-C was 40 lines of what a push is made of."""

    class Interrupted(Model):
        def named_parameters(self, *args, **kwargs):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt, match="a push of base was interrupted") as caught:
        publisher.push_base(Interrupted(1))
    assert len(traceback.format_exception(caught.value)) <= 5
    assert str(publisher.push_base(Model(2))) == "base@1"


def test_what_a_refused_push_and_a_good_one_log(pool, engines, publisher, caplog):
    caplog.set_level(logging.INFO)
    publisher.push_base(Model(1))  # forms the group
    caplog.clear()
    publisher.push_base(Model(2))
    by_process = collections.Counter(record.name.partition(".")[0] for record in caplog.records)
    assert by_process == {"trainer_side": 1, "weft": 1, "rollout_side": len(engines)}
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
    read = trainer_side.packer.Packer.pack

    def explode(self, *_):
        raise RuntimeError("the disk burned")

    trainer_side.packer.Packer.pack = explode
    try:
        with pytest.raises(RuntimeError, match="the disk burned"):
            publisher.push_base(model)
    finally:
        trainer_side.packer.Packer.pack = read
    assert str(publisher.push_base(model)) == "base@3"


def test_a_load_that_fails_everywhere_is_told_to_the_trainer(pool, engines, publisher):
    for engine in engines:
        engine.fail_next_load = LoadFailedError("out of slots")
    with pytest.raises(LoadFailedError, match="out of slots"):
        publisher.push_adapter(peft_of(Model()), "math")
    assert publisher.push_adapter(peft_of(Model()), "math").version == 2


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


def test_versions_beyond_the_retention_are_dropped_unless_in_use(tmp_path):
    with running_pool(tmp_path / "weft.db", retain=2) as pool:
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


def test_an_adapter_store_without_room_refuses_before_a_byte_moves(tmp_path):
    with running_pool(tmp_path / "weft.db") as pool:
        engine = EngineDouble(weights(Model()), adapter_capacity_bytes=4096)
        pool.add_replica("replica-0", engine)
        with Publisher(pool.target, trainer_id="trainer-a") as publisher:
            with pytest.raises(CapacityError, match="replica-0") as caught:
                publisher.push_adapter(peft_of(Model()), "math")
            assert caught.value.reason == "STAGING_FULL"
            assert str(publisher.push_base(Model(1))) == "base@1"


def test_another_base_model_is_refused_at_registration(pool, engines):
    class Other(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Linear(3, 3)

    with pytest.raises(BaseMismatchError):
        pool.add_replica("stranger", EngineDouble(weights(Other())))


def test_threads_end_with_their_owners(pool, engines):
    before = {t.name for t in threading.enumerate()}
    with Publisher(pool.target, trainer_id="trainer-a") as publisher:
        publisher.push_base(Model(1))
    for replica_id in list(pool.agents):
        pool.remove_replica(replica_id)
    ours = [t for t in threading.enumerate() if t.name.startswith("weft-") and t.name not in before]
    until(lambda: not any(t.is_alive() for t in ours))
