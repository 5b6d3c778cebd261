"""Adapters of models whose files have other names, or other tensors, than a trainer's memory."""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.e2e.engine_process import LORA_ARGS, EngineProcess
from tests.e2e.logprobs import PROMPT
from tests.models import (
    Referee,
    load_peft,
    make_adapter,
    make_quantised,
    make_two_towers,
    rename_modules,
)
from trainer_side.params.choose import open_model
from trainer_side.ranks.ranks import OneRank
from trainer_side.sources.adapter_source import adapter_of_model
from trainer_side.sources.file_source import adapter_of_dir
from trainer_side.sources.source import CastRule
from weft_rl.contract.adapter import check_adapter
from weft_rl.contract.errors import InvalidAdapterError, InvalidManifestError
from weft_rl.contract.tensors import DataType, TensorMeta, check_base

KEEP = CastRule(enabled=False)
#: In a trainer's memory.
MEMORY = "model.language_model."
WITH_TORCHVISION = pytest.mark.skipif(
    importlib.util.find_spec("torchvision") is None, reason="vLLM imports these with it alone"
)


@dataclass(frozen=True)
class Case:
    """A running engine, and an adapter that it serves from disk, too, as ``disk``."""

    engine: EngineProcess
    base: Path
    """Return the model that PEFT computes with."""
    adapter: Path
    kind: str


def _started(model: Path, case: tuple[Path, Path, str], *args: str) -> Iterator[Case]:
    base, adapter, kind = case
    disk = ("--lora-modules", f"disk={adapter}")
    engine = EngineProcess(model, (*LORA_ARGS, *disk, *args)).start()
    yield Case(engine, base, adapter, kind)
    engine.stop()


@pytest.fixture(
    scope="module",
    params=[
        "paligemma",
        pytest.param("qwen2_5_vl", marks=WITH_TORCHVISION),
        pytest.param("llava", marks=(WITH_TORCHVISION, pytest.mark.matrix)),
    ],
)
def towers(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Case]:
    root = tmp_path_factory.mktemp("towers")
    model = make_two_towers(request.param, root / "model")
    adapter = make_adapter(
        model, root / "adapter", seed=1, target_modules=r".*language_model\..*_proj"
    )
    case = model, adapter, request.param
    yield from _started(model, case, "--limit-mm-per-prompt", '{"image": 0, "video": 0}')


@pytest.fixture(
    scope="module",
    params=[
        "awq",
        pytest.param("gptq", marks=pytest.mark.matrix),
        pytest.param("compressed-tensors", marks=pytest.mark.matrix),
    ],
)
def quantised(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Case]:
    root = tmp_path_factory.mktemp("quantised")
    model = make_quantised(request.param, root / "model", root / "plain")
    adapter = make_adapter(root / "plain", root / "adapter", seed=1)
    case = root / "plain", adapter, request.param
    yield from _started(model, case, "--dtype", "bfloat16")


def assert_served(case: Case, version: str, adapter: Path) -> float:
    """Push a directory as a coordinator would let it through; returns how far PEFT is off."""
    read = adapter_of_dir(adapter, KEEP)
    facts = case.engine.facts
    check_adapter(read.config_json, read.source.metas, facts["reference"], facts["capabilities"])
    case.engine.push_adapter(version, adapter)
    got, disk = (case.engine.complete(name, PROMPT) for name in (version, "disk"))
    assert (got.tokens, got.logprobs) == (disk.tokens, disk.logprobs)

    def off(adapter: Path | None) -> float:
        want = Referee().logprobs(case.base, PROMPT, got.tokens, adapter)
        return max(abs(a - b) for a, b in zip(got.logprobs, want, strict=True))

    assert off(None) > 1
    return off(case.adapter)


def assert_live_fits(case: Case) -> None:
    """Hold a live PEFT model's adapter against the replica, as a publisher and a coordinator do."""
    facts = case.engine.facts
    opened = open_model(load_peft(case.base, case.adapter), OneRank())
    live = adapter_of_model(opened, "default", KEEP, check_base=True)
    assert live.base is not None
    live.base.check(facts["reference"])
    check_adapter(live.config_json, live.source.metas, facts["reference"], facts["capabilities"])


def test_an_adapter_has_the_names_of_memory_files_or_vllm(towers: Case, tmp_path: Path) -> None:
    assert_live_fits(towers)
    files = "model." if towers.kind == "qwen2_5_vl" else "language_model.model."
    names = {"memory": MEMORY, "files": files, "vllm": "language_model.model."}
    for number, (name, prefix) in enumerate(names.items(), start=1):
        renamed = rename_modules(towers.adapter, tmp_path / name, MEMORY, prefix)
        off = assert_served(towers, f"math@{number}", renamed)
        print(f"{towers.kind} by the names of {name}: {off:.1e} nats")
        assert off <= 1e-4


def test_a_module_that_sees_is_refused_by_any_of_its_names(towers: Case) -> None:
    """vLLM applies a LoRA to the language model alone."""
    reference, capabilities = (towers.engine.facts[fact] for fact in ("reference", "capabilities"))
    module = next(m for m in reference.modules if m.name.startswith("vis"))
    rows, columns = module.shape
    for name in module.names:
        config = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": [name]}
        metas = [
            TensorMeta(f"base_model.model.{name}.lora_A.weight", DataType.FLOAT32, (4, columns)),
            TensorMeta(f"base_model.model.{name}.lora_B.weight", DataType.FLOAT32, (rows, 4)),
        ]
        with pytest.raises(InvalidAdapterError, match=re.escape(name)):
            check_adapter(json.dumps(config), metas, reference, capabilities)


def test_an_adapter_is_served_over_quantised_weights(quantised: Case) -> None:
    assert_live_fits(quantised)
    off = assert_served(quantised, "math@1", quantised.adapter)
    print(f"{quantised.kind}: {off:.1e} nats")
    assert off <= 0.1  # of bfloat16, which is all that vLLM's kernels of 4 bits compute in


def test_plain_weights_for_quantised_ones_are_refused_in_one_sentence(quantised: Case) -> None:
    metas = [
        TensorMeta(name, DataType.FLOAT32, tuple(tensor.shape))
        for name, tensor in load_file(quantised.base / "model.safetensors").items()
    ]
    with pytest.raises(InvalidManifestError) as refused:
        check_base(metas, quantised.engine.facts["reference"])
    assert refused.value.message.startswith(
        "the weights of the served Qwen3ForCausalLM are quantised ('model.layers.0.mlp.down_proj'"
    )
