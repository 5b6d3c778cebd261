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

#: Memory that a pushed base is staged in: "device", beside the engine's weights; "host"; or "auto",
#: the device if the model fits there twice. "in-place" stages nothing: a base is loaded as it
#: arrives, and only what is read from the spill directory is staged, on the host.
Staging = Literal["auto", "host", "device", "in-place"]


def default_replica_id() -> str:
    """Return the machine's host name (a StatefulSet's pod name) as a valid replica name."""
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
    """Longest wait for an earlier process of the same id to leave the registry."""

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
    """Host memory for adapters."""
    staging_memory_bytes: int = 64 * 2**30
    """Memory for staged bases and copies of bases, on the host or the device."""
    staging: Staging = "auto"
    """Memory that bases are staged in on a GPU host."""
    backend: BackendChoice = "auto"
    """Transport backends of the side groups that it joins."""
    running_requests: RunningRequests = "recompute"
    """Treatment of requests that run when the base changes."""
    enable_sleep: bool = False
    """True to let trainers on the same GPU, and operators, put the engine to sleep."""
    drain_seconds: float = 30.0
    """Time for running requests and transfers to end when the process is told to stop; 0 aborts
    them."""
    base_copies: int = 1
    """Number of base versions to keep a copy of, the served one included. Other replicas clone the
    copies, and a rollback serves them. 0, or loading in place, keeps none."""
    spill_dir: str = ""
    """Directory for copies of what is served, which a restart reads; empty for none. The base is
    written from a copy that ``base_copies`` keeps, so not where it is loaded in place."""
    spill_bytes: int = 256 * 2**30
    """Largest size of all spilled versions of this base model, of any replica."""

    access: Path | None = None
    """File of who may call the replica's services; None to serve every caller."""
    insecure: bool = False
    """True to serve every caller on an address that is not loopback."""
    telemetry: TelemetryConfig = NO_TELEMETRY
    """Telemetry settings: metrics, and health without TLS."""
    vllm_defaults: bool = False
    """True to keep vLLM's sampling defaults, not those that RL trainers expect."""
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
