"""``weft rollout``."""

from __future__ import annotations

from typing import Annotated

import typer

from rollout_side.config import AgentConfig, RolloutConfig, Staging, default_replica_id
from weft_rl import logs
from weft_rl.cli.console.options import DEFAULT_COORDINATOR, Coordinator
from weft_rl.cli.servers.descriptors import allow_descriptors
from weft_rl.cli.servers.options import (
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
)
from weft_rl.contract.capabilities import BackendChoice, RunningRequests
from weft_rl.telemetry.config import TelemetryConfig

_GIB = 2**30
#: More than any machine has.
_MAX_GIB = 1e6


def _bytes(option: str, gib: float) -> int:
    """Convert a size in GiB to bytes.

    Raises:
        BadParameter: No machine has so much, or it is no number.
    """
    if not gib <= _MAX_GIB:
        raise typer.BadParameter(f"{option} {gib:g}: at most {_MAX_GIB:g} GiB")
    return int(gib * _GIB)


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
        typer.Option(help="What carries weights here; auto: all that this machine has."),
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
    running_requests: Annotated[
        RunningRequests,
        typer.Option(
            help="What becomes of requests that run when the base changes. recompute: they go on, "
            "and what they have in the KV cache is computed anew. keep: they go on over the cache "
            "that they have, as soon as the weights are there; later requests use none of it. "
            "abort: those that have tokens end with VERSION_CHANGED, to be asked again.",
        ),
    ] = RolloutConfig.running_requests,
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
    enable_sleep: Annotated[
        bool,
        typer.Option(
            "--enable-sleep",
            help="Let trainers on the same GPU, and operators, put the engine to sleep: it gives "
            "the GPU's memory back for a while. Needs a GPU.",
        ),
    ] = RolloutConfig.enable_sleep,
    drain_seconds: Annotated[
        float,
        typer.Option(
            help="Told to stop (SIGTERM): not ready at once; running requests and transfers may "
            "take so long to end. A second SIGTERM, or SIGINT, ends the process at once.",
            min=0,
            max=86_400,
        ),
    ] = RolloutConfig.drain_seconds,
    vllm_defaults: Annotated[
        bool,
        typer.Option(
            "--vllm-defaults",
            help="Leave vLLM's own defaults of sampling. Without it, and unless given after --: "
            "--logprobs-mode processed_logprobs and --generation-config vllm, as RL trainers "
            "expect.",
        ),
    ] = RolloutConfig.vllm_defaults,
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
    traces: Traces = TelemetryConfig.traces,
    log_level: LogLevel = "info",
    log_format: LogFormat = "text",
) -> None:
    """Run a replica: vLLM's engine and OpenAI server, kept up to date by trainers.

    Everything after -- goes to vLLM's server, the model first.
    """
    if not context.args:
        raise typer.BadParameter("name the model after --, as in: weft rollout ... -- MODEL")
    configure_logging(log_level, log_format)
    if log_format == "json":
        logs.configure_vllm()
    allow_descriptors()
    from rollout_side.service.main import run as run_replica

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
        adapter_memory_bytes=_bytes("--adapter-memory-gib", adapter_memory_gib),
        staging_memory_bytes=_bytes("--staging-memory-gib", staging_memory_gib),
        staging=staging,
        backend=backend,
        retain_base=retain_base,
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
