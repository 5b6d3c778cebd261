"""Capabilities of a vLLM engine, read from its config and its workers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from weft_rl.contract.capabilities import Capabilities, RunningRequests
from weft_rl.contract.tensors import DataType, Reference


def data_type(torch_dtype: object) -> DataType:
    """Return the contract's name for a torch dtype (``torch.bfloat16``).

    Raises:
        KeyError: No manifest can hold that dtype.
    """
    return DataType[str(torch_dtype).removeprefix("torch.").upper()]


def lora_modules(expected: Iterable[str]) -> tuple[str, ...]:
    """Return the last name components, sorted, of modules that can carry a LoRA.

    Args:
        expected: Modules as vLLM's loader names them (``q_proj``, ``experts.0.up_proj``). Those of
            experts are left out: ``lora_on_experts`` stands for them.
    """
    return tuple(sorted({name for name in expected if not is_expert(name)}))


def is_expert(module: str) -> bool:
    """Return whether a module, named by vLLM's loader, is one of experts."""
    return module.partition(".")[0] == "experts"


def make_capabilities(
    vllm_config: Any,
    reference: Reference,
    *,
    engine_version: str,
    expected_modules: Iterable[str],
    lora_unapplied: Iterable[str] = (),
    base_refusal: str = "",
    backends: Iterable[str],
    trial_name: str = "",
    gpu_uuids: Iterable[str] = (),
    staging_capacity_bytes: int,
    adapter_capacity_bytes: int,
    loads_in_place: bool = False,
    running_requests: RunningRequests = "recompute",
    served_names: Iterable[str] = (),
) -> Capabilities:
    """Make the capabilities that a replica declares.

    Args:
        vllm_config: vLLM's ``VllmConfig``.
        reference: Reference of the served model.
        engine_version: vLLM's version.
        expected_modules: Modules that can carry a LoRA, from the workers (``weft_open``).
        lora_unapplied: Name prefixes of modules that no LoRA is applied to; from the workers.
        base_refusal: Reason why one of the workers cannot load a base; empty if all can.
        backends: Backends of side groups, from the workers.
        trial_name: Name under which the receiving worker answers trials.
        gpu_uuids: UUIDs of the workers' GPUs.
        staging_capacity_bytes: Bound of staged base weights.
        adapter_capacity_bytes: Bound of the adapter store.
        loads_in_place: Whether bases are loaded as they arrive.
        running_requests: What becomes of running requests when the base changes.
        served_names: Names that vLLM's OpenAI server has by its arguments.
    """
    model, lora = vllm_config.model_config, vllm_config.lora_config
    base_dtype = data_type(model.dtype)
    expected = list(expected_modules)
    return Capabilities(
        engine_version=engine_version,
        base_fingerprint=reference.fingerprint,
        architecture=reference.architecture,
        base_dtype=base_dtype,
        backends=tuple(backends),
        trial_name=trial_name,
        gpu_uuids=tuple(gpu_uuids),
        adapter_dtype=base_dtype if lora is None else data_type(lora.lora_dtype),
        tensor_parallel_size=vllm_config.parallel_config.tensor_parallel_size,
        lora_enabled=lora is not None,
        max_lora_rank=0 if lora is None else lora.max_lora_rank,
        lora_modules=lora_modules(expected),
        lora_unapplied=tuple(lora_unapplied),
        base_refusal=base_refusal,
        lora_on_experts=any(is_expert(name) for name in expected),
        staging_capacity_bytes=staging_capacity_bytes,
        adapter_capacity_bytes=adapter_capacity_bytes,
        loads_in_place=loads_in_place,
        can_sleep=bool(model.enable_sleep_mode),
        quantization=model.quantization or "",
        logprobs_mode=str(model.logprobs_mode),
        logprobs_truncated=str(model.logprobs_mode).startswith("processed_"),
        running_requests=running_requests,
        served_names=tuple(served_names),
    )
