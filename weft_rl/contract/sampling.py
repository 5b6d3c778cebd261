"""Settings of how tokens are sampled, and the one rule of what they may be.

A trainer makes them, and so does a replica of each request: both refuse the same, by the same
words.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable
from dataclasses import dataclass, field
from numbers import Real
from typing import Any, Final, NoReturn

from weft_rl.contract.errors import InvalidRequestError

MAX_SAMPLES: Final = 1_024
MAX_STOPS: Final = 16
MAX_STOP_CHARS: Final = 1_024
MAX_STOP_TOKEN_IDS: Final = 1_024
#: Exact in JSON, too.
MAX_SEED: Final = 2**53 - 1
_MAX_UINT32: Final = 2**32 - 1
#: Engines compute in float32, where a larger number is infinite.
_MAX_FLOAT: Final = 3.4e38


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """Settings by which the samples of a prompt are drawn; what is not given leaves the
    distribution of the model as it is. See ``weft.v1.Sampling``.

    Raises:
        InvalidRequestError: A setting cannot be right; names it.
    """

    temperature: float = 1.0
    """Temperature, at least 0, which takes the most likely token."""
    top_p: float = 1.0
    """Share of the probability that is considered, in (0, 1]."""
    top_k: int = 0
    """Number of tokens considered; 0 considers all tokens."""
    min_p: float = 0.0
    """Least probability of a token, as a share of the most likely one's, in [0, 1]."""
    repetition_penalty: float = 1.0
    """Divisor of the logits of tokens that were there before, above 0."""
    seed: int | None = None
    """Seed, from 0 to 2**53 - 1; None: at random."""
    max_tokens: int | None = field(default=None, metadata={"unset": None})
    """Most tokens of each sample; None: as many as the model's context leaves."""
    min_tokens: int = 0
    """Fewest tokens before an end-of-sequence or stop token may come."""
    stop: str | Iterable[str] = ()
    """Strings that end a sample, or one; the tokens that make them are its last ones. At most 16
    of 1024 characters; kept as a tuple."""
    stop_token_ids: Iterable[int] = ()
    """Tokens that end a sample; the token is its last one. One alone is taken, too; at most 1024,
    kept as a tuple."""
    ignore_eos: bool = False
    """True if the model's end-of-sequence token ends no sample."""

    def __post_init__(self) -> None:
        checked = {
            "temperature": _real("temperature", self.temperature, least=0.0),
            "top_p": _real("top_p", self.top_p, above=0.0, most=1.0),
            "top_k": _whole("top_k", self.top_k),
            "min_p": _real("min_p", self.min_p, least=0.0, most=1.0),
            "repetition_penalty": _real("repetition_penalty", self.repetition_penalty, above=0.0),
            "min_tokens": _whole("min_tokens", self.min_tokens),
            "stop": _several("stop", self.stop, str),
            "stop_token_ids": _several("stop_token_ids", self.stop_token_ids, int),
        }
        if self.seed is not None:
            checked["seed"] = _whole("seed", self.seed, most=MAX_SEED, otherwise=", or None")
        if self.max_tokens is not None:
            checked["max_tokens"] = _whole(
                "max_tokens", self.max_tokens, least=1, otherwise=", or None"
            )
        if not isinstance(self.ignore_eos, bool):
            _refuse("ignore_eos", self.ignore_eos, "True or False")
        for name, value in checked.items():
            object.__setattr__(self, name, value)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            _refuse("min_tokens", self.min_tokens, f"at most max_tokens, {self.max_tokens}")
        _check_stops(self.stop, self.stop_token_ids)


def check_num_samples(number: Any, sampling: Sampling, name: str = "num_samples") -> int:
    """Return how many samples of a prompt are asked for.

    Args:
        name: What the caller calls the number.

    Raises:
        InvalidRequestError: It cannot be right, or there is one most likely sample alone.
    """
    told = "num_samples"
    checked = _whole(name, number, least=1, most=MAX_SAMPLES, field=told)
    if checked > 1 and sampling.temperature == 0:
        _refuse(name, number, "1 with temperature=0, whose samples would all be alike", told)
    return checked


def _refuse(name: str, given: object, wanted: str, field: str = "") -> NoReturn:
    raise InvalidRequestError(
        f"{name}={given!r:.80}: give {wanted}", metadata={"field": f"Sampling.{field or name}"}
    )


def _real(
    name: str,
    given: Any,
    *,
    least: float | None = None,
    above: float | None = None,
    most: float = _MAX_FLOAT,
) -> float:
    """Return a number within its bounds."""
    low = f"of at least {least:g}" if least is not None else f"above {above:g}"
    high = "that is finite" if most == _MAX_FLOAT else f"at most {most:g}"
    try:
        is_number = isinstance(given, Real) and not isinstance(given, bool)
        value = float(given) if is_number else math.nan
    except OverflowError:
        value = math.inf
    is_low = value >= least if least is not None else above is not None and value > above
    if not (is_low and value <= most):  # NaN is neither
        _refuse(name, given, f"a number {low} and {high}")
    return value


def _whole(
    name: str,
    given: Any,
    *,
    least: int = 0,
    most: int = _MAX_UINT32,
    otherwise: str = "",
    field: str = "",
) -> int:
    """Return an integer within its bounds."""
    wanted = f"a whole number from {least} to {most}{otherwise}"
    if isinstance(given, bool) or not hasattr(given, "__index__"):
        _refuse(name, given, wanted, field)
    try:
        value = operator.index(given)
    except TypeError:  # of an array with several
        _refuse(name, given, wanted, field)
    if not least <= value <= most:
        _refuse(name, given, wanted, field)
    return value


def _check_stops(stops: Any, token_ids: Any) -> None:
    if len(stops) > MAX_STOPS or not all(1 <= len(stop) <= MAX_STOP_CHARS for stop in stops):
        wanted = f"at most {MAX_STOPS} strings of 1 to {MAX_STOP_CHARS} characters"
        _refuse("stop", stops, wanted)
    if len(token_ids) > MAX_STOP_TOKEN_IDS or not all(
        0 <= each <= _MAX_UINT32 for each in token_ids
    ):
        _refuse("stop_token_ids", token_ids, f"at most {MAX_STOP_TOKEN_IDS} ids of tokens")


def _several(name: str, given: object, kind: type) -> tuple[object, ...]:
    """Return one or several values of a kind as a tuple."""
    if isinstance(given, kind) and not isinstance(given, bool):
        return (given,)
    several = tuple(given) if isinstance(given, Iterable) and not isinstance(given, bytes) else None
    if several is None or not all(
        isinstance(each, kind) and not isinstance(each, bool) for each in several
    ):
        _refuse(
            name, given, "a string, or several" if kind is str else "the id of a token, or several"
        )
    return several
