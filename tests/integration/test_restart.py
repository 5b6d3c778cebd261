"""A whole pool is restarted: it comes back from its spill directories, or its owners are
asked to publish again. Real coordinator, real gRPC, real gloo, engine double."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Iterator
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

import rollout_side.spill.folder as spill_folder
import rollout_side.spill.spiller
from rollout_side.spill.folder import SpillSettings
from tests.doubles.engine import EngineDouble
from tests.doubles.pool import Pool, running_pool
from tests.integration.models import Model, lora, peft_of, same, until, weights
from tests.integration.replicas import digests, is_ready, replica
from trainer_side import Publisher
from weft_rl.cli.status import read_pool, render
from weft_rl.contract.errors import WeftError
from weft_rl.contract.names import PolicyVersion
from weft_rl.rpc.channel import open_channel
from weft_rl.v1 import inspect_pb2 as pb
from weft_rl.v1.inspect_pb2_grpc import InspectServiceStub


@pytest.fixture(autouse=True)
def look_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rollout_side.spill.spiller, "_LOOK_SECONDS", 0.2)


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[Pool]:
    settings = {"publish_again_after_seconds": 0.5, "lease_seconds": 2.5}
    with running_pool(tmp_path / "weft.db", **settings) as running:
        yield running


def trainer(pool: Pool, **options: Any) -> Publisher:
    return Publisher(
        pool.target, trainer_id="trainer-a", timeout_seconds=20, bucket_bytes=2048, **options
    )


@pytest.fixture
def publisher(pool: Pool) -> Iterator[Publisher]:
    with trainer(pool) as running:
        yield running


def double(
    spill_dir: Path | None = None, owner: str = "replica-0", retain: int = 1
) -> EngineDouble:
    spill = None
    if spill_dir is not None:
        spill = SpillSettings(directory=str(spill_dir), capacity_bytes=2**26, owner=owner)
    return EngineDouble(weights(Model()), base_copies=retain, spill=spill)


def spilled(pool: Pool, replica_id: str) -> list[str]:
    versions = replica(pool, replica_id).report.spilled_versions
    return [f"{v.policy}@{v.version}" for v in versions]


def policy(pool: Pool, name: str) -> pb.Policy:
    with open_channel(pool.target) as channel:
        policies = InspectServiceStub(channel).ListPolicies(pb.ListPoliciesRequest()).policies
    return next((p for p in policies if p.policy == name), pb.Policy())


ALL = ["base@1", "code@1", "math@1", "math@2"]


def push_all(publisher: Publisher) -> dict[str, Any]:
    adapters = {name: peft_of(Model(), seed) for seed, name in enumerate(ALL[1:], 1)}
    publisher.push_base(Model(5))
    publisher.push_adapter(adapters["math@1"], "math")
    publisher.push_adapter(adapters["math@2"], "math")
    publisher.push_adapter(adapters["code@1"], "code")
    return adapters


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("coordinator_too", [True, False])
def test_a_whole_pool_comes_back_by_itself(
    pool: Pool, tmp_path: Path, shared: bool, coordinator_too: bool
) -> None:
    names = ("replica-0", "replica-1")
    directories = {n: tmp_path / ("spill" if shared else n) for n in names}
    for name in names:
        pool.add_replica(name, double(directories[name], name))
    with trainer(pool) as publisher:
        adapters = push_all(publisher)
    for name in names:
        until(lambda name=name: spilled(pool, name) == ALL, 20)  # type: ignore[misc]
    pushed = {version: digests(pool, names[0], version) for version in ALL}
    for name in names:
        pool.remove_replica(name)
    if coordinator_too:
        pool.stop_coordinator()
        pool.start_coordinator()
    engines = {name: double(directories[name], name) for name in names}
    for name in names:
        pool.add_replica(name, engines[name])
        assert spilled(pool, name) == ALL, "said as it registers"
    for name in names:
        until(lambda name=name: is_ready(pool, name), 20)  # type: ignore[misc]
        until(
            lambda name=name: pool.agents[name].serving.vector.adapters.keys() == {"math", "code"}
        )  # type: ignore[misc]
        engine = engines[name]
        assert same(engine.base, weights(Model(5)))
        for version, adapter in adapters.items():
            until(lambda e=engine, v=version: e.store.adapter(PolicyVersion.parse(v)))  # type: ignore[misc]
            assert same(engine.adapter(version), lora(adapter))
        assert {version: digests(pool, name, version) for version in ALL} == pushed
        assert engine.aliases == {"math": 2, "code": 1}
        assert list(replica(pool, name).report.retained_base_versions) == [1]
        assert engine.store.usage().staged_transfer_ids == ()
    late = double()  # without a directory: it clones from one that was restored
    pool.add_replica("replica-9", late)
    until(lambda: is_ready(pool, "replica-9"))
    assert same(late.base, weights(Model(5)))
    with trainer(pool) as publisher:
        assert str(publisher.push_adapter(adapters["math@1"], "math").version) == "math@3"


def wide(seed: int) -> Model:
    """A model of which changes are a small part."""
    model = Model(seed)
    model.wide = torch.nn.Linear(300, 400)
    return model


def test_deltas_are_spilled_as_such_and_a_restart_reads_them(pool: Pool, tmp_path: Path) -> None:
    def engine() -> EngineDouble:
        spill = SpillSettings(
            directory=str(tmp_path / "a"), capacity_bytes=2**26, owner="replica-0"
        )
        return EngineDouble(weights(wide(0)), base_copies=1, spill=spill)

    pool.add_replica("replica-0", engine())
    model, names = wide(5), list[str]()
    with trainer(pool, delta="always") as publisher:
        for number in range(1, 4):
            with torch.no_grad():
                model.wide.weight[number, 7] += 1
            report = publisher.push_base(model).report
            assert report.delta.is_delta is (number > 1)
            names.append(f"base@{number}")
            until(lambda: spilled(pool, "replica-0") == names)
        sizes = {
            path.name.partition(".")[0]: sum(file.stat().st_size for file in path.iterdir())
            for path in (tmp_path / "a").glob("*/*")
        }
        assert max(sizes, key=sizes.__getitem__) == "base@1"
        assert sorted(sizes.values())[-2] < sizes["base@1"] / 10
        pool.remove_replica("replica-0")
        again = engine()
        pool.add_replica("replica-0", again)
        until(lambda: is_ready(pool, "replica-0"))
        assert same(again.base, weights(model))
        with torch.no_grad():
            model.wide.weight[9, 9] += 1
        assert publisher.push_base(model).report.delta.is_delta, "of what was restored"
        assert same(again.base, weights(model))
        until(lambda: spilled(pool, "replica-0") == [*names, "base@4"])
    assert len(list((tmp_path / "a").glob("*/*/weft.changes"))) == 3


def test_a_corrupt_version_is_refused_and_nothing_changes(
    pool: Pool, publisher: Publisher, tmp_path: Path
) -> None:
    pool.add_replica("replica-0", double(tmp_path / "a"))
    adapters = push_all(publisher)
    until(lambda: spilled(pool, "replica-0") == ALL)
    pool.remove_replica("replica-0")
    (weights_file,) = (tmp_path / "a").glob("*/base@1.*/model.safetensors")
    data = bytearray(weights_file.read_bytes())
    data[-1] ^= 1
    weights_file.write_bytes(bytes(data))
    engine = double(tmp_path / "a")
    pool.add_replica("replica-0", engine)
    until(lambda: "is not the committed base@1" in replica(pool, "replica-0").state_reason)
    assert same(engine.base, weights(Model())), "nothing changed"
    until(lambda: "base@1" not in spilled(pool, "replica-0"))
    publisher.push_base(Model(6))
    until(lambda: is_ready(pool, "replica-0"))
    until(lambda: spilled(pool, "replica-0") == ["base@2", *ALL[1:]])
    assert same(engine.base, weights(Model(6)))
    assert same(engine.adapter("math@2"), lora(adapters["math@2"]))


def test_what_is_retired_or_superseded_leaves_the_directory(pool: Pool, tmp_path: Path) -> None:
    pool.stop_coordinator()
    pool.config["retain_versions"] = 2
    pool.start_coordinator()
    pool.add_replica("replica-0", double(tmp_path / "a"))
    with trainer(pool) as publisher:
        for seed in range(1, 5):
            publisher.push_adapter(peft_of(Model(), seed), "math")
            publisher.push_base(Model(seed))
    until(lambda: spilled(pool, "replica-0") == ["base@4", "math@3", "math@4"], 20)
    names = {path.name.rpartition(".")[0] for path in (tmp_path / "a").glob("*/*")}
    assert names == {"base@4", "math@3", "math@4"}


def test_a_full_disk_does_not_touch_what_is_served(
    pool: Pool, publisher: Publisher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: Any, **kwargs: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(spill_folder, "write_version", full)
    engine = double(tmp_path / "a")
    pool.add_replica("replica-0", engine)
    publisher.push_base(Model(1))
    publisher.push_base(Model(2))
    until(lambda: is_ready(pool, "replica-0"))
    assert same(engine.base, weights(Model(2)))
    assert spilled(pool, "replica-0") == []


def test_without_a_directory_the_owner_is_asked_and_publishes_again(pool: Pool) -> None:
    asked, pushed = list[str](), threading.Event()
    adapter = peft_of(Model(), 1)

    def publish_again(name: str) -> None:
        asked.append(name)
        if name == "base":
            publisher.push_base(Model(5))
        else:
            publisher.push_adapter(adapter, name)
        if len(asked) == 2:
            pushed.set()

    with trainer(pool, on_publish_again=publish_again) as publisher:
        pool.add_replica("replica-0", double())
        publisher.push_base(Model(5))
        publisher.push_adapter(adapter, "math")
        assert publisher.wanted == frozenset()
        pool.remove_replica("replica-0")
        fresh = double()
        pool.add_replica("replica-0", fresh)
        until(lambda: policy(pool, "base").publish_again_version == 1)
        assert pushed.wait(20)
        until(lambda: is_ready(pool, "replica-0"))
        until(lambda: policy(pool, "base").publish_again_version == 0)
        assert (sorted(asked), publisher.wanted) == (["base", "math"], frozenset())
        assert same(fresh.base, weights(Model(5)))
        assert same(fresh.adapter("math@2"), lora(adapter))
        pool.remove_replica("replica-0")  # and once more
        pushed.clear()
        asked.clear()
        pool.add_replica("replica-0", double())
        assert pushed.wait(20)
        until(lambda: is_ready(pool, "replica-0"))
    assert not [t for t in threading.enumerate() if t.name.startswith("weft-notices")]


def test_a_trainer_may_poll_instead_and_nobody_owning_it_is_said(pool: Pool) -> None:
    pool.add_replica("replica-0", double())
    with trainer(pool) as publisher:
        publisher.push_adapter(peft_of(Model(), 1), "math")
        pool.remove_replica("replica-0")
        pool.add_replica("replica-0", double())
        until(lambda: publisher.wanted == {"math"})
        publisher.push_adapter(peft_of(Model(), 1), "math")
        assert publisher.wanted == frozenset()
        pool.remove_replica("replica-0")
    pool.add_replica("replica-0", double())
    until(lambda: policy(pool, "math").lost)
    until(lambda: is_ready(pool, "replica-0"))  # nobody waits for what nobody can bring
    assert not policy(pool, "math").HasField("lease")
    shown = StringIO()
    with open_channel(pool.target) as channel:
        Console(file=shown, width=200).print(render(read_pool(InspectServiceStub(channel))))
    assert "math@2 is lost: no replica in contact holds it" in shown.getvalue()


def lose_catalog(pool: Pool, tmp_path: Path, *, recover: bool = True) -> None:
    """What starts next is told so."""
    pool.stop_coordinator()
    for path in tmp_path.glob("weft.db*"):
        path.unlink()
    pool.config["recover"] = recover


def is_back(pool: Pool, replica_id: str) -> bool:
    with open_channel(pool.target) as channel:
        replicas = InspectServiceStub(channel).ListReplicas(pb.ListReplicasRequest()).replicas
    states = {known.replica_id: known.state for known in replicas}
    served = policy(pool, "math").served_version if states else 0
    return bool(served) and states.get(replica_id) == pb.REPLICA_STATE_READY


def serves(pool: Pool, replica_id: str, adapters: dict[str, Any]) -> None:
    """By what the engine has."""
    engine = pool.agents[replica_id].engine
    assert isinstance(engine, EngineDouble)
    assert same(engine.base, weights(Model(5)))
    assert {name: engine.aliases[name] for name in ("code", "math")} == {"code": 1, "math": 2}
    for name, adapter in adapters.items():
        assert same(engine.adapter(name), lora(adapter))


def test_a_lost_catalog_is_written_anew_from_what_replicas_hold(pool: Pool, tmp_path: Path) -> None:
    names = ("replica-0", "replica-1")
    for name in names:
        pool.add_replica(name, double(tmp_path / name, name))
    with trainer(pool) as publisher:
        adapters = push_all(publisher)
        lose_catalog(pool, tmp_path)
        pool.start_coordinator()
        for name in names:
            until(lambda name=name: is_back(pool, name), 20)  # type: ignore[misc]
            serves(pool, name, adapters)
        pool.add_replica("late", double())
        until(lambda: is_back(pool, "late"), 20)
        serves(pool, "late", adapters)
        pushed = publisher.push_base(Model(6)).version
        # Numbers leap by what the trainer tells, and again where a replica comes only after it.
        assert pushed.version in (1002, 2002)
        until(lambda: policy(pool, "math").versions == [1, 2])
        pool.remove_replica("late")
    for name in names:
        until(lambda name=name: str(pushed) in spilled(pool, name), 20)  # type: ignore[misc]
    lose_catalog(pool, tmp_path, recover=False)
    for name in names:
        pool.remove_replica(name)
    pool.start_coordinator()
    for name in names:  # which hold nothing but what is on their disks
        pool.add_replica(name, double(tmp_path / name, name))
    for name in names:
        until(lambda name=name: is_back(pool, name), 20)  # type: ignore[misc]
    engine = pool.agents["replica-0"].engine
    assert isinstance(engine, EngineDouble)
    assert same(engine.base, weights(Model(6)))
    with trainer(pool) as publisher:
        assert publisher.push_base(Model(5)).version > pushed


def test_only_a_coordinator_that_recovers_goes_on_with_a_pool_whose_catalog_is_gone(
    pool: Pool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pool.config["lost_after_seconds"] = 2.0  # a third of the time that it waits for them
    agent = pool.add_replica("replica-0", double())
    with trainer(pool) as publisher:
        adapters = push_all(publisher)
        lose_catalog(pool, tmp_path, recover=False)
        pool.start_coordinator()
        assert agent.registration is not None
        registration = agent.registration
        until(lambda: "over an empty one with --recover" in registration.trouble)
        until(lambda: "could not renew base yet" in caplog.text and "--recover" in caplog.text)
        with pytest.raises(WeftError):
            publisher.push_base(Model(6), timeout_seconds=3)
        serves(pool, "replica-0", adapters)
        lose_catalog(pool, tmp_path)
        pool.start_coordinator()
        until(lambda: is_back(pool, "replica-0"), 20)
        assert publisher.push_base(Model(6)).version > PolicyVersion("base", 1000)
    pool.remove_replica("replica-0")
    lose_catalog(pool, tmp_path)
    pool.start_coordinator()
    # Nobody of it is left: who comes now waits as long as somebody may come back, and no longer.
    began = time.monotonic()
    pool.add_replica("replica-0", double())
    with trainer(pool) as publisher:
        assert str(publisher.push_base(Model(5)).version) == "base@1"
    assert time.monotonic() - began > 4


def test_a_file_whose_read_hangs_holds_up_neither_its_replica_nor_a_push(
    pool: Pool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pipe that nobody writes to stands for a disk that does not answer."""
    monkeypatch.setattr(rollout_side.spill.spiller, "STALL_SECONDS", 1.0)
    pool.add_replica("replica-0", double(tmp_path / "spill"))
    adapter = peft_of(Model())
    with trainer(pool) as publisher:
        publisher.push_adapter(adapter, "math")
        publisher.push_adapter(adapter, "code")
    until(lambda: spilled(pool, "replica-0") == ["code@1", "math@1"], 20)
    pool.remove_replica("replica-0")
    (file,) = (tmp_path / "spill").glob("*/math@1.*/adapter_model.safetensors")
    file.unlink()
    os.mkfifo(file)
    pool.add_replica("replica-0", double(tmp_path / "spill"))
    with Publisher(pool.target, trainer_id="other", timeout_seconds=20) as other:
        began = time.monotonic()
        other.push_adapter(adapter, "chess")
        assert time.monotonic() - began < 5
    # Nobody else has it: its owner is asked, as if it had not been spilled.
    until(lambda: policy(pool, "math").publish_again_version == 1, 20)
    until(lambda: policy(pool, "code").served_version == 1 and "code" in served(pool), 20)
    assert "math" not in served(pool)
    with trainer(pool) as publisher:
        assert str(publisher.push_adapter(adapter, "math").version) == "math@2"
    until(lambda: is_ready(pool, "replica-0"), 20)
    file.write_bytes(b"x")  # ends the read


def served(pool: Pool) -> set[str]:
    return set(pool.agents["replica-0"].serving.vector.adapters)
