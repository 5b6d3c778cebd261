"""Pushes beside the training: the weights of the moment of the call, in order."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from tests.doubles.engine import EngineDouble
from tests.doubles.pool import running_pool
from tests.integration.models import Model, lora, peft_of, same, weights
from trainer_side import Publisher
from trainer_side.packing.packer import Packer
from weft_rl.contract.errors import TransferAbortedError


@pytest.fixture(scope="module")
def pool(tmp_path_factory):
    with running_pool(tmp_path_factory.mktemp("pool") / "weft.db") as pool:
        yield pool


@pytest.fixture(scope="module")
def engine(pool):
    engine = EngineDouble(weights(Model(9)))
    pool.add_replica("replica-0", engine)
    return engine


@pytest.fixture
def publisher(pool, engine):
    with Publisher(pool.target, trainer_id="trainer-a", timeout_seconds=30) as publisher:
        yield publisher


@pytest.fixture
def gate(monkeypatch):
    """Holds every push before its first bucket until it is set."""
    gate, original = threading.Event(), Packer.pack

    def pack(packer, index, *rest, **more):
        assert gate.wait(20)
        return original(packer, index, *rest, **more)

    monkeypatch.setattr(Packer, "pack", pack)
    yield gate
    gate.set()


def train_on(model):
    with torch.no_grad():
        for param in model.parameters():
            param.add_(1.0)


@pytest.mark.parametrize("what", ["base", "adapter", "merged"])
def test_the_weights_are_those_of_the_call(what, engine, publisher, gate):
    model = Model(3) if what == "base" else peft_of(Model(3))
    expected = {
        "base": lambda: weights(model),
        "adapter": lambda: lora(model),
        "merged": lambda: weights(peft_of(Model(3)).merge_and_unload()),
    }[what]()
    if what == "base":
        future = publisher.push_base_async(model)
    elif what == "adapter":
        future = publisher.push_adapter_async(model, "math")
    else:
        future = publisher.push_merged_async(model)
        for name, param in model.named_parameters():  # the base of a PEFT model is not trained
            param.requires_grad_("lora_" in name)
    trained = [p for p in model.parameters() if p.requires_grad]
    with torch.no_grad():
        for param in trained:
            param.add_(1.0)
    assert not future.done()
    gate.set()
    version = future.result(20).version
    served = engine.adapter(str(version)) if what == "adapter" else engine.base
    assert served.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.allclose(served[name], tensor, rtol=0, atol=1e-6), name


def test_pushes_go_in_the_order_of_the_calls(engine, publisher, gate):
    models = [Model(i) for i in range(3)]
    futures = [publisher.push_base_async(model) for model in models]
    gate.set()
    versions = [future.result(20).version.version for future in futures]
    assert versions == sorted(versions)
    assert publisher.push_base(Model(7)).version.version == versions[-1] + 1
    assert same(engine.base, weights(Model(7)))


def test_a_waiting_push_is_replaced_when_asked(engine, publisher, gate):
    first = publisher.push_base_async(Model(1))
    waiting = publisher.push_base_async(Model(2))
    other = publisher.push_adapter_async(peft_of(Model(1)), "other")
    last = publisher.push_base_async(Model(3), when_busy="replace")
    gate.set()
    numbers = [push.result(20).version.version for push in (first, last)]
    assert numbers[1] == numbers[0] + 1  # no number was burnt
    with pytest.raises(TransferAbortedError, match="replaced") as caught:
        waiting.result(20)
    assert caught.value.reason == "REPLACED"
    assert str(other.result(20).version).startswith("other@")
    assert same(engine.base, weights(Model(3)))


def test_host_memory_is_used_again(publisher, gate):
    gate.set()
    for _ in range(3):
        publisher.push_base_async(Model(1)).result(20)
    buffers = [b for free in publisher._background._memory._free.values() for b in free]
    assert len(buffers) == len(list(Model(1).parameters()))


def test_of_one_policy_two_wait_and_who_asks_for_more_is_held_or_refused(engine, publisher, gate):
    first = publisher.push_base_async(Model(1))
    waiting = [publisher.push_base_async(Model(2)), publisher.push_base_async(Model(3))]
    refused = publisher.push_base_async(Model(4), timeout_seconds=0.3)
    assert refused.exception(0).reason == "DEADLINE"
    assert "'base' wait already" in str(refused.exception(0))
    with ThreadPoolExecutor(1) as caller:
        held = caller.submit(publisher.push_base_async, Model(5))
        with pytest.raises(TimeoutError):
            held.result(0.3)
        other = publisher.push_adapter_async(peft_of(Model(1)), "of-another-name")
        gate.set()
        last = held.result(20)
    versions = [future.result(20).version.version for future in (first, *waiting, last)]
    assert versions == list(range(versions[0], versions[0] + 4))  # no number was burnt
    assert str(other.result(20).version).startswith("of-another-name@")
    assert same(engine.base, weights(Model(5)))


def test_a_failure_is_the_futures(publisher, gate):
    gate.set()
    future = publisher.push_base_async(torch.nn.Linear(2, 2))
    assert type(future.exception(20)).__name__ == "InvalidManifestError"
    assert not future.cancel()
