"""Samples as trainers get them, put together from the replicas' streams."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

import torch

from weft_rl.contract.errors import WeftError
from weft_rl.contract.names import PolicyVersion, provenance
from weft_rl.rpc.codec import version_from_proto
from weft_rl.v1 import generate_pb2 as pb

_REASONS: Final = {
    pb.FINISH_REASON_STOP: "stop",
    pb.FINISH_REASON_LENGTH: "length",
    pb.FINISH_REASON_ABORT: "abort",
}


@dataclass(frozen=True, kw_only=True, eq=False)
class Sample:
    """Completion of a prompt; its CPU tensors have one element a token and belong to the caller."""

    token_ids: torch.Tensor
    """Token ids, int64, an end-of-sequence token included."""
    logprobs: torch.Tensor
    """Log-probability of each token, float32, as the client's ``logprobs_mode`` says."""
    versions: torch.Tensor
    """Version of the asked policy that made each token, int64."""
    base_versions: torch.Tensor
    """Version of the base that each token was sampled over, int64."""
    older_cache: torch.Tensor
    """Mask of tokens sampled over a cache that was kept from an earlier version of the base, bool.
    See ``weft rollout --running-requests keep``."""
    adapter: PolicyVersion | None
    """Exact version that made the whole sample; None for the base model itself."""
    finish_reason: str
    """``stop`` (an end-of-sequence or stop token, a stop string), ``length`` or ``abort``."""
    error: WeftError | None = None
    """Error that left it missing or not whole; only with ``on_error="keep"``."""


@dataclass(frozen=True, kw_only=True, eq=False)
class SampleGroup:
    """Samples of one prompt."""

    index: int
    """Index of the prompt, among those of the call or stream."""
    prompt_token_ids: list[int]
    """Prompt tokens that were completed; of a text, its tokens (empty if nothing was sampled)."""
    samples: tuple[Sample, ...]
    """Samples in order; ``num_samples`` of them."""
    replica_ids: tuple[str, ...]
    """Replica that made each sample."""
    remarks: tuple[str, ...] = ()
    """Remarks on the samples, for messages, such as ``math@7 was trained on base@0, served over
    base@1``. Such samples are of a policy that its trainer does not hold."""


@dataclass(frozen=True)
class OverAnotherBase:
    """Adapter's version that is served over a base of another content than it was trained on."""

    version: PolicyVersion
    trained_on: int
    served_over: int

    def __str__(self) -> str:
        return f"{self.version} was {provenance(self.trained_on, self.served_over)}"

    def made(self, sample: Sample) -> bool:
        """Return whether a sample has tokens that the version made over that base."""
        return sample.adapter == self.version and bool(
            (sample.base_versions == self.served_over).any()
        )


@dataclass
class Draft:
    """Sample that is still being made."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    last: pb.SampleChunk | None = None

    def add(self, chunk: pb.SampleChunk) -> None:
        """Add further tokens."""
        self.token_ids.extend(chunk.token_ids)
        self.logprobs.extend(chunk.logprobs)
        if chunk.finish_reason:
            self.last = chunk

    @property
    def is_whole(self) -> bool:
        """True if the sample has ended by itself."""
        return self.last is not None and self.last.finish_reason != pb.FINISH_REASON_ABORT

    def sample(self, error: WeftError | None = None) -> Sample:
        """Return the sample, as far as it has come."""
        last = self.last or pb.SampleChunk(finish_reason=pb.FINISH_REASON_ABORT)
        adapter = version_from_proto(last.adapter) if last.HasField("adapter") else None
        count = len(self.token_ids)
        base_versions = torch.full((count,), -1, dtype=torch.int64)
        older_cache = torch.zeros(count, dtype=torch.bool)
        for span in last.base_spans:
            base_versions[span.start : span.end] = span.version
            older_cache[span.start : span.end] = span.older_cache
        versions = base_versions
        if adapter is not None:
            versions = torch.full((count,), adapter.version, dtype=torch.int64)
        return Sample(
            token_ids=torch.tensor(self.token_ids, dtype=torch.int64),
            logprobs=torch.tensor(self.logprobs, dtype=torch.float32),
            versions=versions,
            base_versions=base_versions,
            older_cache=older_cache,
            adapter=adapter,
            finish_reason=_REASONS[last.finish_reason],
            error=error,
        )
