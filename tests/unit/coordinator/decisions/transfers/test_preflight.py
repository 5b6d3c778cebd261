"""Whether what is pushed fits the base and a kind of replica."""

from __future__ import annotations

import dataclasses

import pytest

from tests.unit.coordinator.decisions.machine import CAPABILITIES, SPEC
from weft_rl.contract.manifest import plan_buckets
from weft_rl.contract.tensors import DataType, Reference, TensorMeta
from weft_rl.coordinator.decisions.state.pool import FitKey
from weft_rl.coordinator.decisions.transfers.preflight import check_fit

_NAME = "model.layers.0.q_proj.weight"
_REFERENCE = Reference("Tiny", (TensorMeta(_NAME, DataType.BFLOAT16, (8, 8)),))
_LORA = "base_model.model.model.layers.0.q_proj"
_CAPABILITIES = dataclasses.replace(CAPABILITIES, lora_modules=("q_proj",))
_KEY = FitKey(b"layout", b"config", _CAPABILITIES)


@pytest.mark.parametrize(
    ("name", "shape", "reason"),
    [(_NAME, (8, 8), ""), (_NAME, (8, 4), "INVALID_MANIFEST"), ("w", (8, 8), "INVALID_MANIFEST")],
)
def test_a_base_is_what_the_engine_loads(name: str, shape: tuple[int, int], reason: str) -> None:
    manifest = plan_buckets([TensorMeta(name, DataType.BFLOAT16, shape)])
    failure = check_fit(manifest, None, _REFERENCE, _KEY)
    assert (failure.reason if failure else "") == reason


@pytest.mark.parametrize("name", ["draft_model.fc", "mtp.fc", "model.layers.1.eh_proj.weight"])
def test_a_base_may_hold_what_is_for_drafts(name: str) -> None:
    base = _REFERENCE.tensors[0]
    manifest = plan_buckets([base, dataclasses.replace(base, name=name)])
    assert check_fit(manifest, None, _REFERENCE, _KEY) is None


@pytest.mark.parametrize(("rank", "fits"), [(4, True), (8, False)])
def test_an_adapter_is_what_its_config_says(rank: int, fits: bool) -> None:
    metas = [
        TensorMeta(f"{_LORA}.lora_A.weight", DataType.BFLOAT16, (rank, 8)),
        TensorMeta(f"{_LORA}.lora_B.weight", DataType.BFLOAT16, (8, rank)),
    ]
    failure = check_fit(plan_buckets(metas), SPEC, _REFERENCE, _KEY)
    assert (failure is None) is fits, failure
