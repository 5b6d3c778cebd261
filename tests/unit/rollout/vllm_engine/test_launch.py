"""What a replica declares of what its workers have found."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from rollout_side.vllm_engine.launch import with_common_draft
from tests.doubles.vllm import FakeEngine
from weft_rl.contract.tensors import DataType, Reference, TensorMeta

FILES = [TensorMeta(f"draft_model.{name}", DataType.FLOAT32, (1,)) for name in ("fc", "norm")]
BASE = Reference("Tiny", (TensorMeta("a", DataType.FLOAT32, (1,)),))
BOTH = [meta.name for meta in FILES]


@pytest.mark.parametrize(
    ("loaded", "declared", "is_told"),
    [
        ([BOTH, BOTH], BOTH, False),
        ([[], []], [], False),
        ([BOTH, BOTH[:1]], [], True),
        ([[], BOTH], [], True),
    ],
)
async def test_ranks_that_differ_load_no_draft(
    loaded: Sequence[Sequence[str]],
    declared: list[str],
    is_told: bool,
    caplog: pytest.LogCaptureFixture,
) -> None:
    engine = FakeEngine(num_ranks=2)
    found = await with_common_draft(engine, BASE, FILES, loaded)
    assert list(found.draft_by_name) == declared
    assert engine.calls == (["weft_keep_draft"] if is_told else [])
    assert ("ranks differ in what they load" in caplog.text) is is_told
