"""Orders to generate, and the answers of an engine."""

from __future__ import annotations

import enum
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from weft_rl.contract.names import PolicyVersion
from weft_rl.contract.sampling import Sampling


@dataclass(frozen=True, kw_only=True)
class GenerateOrder:
    """Prompt to complete, with the adapter and the sampling to complete it with."""

    prompt: str | list[int]
    """Prompt as text, or as tokens."""
    adapter: PolicyVersion | None
    """Adapter version to complete it with; None for the base model itself."""
    num_samples: int = 1
    """Number of samples of the prompt."""
    sampling: Sampling = field(default_factory=Sampling)
    strict: bool = False
    """True if the answer ends when the base changes before its last token."""
    exact_base: bool = False
    """True if the answer ends when the base changes before its first token: the request named a
    version of the base."""
    chunk_tokens: int = 0
    """Least number of tokens in a chunk, except a sample's first and last; 0 sends tokens as they
    come."""


class FinishReason(enum.Enum):
    """Reason why a sample has ended."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


@dataclass(frozen=True)
class BaseSpan:
    """Span of a sample's tokens, ``[start, end)``, that were sampled under one version of the
    base."""

    version: int
    start: int
    end: int
    older_cache: bool = False
    """True if the sample's cache was kept from an earlier version."""


@dataclass(frozen=True, kw_only=True)
class SampleChunk:
    """Further tokens of one sample."""

    index: int
    token_ids: Sequence[int]
    logprobs: Sequence[float]
    finish_reason: FinishReason | None = None
    """Reason of the end; set on the last chunk only."""
    base_spans: tuple[BaseSpan, ...] = ()
    """Spans of all the sample's tokens, without gaps; set on the last chunk only."""


class Answer(Protocol):
    """Answer that an engine is making. It counts as a running request from its creation until
    ``end``."""

    base: int
    """Version of the base when the answer was requested."""
    prompt_token_ids: Sequence[int]
    """Tokens of a text prompt, known with the first chunks; empty before, and for a prompt of
    tokens."""

    def chunks(self) -> AsyncGenerator[Sequence[SampleChunk], None]:
        """Yield the chunks sampled since the last iteration; to be iterated once. Ends when every
        sample has had its last chunk.

        Raises:
            InvalidRequestError: The engine refuses the prompt; nothing was sampled.
            CapacityError: ``TOO_MANY_CALLS``: the engine's own bounds are met.
            VersionChangedError: The base has changed, and the order is strict. The tokens that came
                are of the version before.
            PeerUnavailableError: The engine has died.
        """

    def end(self) -> None:
        """End the answer in the engine, wherever it is; idempotent."""
