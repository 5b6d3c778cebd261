"""The options of credentials, which every command has."""

from __future__ import annotations

import os
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from weft_rl.rpc.security.credentials import VARIABLES


def _keep(parameter: typer.CallbackParam, value: str | None) -> str | None:
    """Let a given option win over the environment, here and in child processes."""
    if value is not None:
        os.environ[VARIABLES[str(parameter.name)]] = value
    return value


def _file(variable: str, text: str) -> Any:
    return typer.Option(
        metavar="FILE", envvar=variable, help=text, callback=_keep, expose_value=False
    )


def _options(
    tls_cert: Annotated[
        str | None, _file("WEFT_TLS_CERT", "Certificate chain of this process, PEM.")
    ] = None,
    tls_key: Annotated[str | None, _file("WEFT_TLS_KEY", "Its private key, PEM.")] = None,
    tls_ca: Annotated[
        str | None, _file("WEFT_TLS_CA", "Certificates of who signs those of others, PEM.")
    ] = None,
    token_file: Annotated[
        str | None, _file("WEFT_TOKEN_FILE", "File that holds the bearer token to send.")
    ] = None,
) -> None:
    """Declare the options; the function itself is never called."""


class CommandsWithCredentials(TyperGroup):
    """A group whose commands all have these options; they are kept in the environment,
    where channels look for them."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        template = typer.Typer(add_completion=False)
        template.command()(_options)
        options = typer.main.get_command(template).params
        for command in self.commands.values():
            command.params += options
