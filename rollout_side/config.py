"""Settings of a replica's agent."""

from __future__ import annotations

import secrets
import socket
from dataclasses import dataclass, field

from weft.contract.names import check_name


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
