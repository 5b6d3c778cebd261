"""Settings of a coordinator."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from weft_rl.contract.errors import InvalidRequestError
from weft_rl.coordinator.decisions.state.pool import Settings
from weft_rl.rpc.channel import check_listen
from weft_rl.rpc.security.credentials import NO_CREDENTIALS, Credentials
from weft_rl.telemetry.config import NO_TELEMETRY, TelemetryConfig


@dataclass(frozen=True, kw_only=True)
class CoordinatorConfig:
    """Options of one coordinator process.

    Raises:
        InvalidRequestError: An option is out of range; names it.
    """

    catalog: Path
    """SQLite file that holds versions and fencing tokens; created if absent."""
    listen: str = "127.0.0.1:50051"
    """HOST:PORT; port 0 takes a free one."""
    lease_seconds: float = Settings.lease_seconds
    """Seconds that a trainer keeps a policy without renewing."""
    heartbeat_seconds: float = Settings.heartbeat_seconds
    """Seconds between the heartbeats that replicas are asked for."""
    lost_after_seconds: float = Settings.lost_after_seconds
    """Seconds of silence after which a replica is given up: several heartbeats."""
    retain_versions: int = Settings.retain
    """Number of newest versions of each adapter that stay requestable; the alias always does."""
    commit_timeout_seconds: float = 120.0
    """Seconds that a replica may take at most to switch to a committed version."""
    stall_seconds: float = Settings.stall_seconds
    """Seconds that a member of a transfer may be silent while it owes the next step. Then it is
    given up for the transfer: its process lives, but the thread that works hangs."""
    sender_stall_seconds: float = Settings.sender_stall_seconds
    """Seconds that a trainer may be silent while another transfer waits for its replicas."""
    max_transfer_seconds: float = Settings.max_transfer_seconds
    """Seconds that a push may take once it is its turn; the wait before that is bounded by the
    push's own deadline alone."""
    publish_again_after_seconds: float = Settings.publish_again_after_seconds
    """Seconds for which no replica holds a served version before its owner is asked for it."""
    max_policies_per_trainer: int = Settings.max_policies_per_trainer
    """Number of policies that one trainer may have at a time, owned or served. A trainer is one
    identity of the access file, or one trainer_id where callers are not identified."""
    credentials: Credentials = NO_CREDENTIALS
    """Credentials shown to callers, and to the replicas that the coordinator calls."""
    access: Path | None = None
    """File that says who may call what; None where everybody may."""
    insecure: bool = False
    """True if it may serve everybody on an address that is not loopback."""
    telemetry: TelemetryConfig = NO_TELEMETRY
    """Telemetry of the process: metrics, and health without TLS."""
    stop_seconds: float = 5.0
    """Seconds that calls under way may take to end when the process is told to stop."""

    def __post_init__(self) -> None:
        for name in (
            "lease_seconds",
            "heartbeat_seconds",
            "commit_timeout_seconds",
            "publish_again_after_seconds",
            "stall_seconds",
            "sender_stall_seconds",
            "max_transfer_seconds",
        ):
            if not 0.01 <= getattr(self, name) <= 86_400:
                raise InvalidRequestError(f"{name} must be between 0.01 and 86400 seconds")
        if not self.heartbeat_seconds <= self.lost_after_seconds <= 86_400:
            raise InvalidRequestError(
                "lost_after_seconds must be at least heartbeat_seconds, at most 86400"
            )
        if not 1 <= self.retain_versions <= 1_000_000:
            raise InvalidRequestError("retain_versions must be between 1 and 1000000")
        if not 1 <= self.max_policies_per_trainer <= 1_000_000:
            raise InvalidRequestError("max_policies_per_trainer must be between 1 and 1000000")
        if not 0 <= self.stop_seconds <= 300:
            raise InvalidRequestError("stop_seconds must be between 0 and 300")
        check_listen(self.listen)

    @property
    def settings(self) -> Settings:
        """Options that decisions depend on."""
        return Settings(
            lease_seconds=self.lease_seconds,
            heartbeat_seconds=self.heartbeat_seconds,
            lost_after_seconds=self.lost_after_seconds,
            retain=self.retain_versions,
            publish_again_after_seconds=self.publish_again_after_seconds,
            stall_seconds=self.stall_seconds,
            sender_stall_seconds=self.sender_stall_seconds,
            max_transfer_seconds=self.max_transfer_seconds,
            max_policies_per_trainer=self.max_policies_per_trainer,
        )
