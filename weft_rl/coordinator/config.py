"""Settings of a coordinator."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path

from weft_rl.contract.errors import InvalidRequestError
from weft_rl.contract.options import access_setting, check_bounds, insecure_setting, setting
from weft_rl.coordinator.decisions.state.pool import PoolSettings
from weft_rl.rpc.channel import check_listen
from weft_rl.rpc.security.credentials import NO_CREDENTIALS, Credentials
from weft_rl.telemetry.config import NO_TELEMETRY, TelemetryConfig


@dataclass(frozen=True, kw_only=True)
class CoordinatorConfig(PoolSettings):
    """Options of one coordinator process.

    Raises:
        InvalidRequestError: An option is out of range; names it.
    """

    listen: str = setting(
        "127.0.0.1:50051", "Address to listen on; port 0 picks a free one.", "HOST:PORT"
    )
    catalog: Path = setting(
        Path("weft.db"),
        "SQLite file of what outlives a restart: versions, leases, history.",
        "FILE",
    )
    """Created if it is missing."""
    commit_timeout_seconds: float = setting(120.0, bounds=(0.01, 86_400))
    """Longest time that a replica may take to switch to a committed version."""
    credentials: Credentials = NO_CREDENTIALS
    """Credentials shown to callers, and to the replicas that the coordinator calls."""
    access: Path | None = access_setting()
    insecure: bool = insecure_setting()
    telemetry: TelemetryConfig = NO_TELEMETRY
    stop_seconds: float = setting(5.0, bounds=(0, 300))
    """Time for running calls to end when the process is told to stop."""

    def __post_init__(self) -> None:
        check_bounds(self)
        if not self.heartbeat_seconds <= self.lost_after_seconds:
            raise InvalidRequestError("lost_after_seconds must be at least heartbeat_seconds")
        check_listen(self.listen)

    @property
    def settings(self) -> PoolSettings:
        """Options that decisions depend on."""
        return PoolSettings(
            **{each.name: getattr(self, each.name) for each in fields(PoolSettings)}
        )
