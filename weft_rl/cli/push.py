"""``weft push``: publish an adapter or a checkpoint from disk."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from weft_rl.cli.console.options import DEFAULT_COORDINATOR, Coordinator, Json
from weft_rl.cli.console.output import print_json, print_text, rate
from weft_rl.contract.errors import InvalidRequestError
from weft_rl.contract.names import BASE_POLICY, plural
from weft_rl.contract.options import (
    DEFAULT_BASE,
    DEFAULT_CONNECT_SECONDS,
    DEFAULT_REQUIRE,
    DEFAULT_TIMEOUT_SECONDS,
    Require,
)


def push(
    path: Annotated[
        Path,
        typer.Argument(
            metavar="PATH", help="Directory of a PEFT adapter, or a safetensors checkpoint."
        ),
    ],
    policy: Annotated[
        str,
        typer.Option(
            metavar="NAME", help="Name of the adapter, or 'base' for a checkpoint of the model."
        ),
    ],
    coordinator: Coordinator = DEFAULT_COORDINATOR,
    trainer_id: Annotated[
        str, typer.Option(metavar="NAME", help="Trainer that will own the policy.")
    ] = "weft-push",
    require: Annotated[
        str,
        typer.Option(
            metavar="NUMBER",
            help="Number of replicas that have to serve the version, or 'all' that are ready.",
        ),
    ] = str(DEFAULT_REQUIRE),
    timeout: Annotated[
        float, typer.Option(metavar="SECONDS", help="Longest time of the whole push.", min=1)
    ] = DEFAULT_TIMEOUT_SECONDS,
    connect_seconds: Annotated[
        float,
        typer.Option(
            metavar="SECONDS", help="Longest wait for the coordinator's first answer.", min=0.1
        ),
    ] = DEFAULT_CONNECT_SECONDS,
    takeover: Annotated[
        bool,
        typer.Option("--takeover", help="Take the policy from another process of --trainer-id."),
    ] = False,
    cast: Annotated[
        bool, typer.Option(help="Cast floats to the dtype that replicas serve.")
    ] = True,
    check_finite: Annotated[
        bool,
        typer.Option(
            "--check-finite", help="Refuse NaN and infinities, looked for after the cast."
        ),
    ] = False,
    base: Annotated[
        str,
        typer.Option(
            metavar="BASE",
            help="Base that the adapter is for: 'auto' finds out, 'base@N' says which one it was "
            "trained on, 'same' and 'only base@N' refuse any other, 'any' compares nothing.",
        ),
    ] = DEFAULT_BASE,
    draft: Annotated[
        Path | None,
        typer.Option(
            metavar="PATH",
            help="Safetensors files of the model that drafts tokens, to be pushed with the base.",
        ),
    ] = None,
    json_output: Json = False,
) -> None:
    """Publish an adapter or a checkpoint from disk."""
    for given in (path, draft):
        if given is not None and not os.path.exists(given):  # False of what no file system takes
            raise InvalidRequestError(f"{given} does not exist")
    if draft is not None and policy != BASE_POLICY:
        raise InvalidRequestError(
            f"--draft needs --policy {BASE_POLICY}: a draft model is pushed with a base"
        )
    from trainer_side import Publisher, PushOptions

    with Publisher(
        coordinator,
        trainer_id=trainer_id,
        require=parse_require(require),
        timeout_seconds=timeout,
        connect_seconds=connect_seconds,
        takeover=takeover,
        options=PushOptions(cast=cast, check_finite=check_finite),
    ) as publisher:
        if policy == BASE_POLICY:
            version, report = publisher.push_base(path, draft=draft)
        else:
            version, report = publisher.push_adapter(path, policy, base=base)
    if json_output:
        print_json({"version": str(version)} | dataclasses.asdict(report))
        return
    speed = rate(report.total_bytes, report.staging_seconds)
    at = f" at {speed}" if speed else ""
    print_text(
        f"[bold green]{version}[/] is served by {plural(report.num_replicas, 'replica')}: "
        f"{report.total_bytes:,} bytes in {report.seconds:.3f} s "
        f"(forming {report.forming_seconds:.3f}, staging {report.staging_seconds:.3f}{at}, "
        f"committing {report.committing_seconds:.3f})"
    )
    for remark in report.remarks:
        print_text(f"  {escape(remark)}")


def parse_require(text: str) -> Require:
    """Parse the value of ``--require``.

    Raises:
        InvalidRequestError: It is neither "all" nor a number of at least 1.
    """
    if text == "all":
        return "all"
    if text.isdecimal() and 1 <= len(text) <= 9 and int(text) >= 1:
        return int(text)
    raise InvalidRequestError(f"--require {text!r}: use a number of replicas, at least 1, or 'all'")
