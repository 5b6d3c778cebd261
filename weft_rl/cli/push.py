"""``weft push``: publish from disk."""

from __future__ import annotations

import dataclasses
import typing
from pathlib import Path

from rich.console import Console

from trainer_side import Publisher
from weft_rl.cli.console.output import plural, print_json, rate
from weft_rl.contract.errors import InvalidRequestError
from weft_rl.contract.names import BASE_POLICY
from weft_rl.contract.push_defaults import OnBaseChange, Require


def push_path(
    path: Path,
    policy: str,
    *,
    coordinator: str,
    trainer_id: str,
    require: str,
    timeout_seconds: float,
    connect_seconds: float,
    takeover: bool,
    cast: bool,
    check_finite: bool,
    base_version: int | None,
    on_base_change: str,
    json_output: bool = False,
) -> None:
    """Push ``path`` as ``policy`` and print what it cost.

    Raises:
        WeftError: The push was refused or failed; nothing changed.
    """
    if not path.exists():
        raise InvalidRequestError(f"{path} does not exist")
    with Publisher(
        coordinator,
        trainer_id=trainer_id,
        require=parse_require(require),
        timeout_seconds=timeout_seconds,
        check_finite=check_finite or None,
        connect_seconds=connect_seconds,
        takeover=takeover,
    ) as publisher:
        if policy == BASE_POLICY:
            publisher.push_base(path, cast=cast)
        else:
            publisher.push_adapter(
                path,
                policy,
                cast=cast,
                base_version=base_version,
                on_base_change=typing.cast(OnBaseChange, on_base_change),
            )
        report = publisher.last_report
        assert report is not None
    if json_output:
        print_json(dataclasses.asdict(report) | {"version": str(report.version)})
        return
    speed = rate(report.total_bytes, report.staging_seconds)
    at = f" at {speed}" if speed else ""
    Console().print(
        f"[bold green]{report.version}[/] is served by {plural(report.num_replicas, 'replica')}: "
        f"{report.total_bytes:,} bytes in {report.seconds:.3f} s "
        f"(forming {report.forming_seconds:.3f}, staging {report.staging_seconds:.3f}{at}, "
        f"committing {report.committing_seconds:.3f})",
        soft_wrap=True,
    )
    for remark in report.remarks:
        Console().print(f"  {remark}", markup=False, highlight=False)


def parse_require(text: str) -> Require:
    """Parse the value of ``--require``.

    Raises:
        InvalidRequestError: Neither "all" nor a number from 1 on.
    """
    if text == "all":
        return "all"
    if text.isdigit() and int(text) >= 1:
        return int(text)
    raise InvalidRequestError(f"--require {text!r}: use a number of replicas, at least 1, or 'all'")
