"""Settings of how tokens are sampled."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from weft_rl.contract.errors import InvalidRequestError


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """Settings by which the samples of a prompt are drawn; what is not given leaves the
    distribution of the model as it is. See ``weft.v1.Sampling``."""

    temperature: float = 1.0
    """Temperature; 0 takes the most likely token."""
    top_p: float = 1.0
    top_k: int = 0
    """Number of tokens considered; 0 considers all tokens."""
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    max_tokens: int | None = None
    """Most tokens of each sample; None: as many as the model's context leaves."""
    min_tokens: int = 0
    """Fewest tokens before an end-of-sequence or stop token may come."""
    stop: str | Iterable[str] = ()
    """Strings that end a sample, or one; the tokens that make them are its last ones. Kept as a
    tuple."""
    stop_token_ids: Iterable[int] = ()
    """Tokens that end a sample; the token is its last one. One alone is taken, too; kept as a
    tuple."""
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        """Check the stops, and keep them as tuples.

        Raises:
            InvalidRequestError: A stop is of another kind.
        """
        object.__setattr__(self, "stop", _several("stop", self.stop, str))
        object.__setattr__(
            self, "stop_token_ids", _several("stop_token_ids", self.stop_token_ids, int)
        )


def _several(name: str, given: object, kind: type) -> tuple[object, ...]:
    """Return one or several values of a kind as a tuple."""
    if isinstance(given, kind) and not isinstance(given, bool):
        return (given,)
    several = tuple(given) if isinstance(given, Iterable) and not isinstance(given, bytes) else None
    if several is None or not all(
        isinstance(each, kind) and not isinstance(each, bool) for each in several
    ):
        what = "a string, or several" if kind is str else "the id of a token, or several"
        raise InvalidRequestError(f"{name}={given!r:.80}: give {what}")
    return several
