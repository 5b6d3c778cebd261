"""The program that takes the place of TRL's `vllm-serve`."""

from __future__ import annotations

import sys
from pathlib import Path

from tests.e2e.replicas import LORA_ARGS, running_coordinator, running_replicas, served_versions
from tests.integrations.migration import run_pasted
from weft_rl.cli.demo.tiny_model import make_model


def test_from_vllm_serve(tmp_path: Path) -> None:
    make_model(tmp_path / "model")
    with (
        running_coordinator(tmp_path) as coordinator,
        running_replicas(tmp_path, coordinator.target, [tmp_path / "model"], *LORA_ARGS),
    ):
        program = "from_trl_vllm_serve.py"
        env = {"ACCELERATE_USE_CPU": "true"}
        command = [sys.executable, program]
        run_pasted(tmp_path, [program], command, coordinator.target, tmp_path / "model", env)
        assert served_versions(coordinator.target) == {"math": 3}
