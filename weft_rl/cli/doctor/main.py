"""``weft doctor``: all checks, in order."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console
from rich.markup import escape

from weft_rl.cli.console.output import print_json, print_text
from weft_rl.cli.doctor.connection import check_connection, check_own
from weft_rl.cli.doctor.finding import Finding, Level, fail
from weft_rl.cli.doctor.machine import check_addresses, check_engine, check_space
from weft_rl.contract.errors import WeftError
from weft_rl.contract.names import plural
from weft_rl.rpc.security.credentials import Credentials

_COLOURS = {Level.OK: "green", Level.WARN: "yellow", Level.FAIL: "bold red"}


def examine(
    coordinator: str, *, data_host: str, catalog: Path | None, spill_dir: Path | None
) -> Iterator[Finding]:
    """Run every check; yield findings as they are made."""
    try:
        credentials = Credentials.from_environment()
    except WeftError as error:
        yield fail("credentials", error.message, "check the options and the environment")
        return
    yield from check_own(credentials)
    yield from check_connection(coordinator, credentials)
    yield from check_addresses(coordinator, data_host)
    yield from check_engine()
    yield from check_space(catalog, spill_dir)


def run_doctor(
    coordinator: str,
    *,
    data_host: str,
    catalog: Path | None,
    spill_dir: Path | None,
    json_output: bool,
) -> bool:
    """Print the findings; return whether no check failed."""
    console = Console()
    found = []
    for finding in examine(coordinator, data_host=data_host, catalog=catalog, spill_dir=spill_dir):
        found.append(finding)
        if not json_output:
            show(finding, console)
    fails, warns = (
        sum(finding.level == level for finding in found) for level in (Level.FAIL, Level.WARN)
    )
    if json_output:
        print_json({"ok": not fails, "findings": [dataclasses.asdict(f) for f in found]})
    else:
        console.print(f"{plural(fails, 'failure')}, {plural(warns, 'warning')}")
    return not fails


def show(finding: Finding, console: Console) -> None:
    """Print a finding in one line, and its remedy in a second."""
    name = finding.check.replace("_", " ")
    colour = _COLOURS[finding.level]
    text = f"[{colour}]{finding.level.value:<4}[/]  {name:<18} {escape(finding.says)}"
    print_text(text, to=console)
    if finding.advice:
        print_text(f"{'':24} -> {escape(finding.advice)}", to=console)
