"""The program and the command that take the place of `swift rollout`."""

from __future__ import annotations

import json
from pathlib import Path

from tests.integrations.migration import run_pasted
from tests.integrations.parity import sampled, version
from tests.integrations.pool import serving

_ON_A_CPU = """
    --torch_dtype float32 --attn_impl eager --check_model false --model_type llama --template dummy
    --split_dataset_ratio 0 --dataloader_num_workers 0 --save_strategy no --report_to none
"""
_ENV = {"ACCELERATE_USE_CPU": "true", "GLOO_SOCKET_IFNAME": "lo", "USE_HF": "1"}


def test_from_swift_rollout(tmp_path: Path) -> None:
    rows = [{"messages": [{"role": "user", "content": f"w{5 + i} w{9 + i}"}]} for i in range(32)]
    (tmp_path / "prompts.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    files = ["from_swift_rollout.py", "from_swift_rollout.sh"]
    with serving(tmp_path) as served:
        coordinator = served.pool.coordinator
        command = ["bash", "-e", files[1], *_ON_A_CPU.split()]
        run_pasted(tmp_path, files, command, coordinator, served.model, _ENV)
        assert version(sampled(coordinator, "math")) == 3
