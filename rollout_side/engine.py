"""What the agent needs of an inference engine; vLLM's is in ``vllm_engine``."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from rollout_side.generation import Answer, GenerateOrder
from rollout_side.version_facts import VersionFacts
from weft_rl.contract.capabilities import Capabilities
from weft_rl.contract.checkpoint import Checkpoint, StoredTensor
from weft_rl.contract.group import GroupTicket
from weft_rl.contract.layout.manifest import Manifest
from weft_rl.contract.names import PolicyVersion
from weft_rl.contract.tensors import Reference


@dataclass(frozen=True, kw_only=True)
class AliasRefusals:
    """The aliases that are refused, since what they stand for in the pool is not served here, or
    nobody can tell what that is."""

    every: str = ""
    """Why all of them are; empty where they are not."""
    is_away: bool = False
    """Whether that is for want of contact with the coordinator."""
    named: Mapping[str, str] = field(default_factory=dict)
    """Why others are, by policy."""

    def why(self, policy: str) -> str:
        """Why the alias of a policy is refused; empty where it is not."""
        return self.every or self.named.get(policy, "")

    @property
    def reason(self) -> str:
        """Of the error that says so."""
        return "COORDINATOR_AWAY" if self.is_away else "REFUSING"


@dataclass(frozen=True, kw_only=True)
class JoinOrder:
    """A side group that the receivers are to join; receiver ``i`` has the ticket's rank + i."""

    ticket: GroupTicket
    trainer_id: str
    """Whose group it is; a new group replaces the trainer's old one."""
    is_probe: bool = False
    """Whether it only asks if the receivers answer; see ``probe``."""


@dataclass(frozen=True, kw_only=True)
class MemoryUse:
    """Bytes held for Weft, in host memory or where bases are staged."""

    adapter_bytes: int
    staging_bytes: int
    staged_transfer_ids: tuple[str, ...] = ()
    """Transfers of which bytes are staged, whole or in part."""
    retained_bases: tuple[int, ...] = ()
    """Versions of the base that a copy is held of, last used first."""
    pinned_base_bytes: int = 0
    """Memory of the copies that are pinned."""
    spilled: tuple[PolicyVersion, ...] = ()
    """Versions that lie whole in the spill directory; bounded."""
    spilled_digests: tuple[tuple[PolicyVersion, bytes], ...] = ()
    """The content digests of those; of one version there may be several."""


@dataclass(frozen=True)
class AbsentPolicy:
    """A policy that the pool served once, and does not any more."""

    last_version: int
    """The highest of its numbers that will not be served."""
    reason: str
    """Why, for who asks for it."""


@dataclass(frozen=True, kw_only=True)
class SwitchTimes:
    """What a switch cost."""

    pause_seconds: float = 0.0
    """How long generation was paused."""
    load_seconds: float = 0.0
    num_begun: int = 0
    """Requests that had tokens when the base changed."""


@dataclass(frozen=True, kw_only=True)
class SpillOrder:
    """What a replica's spill directory is to hold."""

    keep: tuple[PolicyVersion, ...] = ()
    """Versions to be written, the first first; those that are no longer held are skipped."""
    retired: tuple[PolicyVersion, ...] = ()
    """Adapter versions to be removed."""
    served_base: int = 0
    serves_all: bool = False
    """Whether the replica serves what the pool does: only then may bases that
    others need be told from those that nobody needs, and removed."""


@dataclass(frozen=True, kw_only=True)
class SendOrder:
    """What a replica is to send as rank 0 of a side group."""

    ticket: GroupTicket
    transfer_id: str
    policy: str
    version: int
    nonce: int
    timeout_seconds: float


@dataclass(frozen=True, kw_only=True)
class SleepOrder:
    """How an engine is to fall asleep."""

    trainer_id: str
    """Who wants it to; empty for an operator."""
    level: int = 1
    """1 moves the weights to host memory, 2 discards them."""
    aborts: bool
    """Whether running requests are aborted, rather than finished."""
    timeout_seconds: float
    """How long those may take to end."""


@dataclass(frozen=True)
class Asleep:
    """An engine sleeps."""

    trainer_id: str
    """Who put it to sleep; empty for an operator."""
    weights_awake: bool = False
    """Whether a switch has woken its weights; the KV cache sleeps on."""
    level: int = 1
    """At which it was put to sleep."""
    base_discarded: bool = False
    """Whether it must load a base before it can serve."""


class EngineWork(NamedTuple):
    """What an engine was asked and has not answered."""

    owed: str
    """The oldest call of that kind, for people; empty where there is none."""
    seen_at: float
    """``time.monotonic()`` when the engine was last seen to get on: it answered a call, took the
    oldest one, or a thread of it that loads said so."""


class Engine(Protocol):
    """A running engine. Every method is a coroutine of the agent's event loop, is
    bounded by the engine's own step time, and may be cancelled only by ending the
    process: cancel nothing, set deadlines around it and quarantine on overrun."""

    capabilities: Capabilities
    reference: Reference
    model_name: str
    """Name of the base model in the OpenAI API."""
    spills: bool
    """Whether it has a spill directory."""

    @property
    def checkpoint(self) -> Checkpoint:
        """What it was started with, as far as its files were read; does not block."""

    @property
    def dirty_reason(self) -> str:
        """Why the weights may be mixed; empty when they are not. Set by a switch that
        fails so, and by a load in place that ends before it is committed."""

    @property
    def work(self) -> EngineWork:
        """What it owes an answer to, and when it was last seen to get on. Any thread may ask;
        asks no worker."""

    @property
    def base_version(self) -> int:
        """Version of the base that tokens are sampled under from now on."""

    @property
    def loading(self) -> str:
        """Transfer that generation is paused for, by ``load_in_place``; else empty."""

    @property
    def asleep(self) -> Asleep | None:
        """Set while it sleeps: it answers no requests. A switch wakes the weights, and no
        more; adapters stay until they are awake."""

    async def end_requests(self, order: SleepOrder, is_wanted: Callable[[], bool]) -> None:
        """Before ``fall_asleep``: refuse new requests and let running ones end. Switches may
        come meanwhile. New ones stay refused until ``wake_up`` or ``take_requests``, unless
        this fails.

        Args:
            order: Of which ``timeout_seconds`` bounds this.
            is_wanted: Asked often; returns early where it is not.

        Raises:
            NotReadyError: ``SLEEP_DISABLED``: it cannot sleep; or ``TRANSFER_UNDER_WAY``: a base
                is being loaded in place. Nothing changed.
            TransferTimeoutError: Requests have not ended in time; it takes new ones again.
        """

    def take_requests(self) -> None:
        """Take new requests again that ``end_requests`` alone refuses: it is not to sleep. Nothing
        changes where it sleeps, or falls asleep."""

    async def fall_asleep(self, order: SleepOrder) -> bool:
        """After ``end_requests``: reset the prefix cache, and give the accelerator's memory back,
        also that of copies of bases. Weights that are awake are put to sleep again; asleep,
        they stay as they are.

        Returns:
            Whether it sleeps. If not, requests run, or the weights are being read (cloned, say):
            nothing changed, and it is to be tried again.

        Raises:
            NotReadyError: As ``end_requests``; it takes requests again.
            TransferTimeoutError: It would be tried again, but no ``timeout_seconds`` are left; it
                takes requests again.
            LoadFailedError: Dirty; it may sleep.
        """

    async def wake_up(self) -> None:
        """Take the memory back and take requests again; succeeds if it is awake. A base that
        was discarded is loaded as by ``apply_retained``; if that fails, it is dirty."""

    async def join_group(self, order: JoinOrder) -> None:
        """Tell the receivers to join; returns before they have joined."""

    async def load_adapter(
        self,
        transfer_id: str,
        version: PolicyVersion,
        config_json: str,
        content_digest: bytes,
        alias: int = 0,
    ) -> SwitchTimes:
        """Make a staged adapter requestable as ``str(version)`` and flip its alias
        to it, or to the held version ``alias``.

        Raises:
            NotReadyError: Not staged.
            DigestMismatchError: Other bytes are staged.
            LoadFailedError: The engine refused it; nothing changed.
        """

    async def apply_base(
        self, transfer_id: str, version: PolicyVersion, content_digest: bytes
    ) -> SwitchTimes:
        """Load a staged base under a pause; what becomes of running requests says
        ``Capabilities.running_requests``. No request that begins uses a block of the KV
        cache that is older; every adapter stays served. The copy is retained, as far as
        retention allows. One that was loaded in place is only made to be served; one
        that is being loaded in place for another transfer is given up before.

        Raises:
            NotReadyError, DigestMismatchError: Nothing changed.
            LoadFailedError: Metadata ``dirty`` says whether weights are mixed; then
                the engine stays paused.
        """

    async def load_in_place(
        self, transfer_id: str, version: PolicyVersion, timeout_seconds: float
    ) -> None:
        """Pause generation, and load a base's buckets as they arrive; returns before
        any has. ``apply_base`` or ``discard`` ends it: the version is served, or generation
        resumes if nothing was loaded yet, else the engine is dirty and stays paused. If
        neither comes within the timeout it ends as by ``discard``; but what was loaded
        whole by then can still be applied. Meanwhile no adapter can be loaded, and none
        goes. Idempotent by transfer; one that is under way for another is given up.

        Raises:
            NotReadyError: Nothing of it was prepared, or it has ended; nothing changed.
            LoadFailedError: As ``apply_base``.
        """

    async def apply_retained(self, version: PolicyVersion) -> SwitchTimes:
        """Load a retained copy of the base, as ``apply_base`` loads a staged one; base@0 from
        the files that it was started with.

        Raises:
            NotFoundError: None is held; nothing changed.
            LoadFailedError: As ``apply_base``.
        """

    async def set_alias(self, version: PolicyVersion) -> None:
        """Let an adapter's bare name stand for a version that can be requested.

        Raises:
            NotFoundError: It cannot be requested.
        """

    async def drop_alias(self, policy: str) -> None:
        """Let an adapter's bare name stand for nothing; succeeds if it does not."""

    def note_absent(self, policies: Mapping[str, AbsentPolicy]) -> None:
        """Say why, to who asks for one of these policies that are not served any more."""

    async def manifest(self, version: PolicyVersion) -> Manifest:
        """The manifest of an adapter that is held, or a retained base.

        Raises:
            NotFoundError: None is held.
        """

    def digest_tensors(
        self, version: PolicyVersion
    ) -> AsyncGenerator[Sequence[StoredTensor], None]:
        """Digest every tensor of a version that is held, or of what the engine was started
        with (``base@0``), in parts, as they are made of the bytes that are there now. One
        version is read at a time, beside all else; close what is not read to its end.

        Raises:
            NotFoundError: It is not held, or was dropped while it was read.
            NotReadyError: ``NOT_RETAINED``: the files of ``base@0`` cannot be read, or are
                being read.
        """

    async def holds_started_with(self, version: PolicyVersion) -> bool:
        """Whether the copy that is held of a base has the very bytes of the files that the
        engine was started with. Compares digests that are known; False while these files are
        read, or where they cannot be compared.

        Raises:
            NotFoundError: No copy is held.
        """

    async def spilled_facts(self, version: PolicyVersion, content_digest: bytes) -> VersionFacts:
        """What the spill directory says of a version.

        Raises:
            NotFoundError: It does not lie there, or cannot be read.
        """

    async def send(self, order: SendOrder) -> None:
        """Send a held version to a side group, beside all else; returns at once.

        Raises:
            NotFoundError: It is not held.
        """

    async def spill(self, order: SpillOrder) -> None:
        """Say what is to be spilled from now on; returns at once. Nothing without a
        spill directory."""

    async def restore(
        self,
        transfer_id: str,
        version: PolicyVersion,
        content_digest: bytes,
        layout_digest: bytes,
    ) -> None:
        """Stage a version from the spill directory, as if it had been received;
        returns when it is. Nothing that is served changes.

        Raises:
            NotReadyError: ``NOT_RETAINED``: it is not there, or cannot be read.
            DigestMismatchError: What is there is not that version.
            CapacityError: There is no memory for it.
        """

    async def pin_bases(self, versions: Sequence[int]) -> None:
        """Keep the copies of these versions of the base where they are held, and no
        others beyond those that are retained."""

    async def discard(self, transfer_id: str) -> None:
        """Drop what was staged, end its loading in place; succeeds if nothing was."""

    def refuse_aliases(self, refused: AliasRefusals) -> None:
        """Refuse requests for aliases (``math``, ``base``, the model's own names) as told, from
        now on; exact versions answer all the same."""

    async def retire(self, version: PolicyVersion) -> bool:
        """Stop taking requests for an adapter version; drop it once unused.

        Returns:
            Whether it is gone; call again later if not.
        """

    async def memory(self) -> MemoryUse:
        """What is held now, or was a moment ago; what the calls to this engine that have
        returned have changed is in it. Asks no worker: it may be called at any rate."""

    def generate(self, order: GenerateOrder) -> Answer:
        """Begin to complete a prompt; it is admitted when this returns, and the caller calls
        ``Answer.end`` in the end.

        Raises:
            NotFoundError: The adapter cannot be requested.
            PeerUnavailableError: ``REFUSING``: see ``refuse_requests``.
        """

    def num_requests(self) -> int:
        """Requests that have begun and not ended."""

    def refuse_requests(self, reason: str) -> None:
        """Refuse new requests, saying why, or take them again where it is empty.

        Running ones continue.
        """
