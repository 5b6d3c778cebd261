"""Batch tensors of samples, as a trainer's loss takes them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from trainer_side.rollouts.sample import SampleGroup
from weft_rl.contract.errors import InvalidRequestError


@dataclass(frozen=True, kw_only=True, eq=False)
class Padded:
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


def pad(groups: Sequence[SampleGroup], *, pad_token_id: int) -> Padded:
    """Pad samples and put them together.

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
    return Padded(
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
