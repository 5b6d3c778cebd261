"""Settings of a replica."""

from __future__ import annotations

import secrets
import socket
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from weft_rl.contract.capabilities import BackendChoice, RunningRequests
from weft_rl.contract.errors import InvalidRequestError
from weft_rl.contract.names import check_name
from weft_rl.rpc.channel import check_listen
from weft_rl.telemetry.config import NO_TELEMETRY, TelemetryConfig

#: Where a base is staged: "device" beside the engine's own weights, "host", or "auto":
#: on the device if the model fits there twice. Or nowhere, "in-place": it is loaded as it
#: arrives, and only what is read from the spill directory is staged, on the host.
Staging = Literal["auto", "host", "device", "in-place"]


def default_replica_id() -> str:
    """Return the machine's host name (a StatefulSet's pod name), cut to the rule of names."""
    name = "".join(c if c.isalnum() or c in "._-" else "-" for c in socket.gethostname())
    return name.lstrip("._-").replace("..", ".")[:63] or "replica"


@dataclass(frozen=True, kw_only=True)
class AgentConfig:
    """Settings of a replica's part in a pool."""

    coordinator: str
    """HOST:PORT of the coordinator."""
    replica_id: str
    """Stable name in the pool."""
    listen: str = "127.0.0.1:0"
    """HOST:PORT of the ReplicaService; port 0 picks a free one."""
    advertise_host: str = ""
    """Host that the coordinator and trainers reach this machine by. Empty: the host of ``listen``,
    or, for a wildcard, the address of the route to the coordinator."""
    http_url: str = ""
    """Base URL of the OpenAI-compatible server, as clients reach it."""
    unready_after_seconds: float = 30.0
    """Seconds without an answer from the coordinator after which this replica is not ready and
    refuses bare names."""
    incarnation: str = field(default_factory=lambda: secrets.token_hex(8))
    """Random id of this process."""
    conflict_patience_seconds: float = 30.0
    """Seconds that a former process with the same id may linger in the registry."""

    def __post_init__(self) -> None:
        check_name(self.replica_id, "replica")
        check_listen(self.listen)
        if self.http_url and not self.http_url.startswith(("http://", "https://")):
            raise InvalidRequestError(
                f"--http-url is {self.http_url!r}; it must be http://HOST:PORT or https://HOST:PORT"
            )
        if not 0 < self.unready_after_seconds <= 86_400:
            raise InvalidRequestError("unready_after_seconds must be more than 0, at most 86400")


@dataclass(frozen=True, kw_only=True)
class RolloutConfig:
    """Options of one replica process."""

    agent: AgentConfig
    vllm_args: Sequence[str]
    """vLLM's own server arguments, the model first."""
    http_host: str = "127.0.0.1"
    http_port: int = 8000
    adapter_memory_bytes: int = 4 * 2**30
    """Bound of the adapter store, in host memory."""
    staging_memory_bytes: int = 64 * 2**30
    """Bound of staged and retained base weights, wherever they are staged."""
    staging: Staging = "auto"
    """Memory that bases are staged in on a GPU host; "in-place" loads them as they arrive."""
    backend: BackendChoice = "auto"
    """Backends of the side groups to join."""
    running_requests: RunningRequests = "recompute"
    """Treatment of requests that run when the base changes."""
    enable_sleep: bool = False
    """True if trainers on the same GPU may put the engine to sleep."""
    drain_seconds: float = 30.0
    """Seconds that running requests and transfers may take to end once the process is told to stop;
    0 cuts them."""
    base_copies: int = 1
    """Number of base versions to keep a copy of, the served one included. Other replicas clone from
    these copies, and rollback goes back to them. 0 keeps none; nor does loading in place."""
    spill_dir: str = ""
    """Directory for copies of what is served, so that a restart finds it; empty for none. The base
    is written from the copy that ``base_copies`` keeps, so not where it is loaded in place."""
    spill_bytes: int = 256 * 2**30
    """Bound of all spilled versions of this base model, of whichever replica."""

    access: Path | None = None
    """File that says who may call the ReplicaService; None if everybody may."""
    insecure: bool = False
    """True if it may serve everybody on an address that is not loopback."""
    telemetry: TelemetryConfig = NO_TELEMETRY
    """Telemetry settings: metrics, and health without TLS."""
    vllm_defaults: bool = False
    """True to keep vLLM's sampling defaults; else they are those that RL trainers expect."""
    allow_unversioned_changes: bool = False
    """True to accept an environment that opens vLLM endpoints which change weights."""

    def __post_init__(self) -> None:
        if not 0 <= self.base_copies <= 100:
            raise InvalidRequestError("base_copies must be between 0 and 100")
        if not 0 <= self.drain_seconds <= 86_400:
            raise InvalidRequestError("drain_seconds must be between 0 and 86400")
        if self.spill_dir and not self.base_copies:
            raise InvalidRequestError(
                "--spill-dir writes the base from the copy that --base-copies keeps: it needs "
                "--base-copies 1 or more"
            )
