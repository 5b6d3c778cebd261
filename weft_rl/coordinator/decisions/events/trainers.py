"""What trainers ask for."""

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
    """A trainer asks for a policy's lease."""

    ticket: int
    trainer_id: str
    session_id: str
    policy: str
    kind: PolicyKind
    process: TrainerProcess = UNKNOWN_PROCESS
    displaced_token: int = 0
    """The lease of the same trainer that ends first, if it is live."""
    last_version: int = 0
    """Newest of the policy that the trainer was told of."""
    last_token: int = 0
    """The largest that it owned a lease by."""
    identity: str = ""
    """Whose credentials it has shown; empty where nobody is asked."""

    @property
    def owner(self) -> str:
        """Whose policies are counted together: names of trainers are their own choice."""
        return self.identity or self.trainer_id


@dataclass(frozen=True)
class RenewLease:
    """A trainer asks for more time."""

    ticket: int
    policy: str
    fencing_token: int
    session_id: str = ""
    """Whose lease it must be; empty for any."""


@dataclass(frozen=True)
class ReleasePolicy:
    """A trainer gives its lease back."""

    ticket: int
    policy: str
    fencing_token: int
    session_id: str = ""
    """Whose lease it must be; empty for any."""


@dataclass(frozen=True)
class DescribeTarget:
    """A trainer asks what the pool is; waits until ``deadline``."""

    ticket: int
    deadline: float


@dataclass(frozen=True, kw_only=True)
class BeginTransfer:
    """A trainer asks to push a version."""

    ticket: int
    request_id: str
    policy: str
    fencing_token: int
    layout_digest: bytes
    layout: Layout | None
    """The layout of that digest; None when no such manifest is known."""
    adapter: AdapterSpec | None
    min_replicas: int
    deadline: float
    answer_by: float
    backend: str
    group_id: str
    ids: FreshIds
    session_id: str = ""
    """Whose lease it must be; empty for any."""
    recorded: VersionRecord | None
    """What the catalog knows of this trainer's request id."""
    check_finite: bool = False
    refuse_other_base: bool = False
    carries_runs: bool = False
    send_plan: SendPlan | None = None
    backend_reason: str = ""
    trial_names: frozenset[str] = frozenset()


@dataclass(frozen=True)
class AwaitTransfer:
    """A trainer waits for a transfer's end."""

    ticket: int
    transfer_id: str


@dataclass(frozen=True)
class AbortTransfer:
    """A trainer gives a transfer of its policy up."""

    ticket: int
    transfer_id: str
    policy: str
    fencing_token: int
    message: str
    request_id: str = ""
    """Names it where ``transfer_id`` is empty."""


@dataclass(frozen=True, kw_only=True)
class SleepRollouts:
    """The owner of the base's lease puts the replicas on its GPUs to sleep."""

    ticket: int
    fencing_token: int
    session_id: str
    gpu_uuids: frozenset[str]
    level: int = 1
    aborts: bool
    """Whether running requests are aborted, rather than finished."""
    seconds: float
    """How long those may take to end."""
    answer_by: float


@dataclass(frozen=True)
class WakeRollouts:
    """It wakes them."""

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
