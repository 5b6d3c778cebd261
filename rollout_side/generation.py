"""What an engine is asked to generate, and what it answers."""

from __future__ import annotations

import enum
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from weft_rl.contract.names import PolicyVersion
from weft_rl.contract.sampling import Sampling


@dataclass(frozen=True, kw_only=True)
class GenerateOrder:
    """One prompt, and by what it is completed."""

    prompt: str | list[int]
    """Text, or tokens."""
    adapter: PolicyVersion | None
    """None: the base model itself."""
    sampling: Sampling = field(default_factory=Sampling)
    strict: bool = False
    """Whether the answer ends when the base changes before its last token."""
    exact_base: bool = False
    """Whether it ends when the base changes before its first one: a version of it was named."""
    chunk_tokens: int = 0
    """Tokens of a chunk, at least, but of a sample's first and last; 0: as they come."""


class FinishReason(enum.Enum):
    """Why a sample has ended."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


@dataclass(frozen=True)
class BaseSpan:
    """Tokens ``[start, end)`` of a sample were sampled under one version of the base."""

    version: int
    start: int
    end: int
    older_cache: bool = False
    """Whether the sample's cache was kept from an earlier version."""


@dataclass(frozen=True, kw_only=True)
class SampleChunk:
    """Further tokens of one sample."""

    index: int
    token_ids: Sequence[int]
    logprobs: Sequence[float]
    finish_reason: FinishReason | None = None
    """Of the last chunk."""
    base_spans: tuple[BaseSpan, ...] = ()
    """Of the last chunk: of all the sample's tokens, without gaps."""


class Answer(Protocol):
    """An answer that an engine is making. It counts as a running request from the moment it
    was made until ``end``."""

    base: int
    """Version of the base when it was asked for."""
    prompt_token_ids: Sequence[int]
    """What the prompt's text was made into, known with the first chunks; else empty."""

    def chunks(self) -> AsyncGenerator[Sequence[SampleChunk], None]:
        """What has been sampled since the last time; to be iterated once. Ends when every
        sample has had its last chunk.

        Raises:
            InvalidRequestError: The engine refuses it; nothing was sampled.
            CapacityError: ``TOO_MANY_CALLS``: the engine's own bounds are met.
            VersionChangedError: The base has changed, and it is strict. The tokens that came
                are of the version before.
            PeerUnavailableError: The engine has died.
        """

    def end(self) -> None:
        """End it in the engine, wherever it is; idempotent."""
