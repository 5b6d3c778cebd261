"""Capabilities of a replica's engine, as it declares them at registration."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from weft_rl.contract.errors import InvalidRequestError
from weft_rl.contract.tensors import DataType

#: Side-group backends: between hosts' memories, between accelerators', and within one host.
GLOO = "gloo"
NCCL = "nccl"
ONE_SIDED = "one-sided"
#: Choice of one end: the best backend that both have, or this one and no other.
BackendChoice = Literal["auto", "nccl", "one-sided", "gloo"]
#: Fate of requests that run when the base changes: their cache is computed anew, they keep it,
#: or they end.
RunningRequests = Literal["recompute", "keep", "abort"]


@dataclass(frozen=True, kw_only=True)
class Capabilities:
    """Features and room of a replica's engine; sizes in bytes.

    Raises:
        InvalidRequestError: There are no receivers.
    """

    engine_version: str
    """vLLM's version."""
    base_fingerprint: str
    """``Reference.fingerprint`` of the served model."""
    architecture: str
    """First entry of the model's ``architectures``."""
    base_dtype: DataType
    """Type that floats of the base are served in."""
    adapter_dtype: DataType
    """Type that adapters are served in."""
    backends: tuple[str, ...] = (GLOO,)
    """Side-group backends, best first."""
    num_receivers: int = 1
    """Number of members that this replica adds to a side group."""
    tensor_parallel_size: int = 1
    """Workers of the engine."""
    lora_enabled: bool = False
    """True if adapters can be served at all."""
    max_lora_rank: int = 0
    """Largest rank of an adapter."""
    lora_modules: tuple[str, ...] = ()
    """Last name components of the modules that can carry a LoRA."""
    lora_unapplied: tuple[str, ...] = ()
    """Prefixes of the names of modules to which its engine applies no LoRA, as those of an encoder;
    whole components (``model.vision_model``)."""
    lora_on_experts: bool = False
    """True if LoRA on expert parameters can be served."""
    staging_capacity_bytes: int = 0
    """Bound of staged base weights."""
    adapter_capacity_bytes: int = 0
    """Bound of the adapter store."""
    loads_in_place: bool = False
    """True if bases that come over a side group are loaded as they arrive, not staged."""
    trial_name: str = field(default="", compare=False)
    """Name under which its receiving worker answers trials of one-sided reading; empty: nowhere."""
    gpu_uuids: tuple[str, ...] = field(default=(), compare=False)
    """UUIDs of its workers' GPUs; empty on CPUs."""
    can_sleep: bool = field(default=False, compare=False)
    """True if its engine can give the GPU's memory back for a while."""
    base_refusal: str = field(default="", compare=False)
    """Reason why no base can be loaded into its engine while it runs, a sentence without its end;
    empty where one can."""
    draft_method: str = field(default="", compare=False)
    """Method by which its engine drafts tokens with weights of their own; empty where there are
    none."""
    draft_fingerprint: str = ""
    """``Reference.draft_fingerprint``: the model that drafts tokens, if it can come with a base."""
    reference_digest: str = ""
    """``Reference.details_digest``: what the fingerprints leave out."""
    quantization: str = field(default="", compare=False)
    """Method by which the engine quantises the base as it loads it; empty where it does not."""
    logprobs_mode: str = field(default="", compare=False)
    """Meaning of its log-probabilities, as vLLM names it; empty where it is not told."""
    logprobs_truncated: bool = field(default=False, compare=False)
    """True if they are of the distribution that is left after top-k, top-p and min-p."""
    running_requests: str = field(
        default="recompute", compare=False, metadata={"unset": "recompute"}
    )
    """A ``RunningRequests``."""
    served_names: tuple[str, ...] = field(default=(), compare=False)
    """Names that its server has by its own arguments, for the base model and for adapters
    from files. Not compared: whether a layout fits does not depend on them."""

    def __post_init__(self) -> None:
        """Check that there is a receiver."""
        if not self.num_receivers:
            raise InvalidRequestError(
                "num_receivers is 0; a replica adds at least 1 member",
                metadata={"field": "Capabilities.num_receivers"},
            )
