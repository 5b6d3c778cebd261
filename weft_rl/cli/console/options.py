"""Options that several commands have, and the credentials that all of them take."""

from __future__ import annotations

import os
from collections.abc import Callable
from inspect import Parameter, Signature
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from weft_rl.contract.errors import InvalidRequestError
from weft_rl.contract.names import check_name
from weft_rl.contract.options import SECURITY
from weft_rl.coordinator.config import CoordinatorConfig
from weft_rl.rpc.channel import check_target
from weft_rl.rpc.security.credentials import VARIABLES

#: Where a coordinator listens unless it is told otherwise.
DEFAULT_COORDINATOR = CoordinatorConfig.listen


def _checked(check: Callable[[str, str], str], what: str) -> Callable[[str], str]:
    """Return a callback that refuses a value before the coordinator is called."""

    def checked(value: str) -> str:
        try:
            return check(value, what) if value else value
        except InvalidRequestError as error:
            raise typer.BadParameter(error.message) from None

    return checked


Coordinator = Annotated[
    str,
    typer.Option(
        "--coordinator",
        "-c",
        envvar="WEFT_COORDINATOR",
        metavar="HOST:PORT",
        callback=_checked(check_target, "--coordinator"),
        help="Address of the coordinator.",
    ),
]


def _named(what: str, text: str) -> Any:
    check = _checked(check_name, what)
    return typer.Argument(metavar=what.upper(), help=text, callback=check)


PolicyName = Annotated[str, _named("policy", "Name of an adapter, or 'base'.")]
OptionalPolicyName = Annotated[
    str, _named("policy", "Name of an adapter, or 'base'; default: all.")
]
AdapterName = Annotated[str, _named("policy", "Name of an adapter.")]
ReplicaId = Annotated[str, _named("replica", "Name of the replica, as weft status shows it.")]
TransferId = Annotated[str, _named("transfer", "Its id, as weft transfers --wide shows it.")]
Wide = Annotated[
    bool,
    typer.Option("--wide", help="Show every column in full, as where the output is no terminal."),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON, one object a line.")]


_CREDENTIALS = {
    "tls_cert": "Certificate chain of this process, PEM.",
    "tls_key": "Private key of that certificate, PEM.",
    "tls_ca": "Certificates of the authorities that sign those of peers, PEM.",
    "token_file": "File that holds the bearer token to send.",
}


def _keep(parameter: typer.CallbackParam, value: str | None) -> str | None:
    """Let a given option win over the environment, here and in child processes."""
    if value is not None:
        os.environ[VARIABLES[str(parameter.name)]] = value
    return value


def _credential(name: str, text: str) -> Parameter:
    option: Any = typer.Option(
        metavar="FILE",
        envvar=VARIABLES[name],
        help=text,
        callback=_keep,
        expose_value=False,
        rich_help_panel=SECURITY,
    )
    annotation = Annotated[str | None, option]
    return Parameter(name, Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


class CommandsWithCredentials(TyperGroup):
    """Group of commands that all take credentials, which are kept in the environment for the
    channels to read."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)

        def template() -> None:
            """Take the options; it is never called."""

        options = [_credential(name, text) for name, text in _CREDENTIALS.items()]
        template.__signature__ = Signature(options)  # type: ignore[attr-defined]
        made = typer.Typer(add_completion=False)
        made.command()(template)
        for command in self.commands.values():
            command.params += typer.main.get_command(made).params
