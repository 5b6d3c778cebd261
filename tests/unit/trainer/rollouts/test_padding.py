"""Prompts on the left, completions on the right, each position one token."""

from __future__ import annotations

import pytest
import torch

from trainer_side.rollouts.sample import Sample, SampleGroup, pad
from weft_rl.contract.errors import InvalidRequestError, NotFoundError


def _sample(tokens: list[int], version: int, error: NotFoundError | None = None) -> Sample:
    versions = torch.full((len(tokens),), version)
    return Sample(
        token_ids=torch.tensor(tokens, dtype=torch.int64),
        logprobs=-torch.tensor(tokens, dtype=torch.float32),
        versions=versions,
        base_versions=versions,
        older_cache=versions < 0,
        adapter=None,
        finish_reason="stop",
        error=error,
    )


def _group(prompt: list[int], *samples: Sample) -> SampleGroup:
    replicas = ("r",) * len(samples)
    return SampleGroup(index=0, prompt_token_ids=prompt, samples=samples, replica_ids=replicas)


def test_rows_are_samples_in_order() -> None:
    batch = pad(
        [_group([1, 2, 3], _sample([4, 5], 7), _sample([6], 7)), _group([8], _sample([9], 8))],
        pad_token_id=99,
    )
    assert batch.prompt_ids.tolist() == [[1, 2, 3], [1, 2, 3], [99, 99, 8]]
    assert batch.prompt_mask.tolist() == [[True] * 3, [True] * 3, [False, False, True]]
    assert batch.completion_ids.tolist() == [[4, 5], [6, 99], [9, 99]]
    assert batch.completion_mask.tolist() == [[True, True], [True, False], [True, False]]
    assert batch.logprobs.tolist() == [[-4, -5], [-6, 0], [-9, 0]]
    assert batch.versions.tolist() == [[7, 7], [7, -1], [8, -1]]
    assert (batch.logprobs.dtype, batch.versions.dtype) == (torch.float32, torch.int64)


def test_failed_samples_and_none_are_refused() -> None:
    with pytest.raises(InvalidRequestError, match="no samples"):
        pad([], pad_token_id=0)
    failed = _group([1], _sample([], 0, NotFoundError("math@9 is gone")))
    with pytest.raises(InvalidRequestError, match="a sample failed: math@9 is gone"):
        pad([failed], pad_token_id=0)
