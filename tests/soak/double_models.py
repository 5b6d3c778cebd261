"""What is pushed to the engine double of ``tests.doubles.replica_process``."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from tests.doubles.replica_weights import base_weights
from tests.soak.weights import RANKS
from trainer_side import Publisher
from weft_rl.contract.names import BASE_POLICY, PolicyVersion

#: Its base: 8 MiB and a projection. A version that leaked would show at once.
NUM_TENSORS, ELEMENTS = 8, 2**18
_PROJECTION = "base_model.model.layers.0.q_proj"
_WIDTH = 64


class DoubleModels:
    """Files of a base and of adapters, written anew for each push."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def push(self, publisher: Publisher, policy: str, seed: int) -> PolicyVersion:
        """Push weights that all equal ``seed``, or nearly."""
        path = self._directory / policy
        path.mkdir(exist_ok=True)
        if policy == BASE_POLICY:
            tensors = {
                name: torch.full(tuple(tensor.shape), float(seed))
                for name, tensor in base_weights(NUM_TENSORS, ELEMENTS).items()
            }
            save_file(tensors, path / "model.safetensors")
            return publisher.push_base(path).version
        rank = RANKS[policy]
        tensors = {
            f"{_PROJECTION}.lora_A.weight": torch.full((rank, _WIDTH), float(seed)),
            f"{_PROJECTION}.lora_B.weight": torch.full((_WIDTH, rank), float(seed)),
        }
        save_file(tensors, path / "adapter_model.safetensors")
        config = {
            "peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": ["q_proj"]
        }  # fmt: skip
        (path / "adapter_config.json").write_text(json.dumps(config))
        return publisher.push_adapter(path, policy).version
