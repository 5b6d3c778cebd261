"""A pool on the accelerators of one host: what the GPU benchmark and tests run against."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from tests.models import make_tokenizer
from weft_rl.cli.demo.processes import Process
from weft_rl.rpc.channel import open_channel
from weft_rl.v1 import inspect_pb2
from weft_rl.v1.inspect_pb2_grpc import InspectServiceStub

#: Qwen3-8B's shape: 16.4 GB in bf16.
QWEN3_8B: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "attention_bias": False,
}
#: Qwen3-30B-A3B's shape.
QWEN3_MOE: dict[str, Any] = {
    **QWEN3_8B,
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
#: vLLM compiles the model, and several engines may start at once.
_START_SECONDS = 400.0
_ENVIRONMENT = {
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "4",
}


def write_config(path: Path, config: dict[str, Any]) -> Path:
    """A model directory without weights: engines fill theirs at random."""
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    make_tokenizer(path)
    return path


def write_weights(path: Path, device: str) -> None:
    """Give a model directory weights, drawn on a device."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device(device):
        torch.manual_seed(5)
        config = AutoConfig.from_pretrained(path)
        model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(path, max_shard_size="4GB")
    del model
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


@dataclass
class GpuPool:
    """A coordinator, and replicas that are started one by one; ``stop`` ends them all."""

    work: Path
    target: str = ""
    replicas: dict[str, Process] = field(default_factory=dict)
    _coordinator: Process | None = None

    def start(self) -> GpuPool:
        """Start the coordinator."""
        args = ("-m", "weft_rl", "coordinator", "--listen", "127.0.0.1:0", "--catalog",
                str(self.work / "weft.db"), "--log-level", "warning")  # fmt: skip
        self._coordinator = Process("coordinator", args, self.work, {})
        line = self._coordinator.line(lambda text: text.startswith("listening on "), 60)
        self.target = line.removeprefix("listening on ")
        return self

    def launch(
        self,
        name: str,
        gpus: str,
        model: Path,
        *args: str,
        options: Sequence[str] = (),
        environment: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """Start a replica on these of the GPUs that this process sees; ``url`` waits for it."""
        command = ("-m", "weft_rl", "rollout", "-c", self.target, "--http-port", "0",
                   "--replica-id", name, "--drain-seconds", "0", *options, "--", str(model),
                   "--served-model-name", "base-model", "--dtype", "bfloat16",
                   "--disable-uvicorn-access-log", *args)  # fmt: skip
        if seen := os.environ.get("CUDA_VISIBLE_DEVICES"):
            gpus = ",".join(seen.split(",")[int(number)] for number in gpus.split(","))
        seen_by_it = {**_ENVIRONMENT, "CUDA_VISIBLE_DEVICES": gpus, **environment}
        self.replicas[name] = Process(name, command, self.work, seen_by_it)

    def url(self, name: str) -> str:
        """Base URL of a replica's OpenAI server, once it listens."""
        line = self.replicas[name].line(lambda text: "serving on " in text, _START_SECONDS)
        match = re.search(r"http://[^\s,]+", line)
        assert match is not None
        return match.group()

    def set_apart(self, name: str) -> None:
        """Take a replica out of pushes."""
        self._order("cordon", name, "--no-pushes", "--reason", "its turn has not come")

    def bring_back(self, name: str) -> None:
        """Let it catch up and take part."""
        self._order("uncordon", name)

    def wait_registered(self, count: int, timeout_seconds: float) -> float:
        """Wait until so many replicas can be pushed to; those with dummy weights are not
        ready before that. Returns how long it took.

        Raises:
            TimeoutError: They were not.
        """
        pending = inspect_pb2.REPLICA_STATE_PENDING_WEIGHTS
        return self._wait(count, timeout_seconds, (inspect_pb2.REPLICA_STATE_READY, pending))

    def wait_ready(self, count: int, timeout_seconds: float) -> float:
        """Wait until so many replicas are ready; returns how long that took.

        Raises:
            TimeoutError: They were not.
        """
        return self._wait(count, timeout_seconds, (inspect_pb2.REPLICA_STATE_READY,))

    def wait_logged(self, name: str, text: str, timeout_seconds: float) -> float:
        """Wait until a replica has logged a text; returns how long that took.

        Raises:
            TimeoutError: It did not.
        """
        began, path = time.monotonic(), self.replicas[name].log_path
        while text not in path.read_text():
            if time.monotonic() - began > timeout_seconds:
                raise TimeoutError(f"{name} has not logged {text!r}: see {path}")
            time.sleep(0.05)
        return time.monotonic() - began

    def _wait(self, count: int, timeout_seconds: float, states: tuple[int, ...]) -> float:
        began = time.monotonic()
        with open_channel(self.target) as channel:
            stub = InspectServiceStub(channel)
            while time.monotonic() - began < timeout_seconds:
                found = stub.ListReplicas(inspect_pb2.ListReplicasRequest(), timeout=10).replicas
                if sum(r.state in states for r in found) >= count:
                    return time.monotonic() - began
                time.sleep(0.02)
        raise TimeoutError("\n".join(f"{r.replica_id}: {r.state_reason}" for r in found))

    def _order(self, *order: str) -> None:
        command = (sys.executable, "-m", "weft_rl", *order, "-c", self.target)
        subprocess.run(command, check=True, timeout=60, stdout=subprocess.DEVNULL)

    def stop(self) -> None:
        """End every process, and print what one that had ended already said last."""
        for process in (self._coordinator, *self.replicas.values()):
            if process is not None and process.poll() is not None:
                print(f"{process.name} had ended, exit code {process.returncode}:\n"
                      f"{process.tail(40)}", flush=True)  # fmt: skip
        for process in self.replicas.values():
            process.send_signal(15)
        for process in self.replicas.values():
            process.stop()
        if self._coordinator is not None:
            self._coordinator.stop()
