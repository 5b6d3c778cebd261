"""What differs between versions of vLLM, without vLLM."""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

from rollout_side.vllm_engine.compat import bridges, places
from weft_rl.contract.errors import UnsupportedError


@pytest.mark.parametrize("version", ["0.26.0", "0.26.1", "0.32.0+cpu", "0.32.0rc1", "0.33.0"])
def test_versions_that_work(version: str) -> None:
    bridges.check_version(version)


@pytest.mark.parametrize(
    "version", ["0.25.9", "0.27.0", "0.31.0", "0.34.0", "0.34.0rc1", "1.0", "0.9", "dev"]
)
def test_versions_that_are_refused(version: str) -> None:
    with pytest.raises(UnsupportedError) as refused:
        bridges.check_version(version)
    assert version in str(refused.value)
    assert bridges.SUPPORTED_RANGE in str(refused.value)


@pytest.mark.parametrize(
    "error",
    [
        ModuleNotFoundError("No module named 'vllm'"),
        # torchvision's build for CUDA, beside torch for a CPU.
        RuntimeError("operator torchvision::nms does not exist"),
        ImportError("cannot import name 'a'\nTraceback (most recent call last):"),
        SystemExit(1),
    ],
)
@pytest.mark.parametrize("load", [bridges.installed_version, bridges.server_parts])
def test_what_importing_it_ends_with_is_a_sentence(
    monkeypatch: pytest.MonkeyPatch, load: Callable[[], object], error: BaseException
) -> None:
    def import_module(name: str) -> Any:
        raise error

    monkeypatch.setattr(bridges.importlib, "import_module", import_module)
    with pytest.raises(UnsupportedError, match="vLLM cannot be imported") as raised:
        load()
    assert f"({type(error).__name__}: {str(error).partition(chr(10))[0]})" in raised.value.message
    assert "\n" not in raised.value.message


def test_the_range_is_the_one_that_is_installed_and_that_the_readme_names() -> None:
    """The newest is tried by `make versions`, if there is a build for CPUs or not."""
    (major, oldest), (_, newest) = places.RELEASES[0], places.RELEASES[-1]
    holes = [f"!={major}.{n}.*" for n in range(oldest, newest) if (major, n) not in places.RELEASES]
    found = ",".join((f">={major}.{oldest}", f"<{major}.{newest + 1}", *holes))
    assert found == bridges.SUPPORTED_RANGE
    root = Path(__file__).parents[5]
    assert f'"vllm{bridges.SUPPORTED_RANGE}"' in (root / "pyproject.toml").read_text()
    *older, last = (f"{major}.{minor}" for major, minor in places.RELEASES)
    assert f"vLLM {', '.join(older)} or {last}" in (root / "README.md").read_text()


class _Wrapper(nn.Module):
    """As vLLM's ``BaseLayerWithLoRA``."""

    def __init__(self, base_layer: nn.Module) -> None:
        super().__init__()
        self.base_layer = base_layer


def test_loaders_see_no_layers_that_lora_wraps(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.ModuleDict({"up": nn.Linear(2, 2), "deep": nn.ModuleDict({"down": nn.Linear(2, 2)})})
    built = [name for name, _ in model.named_parameters()]
    model["up"] = _Wrapper(model["up"])
    model["deep"]["down"] = _Wrapper(model["deep"]["down"])
    wrapped = [name for name, _ in model.named_parameters()]
    assert "deep.down.base_layer.weight" in wrapped
    monkeypatch.delitem(sys.modules, "vllm.lora.layers", raising=False)
    with bridges.without_lora(model):  # nothing can be wrapped
        assert [name for name, _ in model.named_parameters()] == wrapped
    layers = SimpleNamespace(BaseLayerWithLoRA=_Wrapper)
    monkeypatch.setitem(sys.modules, "vllm.lora.layers", layers)  # type: ignore[arg-type]
    with contextlib.suppress(KeyError), bridges.without_lora(model):
        assert [name for name, _ in model.named_parameters()] == built
        raise KeyError("no such name")  # as a loader may
    assert [name for name, _ in model.named_parameters()] == wrapped


@pytest.mark.parametrize(
    ("module", "rank", "alpha"),
    [
        ("model.layers.0.self_attn.q_proj", 4, 32),
        ("model.layers.1.mlp.up_proj", 16, 32),
        ("model.layers.0.mlp.up_proj", 8, 32),
        ("model.layers.0.self_attn.k_proj", 8, 3),
        ("model.layers.0.self_attn.other_q_proj", 8, 32),
    ],
)
@pytest.mark.parametrize("rslora", [False, True])
def test_patterns_scale_as_peft_does(module: str, rank: int, alpha: float, rslora: bool) -> None:
    config = {
        "r": 8,
        "lora_alpha": 32,
        "use_rslora": rslora,
        "rank_pattern": {"q_proj": 4, "1.mlp.up_proj": 16},
        "alpha_pattern": {"k_proj": 3},
    }
    scaling = alpha / (math.sqrt(rank) if rslora else rank)
    assert bridges.pattern_scaling(config, module) == (rank, pytest.approx(scaling))
    config["rank_pattern"] = config["alpha_pattern"] = None
    assert bridges.pattern_scaling(config, module)[0] == 8


class _Mapper:
    def get_unstacked_mapper(self) -> str:
        return "unstacked"


class _Model:
    hf_to_vllm_mapper = _Mapper()


def test_the_mapper_by_either_name() -> None:
    assert bridges.rename_mapper(object()) is None
    assert bridges.rename_mapper(_Model()) == "unstacked"
    _Mapper.get_rename_mapper = lambda self: "renames"  # type: ignore[attr-defined]
    try:
        assert bridges.rename_mapper(_Model()) == "renames"
    finally:
        del _Mapper.get_rename_mapper  # type: ignore[attr-defined]


async def test_what_an_old_version_lacks_is_left_out() -> None:
    class Old:
        """An engine and a model runner without the newer methods."""

    await bridges.set_weight_version(Old(), "base@3")
    bridges.reset_lora_state(Old())
    bridges.validate_loaded(Old(), None)
    assert not bridges.helper_knows_patterns(Old())


def test_a_loader_that_cannot_read_its_files_again_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class DummyModelLoader:
        pass

    loaders = SimpleNamespace(get_model_loader=lambda config: DummyModelLoader())
    monkeypatch.setitem(sys.modules, "vllm.model_executor.model_loader", loaders)
    worker = SimpleNamespace(
        vllm_config=SimpleNamespace(load_config=None),
        model_config=None,
        model_runner=SimpleNamespace(get_model=object),
    )
    with pytest.raises(UnsupportedError, match="DummyModelLoader cannot read its files again"):
        bridges.checkpoint_tensors(worker)


@pytest.mark.parametrize(
    ("lazily", "strategy", "used"),
    [(True, None, "lazy"), (True, "torchao", "torchao"), (False, "prefetch", "prefetch")],
)
def test_files_are_read_again_without_a_word_and_no_more_of_them_than_is_used(
    monkeypatch: pytest.MonkeyPatch, lazily: bool, strategy: str | None, used: str
) -> None:
    def get_model_loader(config: Any) -> Any:
        return SimpleNamespace(get_all_weights=lambda *of: iter([config]))

    loaders = SimpleNamespace(get_model_loader=get_model_loader)
    monkeypatch.setitem(sys.modules, "vllm.model_executor.model_loader", loaders)
    config = SimpleNamespace(use_tqdm_on_load=True, safetensors_load_strategy=strategy)
    runner = SimpleNamespace(get_model=lambda: None)
    worker = SimpleNamespace(
        vllm_config=SimpleNamespace(load_config=config), model_config=None, model_runner=runner
    )
    (given,) = bridges.checkpoint_tensors(worker, lazily=lazily)
    assert vars(given) == {"use_tqdm_on_load": False, "safetensors_load_strategy": used}
    assert vars(config) == {"use_tqdm_on_load": True, "safetensors_load_strategy": strategy}


def test_files_of_which_a_part_can_be_read_again(tmp_path: Path) -> None:
    def why(model: object = None, load_format: str = "auto", **settings: object) -> str:
        load_config = SimpleNamespace(load_format=load_format, download_dir=None, **settings)
        worker = SimpleNamespace(
            vllm_config=SimpleNamespace(load_config=load_config),
            model_config=SimpleNamespace(model=str(tmp_path), revision=None),
            model_runner=SimpleNamespace(get_model=lambda: model),
        )
        return bridges.why_read_whole(worker)

    (tmp_path / "pytorch_model.bin").touch()
    assert why() == "there are no safetensors files on disk"
    (tmp_path / "model.safetensors").touch()
    for load_format in ("auto", "hf", "safetensors", "mistral"):
        assert why(load_format=load_format, model_loader_extra_config={}) == ""
    assert "fastsafetensors" in why(load_format="fastsafetensors")
    assert why(model_loader_extra_config={"enable_multithread_load": True})
    assert why(safetensors_load_strategy="torchao")
    assert "chooses its files" in why(SimpleNamespace(secondary_weights=["of another model"]))
    assert "chooses its files" in why(SimpleNamespace(allow_patterns_overrides=["*.pt"]))


def _module(monkeypatch: pytest.MonkeyPatch, name: str, **members: Any) -> None:
    monkeypatch.setitem(sys.modules, name, SimpleNamespace(**members))


def test_an_executor_that_knows_which_tags_sleep_sleeps_in_part(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Newer:
        @property
        def is_sleeping(self) -> bool:
            return False

    class Older:
        """0.26 sets a flag in ``__init__``."""

    for executor, expected in ((Newer, True), (Older, False)):
        _module(monkeypatch, "vllm.v1.executor.abstract", Executor=executor)
        assert bridges.can_sleep_in_part() is expected


def test_what_is_discarded_is_what_was_allocated_for_weights(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def data(tag: str, num_bytes: int) -> Any:
        return SimpleNamespace(tag=tag, handle=(0, num_bytes, 0, 0))

    held = {1000: data("weights", 64), 2000: data("kv_cache", 32), 3000: data("weights", 8)}
    allocator = SimpleNamespace(pointer_to_data=held)
    _module(monkeypatch, "vllm.device_allocator", get_mem_allocator_instance=lambda: allocator)
    assert bridges.weights_memory() == [(1000, 64), (3000, 8)]
    held[4000] = data("default", 16)  # which wakes with whatever does
    assert bridges.waking_bytes() == 64 + 8 + 16
