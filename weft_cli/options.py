"""Options that several commands share."""

from __future__ import annotations

from typing import Annotated

import typer

Coordinator = Annotated[
    str,
    typer.Option(
        "--coordinator",
        "-c",
        envvar="WEFT_COORDINATOR",
        metavar="HOST:PORT",
        help="The coordinator's address.",
    ),
]
