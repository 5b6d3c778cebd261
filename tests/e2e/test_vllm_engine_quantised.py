"""Adapters of models whose files have other tensors than a trainer's memory: weights of 4 bits."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.e2e.engine_process import LORA_ARGS, EngineProcess
from tests.e2e.logprobs import PROMPT
from tests.e2e.vllm_build import skip_unless_computed
from tests.models import (
    Referee,
    load_hf,
    load_peft,
    load_quantised,
    make_adapter,
    make_quantised,
    put_adapter,
)
from trainer_side.params.choose import open_model
from trainer_side.ranks.ranks import OneRank
from trainer_side.sources.adapter_source import adapter_of_model
from trainer_side.sources.file_source import adapter_of_dir
from trainer_side.sources.source import CastRule
from weft_rl.contract.adapter import check_adapter
from weft_rl.contract.errors import InvalidManifestError
from weft_rl.contract.tensors import DataType, TensorMeta, check_base

KEEP = CastRule(enabled=False)
#: Operation by which vLLM multiplies by weights of 4 bits on a CPU.
_OPERATION = "cpu_gemm_wna16"


@dataclass(frozen=True)
class Case:
    """A running engine, and an adapter that it serves from disk, too, as ``disk``."""

    engine: EngineProcess
    base: Path
    """Return the model that PEFT computes with."""
    adapter: Path
    kind: str
    model: Path
    """Directory of the model that the engine serves."""


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
    skip_unless_computed(_OPERATION)
    root = tmp_path_factory.mktemp("quantised")
    model = make_quantised(request.param, root / "model", root / "plain")
    adapter = make_adapter(root / "plain", root / "adapter", seed=1)
    disk = ("--lora-modules", f"disk={adapter}")
    engine = EngineProcess(model, (*LORA_ARGS, *disk, "--dtype", "bfloat16")).start()
    assert engine.facts["capabilities"].base_refusal == ""  # a reload gives it the same bits
    yield Case(engine, root / "plain", adapter, request.param, model)
    engine.stop()


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


def assert_live_fits(case: Case, model: Any) -> None:
    """Hold a live PEFT model's adapter against the replica, as a publisher and a coordinator do."""
    facts = case.engine.facts
    opened = open_model(model, OneRank())
    live = adapter_of_model(opened, "default", KEEP, check_base=True)
    assert live.base is not None
    live.base.check(facts["reference"])
    check_adapter(live.config_json, live.source.metas, facts["reference"], facts["capabilities"])


def test_an_adapter_is_served_over_quantised_weights(quantised: Case) -> None:
    assert_live_fits(quantised, load_peft(quantised.base, quantised.adapter))
    off = assert_served(quantised, "math@1", quantised.adapter)
    print(f"{quantised.kind}: {off:.1e} nats")
    assert off <= 0.1  # of bfloat16, which is all that vLLM's kernels of 4 bits compute in


@pytest.mark.filterwarnings("ignore:`torch.jit")  # a package's of compressed-tensors
def test_an_adapter_of_a_quantised_trainer_is_served_over_quantised_weights(
    quantised: Case, tmp_path: Path
) -> None:
    """bitsandbytes' 4 bits over other ones; compressed-tensors over the files that are served."""
    trained = {"bitsandbytes": load_quantised(quantised.base, 4)}
    if quantised.kind == "compressed-tensors":  # transformers' AWQ and GPTQ need packages for GPUs
        trained["the same files"] = load_hf(quantised.model)
        trained["the same files"](input_ids=torch.tensor([[5]]))  # unpacks what PEFT asks for
    for number, (kind, model) in enumerate(trained.items(), start=2):
        peft = put_adapter(model, quantised.adapter)
        assert_live_fits(quantised, peft)
        peft.save_pretrained(tmp_path / kind)
        off = assert_served(quantised, f"math@{number}", tmp_path / kind)
        print(f"{quantised.kind} from {kind}: {off:.1e} nats")
        assert off <= 0.1


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
