"""NCCL uses the network that members are told of, and pushes are sent accordingly.

Two processes with unlike ``NCCL_HOSTID`` are on two hosts for NCCL: it uses its network.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from benchmarks.gpu_pool import GpuPool, write_config
from tests.gpu.conftest import Note
from tests.gpu.test_pushes import DEVICE, NUM_GPUS, VLLM, config_of
from trainer_side import Publisher
from weft_rl.transport.nccl_network import nccl_network

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(NUM_GPUS < 2, reason="needs two NVIDIA GPUs"),
    pytest.mark.timeout(240),
]
_MEMBER = """
import sys, torch, torch.distributed as dist
rank = int(sys.argv[1])
torch.cuda.set_device(rank)
dist.init_process_group("nccl", init_method=f"file://{sys.argv[2]}", rank=rank, world_size=2)
sent = torch.full((2**20,), rank, device="cuda")
dist.broadcast(sent, 0)
torch.cuda.synchronize()
assert not sent.any()
dist.destroy_process_group()
"""


@pytest.mark.parametrize(
    "settings", [{}, {"NCCL_NET": "Socket"}, {"NCCL_IB_DISABLE": "1"}], ids=str
)
def test_nccl_uses_the_network_that_was_told(
    settings: dict[str, str], tmp_path: Path, note: Note
) -> None:
    members = []
    for rank in range(2):
        log = {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_FILE": str(tmp_path / f"log{rank}")}
        environment = {**os.environ, **settings, **log, "NCCL_HOSTID": f"host{rank}"}
        command = [sys.executable, "-c", _MEMBER, str(rank), str(tmp_path / "store")]
        members.append(subprocess.Popen(command, env=environment))
    try:
        assert [member.wait(100) for member in members] == [0, 0]
    finally:
        for member in members:
            member.kill()
    (used,) = {*re.findall(r"via NET/([^/\s]+)", (tmp_path / "log0").read_text())}
    told = nccl_network({**os.environ, **settings})
    note("two processes", str(settings), f"NCCL used {used}, told: {told}")
    assert told.startswith("sockets") == (used == "Socket")


@pytest.mark.parametrize(("host", "used"), [("a", "nccl"), ("b", "stream")])
def test_a_push_between_hosts_uses_no_plain_sockets_of_nccl(
    host: str, used: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, note: Note
) -> None:
    config = config_of("dense")
    shape = {**config.to_dict(), "architectures": ["Qwen3ForCausalLM"]}
    path = write_config(tmp_path / "model", shape)
    monkeypatch.setenv("NCCL_NET", "Socket")
    monkeypatch.setenv("NCCL_HOSTID", "a")
    for name in ("trainer", "replica"):
        (tmp_path / name).mkdir(mode=0o700)
    monkeypatch.setenv("WEFT_ONE_SIDED_DIR", str(tmp_path / "trainer"))
    elsewhere = {"NCCL_HOSTID": host, "WEFT_ONE_SIDED_DIR": str(tmp_path / "replica")}
    pool = GpuPool(tmp_path).start()
    try:
        pool.launch(
            "replica", "1", path, *VLLM, "--load-format", "dummy",
            environment=elsewhere,
        )  # fmt: skip
        pool.url("replica")
        pool.wait_registered(1, 100)
        with torch.device(DEVICE):
            model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        with Publisher(pool.target, trainer_id="test", timeout_seconds=100) as publisher:
            report = publisher.push_base(model).report
    finally:
        pool.stop()
    note("dense", f"host {host}", f"{report.backend}: {report.backend_reason}")
    assert report.backend == used
    assert ("not nccl: it would use plain sockets" in report.backend_reason) == (used == "stream")
