"""The settings of a replica."""

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
    """The machine's host name (a StatefulSet's pod name), cut to the rule of names."""
    name = "".join(c if c.isalnum() or c in "._-" else "-" for c in socket.gethostname())
    return name.lstrip("._-").replace("..", ".")[:63] or "replica"


@dataclass(frozen=True, kw_only=True)
class AgentConfig:
    """How a replica takes part in a pool."""

    coordinator: str
    """HOST:PORT of the coordinator."""
    replica_id: str
    """Stable name in the pool."""
    listen: str = "127.0.0.1:0"
    """HOST:PORT of the ReplicaService; port 0 picks a free one."""
    advertise_host: str = ""
    """Host that the coordinator and trainers reach this machine by; empty: the
    host of ``listen``, or, for a wildcard, the address of the route to the
    coordinator."""
    http_url: str = ""
    """Base URL of the OpenAI-compatible server, as clients reach it."""
    contact_seconds: float = 30.0
    """Time without an answer from the coordinator after which this replica is not
    ready and refuses bare names."""
    incarnation: str = field(default_factory=lambda: secrets.token_hex(8))
    """Random for each process."""
    conflict_patience_seconds: float = 30.0
    """How long a former process with the same id may linger in the registry."""

    def __post_init__(self) -> None:
        check_name(self.replica_id, "replica")
        check_listen(self.listen)
        if self.http_url and not self.http_url.startswith(("http://", "https://")):
            raise InvalidRequestError(
                f"--http-url is {self.http_url!r}; it must be http://HOST:PORT or https://HOST:PORT"
            )
        if not 0 < self.contact_seconds <= 86_400:
            raise InvalidRequestError("contact_seconds must be more than 0, at most 86400")


@dataclass(frozen=True, kw_only=True)
class RolloutConfig:
    """The options of one replica process."""

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
    """Where bases are staged on a GPU host; "in-place" loads them as they arrive."""
    backend: BackendChoice = "auto"
    """Which side groups to join."""
    running_requests: RunningRequests = "recompute"
    """What becomes of requests that run when the base changes."""
    enable_sleep: bool = False
    """Whether trainers on the same GPU may put the engine to sleep."""
    drain_seconds: float = 30.0
    """How long running requests and transfers may take to end once the process is told
    to stop; 0 cuts them."""
    retain_base: int = 1
    """Versions of the base that a copy is kept of, the served one
    included; others are cloned from it, and rollback goes back to it. 0 keeps none; nor does
    loading in place."""
    spill_dir: str = ""
    """Directory that what is served is written to, so that a restart finds it; empty
    for none. The base is written from the copy that ``retain_base`` keeps, so not where
    it is loaded in place."""
    spill_bytes: int = 256 * 2**30
    """Bound of the versions of this base model there, of whichever replica."""

    access: Path | None = None
    """The file that says who may call the ReplicaService; None where everybody may."""
    insecure: bool = False
    """Whether it may serve everybody on an address that is not loopback."""
    telemetry: TelemetryConfig = NO_TELEMETRY
    """What it shows of itself: metrics, and health without TLS."""
    vllm_defaults: bool = False
    """Leave vLLM's defaults of sampling; else they are those that RL trainers expect."""
    allow_unversioned_changes: bool = False
    """Take an environment that opens endpoints of vLLM's which change weights."""

    def __post_init__(self) -> None:
        if not 0 <= self.retain_base <= 100:
            raise InvalidRequestError("retain_base must be between 0 and 100")
        if not 0 <= self.drain_seconds <= 86_400:
            raise InvalidRequestError("drain_seconds must be between 0 and 86400")
        if self.spill_dir and not self.retain_base:
            raise InvalidRequestError(
                "--spill-dir writes the base from the copy that --retain-base keeps: it needs "
                "--retain-base 1 or more"
            )
