"""Options that several commands share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Final

import typer

from weft_rl.contract.errors import InvalidRequestError
from weft_rl.contract.names import check_name
from weft_rl.coordinator.config import CoordinatorConfig
from weft_rl.rpc.channel import check_target

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

#: As far as a version's number goes; a database holds no larger one.
MAX_VERSION: Final = 2**63 - 1


def _name_of(what: str) -> Callable[[str], str]:
    """Return a callback that refuses a word that cannot name a policy or a replica, before anybody
    is asked."""

    def checked(value: str) -> str:
        try:
            return check_name(value, what) if value else value
        except InvalidRequestError as error:
            raise typer.BadParameter(error.message) from None

    return checked


PolicyName = Annotated[
    str,
    typer.Argument(
        metavar="POLICY", help="Adapter's name, or 'base'.", callback=_name_of("policy")
    ),
]
OptionalPolicyName = Annotated[
    str,
    typer.Argument(
        metavar="[POLICY]",
        help="Adapter's name, or 'base'; default: all.",
        callback=_name_of("policy"),
    ),
]
AdapterName = Annotated[
    str, typer.Argument(metavar="POLICY", help="Adapter's name.", callback=_name_of("policy"))
]
ReplicaId = Annotated[
    str,
    typer.Argument(
        metavar="REPLICA", help="Its name in weft status.", callback=_name_of("replica")
    ),
]

Json = Annotated[bool, typer.Option("--json", help="Print JSON for programs, one object a line.")]
