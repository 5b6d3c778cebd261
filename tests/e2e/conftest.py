"""Tiny models and running engines, one of each a session."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from xdist.scheduler import LoadFileScheduling

from tests.e2e.engine_process import LORA_ARGS, EngineProcess
from tests.models import Referee, make_adapter, make_model

NUM_ADAPTERS = 4
# Files whose tests share this session's engines: where several processes run tests, one has these.
_SHARE_ENGINES = {
    "test_vllm_engine_adapters.py",
    "test_vllm_engine_base.py",
    "test_vllm_engine_workers.py",
    "test_vllm_layerwise_reload.py",
}


class _SharedEngines(LoadFileScheduling):
    """A process has the tests of a file, and one has those of the files that share engines.

    (``--dist loadgroup`` is for that, and does nothing with xdist 3.8 and pytest 9.2: the former
    names groups where the latter no longer looks.)
    """

    def _split_scope(self, nodeid: str) -> str:
        path = nodeid.partition("::")[0]
        return "engines" if Path(path).name in _SHARE_ENGINES else path


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadFileScheduling | None:
    """Of ``--dist loadfile``."""
    return _SharedEngines(config, log) if config.getvalue("dist") == "loadfile" else None


@dataclass(frozen=True)
class TinyModels:
    """A base, another one of the same shape, and adapters trained on the first."""

    base: Path
    other: Path
    adapters: tuple[Path, ...]


def _tiny(root: Path, kind: str, *, tied: bool, adapters: int) -> TinyModels:
    base = make_model(kind, root / "base", seed=0, tied=tied)
    return TinyModels(
        base,
        make_model(kind, root / "other", seed=1, tied=tied),
        tuple(make_adapter(base, root / f"adapter{i}", seed=i) for i in range(adapters)),
    )


@pytest.fixture(scope="session")
def qwen2(tmp_path_factory: pytest.TempPathFactory) -> TinyModels:
    """Untied Qwen2."""
    root = tmp_path_factory.mktemp("qwen2")
    return _tiny(root, "qwen2", tied=False, adapters=NUM_ADAPTERS)


@pytest.fixture(scope="session")
def qwen2_tied(tmp_path_factory: pytest.TempPathFactory) -> TinyModels:
    """Qwen2 whose lm_head is its embedding."""
    root = tmp_path_factory.mktemp("qwen2-tied")
    return _tiny(root, "qwen2", tied=True, adapters=NUM_ADAPTERS)


@pytest.fixture(scope="session")
def qwen3_moe(tmp_path_factory: pytest.TempPathFactory) -> TinyModels:
    """Qwen3-MoE, without adapters: vLLM serves none on experts without Triton."""
    return _tiny(tmp_path_factory.mktemp("moe"), "qwen3_moe", tied=False, adapters=0)


@pytest.fixture(scope="session")
def referee() -> Referee:
    """transformers and PEFT."""
    return Referee()


@pytest.fixture(scope="session")
def engine_tp1(qwen2: TinyModels) -> Iterator[EngineProcess]:
    """An engine of one worker that serves ``qwen2.base``."""
    engine = EngineProcess(qwen2.base, tuple(LORA_ARGS)).start()
    yield engine
    engine.stop()


@pytest.fixture(scope="session")
def engine_tp2(qwen2_tied: TinyModels) -> Iterator[EngineProcess]:
    """An engine of two workers that serves ``qwen2_tied.base``."""
    args = (*LORA_ARGS, "--tensor-parallel-size", "2")
    engine = EngineProcess(qwen2_tied.base, args).start()
    yield engine
    engine.stop()


@dataclass(frozen=True)
class Served:
    """An engine and the models that it is tested with."""

    engine: EngineProcess
    models: TinyModels


@pytest.fixture(params=["tp1", "tp2"])
def served(request: pytest.FixtureRequest) -> Served:
    """Each engine, serving its base; leave it so."""
    models = {"tp1": "qwen2", "tp2": "qwen2_tied"}[request.param]
    return Served(
        request.getfixturevalue(f"engine_{request.param}"), request.getfixturevalue(models)
    )
