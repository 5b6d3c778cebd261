"""How tokens are sampled."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How the samples of a prompt are drawn; what is not given leaves the distribution of the
    model as it is. See ``weft.v1.Sampling``."""

    num_samples: int = 1
    """Of each prompt, at most 1024."""
    temperature: float = 1.0
    """0 takes the most likely token."""
    top_p: float = 1.0
    top_k: int = 0
    """0 considers all tokens."""
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    max_tokens: int | None = None
    """Of each sample; None: as many as the model's context leaves."""
    min_tokens: int = 0
    """Before an end-of-sequence or stop token may come."""
    stop: tuple[str, ...] = ()
    """Strings that end a sample; the tokens that make them are its last ones."""
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end a sample; the token is its last one."""
    ignore_eos: bool = False
