"""An adapter is for the base that its own model holds now, not for what was pushed from it."""

import copy
import threading

import pytest
import torch
from safetensors.torch import save_file

from tests.doubles.engine import EngineDouble
from tests.integration.models import Model, peft_of, weights
from trainer_side import Publisher
from weft_rl.checkpoints.digest_cache import DigestCache
from weft_rl.checkpoints.reader import read_checkpoint
from weft_rl.contract.errors import BaseMismatchError
from weft_rl.rpc.channel import open_channel
from weft_rl.v1 import admin_pb2
from weft_rl.v1.admin_pb2_grpc import AdminServiceStub


@pytest.fixture
def loaded(pool, tmp_path, monkeypatch):
    """Make a model that was loaded from the checkpoint that the pool was started with."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = tmp_path / "checkpoint"
    path.mkdir()
    save_file(dict(Model(1).state_dict()), path / "model.safetensors")
    engine = EngineDouble(weights(Model(1)), base_copies=3)
    files = [path / "model.safetensors"]
    engine.checkpoint = read_checkpoint(files, DigestCache(None), threading.Event())
    pool.add_replica("told", engine)

    def load():
        model = Model(1)
        model.name_or_path = str(path)
        return model

    return load


def roll_back(pool, version):
    with open_channel(pool.target) as channel:
        AdminServiceStub(channel).Rollback(
            admin_pb2.RollbackRequest(policy="base", to_version=version), timeout=20
        )


def refused(publisher, model, words):
    with pytest.raises(BaseMismatchError, match=words):
        publisher.push_adapter(model, "math", base="same")
    (remark,) = publisher.push_adapter(model, "math").report.remarks
    return remark


def accepted(publisher, model):
    assert publisher.push_adapter(model, "math", base="same").report.remarks == ()


def test_a_merged_push_makes_no_module_a_version_of_the_base(pool, publisher, loaded):
    model = peft_of(loaded())
    accepted(publisher, model)
    publisher.push_merged(model)
    said = refused(publisher, model, "trained on base@0, the pool serves base@1")
    assert said == "trained on base@0, served over base@1"
    publisher.push_base(loaded())  # the very bytes of base@0
    accepted(publisher, model)
    publisher.push_merged_async(model).result(20)
    refused(publisher, model, "trained on base@2, the pool serves base@3|trained on base@0")


def test_nor_does_one_of_a_base_that_was_pushed_by_itself(pool, publisher, loaded):
    base = Model(4)
    publisher.push_base(base)
    model = peft_of(base)
    accepted(publisher, model)
    publisher.push_merged(model)
    refused(publisher, model, "trained on base@1, the pool serves base@2")
    roll_back(pool, 1)
    accepted(publisher, model)


def test_what_counts_is_what_the_base_holds(pool, publisher, loaded):
    other = Model(4)
    publisher.push_base(other)
    accepted(publisher, peft_of(copy.deepcopy(other)))  # another module with the same content
    publisher.push_tensors(weights(Model(5)))
    accepted(publisher, peft_of(Model(5)))
    refused(publisher, peft_of(loaded()), "trained on base@0, the pool serves base@2")
    publisher.push_base(Model(6))
    refused(publisher, peft_of(other), "trained on base@1, the pool serves base@3")


@pytest.mark.parametrize("how", ["load_state_dict", "in place", "by .data", "merged"])
def test_a_base_that_was_changed_is_what_it_was_no_more(pool, publisher, loaded, how):
    model = peft_of(loaded())
    accepted(publisher, model)
    base = model.get_base_model()
    if how == "load_state_dict":
        base.load_state_dict({name: t + 1 for name, t in base.state_dict().items()})
    elif how == "merged":
        model.merge_adapter()
    else:
        with torch.no_grad():
            for param in base.parameters():
                (param.data if how == "by .data" else param).add_(1)
    refused(publisher, model, "not known which base")


def test_two_models_over_one_base_are_for_the_same(pool, publisher, loaded):
    base = loaded()
    first = peft_of(base)
    first.add_adapter("second", first.peft_config["default"])
    publisher.push_merged(first)
    refused(publisher, first, "trained on base@0, the pool serves base@1")
    with pytest.raises(BaseMismatchError, match="trained on base@0"):
        publisher.push_adapter(first, "more", base="same", adapter_name="second")
    publisher.push_base(loaded())
    accepted(publisher, first)


def test_an_async_push_is_judged_by_the_base_at_the_call(pool, publisher, loaded):
    model = peft_of(loaded())
    accepted(publisher, model)
    with Publisher(pool.target, trainer_id="other", timeout_seconds=20) as other:
        future = other.push_adapter_async(model, "other", base="same")
        assert future.result(20).report.remarks == ()
