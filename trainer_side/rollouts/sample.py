"""Samples as trainers get them, put together from the replicas' streams, and batches of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import torch

from weft_rl.contract.errors import InvalidRequestError, WeftError
from weft_rl.contract.names import PolicyVersion, plural, provenance
from weft_rl.rpc.codec import POLICY_VERSION
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

    def __repr__(self) -> str:
        """Return how many tokens it has, of which versions, and how it ended."""
        bases = sorted({version for version in self.base_versions.tolist() if version >= 0})
        made_by = [f"base@{version}" for version in bases]
        if self.adapter is not None:
            made_by = [str(self.adapter)]
        text = f"{plural(len(self.token_ids), 'token')} of {', '.join(made_by) or 'no version'}"
        error = f", {self.error.reason}" if self.error is not None else ""
        return f"Sample({text}, {self.finish_reason}{error})"


@dataclass(frozen=True, kw_only=True, eq=False)
class SampleGroup:
    """Samples of one prompt."""

    index: int
    """Index of the prompt, among those of the call or stream."""
    prompt_token_ids: list[int]
    """Prompt tokens that were completed; of a text, its tokens (empty if nothing was sampled)."""
    samples: tuple[Sample, ...]
    """Samples in order, as many as were asked for."""
    replica_ids: tuple[str, ...]
    """Replica that made each sample."""
    remarks: tuple[str, ...] = ()
    """Remarks on the samples, for messages, such as ``math@7 was trained on base@0, served over
    base@1``. Such samples are of a policy that its trainer does not hold."""

    def __repr__(self) -> str:
        """Return how many samples it has, and how many of them have failed."""
        num_failed = sum(sample.error is not None for sample in self.samples)
        num_tokens = sum(len(sample.token_ids) for sample in self.samples)
        text = f"prompt {self.index}, {plural(len(self.samples), 'sample')} of "
        text += plural(num_tokens, "token") + f", {num_failed} failed" * bool(num_failed)
        return f"SampleGroup({text}{', ' + '; '.join(self.remarks) if self.remarks else ''})"


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
class PartialSample:
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
        adapter = POLICY_VERSION.decode(last.adapter) if last.HasField("adapter") else None
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


@dataclass(frozen=True, kw_only=True, eq=False)
class PaddedBatch:
    """Batch tensors with one row a sample, groups in their order; on the CPU, owned by the caller.

    Prompts are padded on the left and completions on the right, so that ``cat([prompt_ids,
    completion_ids], 1)`` has no gap, and position ``i`` of ``completion_ids``, ``logprobs`` and
    ``versions`` is the same token. The trainer's log-probability of that token comes from the
    logits one position before.
    """

    prompt_ids: torch.Tensor
    """Prompt tokens, int64, (samples, longest prompt)."""
    prompt_mask: torch.Tensor
    """Prompt mask, bool; true where there is a token."""
    completion_ids: torch.Tensor
    """Completion tokens, int64, (samples, longest completion)."""
    completion_mask: torch.Tensor
    """Completion mask, bool; true where there is a token."""
    logprobs: torch.Tensor
    """Log-probabilities as the replicas say, float32; 0 where there is no token."""
    versions: torch.Tensor
    """Versions of the policy that was asked, int64; -1 where there is no token."""

    def __repr__(self) -> str:
        """Return the size of the batch."""
        (rows, prompt), completion = self.prompt_ids.shape, self.completion_ids.shape[1]
        text = f"{plural(rows, 'sample')}, prompts of {prompt} tokens, completions of {completion}"
        return f"PaddedBatch({text})"


def pad(groups: Sequence[SampleGroup], *, pad_token_id: int) -> PaddedBatch:
    """Pad samples and put them together, groups in their order; does not block.

    Args:
        groups: Groups of ``RolloutClient.generate`` or of a stream; copied, not kept.
        pad_token_id: Token id where there is no token; the masks are false there.

    Raises:
        InvalidRequestError: There are no samples, or one of them failed.
    """
    samples = [sample for group in groups for sample in group.samples]
    prompts = [torch.tensor(g.prompt_token_ids) for g in groups for _ in g.samples]
    if not samples:
        raise InvalidRequestError("there are no samples to put together")
    for sample in samples:
        if sample.error is not None:
            raise InvalidRequestError(f"a sample failed: {sample.error.message}") from sample.error
    prompt_ids, prompt_mask = _padded(prompts, pad_token_id, left=True)
    completion_ids, completion_mask = _padded([s.token_ids for s in samples], pad_token_id)
    return PaddedBatch(
        prompt_ids=prompt_ids,
        prompt_mask=prompt_mask,
        completion_ids=completion_ids,
        completion_mask=completion_mask,
        logprobs=_padded([s.logprobs for s in samples], 0.0)[0],
        versions=_padded([s.versions for s in samples], -1)[0],
    )


def _padded(
    rows: Sequence[torch.Tensor], value: float, *, left: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    side = "left" if left else "right"
    pad_rows = torch.nn.utils.rnn.pad_sequence
    padded = pad_rows([*rows], batch_first=True, padding_value=value, padding_side=side)
    mask = pad_rows([torch.ones(len(r), dtype=torch.bool) for r in rows], True, False, side)
    return padded, mask
