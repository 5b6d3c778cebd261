"""Settings of a coordinator."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from weft_rl.contract.errors import InvalidRequestError
from weft_rl.coordinator.decisions.state.pool import PoolSettings
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
    """SQLite file of versions, leases and history; created if it is missing."""
    listen: str = "127.0.0.1:50051"
    """HOST:PORT to listen on; port 0 takes a free one."""
    lease_seconds: float = PoolSettings.lease_seconds
    """Seconds without a renewal after which a trainer no longer owns a policy."""
    heartbeat_seconds: float = PoolSettings.heartbeat_seconds
    """Seconds between a replica's heartbeats."""
    lost_after_seconds: float = PoolSettings.lost_after_seconds
    """Seconds without a heartbeat after which a replica is lost: several heartbeats."""
    retain_versions: int = PoolSettings.retain
    """Number of newest versions of each adapter that can be requested; the one that the bare name
    stands for always can."""
    commit_timeout_seconds: float = 120.0
    """Longest time that a replica may take to switch to a committed version."""
    stall_seconds: float = PoolSettings.stall_seconds
    """Seconds after which a member of a transfer that is expected to act, and has reported nothing,
    is left out of the transfer: its process may live while its working thread hangs."""
    sender_stall_seconds: float = PoolSettings.sender_stall_seconds
    """Seconds without a report of its trainer after which a push is aborted, if another transfer
    waits for its replicas."""
    max_transfer_seconds: float = PoolSettings.max_transfer_seconds
    """Longest time of a push from when it is its turn; its own deadline bounds the wait before."""
    publish_again_after_seconds: float = PoolSettings.publish_again_after_seconds
    """Seconds without any replica that holds a served version, after which its owner is asked to
    push it again."""
    max_policies_per_trainer: int = PoolSettings.max_policies_per_trainer
    """Number of policies, owned or served, that one trainer may have at a time. A trainer is an
    identity of the access file, or a trainer_id where callers are not identified."""
    recover: bool = False
    """True to let an empty catalog be of the pool of the first replica or trainer that comes back:
    its own was lost. No effect on a catalog that belongs to a pool."""
    credentials: Credentials = NO_CREDENTIALS
    """Credentials shown to callers, and to the replicas that the coordinator calls."""
    access: Path | None = None
    """File of who may call what; None to serve every caller."""
    insecure: bool = False
    """True to serve every caller on an address that is not loopback."""
    telemetry: TelemetryConfig = NO_TELEMETRY
    """Telemetry of the process: metrics, and health without TLS."""
    stop_seconds: float = 5.0
    """Time for running calls to end when the process is told to stop."""

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
    def settings(self) -> PoolSettings:
        """Options that decisions depend on."""
        return PoolSettings(
            lease_seconds=self.lease_seconds,
            heartbeat_seconds=self.heartbeat_seconds,
            lost_after_seconds=self.lost_after_seconds,
            retain=self.retain_versions,
            publish_again_after_seconds=self.publish_again_after_seconds,
            stall_seconds=self.stall_seconds,
            sender_stall_seconds=self.sender_stall_seconds,
            max_transfer_seconds=self.max_transfer_seconds,
            max_policies_per_trainer=self.max_policies_per_trainer,
            recover=self.recover,
        )
