"""``python -m benchmarks.gpu_deltas``: deltas of a base of 16.4 GB, trainer and replica on one GPU.

The replica loads in place, so that a delta is read against the weights that it serves, and written
over them. A copy of the trainer's masters in float32 would not fit: bits are stepped as an
optimizer at a small learning rate steps them. What the replica serves in the end is compared,
tensor by tensor, with the trainer's.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from torch.distributed.tensor import DTensor

from benchmarks.gpu import Clients, measure
from benchmarks.gpu_pool import QWEN3_8B, GpuPool, write_config
from benchmarks.machine import describe
from trainer_side import Publisher, PushReport, PushResult
from weft_rl.contract.names import PolicyVersion
from weft_rl.rpc.channel import open_channel
from weft_rl.rpc.codec import POLICY_VERSION
from weft_rl.transport.digests.wsum64 import digests_of
from weft_rl.v1 import admin_pb2, inspect_pb2
from weft_rl.v1.admin_pb2_grpc import AdminServiceStub
from weft_rl.v1.inspect_pb2_grpc import InspectServiceStub

#: Ways to give the weights, each with the shares of elements that change; all are sent without.
#: Versions of a model's last share are rolled back.
_WAYS: dict[str, tuple[float, ...]] = {
    "all elements": (),
    "a model": (0.002, 0.0147, 0.05, 0.01),
    "an iterator": (0.01,),
}
#: vLLM's options for CUDA graphs of a model that it does not compile: it starts in seconds.
_GRAPHS = (
    "--compilation-config",
    '{"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [1, 2, 4]}',
)


def arriving(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield each weight in memory that is used again for the next."""
    memory = torch.empty(0, dtype=torch.bfloat16, device="cuda")
    for name, parameter in model.named_parameters():
        if parameter.numel() > memory.numel():
            memory = torch.empty_like(parameter).view(-1)
        given = memory[: parameter.numel()].view(parameter.shape)
        yield name, given.copy_(parameter.detach())


def step(model: torch.nn.Module, share: float) -> None:
    """Change a share of the elements that this process holds: 87 of 100 by one unit in the last
    place, others by two."""
    with torch.no_grad():
        for parameter in model.parameters():
            own = parameter.to_local() if isinstance(parameter, DTensor) else parameter
            bits = own.view(-1).view(torch.int16)
            for begin in range(0, len(bits), 2**26):
                own = bits[begin : begin + 2**26]
                draw = torch.rand(len(own), device=own.device)
                own += (draw < share).to(torch.int16) + (draw < share * 0.13).to(torch.int16)


def show(what: str, reports: list[PushReport]) -> None:
    """Print medians in milliseconds."""

    def median(values: list[float]) -> float:
        return statistics.median(values) * 1e3

    last = reports[-1]
    print(
        f"RESULT {what}: {last.sent_bytes / 1e6:.1f} MB, "
        f"seconds {median([r.seconds for r in reports]):.1f} ms "
        f"(least {min(r.seconds for r in reports) * 1e3:.1f}), comparing "
        f"{median([r.delta.comparing_seconds for r in reports]):.1f}, forming "
        f"{median([r.forming_seconds for r in reports]):.1f}, staging "
        f"{median([r.staging_seconds for r in reports]):.1f}, committing "
        f"{median([r.committing_seconds for r in reports]):.1f}, pause "
        f"{median([r.pause_seconds for r in reports]):.1f}; {last.backend}"
        f"{'' if last.delta.is_delta else '; whole: ' + last.delta.whole_reason}",
        flush=True,
    )


def compare(target: str, name: str, version: PolicyVersion, model: torch.nn.Module) -> None:
    """Compare what a replica serves with a model, tensor by tensor."""
    request = inspect_pb2.DigestTensorsRequest(
        replica_id=name, version=POLICY_VERSION.encode(version)
    )
    with open_channel(target) as channel:
        stub = InspectServiceStub(channel)
        served = {
            tensor.name: tensor.digest
            for answer in stub.DigestTensors(request, timeout=120)
            for tensor in answer.chunk.tensors
        }
    own = dict(model.named_parameters())
    digests = dict(zip(own, digests_of([p.detach() for p in own.values()]), strict=True))
    wrong = [key for key, digest in digests.items() if served.get(key) != digest]
    print(f"RESULT {version} served by {name}: {len(digests)} tensors compared, "
          f"{len(wrong)} differ {wrong[:3]}", flush=True)  # fmt: skip


def roll_back(target: str, to: int) -> None:
    """Serve an earlier base; print what that took."""
    with open_channel(target) as channel:
        stub = AdminServiceStub(channel)
        order = admin_pb2.RollbackRequest(policy="base", to_version=to)
        began = time.monotonic()
        done = stub.Rollback(order, timeout=60)
        took = time.monotonic() - began
    pause = done.pause.ToNanoseconds() / 1e6
    print(f"RESULT rollback to base@{to}: {took * 1e3:.1f} ms, pause {pause:.1f}", flush=True)


def stepped(publisher: Publisher, model: torch.nn.Module) -> PushResult:
    """Push a model that has changed by 1 %."""
    step(model, 0.01)
    torch.cuda.synchronize()
    return publisher.push_base(model)


def main() -> None:
    """Measure; print hardware, versions, command and results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=36)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--staging", default="in-place")
    parser.add_argument("--memory", default="0.35", help="vLLM's --gpu-memory-utilization")
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--quantization", default="", help="vLLM's, as weights are loaded")
    parser.add_argument("--replica-gpu", default="0", help="the trainer's is 0")
    parser.add_argument("--graphs", action="store_true", help="the replica decodes by CUDA graphs")
    options = parser.parse_args()
    print(describe(), torch.cuda.get_device_name(0), flush=True)
    from transformers import AutoConfig, AutoModelForCausalLM

    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        shape = {**QWEN3_8B, "num_hidden_layers": options.layers}
        path = write_config(work / "model", shape)
        with torch.device("cuda:0"):
            config = AutoConfig.from_pretrained(path)
            model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        named = [*model.named_parameters()]
        staging, quantised = ["--staging", options.staging], list[str]()
        if options.quantization:  # deltas change a copy
            staging += ["--staging-memory-gib", "40"]
            quantised += ["--quantization", options.quantization]
        pool = GpuPool(work).start()
        try:
            pool.launch("replica-0", options.replica_gpu, path, "--load-format", "dummy",
                        "--max-model-len", "4096", "--gpu-memory-utilization", options.memory,
                        *(_GRAPHS if options.graphs else ["--enforce-eager"]), *quantised,
                        options=staging)  # fmt: skip
            url = pool.url("replica-0")
            pool.wait_registered(1, 60)
            for what, shares in _WAYS.items():
                with Publisher(
                    pool.target,
                    trainer_id="bench",
                    progress=None,
                    timeout_seconds=60,
                    delta="always" if shares else "never",
                    backend=options.backend,
                ) as publisher:
                    for share in shares or (0.0,):
                        reports = []
                        for number in range(options.repeats + 2):
                            step(model, share or 0.01)
                            torch.cuda.synchronize()
                            time.sleep(0.3)
                            if what == "an iterator":
                                result = publisher.push_tensors(arriving(model), metadata=named)
                            else:
                                result = publisher.push_base(model)
                            if number >= 2:
                                reports.append(result.report)
                        show(f"{what}, {share:.2%} changed" if share else what, reports)
                    if what == "a model":
                        compare(pool.target, "replica-0", result.version, model)
                        for back in () if quantised else (1, 0, 1, 3):
                            roll_back(pool.target, result.version.version - back)
                        clients = Clients(work)
                        try:
                            clients.add("replica-0", url)
                            measure(
                                "1 % beside streams of tokens",
                                lambda: stepped(publisher, model),
                                clients,
                                options.repeats,
                                2,
                            )
                        finally:
                            clients.stop()
        finally:
            pool.stop()


if __name__ == "__main__":
    main()
