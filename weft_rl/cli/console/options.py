"""Options that several commands have, and the credentials that all of them take."""

from __future__ import annotations

import os
from collections.abc import Callable
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
PolicyName = Annotated[
    str,
    typer.Argument(
        metavar="POLICY",
        help="Name of an adapter, or 'base'.",
        callback=_checked(check_name, "policy"),
    ),
]
OptionalPolicyName = Annotated[
    str,
    typer.Argument(
        metavar="POLICY",
        help="Name of an adapter, or 'base'; default: all.",
        callback=_checked(check_name, "policy"),
    ),
]
AdapterName = Annotated[
    str,
    typer.Argument(
        metavar="POLICY", help="Name of an adapter.", callback=_checked(check_name, "policy")
    ),
]
ReplicaId = Annotated[
    str,
    typer.Argument(
        metavar="REPLICA",
        help="Name of the replica, as weft status shows it.",
        callback=_checked(check_name, "replica"),
    ),
]
Wide = Annotated[
    bool,
    typer.Option("--wide", help="Show every column in full, as where the output is no terminal."),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON, one object a line.")]


def _keep(parameter: typer.CallbackParam, value: str | None) -> str | None:
    """Let a given option win over the environment, here and in child processes."""
    if value is not None:
        os.environ[VARIABLES[str(parameter.name)]] = value
    return value


def _file(variable: str, text: str) -> Any:
    return typer.Option(
        metavar="FILE",
        envvar=variable,
        help=text,
        callback=_keep,
        expose_value=False,
        rich_help_panel=SECURITY,
    )


def _credentials(
    tls_cert: Annotated[
        str | None, _file("WEFT_TLS_CERT", "Certificate chain of this process, PEM.")
    ] = None,
    tls_key: Annotated[
        str | None, _file("WEFT_TLS_KEY", "Private key of that certificate, PEM.")
    ] = None,
    tls_ca: Annotated[
        str | None,
        _file("WEFT_TLS_CA", "Certificates of the authorities that sign those of peers, PEM."),
    ] = None,
    token_file: Annotated[
        str | None, _file("WEFT_TOKEN_FILE", "File that holds the bearer token to send.")
    ] = None,
) -> None:
    """Declare the options; the function itself is never called."""


class CommandsWithCredentials(TyperGroup):
    """Group of commands that all take credentials, which are kept in the environment for the
    channels to read."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        template = typer.Typer(add_completion=False)
        template.command()(_credentials)
        options = typer.main.get_command(template).params
        for command in self.commands.values():
            command.params += options
