"""Options that several commands share."""

from __future__ import annotations

from typing import Annotated

import typer

from weft.contract.errors import InvalidRequestError
from weft.coordinator.config import CoordinatorConfig
from weft.rpc.channel import check_target

#: Where a coordinator listens that was not told to listen elsewhere.
DEFAULT_COORDINATOR = CoordinatorConfig.listen


def _target(value: str) -> str:
    try:
        return check_target(value, "--coordinator")
    except InvalidRequestError as error:
        raise typer.BadParameter(error.message) from None


Coordinator = Annotated[
    str,
    typer.Option(
        "--coordinator",
        "-c",
        envvar="WEFT_COORDINATOR",
        metavar="HOST:PORT",
        callback=_target,
        help="The coordinator's address.",
    ),
]

Json = Annotated[bool, typer.Option("--json", help="Print JSON for programs, one object a line.")]
