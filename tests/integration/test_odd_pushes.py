"""Whatever a push is given, it succeeds or is refused with a type. Nothing has changed then, and
the next push works."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn.parallel import DistributedDataParallel

from tests.doubles.engine import EngineDouble
from tests.doubles.pool import Pool, running_pool
from tests.integration.models import Model, lora, peft_of, same, weights
from trainer_side import Publisher, PushOptions, RolloutClient, Tls
from weft_rl.contract.errors import WeftError

# -- a pool --------------------------------------------------------------------------------------


class Served:
    """A pool of one replica, and a publisher of it."""

    def __init__(self, pool: Pool, publisher: Publisher, engine: EngineDouble) -> None:
        self.pool, self.publisher, self.engine = pool, publisher, engine

    def outcome(self, push: Callable[[Publisher], Any]) -> WeftError | None:
        """Carry out a push; return the error that it was refused with, which changed nothing."""
        agent = self.pool.agents["replica-0"]
        before, base = agent.serving.vector, self.engine.base
        refused: WeftError | None = None
        try:
            found = push(self.publisher)
            if isinstance(found, Future):
                found.result(30)
        except WeftError as error:
            refused = error
        if refused is not None:
            now = agent.serving.vector
            assert (now.base, now.aliases) == (before.base, before.aliases), refused
            assert self.engine.base is base, refused
        return refused

    def adapter(self, policy: str) -> dict[str, torch.Tensor]:
        """Tensors of the newest version of a policy."""
        versions = self.pool.agents["replica-0"].serving.vector.adapters[policy]
        return self.engine.adapter(f"{policy}@{versions.alias}")


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with running_pool(tmp_path_factory.mktemp("pool") / "weft.db") as pool:
        pool.add_replica("replica-0", engine := EngineDouble(weights(Model())))
        with Publisher(pool.target, trainer_id="t", timeout_seconds=30, progress=None) as publisher:
            yield Served(pool, publisher, engine)


@pytest.fixture(autouse=True)
def next_push_works(served: Served) -> Iterator[None]:
    yield
    served.publisher.push_adapter(model := peft_of(Model(), seed=9), "last")
    assert same(served.adapter("last"), lora(model))


# -- arguments -----------------------------------------------------------------------------------


class NoRepr:
    def __repr__(self) -> str:
        raise RuntimeError("of the user's own")


ODD: dict[str, Any] = {
    "None": None, "True": True, "False": False, "zero": 0, "negative": -1, "fraction": 1.5,
    "nan": float("nan"), "infinite": float("inf"), "huge": 10**30, "digits": 10**5000,
    "bytes": b"x", "empty": "", "long": "x" * 5000, "nul": "a\0b", "surrogate": "\ud800",
    "list": [], "dict": {}, "set": {1}, "object": object(), "type": int, "complex": 1j,
    "np.int64": np.int64(1), "np.float32": np.float32(2), "np.bool": np.bool_(1),
    "array": np.array([1, 2]), "texts": np.array(["base", "math"]), "tensor": torch.ones(2),
    "path": Path("/nowhere"), "no repr": NoRepr(), "superscript": "²",
}  # fmt: skip
_MORE = ("require", "timeout_seconds", "options")
PUSHES: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "push_adapter": ({"policy": "math"}, ("model", "policy", "base", "adapter_name", *_MORE)),
    "push_base": ({}, ("model", "draft", *_MORE)),
    "push_merged": ({}, ("model", "adapter_name", "draft", *_MORE)),
    "push_tensors": ({}, ("tensors", "metadata", "draft", *_MORE)),
}
for _method in ("push_adapter", "push_base", "push_merged"):
    PUSHES[f"{_method}_async"] = (PUSHES[_method][0], (*PUSHES[_method][1], "when_busy"))
CALLS = [(method, argument) for method, (_, names) in PUSHES.items() for argument in names]


@pytest.mark.parametrize(("method", "argument"), CALLS)
def test_an_odd_argument_has_a_typed_outcome(served: Served, method: str, argument: str) -> None:
    given = dict(PUSHES[method][0])
    if method == "push_tensors":
        given["tensors"] = weights(Model())
    else:
        given["model"] = Model() if "base" in method else peft_of(Model())
    for value in ODD.values():
        arguments = {**given, argument: value}
        served.outcome(lambda p, given=arguments: getattr(p, method)(**given))  # type: ignore[misc]


@pytest.mark.parametrize("argument", ["level", "when_running", "timeout_seconds"])
def test_an_odd_argument_of_a_sleep_has_a_typed_outcome(served: Served, argument: str) -> None:
    for value in ODD.values():
        served.outcome(lambda p, v=value: p.rollouts_asleep(**{argument: v}))  # type: ignore[misc]


_OF_PUBLISHER = (
    "coordinator", "trainer_id", "require", "timeout_seconds", "connect_seconds", "backend",
    "ranks", "progress", "on_publish_again", "takeover", "tls", "token", "options",
    "bucket_bytes", "data_host", "device", "max_senders",
)  # fmt: skip
_OF_CLIENT = (
    "coordinator", "logprobs_mode", "logprobs_truncated", "timeout_seconds", "connect_seconds",
    "stall_seconds", "max_requests_per_replica", "tls", "token",
)  # fmt: skip
ODD_TARGETS = ("host:²", "host:" + "9" * 5000, "x" * 300 + ":1", "a\0b:1", "\ud800:1", ".:1")


@pytest.mark.parametrize(
    ("made", "argument"),
    [(Publisher, name) for name in _OF_PUBLISHER] + [(RolloutClient, name) for name in _OF_CLIENT],
)
def test_an_odd_argument_of_a_constructor_has_a_typed_outcome(
    served: Served, made: Any, argument: str
) -> None:
    """And what is made can be used: its first push succeeds or is refused."""
    values = [*ODD.values(), *(ODD_TARGETS if argument in ("coordinator", "data_host") else ())]
    values += [Tls(ca=None), Tls(ca="/nowhere")] if argument == "tls" else []  # type: ignore[arg-type]
    values += ["a\nb", "ü"] if argument == "token" else []
    for value in values:
        given: dict[str, Any] = {"coordinator": served.pool.target}
        if made is Publisher:
            given |= {"trainer_id": "odd", "timeout_seconds": 20, "progress": None}
        try:
            with made(**{**given, argument: value}) as running:
                if made is Publisher and argument not in ("on_publish_again", "progress"):
                    running.push_adapter(peft_of(Model()), "odd", timeout_seconds=20)
        except WeftError:
            continue


# -- streams that progress is shown on -------------------------------------------------------------


class Tee:
    """Stream that programs put in the place of standard error: it can be written to, no more."""

    def __init__(self) -> None:
        self.text = ""

    def write(self, text: str) -> None:
        self.text += text


class Terminal(Tee):
    encoding = None

    def isatty(self) -> bool:
        return True


class Broken:
    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(name)


def _closed() -> Any:
    stream = open("/dev/null", "w")  # noqa: SIM115 (closed here)
    stream.close()
    return stream


@pytest.mark.parametrize("made", [lambda: None, _closed, Tee, Terminal, Broken])
def test_progress_is_shown_on_whatever_standard_error_is(
    served: Served, monkeypatch: pytest.MonkeyPatch, made: Callable[[], Any]
) -> None:
    monkeypatch.setattr("weft_rl.progress._FIRST_LINE_SECONDS", 0.001)
    monkeypatch.setattr("weft_rl.progress._LINE_SECONDS", 0.001)
    monkeypatch.setattr("weft_rl.progress.LineView.first_seconds", 0.001)
    monkeypatch.setattr("weft_rl.progress.TerminalView.first_seconds", 0.001)
    monkeypatch.setenv("TERM", "xterm")
    with Publisher(served.pool.target, trainer_id="t2", timeout_seconds=20) as publisher:
        monkeypatch.setattr(sys, "stderr", made())
        publisher.push_adapter(peft_of(Model()), "shown")
        publisher.push_adapter_async(peft_of(Model()), "shown").result(20)
        monkeypatch.undo()


# -- models --------------------------------------------------------------------------------------


def _replace(model: nn.Module, path: str, wrap: Callable[[Any], nn.Module]) -> nn.Module:
    parent, _, name = path.rpartition(".")
    children = model.get_submodule(parent)._modules
    children[name] = wrap(children[name])
    return model


def ddp(module: nn.Module) -> nn.Module:
    """Make a model as DDP holds it, without a process group."""
    wrapper = DistributedDataParallel.__new__(DistributedDataParallel)
    nn.Module.__init__(wrapper)
    wrapper.module = module
    return wrapper


def compiled(module: nn.Module) -> nn.Module:
    return torch.compile(module, backend="eager")  # type: ignore[return-value]


Wrap = Callable[[Any], nn.Module]
WRAPS: dict[str, Wrap] = {"checkpoint": checkpoint_wrapper, "ddp": ddp, "compiled": compiled}
LAYER = "base_model.model.layers.1.q_proj"
PLACES: dict[str, Callable[[Wrap], nn.Module]] = {
    "a LoRA layer": lambda wrap: _replace(peft_of(Model(), seed=2), LAYER, wrap),
    "a block": lambda wrap: _replace(peft_of(Model(), seed=2), "base_model.model.layers", wrap),
    "the base": lambda wrap: peft_of(wrap(Model()), seed=2),
    "the model": lambda wrap: wrap(peft_of(Model(), seed=2)),
    "twice": lambda wrap: wrap(checkpoint_wrapper(_replace(peft_of(Model(), seed=2), LAYER, wrap))),
}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch.compile's own imports
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("wrap", WRAPS)
def test_wrappers_are_known_by_what_they_are(served: Served, wrap: str, place: str) -> None:
    """Wherever they are, and for every push."""
    plain, model = peft_of(Model(), seed=2), PLACES[place](WRAPS[wrap])
    expected = lora(plain)
    for push in ("push_adapter", "push_adapter_async"):
        error = served.outcome(lambda p, push=push: getattr(p, push)(model, "wrapped"))  # type: ignore[misc]
        assert error is None, error
        assert same(served.adapter("wrapped"), expected)
    served.publisher.push_merged(model)
    merged = weights(plain.merge_and_unload())
    assert merged.keys() == served.engine.base.keys()
    assert all(torch.allclose(t, served.engine.base[n], atol=1e-5) for n, t in merged.items())
    served.publisher.push_merged_async(model).result(20)
    served.publisher.push_base(WRAPS[wrap](Model(6)))
    assert same(served.engine.base, weights(Model(6)))


class _Named(nn.Module):
    """A model of a user's, with attributes that wrappers have, too."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self._orig_mod = nn.Linear(4, 4)
        self.module = nn.ModuleDict({"q_proj": nn.Linear(4, 4), "module": nn.Linear(4, 4)})


def test_a_users_attributes_are_no_wrappers(tmp_path: Path) -> None:
    with running_pool(tmp_path / "weft.db") as pool:
        pool.add_replica("replica-0", engine := EngineDouble(weights(_Named())))
        with Publisher(pool.target, trainer_id="t", timeout_seconds=20) as publisher:
            publisher.push_base(_Named())
    assert same(engine.base, weights(_Named()))


def test_adapters_in_a_models_own_layers(served: Served) -> None:
    """As ``inject_adapter_in_model`` and the inner model of a PEFT model have them."""
    from peft import LoraConfig, inject_adapter_in_model

    config = LoraConfig(r=4, target_modules=["q_proj", "v_proj"])
    model: Any = inject_adapter_in_model(config, Model())
    plain = peft_of(Model(), seed=2)
    with torch.no_grad():
        for (_, own), (_, other) in zip(
            sorted((n, p) for n, p in model.named_parameters() if "lora_" in n),
            sorted((n, p) for n, p in plain.named_parameters() if "lora_" in n),
            strict=True,
        ):
            own.copy_(other)
    expected = lora(plain)
    for each in (model, plain.base_model.model, plain.base_model):
        served.publisher.push_adapter(each, "within")
        assert same(served.adapter("within"), expected)
        served.publisher.push_merged(each)
        error = served.outcome(lambda p, each=each: p.push_base(each))  # type: ignore[misc]
        assert error is not None
        assert "push_adapter sends its adapter" in error.message
    merged = weights(plain.merge_and_unload())
    assert all(torch.allclose(t, served.engine.base[n], atol=1e-5) for n, t in merged.items())
    served.publisher.push_base(plain.unload())


def test_adapters_of_transformers_own(tmp_path: Path) -> None:
    """``add_adapter``: three answers pointed at each other."""
    from peft import LoraConfig
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    settings = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
    config = LlamaConfig(**settings, num_attention_heads=2, num_key_value_heads=2, vocab_size=40)
    model = LlamaForCausalLM(config)
    held = weights(model)
    model.add_adapter(LoraConfig(r=4, target_modules=["q_proj", "v_proj"]), "mine")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.normal_()
    model.save_pretrained(tmp_path / "saved")
    with running_pool(tmp_path / "weft.db") as pool:
        pool.add_replica("replica-0", engine := EngineDouble(held, architecture="LlamaForCausalLM"))
        with Publisher(pool.target, trainer_id="t", timeout_seconds=20) as publisher:
            publisher.push_adapter(model, "math", adapter_name="mine", base="any")
            publisher.push_adapter(tmp_path / "saved", "saved", base="any")
            assert same(engine.adapter("math@1"), engine.adapter("saved@1"))
            publisher.push_merged(model, adapter_name="mine")
            layer: Any = model.model.layers[0].self_attn.q_proj
            name = "model.layers.0.self_attn.q_proj.weight"
            merged = held[name] + layer.get_delta_weight("mine")
            assert torch.allclose(engine.base[name], merged, atol=1e-5)
            with pytest.raises(WeftError, match="has no adapter 'default'; it has mine"):
                publisher.push_adapter(model, "math")


def test_adapters_of_a_model_that_mixes_kinds(served: Served) -> None:
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=4, target_modules=["q_proj", "v_proj"])
    model: Any = get_peft_model(Model(), config, mixed=True)
    held = weights(Model())
    served.publisher.push_adapter(model, "mixed")
    served.publisher.push_merged(model)
    assert same(served.engine.base, held)  # LoRA begins with nothing


class _Subclass(torch.Tensor):
    """A tensor that stands for another one, as torchao's do."""

    held: torch.Tensor

    @staticmethod
    def __new__(cls, held: torch.Tensor) -> _Subclass:
        made: Any = torch.Tensor._make_wrapper_subclass(cls, held.shape, dtype=held.dtype)
        made.held = held
        return made  # type: ignore[no-any-return]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if func is torch.ops.aten.detach.default:
            return cls(args[0].held)
        raise NotImplementedError(f"{func} of a stranger's tensor")


def _fake(tensor: torch.Tensor) -> torch.Tensor:
    return FakeTensorMode(allow_non_fake_inputs=True).from_tensor(tensor)


ODD_TENSORS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "meta": lambda t: t.to("meta"),
    "fake": _fake,
    "subclass": _Subclass,
    "sparse": lambda t: t.to_sparse(),
    "complex": lambda t: t.to(torch.complex64),
    "nested": lambda t: torch.nested.nested_tensor([t[0], t[1]]),
    "lazy": lambda t: nn.UninitializedParameter(),
    "quantised": lambda t: torch.quantize_per_tensor(t, 0.1, 0, torch.qint8),
}


def _with(model: nn.Module, part: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    for name, param in [*model.named_parameters()]:
        if part in name:
            owner, _, last = name.rpartition(".")
            odd = change(param.detach())
            if not isinstance(odd, nn.Parameter):
                odd = nn.Parameter(odd, requires_grad=False)
            model.get_submodule(owner)._parameters[last] = odd
    return model


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.filterwarnings("ignore:.*quantize:UserWarning")
@pytest.mark.filterwarnings("ignore:.*:DeprecationWarning")
@pytest.mark.parametrize("odd", ODD_TENSORS)
def test_tensors_that_stand_for_others_are_refused_by_name(served: Served, odd: str) -> None:
    change = ODD_TENSORS[odd]
    tuned = _with(peft_of(Model()), "layers.1.q_proj.lora_A", change)
    plain = _with(Model(), "layers.1.q_proj.weight", change)
    pushes: dict[str, Callable[[Publisher], Any]] = {
        "adapter": lambda p: p.push_adapter(tuned, "odd"),
        "adapter, later": lambda p: p.push_adapter_async(tuned, "odd"),
        "merged": lambda p: p.push_merged(tuned),
        "merged, later": lambda p: p.push_merged_async(tuned),
        "base": lambda p: p.push_base(plain),
        "base, later": lambda p: p.push_base_async(plain),
        "draft": lambda p: p.push_base(Model(), draft=plain),
        "tensors": lambda p: p.push_tensors(dict(plain.named_parameters())),
        "iterator": lambda p: p.push_tensors(lambda: plain.named_parameters()),
    }
    for kind, push in pushes.items():
        error = served.outcome(push)
        assert error is not None, kind
        assert "q_proj" in error.message or odd in ("lazy", "nested") or kind == "draft", error


def test_a_base_that_is_elsewhere_does_not_matter_to_an_adapter(served: Served) -> None:
    """Offloaded, or quantised by a stranger: its elements are not read."""
    for change in (ODD_TENSORS["meta"], _Subclass):
        model = _with(peft_of(Model(), seed=2), "base_layer.weight", change)
        served.publisher.push_adapter(model, "elsewhere")
        assert same(served.adapter("elsewhere"), lora(peft_of(Model(), seed=2)))


class _Unmade(nn.Module):
    def __init__(self) -> None:
        """Without torch's."""


def _scripted() -> nn.Module:
    return torch.jit.script(nn.Sequential(nn.Linear(2, 2)))


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
@pytest.mark.parametrize(
    "made", [_Unmade, _scripted, lambda: nn.LazyLinear(3), nn.Identity, nn.ParameterList]
)
def test_an_odd_module_has_a_typed_outcome(served: Served, made: Callable[[], nn.Module]) -> None:
    model = made()
    pushes: list[Callable[[Publisher], Any]] = [
        lambda p: p.push_adapter(model, "odd"),
        lambda p: p.push_base(model),
        lambda p: p.push_base_async(model),
        lambda p: p.push_merged(model),
        lambda p: p.push_base(Model(), draft=model),
    ]
    for push in pushes:
        assert served.outcome(push) is not None


def test_the_errors_of_a_users_own_iterator_are_its_own(served: Served) -> None:
    def broken() -> Iterator[tuple[str, torch.Tensor]]:
        yield from list(weights(Model()).items())[:2]
        raise LookupError("of the user's own")

    for metadata in (None, weights(Model())):
        with pytest.raises(LookupError, match="user's own"):
            served.publisher.push_tensors(broken(), metadata=metadata)


def test_options_are_checked_where_they_are_made() -> None:
    for name in ("cast", "check_finite", "kind"):
        for value in ODD.values():
            if type(value) is not bool:
                with pytest.raises(WeftError):
                    PushOptions(**{name: value})
