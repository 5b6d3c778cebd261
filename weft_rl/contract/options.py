"""Options that users give to trainers, commands, coordinator and replicas: checks, defaults.

Here, and not in ``trainer_side``, since the command line shows its help without torch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Final, Literal, TypeVar, get_args

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


# -- servers ---------------------------------------------------------------------


#: Heading of the options of credentials, and of a server's access, in the help.
SECURITY: Final = "Security"
_T = TypeVar("_T")


@dataclass(frozen=True, kw_only=True)
class SettingSpec:
    """Field of a config, as the command line shows it, and its bounds."""

    name: str = ""
    help: str
    """Help of its option; empty for a field that has none."""
    metavar: str | None
    panel: str | None
    """Heading of the option in the help; None for those that come first."""
    bounds: tuple[float, float] | None
    """Least and largest number, in the option's unit."""
    envvar: str | None
    unit: int
    """Number in the field that is 1 in the option: 2**30 for GiB of a field in bytes."""

    @property
    def option(self) -> str:
        """Name of its option: in GiB for a field in bytes."""
        return self.name if self.unit == 1 else self.name.replace("_bytes", "_gib")

    def check(self, value: float) -> None:
        """Refuse a value of the field outside the bounds.

        Raises:
            InvalidRequestError: It is outside, or not a number; names the option.
        """
        if self.bounds is None:
            return
        least, most = self.bounds
        if not least * self.unit <= value <= most * self.unit:
            seconds = " seconds" if self.name.endswith("_seconds") else ""
            raise InvalidRequestError(
                f"{self.option} must be between {least:.15g} and {most:.15g}{seconds}"
            )


def setting(
    default: _T,
    text: str = "",
    metavar: str | None = None,
    *,
    panel: str | None = None,
    bounds: tuple[float, float] | None = None,
    envvar: str | None = None,
    unit: int = 1,
) -> _T:
    """Return a field of a config that is an option, or is bounded; see ``SettingSpec``."""
    known = SettingSpec(
        help=text, metavar=metavar, panel=panel, bounds=bounds, envvar=envvar, unit=unit
    )
    made: Any = field(default=default, metadata={"setting": known})
    return made  # type: ignore[no-any-return]


def settings_of(config: Any) -> Iterator[SettingSpec]:
    """Yield the settings among the fields of a config, or of its class."""
    for each in fields(config):
        if (known := each.metadata.get("setting")) is not None:
            yield dataclasses.replace(known, name=each.name)


def check_bounds(config: Any) -> None:
    """Refuse a config with a setting outside its bounds.

    Raises:
        InvalidRequestError: One is; names it.
    """
    for known in settings_of(config):
        known.check(getattr(config, known.name))


def access_setting() -> Path | None:
    """Return the field of who may call a server; None to serve every caller."""
    text = (
        "TOML file of which certificates or tokens may call what; needs --tls-cert. Read again "
        "when it changes."
    )
    return setting(None, text, "FILE", panel=SECURITY)


def insecure_setting() -> bool:
    """Return the field that is True for a server which serves every caller on any address."""
    text = "Serve every caller although the address is not this machine's loopback."
    return setting(False, text, panel=SECURITY)


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
