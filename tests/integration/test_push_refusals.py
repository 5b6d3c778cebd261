"""What is refused before a byte moves, and leaves every replica as it was."""

import time

import pytest
import torch
from torch import nn

from tests.doubles.engine import EngineDouble
from tests.doubles.pool import running_pool
from tests.integration.models import HIDDEN, Model, peft_of, same, weights
from trainer_side import Publisher
from weft_rl.contract.errors import (
    BaseMismatchError,
    CapacityError,
    InvalidAdapterError,
    InvalidManifestError,
    InvalidNameError,
    PeerUnavailableError,
    WeftError,
)


def test_an_empty_pool_is_a_typed_error_at_the_deadline(publisher):
    began = time.monotonic()
    with pytest.raises(WeftError) as caught:
        publisher.push_base(Model(1), timeout_seconds=0.5)
    assert caught.value.reason in ("POOL_EMPTY", "DEADLINE")
    assert time.monotonic() - began < 5


def test_minimum_number_of_replicas(pool, engines, publisher):
    with pytest.raises(PeerUnavailableError) as caught:
        publisher.push_base(Model(1), require=3, timeout_seconds=0.7)
    assert caught.value.reason == "POOL_EMPTY"
    assert str(publisher.push_base(Model(1), require=2).version) == "base@1"


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
    assert str(publisher.push_base(Model(3)).version) == "base@2"  # no version was burned


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
    assert str(publisher.push_adapter(peft_of(Model()), "math").version) == "math@1"


def _deeper(model):
    model.layers.append(Model().layers[0])
    return model


def _renamed(model):
    model.__class__ = type("Other", (Model,), {})
    return model


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (_reshaped, r"'layers\.0\.q_proj' has the shape \(8,32\), the pool serves one with"),
        (_deeper, r"has 'layers\.3', the pool serves one without"),
        (_renamed, "fits a Other, the pool serves a Model"),
    ],
)
def test_adapter_for_another_base(pool, engines, publisher, spoil, words):
    with pytest.raises(BaseMismatchError, match=words):
        publisher.push_adapter(peft_of(spoil(Model())), "math")
    assert pool.agents["replica-0"].serving.vector.adapters == {}


def test_what_an_adapter_does_not_touch_does_not_matter(pool, engines, publisher):
    """Buffers that a checkpoint holds, say, and a head of the trainer's own."""
    model = _extra(Model())
    model.register_buffer("scale", torch.ones(1))
    assert str(publisher.push_adapter(peft_of(model), "math").version) == "math@1"


def _unfreeze(model):
    model.base_model.model.embed.weight.requires_grad_(True)


def _also_other(model):
    model.add_adapter("other", model.peft_config["default"])
    model.base_model.set_adapter(["default", "other"])


def _hook(model):
    layer = model.base_model.model.layers[0]["q_proj"]
    layer.register_forward_hook(lambda module, given, out: out * 2)


@pytest.mark.parametrize(
    ("spoil", "words"),
    [(_unfreeze, "embed.weight"), (_also_other, "'default' and 'other' together"), (_hook, "hook")],
)
def test_what_the_model_computes_with_beside_the_adapter_is_refused_by_name(
    pool, engines, publisher, spoil, words
):
    model = peft_of(Model())
    assert str(publisher.push_adapter(model, "math").version) == "math@1"
    spoil(model)
    with pytest.raises(InvalidAdapterError, match=words):
        publisher.push_adapter(model, "math")
    with pytest.raises(InvalidAdapterError, match=words):
        publisher.push_adapter_async(model, "math").result(20)
    assert str(publisher.push_adapter(peft_of(Model()), "math").version) == "math@2"


def test_what_is_trained_beside_the_adapter_is_pushed_merged(pool, engines, publisher):
    model = peft_of(Model(), scale=0.0)
    with torch.no_grad():
        model.base_model.model.embed.weight.requires_grad_(True).add_(1.0)
    assert str(publisher.push_merged(model).version) == "base@1"
    expected = weights(Model()) | {"embed.weight": model.base_model.model.embed.weight.detach()}
    assert same(engines[0].base, expected)


@pytest.mark.parametrize("name", ["a@b", "a/b", "..", "a b", "x" * 300, "", "base"])
def test_names_that_cannot_be_policies(pool, engines, publisher, name):
    with pytest.raises(InvalidNameError):
        publisher.push_adapter(peft_of(Model()), name)


def test_an_adapter_store_without_room_refuses_before_a_byte_moves(tmp_path):
    with running_pool(tmp_path / "weft.db") as pool:
        engine = EngineDouble(weights(Model()), adapter_capacity_bytes=4096)
        pool.add_replica("replica-0", engine)
        with Publisher(pool.target, trainer_id="trainer-a") as publisher:
            with pytest.raises(CapacityError, match="replica-0") as caught:
                publisher.push_adapter(peft_of(Model()), "math")
            assert caught.value.reason == "STAGING_FULL"
            assert str(publisher.push_base(Model(1)).version) == "base@1"


def test_another_base_model_is_refused_at_registration(pool, engines):
    class Other(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Linear(3, 3)

    with pytest.raises(BaseMismatchError):
        pool.add_replica("stranger", EngineDouble(weights(Other())))
