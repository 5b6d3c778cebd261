"""Pushes in which rank 0 of a trainer holds nothing that is sent: the other rank alone sends.

FSDP1 lays the parameters of a unit one behind the other, and cuts the whole: the adapter of the
last module of every layer lies at rank 1.
"""

from collections.abc import Iterator

import pytest
import torch

from tests.doubles.engine import EngineDouble
from tests.doubles.pool import Pool, running_pool
from tests.integration.models import Model, same, weights
from tests.trainers.launch import RankedTrainer, running_ranks
from weft_rl.rpc.channel import open_channel
from weft_rl.v1 import inspect_pb2 as pb
from weft_rl.v1.inspect_pb2_grpc import InspectServiceStub

AT_RANK_1 = {"seed": 1, "target_modules": ["v_proj"]}


@pytest.fixture(scope="module")
def pool(tmp_path_factory) -> Iterator[Pool]:
    with running_pool(tmp_path_factory.mktemp("pool") / "weft.db", lost_after_seconds=60) as pool:
        yield pool


@pytest.fixture(scope="module")
def engine(pool) -> EngineDouble:
    engine = EngineDouble(weights(Model(9)))
    pool.add_replica("replica-0", engine)
    return engine


@pytest.fixture(scope="module")
def ranks(pool, engine, tmp_path_factory) -> Iterator[RankedTrainer]:
    with running_ranks(tmp_path_factory.mktemp("ranks"), pool.target, 2) as trainer:
        yield trainer


@pytest.fixture
def trainer(ranks) -> RankedTrainer:
    """The module's, with a model of the test's own."""
    ranks.do("make", kind="fsdp1", peft=AT_RANK_1)
    return ranks


def epoch_of(pool, version):
    """In which epoch a version came."""
    with open_channel(pool.target) as channel:
        listed = InspectServiceStub(channel).ListTransfers(pb.ListTransfersRequest())
    (epoch,) = [each.epoch for each in listed.transfers if each.version.version == version]
    return epoch


def pushed(pool, trainer):
    """The epoch that a push takes, which must succeed."""
    return epoch_of(pool, trainer.push("adapter", policy="math"))


def errors(answers):
    return {(answer.get("type"), answer.get("error")) for answer in answers}


def test_the_group_is_kept_from_push_to_push(pool, engine, trainer, tmp_path):
    epochs = set()
    for _ in range(3):
        trainer.do("train", steps=1)
        version = trainer.push("adapter", policy="math")
        epochs.add(epoch_of(pool, version))
        trainer.do("save", path=str(tmp_path / "whole.pt"))
        expected = {
            name.replace(".default", ""): tensor.float()
            for name, tensor in torch.load(tmp_path / "whole.pt").items()
            if "lora_" in name
        }
        assert same(engine.adapter(f"math@{version}"), expected)
    assert len(epochs) == 1, epochs


def test_the_next_push_has_another_group_once_other_ranks_send(pool, trainer):
    first = pushed(pool, trainer)
    trainer.do("make", kind="fsdp2", peft={"seed": 1})
    second = pushed(pool, trainer)
    trainer.do("make", kind="fsdp1", peft=AT_RANK_1)
    third = pushed(pool, trainer)
    assert first < second < third
    assert pushed(pool, trainer) == third


def test_the_next_push_has_another_group_once_a_replica_came_or_went(pool, trainer):
    first = pushed(pool, trainer)
    pool.add_replica("replica-1", EngineDouble(weights(Model(9))))
    second = pushed(pool, trainer)
    assert pushed(pool, trainer) == second > first
    pool.remove_replica("replica-1")
    assert pushed(pool, trainer) > second


def test_a_push_that_fails_takes_the_group_with_it(pool, trainer):
    first = pushed(pool, trainer)
    trainer.do("make", kind="fsdp1", peft=AT_RANK_1 | {"scale": 3e38})
    found = errors(trainer.do("push", what="adapter", policy="math", check_finite=True))
    assert found == {("NotFiniteError", "NOT_FINITE")}
    trainer.do("make", kind="fsdp1", peft=AT_RANK_1)
    assert pushed(pool, trainer) > first


@pytest.mark.parametrize("is_told", [True, False], ids=["told", "not told"])
def test_a_place_that_the_sender_has_lost_is_not_asked_for(is_told, pool, trainer):
    """Whether or not the coordinator has noticed by then."""
    first = pushed(pool, trainer)
    trainer.do("lose_place", is_told=is_told)
    second = pushed(pool, trainer)
    assert pushed(pool, trainer) == second > first


def test_a_sender_that_cannot_join_leaves_no_push_behind(pool, trainer):
    """Nobody else attends it: the next would wait for it until its deadline."""
    first = pushed(pool, trainer)
    trainer.do("lose_place", is_told=True)
    trainer.do("fail_join")
    answers = trainer.do("push", what="adapter", policy="math", timeout=60.0)
    # It has left the others' link with that: they could not agree to begin again.
    assert errors(answers) == {("PeerUnavailableError", "PEER_GONE")}
    assert all(answer["ended"] - answer["began"] < 10 for answer in answers)
    assert epoch_of(pool, trainer.push("adapter", policy="math", timeout=10.0)) > first
