"""Settings of a replica."""

from __future__ import annotations

import secrets
import socket
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal

from weft_rl.contract.backends import BackendChoice
from weft_rl.contract.capabilities import RunningRequests
from weft_rl.contract.errors import InvalidRequestError
from weft_rl.contract.group import SITE_VARIABLE
from weft_rl.contract.names import check_name
from weft_rl.contract.options import access_setting, check_bounds, insecure_setting, setting
from weft_rl.rpc.channel import check_listen
from weft_rl.telemetry.config import NO_TELEMETRY, TelemetryConfig

Staging = Literal["auto", "host", "device", "in-place"]

#: Headings of the options in the help.
_ADDRESSES: Final = "Addresses for other machines"
_WEIGHTS: Final = "Transfer and storage of weights"
_STATES: Final = "Readiness, sleep and shutdown"
_VLLM: Final = "Defaults and checks of vLLM"


def _gib(default: int, text: str, panel: str | None = None) -> int:
    """Return the field of a size in bytes, whose option is in GiB: of at most 1 PiB."""
    bounds = (0.001, 2.0**20)
    return setting(default * 2**30, text, "GIB", panel=panel, bounds=bounds, unit=2**30)


def default_replica_id() -> str:
    """Return the machine's host name (a StatefulSet's pod name) as a valid replica name."""
    name = "".join(c if c.isalnum() or c in "._-" else "-" for c in socket.gethostname())
    return name.lstrip("._-").replace("..", ".")[:63] or "replica"


@dataclass(frozen=True, kw_only=True)
class AgentConfig:
    """Settings of a replica's part in a pool."""

    coordinator: str
    """HOST:PORT of the coordinator."""
    replica_id: str = setting(
        "",
        "Stable name of the replica. Default: the host's name.",
        "NAME",
        envvar="WEFT_REPLICA_ID",
    )
    listen: str = setting(
        "127.0.0.1:0", "Address that the replica's gRPC service listens on.", "HOST:PORT"
    )
    advertise_host: str = setting(
        "",
        "Host by which the coordinator and trainers reach this replica. Default: that of "
        "--listen; where that is every address (0.0.0.0), the one of this machine's route to "
        "the coordinator.",
        "HOST",
        panel=_ADDRESSES,
    )
    site: str = setting(
        "",
        "Label of the place where this replica runs. Weights that go over TCP cross between two "
        "places once.",
        "LABEL",
        panel=_ADDRESSES,
        envvar=SITE_VARIABLE,
    )
    http_url: str = setting(
        "",
        "URL by which clients reach the OpenAI server. Default: http://, --http-host and the "
        "port; say it with --http-host 0.0.0.0, which nobody can call.",
        "URL",
        panel=_ADDRESSES,
    )
    unready_after_seconds: float = setting(
        30.0,
        "After so long without an answer from the coordinator the replica is not ready and "
        "refuses bare names; exact versions still answer.",
        "SECONDS",
        panel=_STATES,
        bounds=(1, 86_400),
    )
    incarnation: str = field(default_factory=lambda: secrets.token_hex(8))
    """Random id of this process."""
    conflict_patience_seconds: float = 30.0
    """Longest wait for an earlier process of the same id to leave the registry."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "replica_id", self.replica_id or default_replica_id())
        check_name(self.replica_id, "replica")
        check_listen(self.listen)
        check_bounds(self)
        if self.http_url and not self.http_url.startswith(("http://", "https://")):
            raise InvalidRequestError(
                f"--http-url is {self.http_url!r}; it must be http://HOST:PORT or https://HOST:PORT"
            )


@dataclass(frozen=True, kw_only=True)
class RolloutConfig:
    """Options of one replica process."""

    agent: AgentConfig
    vllm_args: Sequence[str]
    """vLLM's own server arguments, the model first."""
    http_host: str = setting("127.0.0.1", "Host that the OpenAI server listens on.", "HOST")
    http_port: int = setting(
        8000, "Port of the OpenAI server; 0 picks a free one.", "PORT", bounds=(0, 65535)
    )
    adapter_memory_bytes: int = _gib(4, "Host memory for adapters.")
    staging_memory_bytes: int = _gib(
        64,
        "Memory for staged base weights and copies of the base; with --staging in-place, for "
        "buckets on the GPU.",
    )
    staging: Staging = setting(
        "auto",
        "Place where a pushed base waits for its switch: the device, the host's memory, or "
        "in-place: each bucket is loaded as it arrives. auto: the device if it fits there, "
        "else the host. In place, requests wait while buckets are loaded, a push that fails "
        "then takes the replica out of service, and no copy is kept.",
        "PLACE",
    )
    """In place, only what is read from the spill directory is staged, on the host."""
    running_requests: RunningRequests = setting(
        "recompute",
        "Treatment of requests that run when the base changes. recompute: they go on, with "
        "their KV cache computed anew. keep: they go on over their KV cache, which later "
        "requests do not use. abort: those that have tokens end with VERSION_CHANGED, and the "
        "client sends them again.",
        "TREATMENT",
    )
    spill_dir: str = setting(
        "",
        "Directory for copies of what is served, in PEFT and safetensors files, which a "
        "restart reads. Default: none.",
        "DIR",
    )
    """The base is written from a copy that ``base_copies`` keeps, so not where it is loaded in
    place."""
    backend: BackendChoice = setting(
        "auto",
        "Transport of weights: nccl, one-sided, stream or gloo; auto: any that this machine has.",
        "BACKEND",
        panel=_WEIGHTS,
    )
    base_copies: int = setting(
        1,
        "Number of base versions to keep a copy of, the served one included, unless it came as a "
        "delta that was applied in place. New replicas clone the copies; `weft rollback base` "
        "needs 2, or such deltas. 0, or --staging in-place: none.",
        "VERSIONS",
        panel=_WEIGHTS,
        bounds=(0, 100),
    )
    spill_bytes: int = _gib(256, "Largest size of --spill-dir.", panel=_WEIGHTS)
    """Size of all spilled versions of this base model, of any replica."""
    drain_seconds: float = setting(
        30.0,
        "Time for running requests and transfers to end after SIGTERM. A second SIGTERM, or "
        "SIGINT, ends the process at once.",
        "SECONDS",
        panel=_STATES,
        bounds=(0, 86_400),
    )
    enable_sleep: bool = setting(
        False,
        "Let trainers on the same GPU, and operators, put the engine to sleep, which frees "
        "GPU memory for a while. Needs a GPU.",
        panel=_STATES,
    )
    vllm_defaults: bool = setting(
        False,
        "Keep vLLM's own sampling defaults. Otherwise, unless given after --, they are what "
        "RL trainers expect: --logprobs-mode processed_logprobs and --generation-config vllm.",
        panel=_VLLM,
    )
    allow_unversioned_changes: bool = setting(
        False,
        "Start although VLLM_ALLOW_RUNTIME_LORA_UPDATING or VLLM_SERVER_DEV_MODE is set, "
        "which open endpoints that change weights without Weft.",
        panel=_VLLM,
    )
    access: Path | None = access_setting()
    insecure: bool = insecure_setting()
    telemetry: TelemetryConfig = NO_TELEMETRY

    def __post_init__(self) -> None:
        check_bounds(self)
        if self.spill_dir and not self.base_copies:
            raise InvalidRequestError(
                "--spill-dir writes the base from the copy that --base-copies keeps: it needs "
                "--base-copies 1 or more"
            )
