"""``python -m benchmarks.vllm_native base|lora MODEL_DIR``: vLLM's own ways, for comparison.

The trainer is this process, on GPU 0; an ``AsyncLLM`` in a child has GPU 1. A base goes
over vLLM's NCCL engine, in packed buckets of 1 GiB, between a pause that keeps requests
and a resume; an adapter is saved to /dev/shm and loaded from there.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
import statistics
import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

_PUSHES = 7
_BUCKET_BYTES = 2**30
_PORT = 29533
# The trainer takes the first of the GPUs that this process may see, the engine another.
_ENGINE_GPU = os.environ.get("WEFT_NATIVE_GPU", "1")


async def serve(pipe: Connection, model: str, lora: bool) -> None:
    """The engine's side: orders come over the pipe, one at a time."""
    from vllm import SamplingParams
    from vllm.config import WeightTransferConfig
    from vllm.distributed.weight_transfer.base import (
        WeightTransferInitRequest,
        WeightTransferUpdateRequest,
    )
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.lora.request import LoRARequest
    from vllm.v1.engine.async_llm import AsyncLLM

    settings: dict[str, Any] = {"enable_lora": True, "max_lora_rank": 32, "max_loras": 2,
                                "max_cpu_loras": 4} if lora else {}  # fmt: skip
    engine = AsyncLLM.from_engine_args(
        AsyncEngineArgs(
            model,
            load_format="dummy",
            skip_tokenizer_init=True,
            max_model_len=4096,
            gpu_memory_utilization=0.5,
            dtype="bfloat16",
            weight_transfer_config=WeightTransferConfig(backend="nccl"),
            **settings,
        )
    )
    pipe.send("up")

    async def generate(request: Any, number: int) -> None:
        params = SamplingParams(max_tokens=2, temperature=0.0, detokenize=False)
        prompt = {"prompt_token_ids": [1, 2, 3, 4]}
        async for _ in engine.generate(prompt, params, str(number), lora_request=request):
            pass

    loop = asyncio.get_running_loop()
    while True:
        order, value = await loop.run_in_executor(None, pipe.recv)
        began = time.perf_counter()
        match order:
            case "init":
                await engine.init_weight_transfer_engine(WeightTransferInitRequest(init_info=value))
            case "pause":
                await engine.pause_generation(mode="keep", clear_cache=False)
                await engine.start_weight_update()
            case "update":
                await engine.update_weights(WeightTransferUpdateRequest(update_info=value))
            case "finish":
                await engine.finish_weight_update()
                await engine.reset_prefix_cache(reset_running_requests=True)
                await engine.resume_generation()
            case "lora":
                number, path = value
                request = LoRARequest(f"a{number}", number, path)
                await engine.add_lora(request)
                await generate(request, number)
            case "quit":
                os._exit(0)
        pipe.send(f"{(time.perf_counter() - began) * 1e3:.1f} ms")


def child(pipe: Connection, model: str, lora: bool) -> None:
    """The engine's process."""
    os.environ["CUDA_VISIBLE_DEVICES"] = _ENGINE_GPU
    try:
        asyncio.run(serve(pipe, model, lora))
    except BaseException as error:  # noqa: BLE001 (told to the parent)
        pipe.send(f"ERROR {error!r}")
        os._exit(1)


def tell(pipe: Connection, order: str, value: object = None) -> str:
    """Send an order and wait for its answer."""
    pipe.send((order, value))
    return expect(pipe)


def expect(pipe: Connection) -> str:
    """The next answer, within two minutes."""
    if not pipe.poll(120):
        raise TimeoutError("vLLM did not answer")
    answer: str = pipe.recv()
    if answer.startswith("ERROR"):
        raise RuntimeError(answer)
    return answer


def base(pipe: Connection, model: Any) -> None:
    """Whole models over vLLM's NCCL engine."""
    from vllm.distributed.weight_transfer.nccl_engine import (
        NCCLTrainerSendWeightsArgs,
        NCCLWeightTransferEngine,
    )

    address = {"master_address": "127.0.0.1", "master_port": _PORT, "world_size": 2}
    pipe.send(("init", {**address, "rank_offset": 1}))
    group = NCCLWeightTransferEngine.trainer_init(address)
    expect(pipe)
    named = list(model.named_parameters())
    info = {
        "names": [name for name, _ in named],
        "dtype_names": [str(p.dtype).split(".")[-1] for _, p in named],
        "shapes": [list(p.shape) for _, p in named],
        "packed": True,
        "packed_buffer_size_bytes": _BUCKET_BYTES,
    }
    how = NCCLTrainerSendWeightsArgs(
        group=group, packed=True, packed_buffer_size_bytes=_BUCKET_BYTES
    )
    seconds = []
    for number in range(_PUSHES + 2):
        torch.cuda.synchronize()
        began = time.perf_counter()
        tell(pipe, "pause")
        pipe.send(("update", info))
        NCCLWeightTransferEngine.trainer_send_weights(((n, p.data) for n, p in named), how)
        torch.cuda.synchronize()
        expect(pipe)
        tell(pipe, "finish")
        if number >= 2:
            seconds.append(time.perf_counter() - began)
    print(
        f"RESULT vLLM's own NCCL engine, pause included: median "
        f"{statistics.median(seconds) * 1e3:.1f} ms, min {min(seconds) * 1e3:.1f}",
        flush=True,
    )


def lora(pipe: Connection, model: Any) -> None:
    """Adapters over /dev/shm."""
    from peft import LoraConfig, get_peft_model

    targets = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    settings = LoraConfig(r=32, lora_alpha=64, target_modules=targets, init_lora_weights=False)
    wrapped = get_peft_model(model, settings).to(torch.bfloat16)
    seconds = []
    for number in range(1, 6):
        path = f"/dev/shm/weft-native-{number}"
        torch.cuda.synchronize()
        began = time.perf_counter()
        wrapped.save_pretrained(path)
        saved = time.perf_counter() - began
        tell(pipe, "lora", (number, path))
        seconds.append(time.perf_counter() - began)
        print(f"  saved in {saved * 1e3:.0f} ms, served after {seconds[-1] * 1e3:.0f}", flush=True)
    print(f"RESULT vLLM's own way for adapters, first token included: median "
          f"{statistics.median(seconds[1:]) * 1e3:.1f} ms", flush=True)  # fmt: skip


def main() -> None:
    """See the module."""
    mode, model_dir = sys.argv[1], Path(sys.argv[2])
    context = multiprocessing.get_context("spawn")
    pipe, theirs = context.Pipe()
    process = context.Process(target=child, args=(theirs, str(model_dir), mode == "lora"))
    process.start()
    theirs.close()
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("cuda:0"):
        config = AutoConfig.from_pretrained(model_dir)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    try:
        expect(pipe)
        (base if mode == "base" else lora)(pipe, model)
        pipe.send(("quit", None))
        process.join(20)
    except Exception as error:  # noqa: BLE001 (what is measured is not ours)
        print(f"RESULT vLLM's own way failed: {error!r}", flush=True)
    if process.pid is not None and process.is_alive():
        process.kill()
    print(json.dumps({"ok": mode}), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
