"""Requests of trainers."""

from __future__ import annotations

from dataclasses import dataclass

from weft_rl.contract.layout.send_plan import SendPlan
from weft_rl.coordinator.decisions.state.pool import UNKNOWN_PROCESS, TrainerProcess
from weft_rl.coordinator.decisions.state.transfer import FreshIds
from weft_rl.coordinator.decisions.state.values import (
    AdapterSpec,
    Layout,
    PolicyKind,
    VersionRecord,
)


@dataclass(frozen=True)
class AcquirePolicy:
    """Trainer's request for a policy's lease."""

    ticket: int
    trainer_id: str
    session_id: str
    policy: str
    kind: PolicyKind
    process: TrainerProcess = UNKNOWN_PROCESS
    displaced_token: int = 0
    """Token of a lease of the same trainer that ends first, if it is live."""
    last_version: int = 0
    """Newest version of the policy that the trainer was told of."""
    last_token: int = 0
    """Largest token by which the trainer owned a lease of the policy."""
    identity: str = ""
    """Identity that its credentials have shown; empty where nobody is asked."""

    @property
    def owner(self) -> str:
        """Owner whose policies are counted together: names of trainers are their own choice."""
        return self.identity or self.trainer_id


@dataclass(frozen=True)
class RenewLease:
    """Trainer's request for more time of its lease."""

    ticket: int
    policy: str
    fencing_token: int
    session_id: str = ""
    """Session whose lease it must be; empty for any."""


@dataclass(frozen=True)
class ReleasePolicy:
    """Trainer's request to give its lease back."""

    ticket: int
    policy: str
    fencing_token: int
    session_id: str = ""
    """Session whose lease it must be; empty for any."""


@dataclass(frozen=True)
class DescribeTarget:
    """Trainer's request for a description of the pool; waits until ``deadline``."""

    ticket: int
    deadline: float


@dataclass(frozen=True, kw_only=True)
class BeginTransfer:
    """Trainer's request to push a version."""

    ticket: int
    request_id: str
    policy: str
    fencing_token: int
    layout_digest: bytes
    layout: Layout | None
    """Layout of that digest; None when no such manifest is known."""
    adapter: AdapterSpec | None
    min_replicas: int
    deadline: float
    answer_by: float
    backend: str
    group_id: str
    ids: FreshIds
    session_id: str = ""
    """Session whose lease it must be; empty for any."""
    recorded: VersionRecord | None
    """Record that the catalog has of this trainer's request id."""
    check_finite: bool = False
    refuse_other_base: bool = False
    carries_runs: bool = False
    send_plan: SendPlan | None = None
    backend_reason: str = ""
    trial_names: frozenset[str] = frozenset()


@dataclass(frozen=True)
class AwaitTransfer:
    """Trainer's request to wait for a transfer's end."""

    ticket: int
    transfer_id: str


@dataclass(frozen=True)
class AbortTransfer:
    """Trainer's request to give a transfer of its policy up."""

    ticket: int
    transfer_id: str
    policy: str
    fencing_token: int
    message: str
    request_id: str = ""
    """Request id that names the transfer where ``transfer_id`` is empty."""


@dataclass(frozen=True, kw_only=True)
class SleepRollouts:
    """Request of the owner of the base's lease to put the replicas on its GPUs to sleep."""

    ticket: int
    fencing_token: int
    session_id: str
    gpu_uuids: frozenset[str]
    level: int = 1
    aborts: bool
    """True if running requests are aborted, rather than finished."""
    seconds: float
    """Seconds that running requests may take to end."""
    answer_by: float


@dataclass(frozen=True)
class WakeRollouts:
    """Request of the owner of the base's lease to wake what it has put to sleep."""

    ticket: int
    fencing_token: int
    session_id: str
    answer_by: float


TrainerEvent = (
    AcquirePolicy
    | RenewLease
    | ReleasePolicy
    | DescribeTarget
    | BeginTransfer
    | AwaitTransfer
    | AbortTransfer
    | SleepRollouts
    | WakeRollouts
)
