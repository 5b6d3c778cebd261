"""The ``weft`` command: the signature of each command is its help, option by option."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from weft_rl import __version__
from weft_rl.cli.console.credentials import CommandsWithCredentials
from weft_rl.cli.console.options import DEFAULT_COORDINATOR, Coordinator, Json
from weft_rl.cli.console.output import exit_code, print_error
from weft_rl.cli.lists.commands import add_lists
from weft_rl.cli.orders.commands import add_orders
from weft_rl.cli.servers.coordinator import coordinator
from weft_rl.cli.servers.rollout import rollout
from weft_rl.contract.errors import WeftError
from weft_rl.contract.names import MAX_VERSION
from weft_rl.contract.push_defaults import (
    DEFAULT_CONNECT_SECONDS,
    DEFAULT_ON_BASE_CHANGE,
    DEFAULT_REQUIRE,
    DEFAULT_TIMEOUT_SECONDS,
)

app = typer.Typer(
    cls=CommandsWithCredentials,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


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
            help="Print Weft's version; `weft version` says more.",
        ),
    ] = False,
) -> None:
    """Weft moves weights from RL trainers to a pool of vLLM rollout replicas."""


app.command()(coordinator)
app.command(
    context_settings={"allow_extra_args": True, "ignore_unknown_options": False},
    epilog="Example: weft rollout -c 127.0.0.1:50051 --http-port 8000 -- ./model --enable-lora",
)(rollout)


def run() -> None:
    """Run the command line: typed errors become one line and an exit code, never a traceback."""
    try:
        app()
    except WeftError as error:
        print_error(error, json_output="--json" in sys.argv)
        sys.exit(exit_code(error))
    except KeyboardInterrupt:
        sys.exit(130)


@app.command()
def status(
    coordinator: Coordinator = DEFAULT_COORDINATOR,
    watch: Annotated[
        bool, typer.Option("--watch", "-w", help="Refresh until interrupted.")
    ] = False,
    json_output: Json = False,
    interval: Annotated[float, typer.Option(help="Seconds between refreshes.", min=0.1)] = 1.0,
) -> None:
    """Show the pool: replicas, what they serve, the last transfer."""
    from weft_rl.cli.lists.status import show_status

    show_status(coordinator, watch=watch, json_output=json_output, interval_seconds=interval)


@app.command()
def routes(
    coordinator: Coordinator = DEFAULT_COORDINATOR,
    watch: Annotated[
        bool, typer.Option("--watch", "-w", help="Print each new list until interrupted.")
    ] = False,
    json_output: Json = False,
) -> None:
    """Show which replicas may be sent requests, and what each serves."""
    from weft_rl.cli.routes import show_routes

    show_routes(coordinator, watch=watch, json_output=json_output)


add_lists(app)


@app.command()
def push(
    path: Annotated[
        Path,
        typer.Argument(
            metavar="PATH", help="A PEFT adapter directory, or a safetensors checkpoint."
        ),
    ],
    policy: Annotated[
        str, typer.Option(help="Adapter's name, or 'base' for a checkpoint of the whole model.")
    ],
    coordinator: Coordinator = DEFAULT_COORDINATOR,
    trainer_id: Annotated[str, typer.Option(help="Owner of the policy.")] = "weft-push",
    require: Annotated[
        str, typer.Option(help="At least so many replicas, or 'all' that are ready.")
    ] = str(DEFAULT_REQUIRE),
    timeout: Annotated[
        float, typer.Option(help="Seconds for the whole push.", min=1)
    ] = DEFAULT_TIMEOUT_SECONDS,
    connect_seconds: Annotated[
        float,
        typer.Option(help="Longest wait for a coordinator that was never reached.", min=0.1),
    ] = DEFAULT_CONNECT_SECONDS,
    takeover: Annotated[
        bool,
        typer.Option("--takeover", help="Take the policy over from a process of --trainer-id."),
    ] = False,
    cast: Annotated[
        bool, typer.Option(help="Cast floats to the dtype that the replicas serve.")
    ] = True,
    check_finite: Annotated[
        bool, typer.Option("--check-finite", help="Refuse NaN and infinities, after the cast.")
    ] = False,
    base_version: Annotated[
        int | None,
        typer.Option(
            help="N of the base@N that an adapter was trained on.", min=0, max=MAX_VERSION
        ),
    ] = None,
    on_base_change: Annotated[
        str,
        typer.Option(help="If the pool serves another base: 'warn', 'refuse' or 'ignore'."),
    ] = DEFAULT_ON_BASE_CHANGE,
    json_output: Json = False,
) -> None:
    """Publish an adapter or a checkpoint from disk, as a trainer would."""
    from weft_rl.cli.push import push_path

    push_path(
        path,
        policy,
        coordinator=coordinator,
        trainer_id=trainer_id,
        require=require,
        timeout_seconds=timeout,
        connect_seconds=connect_seconds,
        takeover=takeover,
        cast=cast,
        check_finite=check_finite,
        base_version=base_version,
        on_base_change=on_base_change,
        json_output=json_output,
    )


@app.command()
def verify(
    path: Annotated[
        Path,
        typer.Argument(
            metavar="PATH",
            exists=True,
            help="A PEFT adapter directory, or a safetensors checkpoint, on this machine.",
        ),
    ],
    policy: Annotated[
        str, typer.Option(help="Adapter's name, or 'base'; NAME@N: only while that is served.")
    ],
    coordinator: Coordinator = DEFAULT_COORDINATOR,
    base: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            exists=True,
            help="Base of an adapter; default: what its config names, if that is here.",
        ),
    ] = None,
    prompt: Annotated[
        list[str] | None,
        typer.Option(metavar="TEXT", help="To be completed, any number; default: token ids."),
    ] = None,
    parity: Annotated[
        bool,
        typer.Option(help="Compare log-probabilities with those that transformers computes here."),
    ] = True,
    json_output: Json = False,
) -> None:
    """Say whether what replicas serve is what lies here, tensor by tensor, and answers like it.

    Ends with 1 if something differs.
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


add_orders(app)


@app.command()
def demo(
    keep: Annotated[
        bool,
        typer.Option("--keep", help="Leave all running, the trainers pushing, until interrupted."),
    ] = False,
) -> None:
    """Show it all on this machine: two vLLM replicas, two trainers, one coordinator."""
    from weft_rl.cli.demo.main import run_demo

    sys.exit(run_demo(keep=keep))


@app.command()
def doctor(
    coordinator: Coordinator = DEFAULT_COORDINATOR,
    data_host: Annotated[
        str, typer.Option(metavar="HOST", help="A Publisher's data_host=; default: found out.")
    ] = "",
    catalog: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The coordinator's, where it runs here.")
    ] = None,
    spill_dir: Annotated[
        Path | None, typer.Option(metavar="DIR", help="A replica's, where it runs here.")
    ] = None,
    json_output: Json = False,
) -> None:
    """Look at what stands between this machine and the pool; says what to do about it.

    Ends with 1 if something fails.
    """
    from weft_rl.cli.doctor.main import run_doctor

    is_well = run_doctor(
        coordinator,
        data_host=data_host,
        catalog=catalog,
        spill_dir=spill_dir,
        json_output=json_output,
    )
    sys.exit(0 if is_well else 1)


@app.command()
def version(json_output: Json = False) -> None:
    """Print the versions of Weft and of what it stands on."""
    from weft_rl.cli.version import print_versions

    print_versions(__version__, json_output=json_output)
