"""What an engine answered, compared with transformers and PEFT."""

from __future__ import annotations

from pathlib import Path

from tests.e2e.engine_process import Completion
from tests.models import Referee

# Bounds as measured against transformers: a step of 1e-6 in the weights is above.
MAX_ERROR, MEAN_ERROR = 5e-5, 5e-6
PROMPT = [5, 17, 99, 200, 33]


def check(
    referee: Referee,
    got: Completion,
    model: Path,
    adapter: Path | None = None,
    prompt: list[int] = PROMPT,
) -> None:
    """Compare log-probabilities of the tokens that were generated."""
    want = referee.logprobs(model, prompt, got.tokens, adapter)
    errors = [abs(a - b) for a, b in zip(want, got.logprobs, strict=True)]
    assert max(errors) <= MAX_ERROR, (got.model, errors)
    assert sum(errors) / len(errors) <= MEAN_ERROR, (got.model, errors)
