"""Blocks of the KV cache outside a real engine's own, over a push."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rollout_side.vllm_engine.server import refusals
from tests.e2e.engine_process import EngineProcess, run_child
from tests.e2e.logprobs import check
from tests.models import Referee, make_model

pytestmark = pytest.mark.matrix

#: Longer than vLLM's blocks on a CPU.
PROMPT = [4 + (7 * i) % 250 for i in range(300)]


def take_any_connector(*args: Any) -> None:
    """Those that a replica takes need a GPU."""
    refusals.refuse_caches_beyond_reach = lambda args, environ: None
    run_child(*args)


def test_blocks_that_lie_outside_are_of_the_base_that_is_served(
    tmp_path: Path, referee: Referee
) -> None:
    base = make_model("qwen2", tmp_path / "base", seed=0)
    other = make_model("qwen2", tmp_path / "other", seed=1)
    store = tmp_path / "store"
    connector = {
        "kv_connector": "ResettableConnector",
        "kv_connector_module_path": "tests.e2e.resettable_connector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"shared_storage_path": str(store)},
    }
    args = ("--kv-transfer-config", json.dumps(connector))
    engine = EngineProcess(base, args, child=take_any_connector).start()
    try:
        check(referee, engine.complete("tiny", PROMPT), base, prompt=PROMPT)
        assert any(store.iterdir())
        engine.push_base("base@1", other)
        for _ in range(2):
            check(referee, engine.complete("tiny", PROMPT), other, prompt=PROMPT)
        assert any(store.iterdir())
    finally:
        engine.stop()
