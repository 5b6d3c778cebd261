"""Options that users give to trainers, commands, coordinator and replicas: checks, defaults.

Here, and not in ``trainer_side``, since the command line shows its help without torch.
"""

from __future__ import annotations

from typing import Any, Final, Literal, get_args

from weft_rl.contract.errors import InvalidRequestError

_LONGEST_SECONDS = 7 * 86_400.0


def shown_value(value: object) -> str:
    """Return a value as a message shows it: its ``repr``, cut; its type where it has none."""
    try:
        text = repr(value)
    except Exception:  # noqa: BLE001 (a whole number of thousands of digits, or a user's class)
        return f"(a value of type {type(value).__name__})"
    return text if len(text) <= 80 else f"{text[:77]}..."


def check_seconds(name: str, value: object) -> float:
    """Return ``value`` if it is a time to wait for.

    Raises:
        InvalidRequestError: Not a number, not positive, or longer than a week.
    """
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not 0 < value <= _LONGEST_SECONDS:  # type: ignore[operator]
        raise InvalidRequestError(
            f"{name}={shown_value(value)}: give seconds, more than 0 and at most a week "
            f"({_LONGEST_SECONDS:.0f})"
        )
    return float(value)  # type: ignore[arg-type]


def check_count(name: str, value: object, most: int = 2**62) -> int | None:
    """Return ``value`` if it is None or a positive whole number, at most ``most``.

    Raises:
        InvalidRequestError: Something else.
    """
    if value is not None and (type(value) is not int or not 0 < value <= most):
        bound = f" and at most {most}" if most < 2**62 else ""
        raise InvalidRequestError(
            f"{name}={shown_value(value)}: give a whole number, at least 1{bound}"
        )
    return value


def check_choice(name: str, value: object, choices: Any) -> None:
    """Refuse a word, or number, that is not among a ``Literal``'s.

    Raises:
        InvalidRequestError: It is not; names those that are.
    """
    known = get_args(choices)
    if not any(type(value) is type(each) and value == each for each in known):  # True is not 1
        words = ", ".join(map(repr, known))
        raise InvalidRequestError(f"{name}={shown_value(value)}: use one of {words}")


# -- pushes ----------------------------------------------------------------------

#: Replicas that must hold a version before it is committed: at least so many of any, or all
#: that are ready when the push begins.
Require = Literal["all"] | int

#: One replica is enough: the loss of a replica ends nobody's training.
DEFAULT_REQUIRE: Final = 1
#: Longest time of a push, waiting for replicas included.
DEFAULT_TIMEOUT_SECONDS = 600.0
#: Longest wait for a coordinator that was never reached.
DEFAULT_CONNECT_SECONDS = 5.0
#: Base of an adapter: found out, and a remark where the pool serves another.
DEFAULT_BASE: Final = "auto"


# -- sleep -----------------------------------------------------------------------

#: vLLM's levels: 1 moves the weights to host memory, 2 discards them.
SleepLevel = Literal[1, 2]
#: The level at which weights are discarded.
DISCARDS: Final = 2
#: Treatment of requests that run when a replica falls asleep.
WhenRunning = Literal["finish", "abort"]
#: Time that those may take to end where a caller says nothing.
DEFAULT_REQUESTS_SECONDS: Final = 60.0
#: Time that an engine may take to fall asleep once its requests have ended, and to wake.
SWITCH_SECONDS: Final = 180.0
