"""The ``weft`` command.

Longer than other modules: the signature of each command is its help, option by option.
"""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from rollout_side.config import AgentConfig, RolloutConfig, Staging, default_replica_id
from weft import __version__, logs
from weft.contract.capabilities import BackendChoice
from weft.contract.errors import WeftError
from weft.contract.push_defaults import (
    DEFAULT_CONNECT_SECONDS,
    DEFAULT_ON_BASE_CHANGE,
    DEFAULT_REQUIRE,
    DEFAULT_TIMEOUT_SECONDS,
)
from weft.coordinator.config import CoordinatorConfig
from weft.rpc.security.credentials import Credentials
from weft.telemetry.config import TelemetryConfig
from weft_cli.credentials import CommandsWithCredentials
from weft_cli.lists.commands import add_lists
from weft_cli.options import DEFAULT_COORDINATOR, Coordinator, Json
from weft_cli.orders.commands import add_orders
from weft_cli.output import exit_code, print_error

app = typer.Typer(
    cls=CommandsWithCredentials,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="Weft moves weights from RL trainers to a pool of vLLM rollout replicas.",
)
_GIB = 2**30
LogLevel = Annotated[
    str, typer.Option("--log-level", envvar="WEFT_LOG_LEVEL", help="debug, info or warning.")
]
LogFormat = Annotated[
    logs.LogFormat,
    typer.Option("--log-format", envvar="WEFT_LOG_FORMAT", help="Lines of text, or of JSON."),
]
Metrics = Annotated[
    str,
    typer.Option(
        metavar="HOST:PORT",
        help="Serve Prometheus metrics and /healthz over HTTP here; default: nowhere.",
    ),
]
MetricsAuth = Annotated[
    bool,
    typer.Option(
        "--metrics-auth",
        help="Ask for the token, as HTTP Basic password, or the certificate of who may inspect.",
    ),
]
Health = Annotated[
    str,
    typer.Option(
        metavar="HOST:PORT",
        help="Serve grpc.health.v1 alone here, in plaintext, for probes; default: nowhere.",
    ),
]

Access = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="TOML file that says which certificates or tokens may call what; needs --tls-cert. "
        "Read again when it changes.",
    ),
]
Insecure = Annotated[
    bool,
    typer.Option(
        "--insecure", help="Serve everybody, on an address that is not this machine's loopback."
    ),
]


def run() -> None:
    """Entry point: typed errors become one line and an exit code, never a traceback."""
    try:
        app()
    except WeftError as error:
        print_error(error, json_output="--json" in sys.argv)
        sys.exit(exit_code(error))
    except KeyboardInterrupt:
        sys.exit(130)


@app.command()
def coordinator(
    listen: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="Where to listen; port 0 picks a free one.")
    ] = CoordinatorConfig.listen,
    catalog: Annotated[
        Path, typer.Option(help="SQLite file that outlives restarts: versions, leases, history.")
    ] = Path("weft.db"),
    lease_seconds: Annotated[
        float, typer.Option(help="Time to live of a policy's lease; trainers renew it.")
    ] = CoordinatorConfig.lease_seconds,
    heartbeat_seconds: Annotated[
        float, typer.Option(help="How often replicas report.")
    ] = CoordinatorConfig.heartbeat_seconds,
    lost_after_seconds: Annotated[
        float, typer.Option(help="Silence after which a replica is given up.")
    ] = CoordinatorConfig.lost_after_seconds,
    retain: Annotated[
        int, typer.Option(help="Versions kept of each adapter that `weft retain` says nothing of.")
    ] = CoordinatorConfig.retain,
    stall_seconds: Annotated[
        float,
        typer.Option(
            help="Silence after which a replica whose thread hangs is given up for a transfer."
        ),
    ] = CoordinatorConfig.stall_seconds,
    sender_stall_seconds: Annotated[
        float,
        typer.Option(help="The same of a trainer, while another push waits for its replicas."),
    ] = CoordinatorConfig.sender_stall_seconds,
    max_transfer_seconds: Annotated[
        float, typer.Option(help="Longest that a push may take once it is its turn.")
    ] = CoordinatorConfig.max_transfer_seconds,
    access: Access = CoordinatorConfig.access,
    insecure: Insecure = CoordinatorConfig.insecure,
    metrics: Metrics = TelemetryConfig.metrics,
    metrics_auth: MetricsAuth = TelemetryConfig.metrics_auth,
    health: Health = TelemetryConfig.health,
    log_level: LogLevel = "info",
    log_format: LogFormat = "text",
) -> None:
    """Run the coordinator: registry, versions, transfers, commit."""
    from weft.coordinator.server import serve

    _configure_logging(log_level, log_format)
    config = CoordinatorConfig(
        listen=listen,
        catalog=catalog,
        lease_seconds=lease_seconds,
        heartbeat_seconds=heartbeat_seconds,
        lost_after_seconds=lost_after_seconds,
        retain=retain,
        stall_seconds=stall_seconds,
        sender_stall_seconds=sender_stall_seconds,
        max_transfer_seconds=max_transfer_seconds,
        credentials=Credentials.from_environment(),
        access=access,
        insecure=insecure,
        telemetry=TelemetryConfig(metrics=metrics, metrics_auth=metrics_auth, health=health),
    )
    host = listen.rpartition(":")[0]
    asyncio.run(serve(config, ready=lambda port: print(f"listening on {host}:{port}", flush=True)))


@app.command(
    context_settings={"allow_extra_args": True, "ignore_unknown_options": False},
    epilog="Example: weft rollout -c 127.0.0.1:50051 --http-port 8000 -- ./model --enable-lora",
)
def rollout(
    context: typer.Context,
    coordinator: Coordinator = DEFAULT_COORDINATOR,
    listen: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="Where the replica's gRPC service listens.")
    ] = AgentConfig.listen,
    advertise_host: Annotated[
        str, typer.Option(help="Host that others reach this machine by; default: --listen's.")
    ] = AgentConfig.advertise_host,
    http_host: Annotated[
        str, typer.Option(help="Host of the OpenAI-compatible server.")
    ] = RolloutConfig.http_host,
    http_port: Annotated[
        int, typer.Option(help="Its port; 0 picks a free one.", min=0, max=65535)
    ] = RolloutConfig.http_port,
    http_url: Annotated[
        str, typer.Option(help="Base URL of it as clients reach it; default: host and port.")
    ] = AgentConfig.http_url,
    replica_id: Annotated[
        str, typer.Option(envvar="WEFT_REPLICA_ID", help="Stable name; default: the host's name.")
    ] = "",
    contact_seconds: Annotated[
        float,
        typer.Option(
            help="Out of contact with the coordinator for so long: not ready, refuse "
            "bare names; exact versions still answer.",
            min=1,
        ),
    ] = AgentConfig.contact_seconds,
    adapter_memory_gib: Annotated[
        float, typer.Option(help="Host memory for adapters, at most.", min=0.001)
    ] = RolloutConfig.adapter_memory_bytes / _GIB,
    staging_memory_gib: Annotated[
        float,
        typer.Option(
            help="Memory for base weights, staged or retained; in-place: for buckets on the GPU.",
            min=0.001,
        ),
    ] = RolloutConfig.staging_memory_bytes / _GIB,
    staging: Annotated[
        Staging,
        typer.Option(
            help="Where base weights are staged on a GPU host: on the device, beside the "
            "engine's own (requests then stop only for a copy inside it), or in host memory; "
            "auto: on the device if they fit there. in-place: nowhere, each bucket is loaded "
            "as it arrives. Requests then wait from when the GPU has no room for more buckets, "
            "a push that fails after that takes the replica out of service until it is "
            "repaired, and there is no copy to go back to."
        ),
    ] = RolloutConfig.staging,
    backend: Annotated[
        BackendChoice,
        typer.Option(help="What carries weights here; auto: NCCL on a GPU, and gloo."),
    ] = RolloutConfig.backend,
    retain_base: Annotated[
        int,
        typer.Option(
            help="Versions of the base to keep a copy of, the served one included: late "
            "replicas clone it, `weft rollback base` needs 2. 0 keeps none, as does "
            "--staging in-place.",
            min=0,
            max=100,
        ),
    ] = RolloutConfig.retain_base,
    spill_dir: Annotated[
        str,
        typer.Option(
            metavar="DIR",
            help="Write what is served to this directory, in the background, as PEFT and "
            "safetensors files: after a restart it is read from there. Default: nowhere.",
        ),
    ] = RolloutConfig.spill_dir,
    spill_gib: Annotated[
        float, typer.Option(help="Size of that directory, at most.", min=0.001)
    ] = RolloutConfig.spill_bytes / _GIB,
    drain_seconds: Annotated[
        float,
        typer.Option(
            help="Told to stop (SIGTERM): not ready at once; running requests and transfers may "
            "take so long to end. A second SIGTERM, or SIGINT, ends the process at once.",
            min=0,
            max=86_400,
        ),
    ] = RolloutConfig.drain_seconds,
    allow_unversioned_changes: Annotated[
        bool,
        typer.Option(
            "--allow-unversioned-changes",
            help="Start although VLLM_ALLOW_RUNTIME_LORA_UPDATING or VLLM_SERVER_DEV_MODE is set: "
            "they open endpoints that change weights behind Weft's back.",
        ),
    ] = RolloutConfig.allow_unversioned_changes,
    access: Access = RolloutConfig.access,
    insecure: Insecure = RolloutConfig.insecure,
    metrics: Metrics = TelemetryConfig.metrics,
    metrics_auth: MetricsAuth = TelemetryConfig.metrics_auth,
    health: Health = TelemetryConfig.health,
    log_level: LogLevel = "info",
    log_format: LogFormat = "text",
) -> None:
    """Run a replica: vLLM's engine and OpenAI server, kept up to date by trainers.

    Everything after -- goes to vLLM's server, the model first.
    """
    if not context.args:
        raise typer.BadParameter("name the model after --, as in: weft rollout ... -- MODEL")
    _configure_logging(log_level, log_format)
    from rollout_side.main import run as run_replica

    config = RolloutConfig(
        agent=AgentConfig(
            coordinator=coordinator,
            replica_id=replica_id or default_replica_id(),
            listen=listen,
            advertise_host=advertise_host,
            http_url=http_url,
            contact_seconds=contact_seconds,
        ),
        vllm_args=context.args,
        http_host=http_host,
        http_port=http_port,
        adapter_memory_bytes=int(adapter_memory_gib * _GIB),
        staging_memory_bytes=int(staging_memory_gib * _GIB),
        staging=staging,
        backend=backend,
        retain_base=retain_base,
        spill_dir=spill_dir,
        spill_bytes=int(spill_gib * _GIB),
        drain_seconds=drain_seconds,
        allow_unversioned_changes=allow_unversioned_changes,
        access=access,
        insecure=insecure,
        telemetry=TelemetryConfig(metrics=metrics, metrics_auth=metrics_auth, health=health),
    )
    why = run_replica(
        config, ready=lambda grpc, http: print(f"serving on {http}, gRPC on {grpc}", flush=True)
    )
    print(f"ended: {why}", flush=True)


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
    from weft_cli.status import show_status

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
    from weft_cli.routes import show_routes

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
        str, typer.Option(help="'all' replicas in contact, or at least so many.")
    ] = DEFAULT_REQUIRE,
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
        typer.Option(help="N of the base@N that an adapter was trained on.", min=0),
    ] = None,
    on_base_change: Annotated[
        str,
        typer.Option(help="If the pool serves another base: 'warn', 'refuse' or 'ignore'."),
    ] = DEFAULT_ON_BASE_CHANGE,
    json_output: Json = False,
) -> None:
    """Publish an adapter or a checkpoint from disk, as a trainer would."""
    from weft_cli.push import push_path

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


add_orders(app)


@app.command()
def demo(
    keep: Annotated[
        bool, typer.Option("--keep", help="Leave everything running until interrupted.")
    ] = False,
) -> None:
    """Show it all on this machine: two vLLM replicas, two trainers, one coordinator."""
    from weft_cli.demo.main import run_demo

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
    from weft_cli.doctor.main import run_doctor

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
    from weft_cli.version import print_versions

    print_versions(__version__, json_output=json_output)


def _configure_logging(level: str, log_format: logs.LogFormat) -> None:
    try:
        logs.configure(level, log_format)
    except ValueError:
        raise typer.BadParameter(f"--log-level {level!r}: use debug, info or warning") from None
    os.environ[logs.LEVEL_VARIABLE] = level
    os.environ[logs.FORMAT_VARIABLE] = log_format
