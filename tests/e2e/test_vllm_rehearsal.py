"""A replica learns at its start whether vLLM's reload would give every parameter a value."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from rollout_side.vllm_engine.compat import bridges
from rollout_side.vllm_engine.loading.rehearsal import why_not_reloaded
from tests.e2e.engine_process import EngineProcess
from tests.e2e.logprobs import PROMPT, check
from tests.models import Referee, make_model
from weft_rl.contract.errors import LoadFailedError
from weft_rl.contract.tensors import DataType, Reference, TensorMeta

# vLLM's and torch's own, at import
pytestmark = pytest.mark.filterwarnings("ignore")


_NOT_RELOADED = ("deepseek_v2", "gpt_oss")


class Layer(nn.Module):
    def __init__(self, *names: str) -> None:
        super().__init__()
        for name in names:
            value = torch.arange(4, dtype=torch.float32)
            setattr(self, name, nn.Parameter(value, requires_grad=False))


def by_loader(parameter: Any, weight: torch.Tensor) -> None:
    """As vLLM's models do."""
    from vllm.model_executor.model_loader.weight_utils import default_weight_loader

    getattr(parameter, "weight_loader", default_weight_loader)(parameter, weight)


def past_loader(parameter: Any, weight: torch.Tensor) -> None:
    """As gpt-oss does with its experts."""
    parameter.data.copy_(weight)


class Model(nn.Module):
    """Three layers and what is loaded into them."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = Layer("weight", "bias"), Layer("weight")
        self.scale = torch.ones(1)  # of no module's, and not a buffer
        self.load: Callable[[Any, torch.Tensor], None] = by_loader
        self.does: Callable[[Model], object] = lambda model: None
        self.unreported: frozenset[str] = frozenset()

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        loaded = set()
        for name, weight in weights:
            self.load(self.get_parameter(name), weight)
            loaded.add(name)
        self.does(self)
        return loaded - self.unreported


NAMES = ("up.weight", "up.bias", "down.weight")


def rehearse(model: Model, *, quantization: str | None = None) -> str:
    metas = tuple(TensorMeta(name, DataType.FLOAT32, (4,)) for name in NAMES)
    worker = SimpleNamespace(
        model_runner=SimpleNamespace(get_model=lambda: model),
        model_config=SimpleNamespace(quantization=quantization),
        vllm_config=None,
    )
    return why_not_reloaded(worker, Reference("Model", metas))


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> Model:
    from vllm.model_executor.model_loader.reload import record_metadata_for_reloading

    monkeypatch.setattr(bridges, "vllm_config_context", lambda config: contextlib.nullcontext())
    made = Model()
    record_metadata_for_reloading(made)
    return made


def derive(model: Model) -> None:
    """As MLA does once its weights are loaded."""
    model.down.register_parameter("W_UV", nn.Parameter(torch.ones(2), requires_grad=False))


def load_down_past_it(model: Model) -> None:
    down = model.down
    model.load = lambda p, w: (past_loader if p is down.weight else by_loader)(p, w)


def grow_a_part(model: Model) -> None:
    from vllm.model_executor.model_loader.reload import record_metadata_for_reloading

    model.up.register_parameter("sinks", nn.Parameter(torch.ones(4), requires_grad=False))
    record_metadata_for_reloading(model)
    model.load_weights = lambda weights: {  # type: ignore[method-assign]
        *Model.load_weights(model, weights), "up.sinks",
    }  # fmt: skip


def fail(model: Model) -> None:
    raise KeyError("layers.0.mlp.experts")


CANNOT: dict[str, tuple[Callable[[Model], object], str]] = {
    "derives a parameter": (derive, "'down.W_UV' and 0 more get no value"),
    "is loaded past its loaders": (
        lambda m: setattr(m, "load", past_loader), "'up' and 1 more get no weights"
    ),
    "is loaded past its loaders in part": (load_down_past_it, "'down' and 0 more get no weights"),
    "has a part that nothing comes for": (grow_a_part, "'up.sinks' and 0 more"),
    "does not report a parameter": (
        lambda m: setattr(m, "unreported", frozenset({"down.weight"})), "'down.weight'"
    ),
    "fails": (lambda m: setattr(m, "does", fail), "KeyError: 'layers.0.mlp.experts'"),
}  # fmt: skip


def state(model: Model) -> list[Any]:
    tensors = [*model.named_parameters(), *model.named_buffers(), ("scale", model.scale)]
    return [
        *((name, id(t), t.data_ptr(), t.tolist(), sorted(vars(t))) for name, t in tensors),
        *((name, sorted(vars(m)), sorted(m._parameters)) for name, m in model.named_modules()),
    ]


def test_a_model_that_can_be_reloaded_is_left_as_it_is(model: Model) -> None:
    before = state(model)
    for _ in range(2):  # and so it is rehearsed again
        assert rehearse(model) == ""
        assert state(model) == before


@pytest.mark.parametrize("kind", CANNOT)
def test_what_a_reload_would_leave_without_a_value(model: Model, kind: str) -> None:
    change, text = CANNOT[kind]
    change(model)
    before = state(model)
    why = rehearse(model)
    assert why.startswith("vLLM's reload of Model would leave mixed weights: ")
    assert text in why
    assert state(model) == before


@pytest.mark.parametrize(
    "does",
    [
        lambda m: m.scale.fill_(0),
        lambda m: m.up.bias.zero_(),
        lambda m: setattr(m, "scale", torch.zeros(1)),
        lambda m: setattr(m.up, "noted", True),
        lambda m: setattr(m.up.bias, "data", torch.zeros(4)),
        lambda m: m.down.register_buffer("seen", torch.zeros(1)),
        lambda m: m.add_module("more", Layer("weight")),
        lambda m: torch.add(m.scale, 1, out=m.scale),
    ],
)
def test_what_loading_changes_by_the_way_is_held_back(
    model: Model, does: Callable[[Model], object]
) -> None:
    model.does = does
    before = state(model)
    assert rehearse(model) == ""
    assert state(model) == before


def test_quantised_models_report_what_they_like(model: Model) -> None:
    derive(model)
    assert rehearse(model, quantization="fp8") == ""


@pytest.fixture(params=[pytest.param(kind, marks=pytest.mark.matrix) for kind in _NOT_RELOADED])
def served(
    request: pytest.FixtureRequest, tmp_path: Path
) -> Iterator[tuple[EngineProcess, Path, Path]]:
    """An engine whose model vLLM 0.32 cannot reload, that model, and another one."""
    base = make_model(request.param, tmp_path / "base", seed=0)
    other = make_model(request.param, tmp_path / "other", seed=1)
    # Of itself vLLM takes AMX where the processor has it, which knows no float32.
    args = ("--attention-backend", "CPU_MLA") if request.param == "deepseek_v2" else ()
    engine = EngineProcess(base, args).start()
    yield engine, base, other
    engine.stop()


def test_an_engine_that_cannot_reload_says_so_and_serves_on(
    served: tuple[EngineProcess, Path, Path], referee: Referee
) -> None:
    engine, base, other = served
    why = engine.facts["capabilities"].base_refusal
    assert "get no" in why
    # Of one token: with more, vLLM's DeepSeek-V2 is 0.5 nats from transformers', rehearsed or not.
    check(referee, engine.complete("tiny", PROMPT[:1], 1), base, prompt=PROMPT[:1])
    before = engine.complete("tiny", PROMPT)
    with pytest.raises(LoadFailedError, match="can load no base") as refused:
        engine.push_base("base@1", other)
    assert "dirty" not in refused.value.metadata
    assert not engine.call("dirty_reason")
    assert engine.complete("tiny", PROMPT) == before
