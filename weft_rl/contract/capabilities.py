"""Capabilities of a replica's engine, as it declares them at registration."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from weft_rl.contract.backends import GLOO
from weft_rl.contract.errors import InvalidRequestError
from weft_rl.contract.tensors import DataType

#: Fate of requests that run when the base changes: their cache is computed anew, they keep it,
#: or they end.
RunningRequests = Literal["recompute", "keep", "abort"]


@dataclass(frozen=True, kw_only=True)
class Capabilities:
    """Features and room of a replica's engine; ``weft.v1.Capabilities`` describes each field.

    Raises:
        InvalidRequestError: There are no receivers.
    """

    engine_version: str
    base_fingerprint: str
    architecture: str
    base_dtype: DataType
    adapter_dtype: DataType
    backends: tuple[str, ...] = (GLOO,)
    num_receivers: int = 1
    tensor_parallel_size: int = 1
    lora_enabled: bool = False
    max_lora_rank: int = 0
    lora_modules: tuple[str, ...] = ()
    lora_unapplied: tuple[str, ...] = ()
    lora_on_experts: bool = False
    staging_capacity_bytes: int = 0
    adapter_capacity_bytes: int = 0
    loads_in_place: bool = False
    trial_name: str = field(default="", compare=False)
    gpu_uuids: tuple[str, ...] = field(default=(), compare=False)
    nccl_network: str = field(default="", compare=False)
    can_sleep: bool = field(default=False, compare=False)
    base_refusal: str = field(default="", compare=False)
    draft_method: str = field(default="", compare=False)
    draft_fingerprint: str = ""
    reference_digest: str = ""
    quantization: str = field(default="", compare=False)
    logprobs_mode: str = field(default="", compare=False)
    logprobs_truncated: bool = field(default=False, compare=False)
    running_requests: str = field(
        default="recompute", compare=False, metadata={"unset": "recompute"}
    )
    served_names: tuple[str, ...] = field(default=(), compare=False)
    weft_version: str = field(default="", compare=False)

    def __post_init__(self) -> None:
        if not self.num_receivers:
            raise InvalidRequestError(
                "num_receivers is 0; a replica adds at least 1 member",
                metadata={"field": "Capabilities.num_receivers"},
            )
