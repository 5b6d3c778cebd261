"""``weft rollout``."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from rollout_side.config import AgentConfig, RolloutConfig, Staging, default_replica_id
from weft_rl import logs
from weft_rl.cli.console.options import DEFAULT_COORDINATOR, Coordinator
from weft_rl.cli.server_options import (
    Access,
    Health,
    Insecure,
    LogFormat,
    LogLevel,
    Metrics,
    MetricsAuth,
    Traces,
    announce,
    configure_logging,
    raise_file_limit,
)
from weft_rl.contract.capabilities import BackendChoice, RunningRequests
from weft_rl.telemetry.config import TelemetryConfig

_GIB = 2**30
#: More than any machine has.
_MAX_GIB = 1e6
#: Headings of the options in the help; those without one are shown first.
_ADDRESSES = "Addresses for other machines"
_WEIGHTS = "Transfer and storage of weights"
_STATES = "Readiness, sleep and shutdown"
_VLLM = "Defaults and checks of vLLM"


class RolloutCommand(TyperCommand):
    """Command whose further arguments, those of vLLM, come after ``--``."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the options; say of an unknown one where those of vLLM go."""
        try:
            return super().parse_args(ctx, args)
        except Exception as error:
            option = getattr(error, "option_name", "")
            if type(error).__name__ != "NoSuchOption":  # typer has click's, or its own
                raise
            alike = getattr(error, "possibilities", None) or ()
            meant = f" Did you mean {' or '.join(alike)}?" if alike else ""
            raise typer.BadParameter(
                f"{option} is no option of weft rollout.{meant} Options of vLLM go after --, as "
                f"in: weft rollout -- MODEL {option}",
                ctx=ctx,
            ) from None


def _bytes(option: str, gib: float) -> int:
    """Convert a size in GiB to bytes.

    Raises:
        BadParameter: It is more than any machine has, or not a number.
    """
    if not gib <= _MAX_GIB:
        raise typer.BadParameter(f"{option} {gib:g}: at most {_MAX_GIB:g} GiB")
    return int(gib * _GIB)


def rollout(
    context: typer.Context,
    coordinator: Coordinator = DEFAULT_COORDINATOR,
    replica_id: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            envvar="WEFT_REPLICA_ID",
            help="Stable name of the replica. Default: the host's name.",
        ),
    ] = "",
    http_host: Annotated[
        str, typer.Option(metavar="HOST", help="Host that the OpenAI server listens on.")
    ] = RolloutConfig.http_host,
    http_port: Annotated[
        int,
        typer.Option(
            metavar="PORT",
            help="Port of the OpenAI server; 0 picks a free one.",
            min=0,
            max=65535,
        ),
    ] = RolloutConfig.http_port,
    listen: Annotated[
        str,
        typer.Option(
            metavar="HOST:PORT", help="Address that the replica's gRPC service listens on."
        ),
    ] = AgentConfig.listen,
    adapter_memory_gib: Annotated[
        float, typer.Option(metavar="GIB", help="Host memory for adapters.", min=0.001)
    ] = RolloutConfig.adapter_memory_bytes / _GIB,
    staging_memory_gib: Annotated[
        float,
        typer.Option(
            metavar="GIB",
            help="Memory for staged base weights and copies of the base; with --staging in-place, "
            "for buckets on the GPU.",
            min=0.001,
        ),
    ] = RolloutConfig.staging_memory_bytes / _GIB,
    staging: Annotated[
        Staging,
        typer.Option(
            metavar="PLACE",
            help="Place where a pushed base waits for its switch: the device, the host's memory, "
            "or in-place: each bucket is loaded as it arrives. auto: the device if it fits there, "
            "else the host. In place, requests wait while buckets are loaded, a push that fails "
            "then takes the replica out of service, and no copy is kept.",
        ),
    ] = RolloutConfig.staging,
    running_requests: Annotated[
        RunningRequests,
        typer.Option(
            metavar="TREATMENT",
            help="Treatment of requests that run when the base changes. recompute: they go on, "
            "with their KV cache computed anew. keep: they go on over their KV cache, which "
            "later requests do not use. abort: those that have tokens end with VERSION_CHANGED, "
            "and the client sends them again.",
        ),
    ] = RolloutConfig.running_requests,
    spill_dir: Annotated[
        str,
        typer.Option(
            metavar="DIR",
            help="Directory for copies of what is served, in PEFT and safetensors files, which a "
            "restart reads. Default: none.",
        ),
    ] = RolloutConfig.spill_dir,
    advertise_host: Annotated[
        str,
        typer.Option(
            metavar="HOST",
            help="Host by which the coordinator and trainers reach this replica. Default: that of "
            "--listen; where that is every address (0.0.0.0), the one of this machine's route to "
            "the coordinator.",
            rich_help_panel=_ADDRESSES,
        ),
    ] = AgentConfig.advertise_host,
    http_url: Annotated[
        str,
        typer.Option(
            metavar="URL",
            help="URL by which clients reach the OpenAI server. Default: http://, --http-host and "
            "the port; say it with --http-host 0.0.0.0, which nobody can call.",
            rich_help_panel=_ADDRESSES,
        ),
    ] = AgentConfig.http_url,
    backend: Annotated[
        BackendChoice,
        typer.Option(
            help="Transport of weights; auto: any that this machine has.",
            rich_help_panel=_WEIGHTS,
        ),
    ] = RolloutConfig.backend,
    base_copies: Annotated[
        int,
        typer.Option(
            metavar="VERSIONS",
            help="Number of base versions to keep a copy of, the served one included. New "
            "replicas clone the copies; `weft rollback base` needs 2. 0, or --staging in-place: "
            "none.",
            min=0,
            max=100,
            rich_help_panel=_WEIGHTS,
        ),
    ] = RolloutConfig.base_copies,
    spill_gib: Annotated[
        float,
        typer.Option(
            metavar="GIB",
            help="Largest size of --spill-dir.",
            min=0.001,
            rich_help_panel=_WEIGHTS,
        ),
    ] = RolloutConfig.spill_bytes / _GIB,
    unready_after_seconds: Annotated[
        float,
        typer.Option(
            metavar="SECONDS",
            help="After so long without an answer from the coordinator the replica is not ready "
            "and refuses bare names; exact versions still answer.",
            min=1,
            rich_help_panel=_STATES,
        ),
    ] = AgentConfig.unready_after_seconds,
    drain_seconds: Annotated[
        float,
        typer.Option(
            metavar="SECONDS",
            help="Time for running requests and transfers to end after SIGTERM. A second SIGTERM, "
            "or SIGINT, ends the process at once.",
            min=0,
            max=86_400,
            rich_help_panel=_STATES,
        ),
    ] = RolloutConfig.drain_seconds,
    enable_sleep: Annotated[
        bool,
        typer.Option(
            "--enable-sleep",
            help="Let trainers on the same GPU, and operators, put the engine to sleep, which "
            "frees GPU memory for a while. Needs a GPU.",
            rich_help_panel=_STATES,
        ),
    ] = RolloutConfig.enable_sleep,
    vllm_defaults: Annotated[
        bool,
        typer.Option(
            "--vllm-defaults",
            help="Keep vLLM's own sampling defaults. Otherwise, unless given after --, they are "
            "what RL trainers expect: --logprobs-mode processed_logprobs and --generation-config "
            "vllm.",
            rich_help_panel=_VLLM,
        ),
    ] = RolloutConfig.vllm_defaults,
    allow_unversioned_changes: Annotated[
        bool,
        typer.Option(
            "--allow-unversioned-changes",
            help="Start although VLLM_ALLOW_RUNTIME_LORA_UPDATING or VLLM_SERVER_DEV_MODE is set, "
            "which open endpoints that change weights without Weft.",
            rich_help_panel=_VLLM,
        ),
    ] = RolloutConfig.allow_unversioned_changes,
    access: Access = RolloutConfig.access,
    insecure: Insecure = RolloutConfig.insecure,
    metrics: Metrics = TelemetryConfig.metrics,
    metrics_auth: MetricsAuth = TelemetryConfig.metrics_auth,
    health: Health = TelemetryConfig.health,
    traces: Traces = TelemetryConfig.traces,
    log_level: LogLevel = "info",
    log_format: LogFormat = "text",
) -> None:
    """Run a replica: vLLM's engine with its OpenAI server.

    It serves what trainers push. Everything after -- goes to vLLM's server, the model first.
    """
    if not context.args:
        raise typer.BadParameter("name the model after --, as in: weft rollout ... -- MODEL")
    configure_logging(log_level, log_format)
    if log_format == "json":
        logs.configure_vllm()
    raise_file_limit()
    from rollout_side.service.main import run as run_replica

    config = RolloutConfig(
        agent=AgentConfig(
            coordinator=coordinator,
            replica_id=replica_id or default_replica_id(),
            listen=listen,
            advertise_host=advertise_host,
            http_url=http_url,
            unready_after_seconds=unready_after_seconds,
        ),
        vllm_args=context.args,
        http_host=http_host,
        http_port=http_port,
        adapter_memory_bytes=_bytes("--adapter-memory-gib", adapter_memory_gib),
        staging_memory_bytes=_bytes("--staging-memory-gib", staging_memory_gib),
        staging=staging,
        backend=backend,
        base_copies=base_copies,
        running_requests=running_requests,
        spill_dir=spill_dir,
        spill_bytes=_bytes("--spill-gib", spill_gib),
        enable_sleep=enable_sleep,
        drain_seconds=drain_seconds,
        vllm_defaults=vllm_defaults,
        allow_unversioned_changes=allow_unversioned_changes,
        access=access,
        insecure=insecure,
        telemetry=TelemetryConfig(
            metrics=metrics, metrics_auth=metrics_auth, health=health, traces=traces
        ),
    )
    why = run_replica(
        config,
        ready=lambda grpc, http, ports: announce(
            f"serving on {http}, gRPC on {grpc}", ports.metrics_url
        ),
    )
    print(f"ended: {why}", flush=True)
