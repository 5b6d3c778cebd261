"""Commands whose options come from a config, or are common to all that call the coordinator."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from inspect import Parameter
from typing import Annotated, Any, get_type_hints

import typer
from google.protobuf.message import Message
from rich.console import RenderableType
from rich.text import Text

from weft_rl.cli.console.options import DEFAULT_COORDINATOR, Coordinator, Json, Wide
from weft_rl.cli.console.output import connect, print_json, print_text
from weft_rl.cli.console.table import listing_console
from weft_rl.contract.options import SettingSpec, settings_of
from weft_rl.rpc.codec import as_dict

#: Function that typer makes a command of.
Command = Callable[..., None]
#: Text, with markup, or table for people, and the messages whose fields programs get as one object;
#: none for a remark that is for people only.
Printed = tuple[RenderableType, *tuple[Message, ...]]
#: A larger upper bound is not in the help, which it would only make wider.
_MOST_SHOWN = 100_000


def parameters_of(function: Callable[..., Any]) -> list[Parameter]:
    """Return a function's parameters, each with typer's annotation."""
    hints = get_type_hints(function, include_extras=True)
    known = inspect.signature(function).parameters.values()
    return [each.replace(annotation=hints[each.name]) for each in known]


def command_like(
    function: Callable[..., Any],
    parameters: Sequence[Parameter],
    called: Callable[[dict[str, Any]], None],
) -> Command:
    """Return a command with the name and the help of a function, and other parameters.

    Args:
        parameters: Parameters of the command, each with a default or before those that have one.
        called: Called with their values, by name.
    """
    signature = inspect.Signature(parameters)

    def command(*args: Any, **given: Any) -> None:
        bound = signature.bind(*args, **given)
        bound.apply_defaults()
        called(bound.arguments)

    command.__name__, command.__doc__ = function.__name__, function.__doc__
    command.__annotations__ = {each.name: each.annotation for each in parameters}
    command.__signature__ = signature  # type: ignore[attr-defined]
    return command


def pool_command(function: Callable[..., Iterator[Printed]], *, has_table: bool = False) -> Command:
    """Make a command of a function that takes a channel to the coordinator and yields its output.

    The command has the options --coordinator and --json, and --wide if it prints tables. Calls that
    fail raise a typed error.
    """
    common = [each for each in parameters_of(_common) if has_table or each.name != "wide"]

    def called(given: dict[str, Any]) -> None:
        own = {each.name: given.pop(each.name) for each in common}
        with connect(own["coordinator"]) as channel:
            for shown, *messages in function(channel, **given):
                if own["json_output"]:
                    if messages:
                        print_json({k: v for each in messages for k, v in as_dict(each).items()})
                elif isinstance(shown, str | Text):
                    print_text(shown)
                else:
                    listing_console(wide=own["wide"]).print(shown)

    return command_like(function, [*parameters_of(function)[1:], *common], called)


def _common(
    *,
    coordinator: Coordinator = DEFAULT_COORDINATOR,
    wide: Wide = False,
    json_output: Json = False,
) -> None:
    """Declare the options; the function itself is never called."""


def with_settings(config: type[Any]) -> Callable[[Command], Command]:
    """Give a command an option for each setting of a config, and of the configs in it.

    The options take the place of the command's parameter ``make``. It is called with ``make``, a
    function of the config's other fields that returns the config.
    """
    options = _options(config)

    def decorate(function: Command) -> Command:
        known = parameters_of(function)
        at = [each.name for each in known].index("make")

        def called(given: dict[str, Any]) -> None:
            set_here = {each.name: given.pop(each.name) for each in options}
            function(**given, make=lambda **others: _made(config, set_here | others))

        return command_like(function, [*known[:at], *options, *known[at + 1 :]], called)

    return decorate


def _options(config: type[Any]) -> list[Parameter]:
    """Return the options of a config, by heading, and below each the flags last."""
    headed: dict[str | None, list[Parameter]] = {None: []}
    for known, kind, default in _settings(config):
        headed.setdefault(known.panel, []).append(_option(known, kind, default))
    return [
        option
        for options in headed.values()
        for option in sorted(options, key=lambda option: option.default is False)
    ]


def _settings(config: type[Any]) -> list[tuple[SettingSpec, Any, Any]]:
    """Return the settings that have an option, with the types and defaults of their fields."""
    hints, own = get_type_hints(config), {each.name: each for each in settings_of(config)}
    found = []
    for field in dataclasses.fields(config):
        if dataclasses.is_dataclass(kind := hints[field.name]):
            found += _settings(kind)  # type: ignore[arg-type]
        elif field.name in own and own[field.name].help:
            found.append((own[field.name], kind, field.default))
    return found


def _option(known: SettingSpec, kind: Any, default: Any) -> Parameter:
    least, most = known.bounds or (None, None)
    option: Any = typer.Option(
        *[f"--{known.option.replace('_', '-')}"] * (kind is bool),
        metavar=known.metavar,
        help=known.help,
        rich_help_panel=known.panel,
        min=least,
        max=most if most is not None and most < _MOST_SHOWN else None,
        envvar=known.envvar,
    )
    if known.unit != 1:
        kind, default = float, default / known.unit
    return Parameter(
        known.option,
        Parameter.POSITIONAL_OR_KEYWORD,
        default=default,
        annotation=Annotated[kind, option],
    )


def _made(config: type[Any], values: Mapping[str, Any]) -> Any:
    """Make a config of the values of its fields' options, and of other fields."""
    given = {}
    hints, own = get_type_hints(config), {each.name: each for each in settings_of(config)}
    for field in dataclasses.fields(config):
        known, kind = own.get(field.name), hints[field.name]
        if known is not None and known.unit != 1 and known.option in values:
            num_units = values[known.option] * known.unit
            known.check(num_units)
            given[field.name] = int(num_units)
        elif field.name in values:
            given[field.name] = values[field.name]
        elif dataclasses.is_dataclass(kind) and _settings(kind):  # type: ignore[arg-type]
            given[field.name] = _made(kind, values)  # type: ignore[arg-type]
    return config(**given)
