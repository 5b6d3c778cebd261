"""Interface that the agent needs of an inference engine, and the values that it takes and returns.

vLLM's engine is in ``vllm_engine``.
"""

from __future__ import annotations

import enum
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from weft_rl.contract.capabilities import Capabilities
from weft_rl.contract.checkpoint import Checkpoint, StoredTensor
from weft_rl.contract.group import GroupTicket
from weft_rl.contract.manifest import Manifest
from weft_rl.contract.names import PolicyVersion
from weft_rl.contract.replica_report import AbsentPolicy, EngineReport, HeldVersion, Sleep
from weft_rl.contract.sampling import Sampling
from weft_rl.contract.tensors import Reference
from weft_rl.v1 import types_pb2


@dataclass(frozen=True)
class VersionFacts:
    """Recorded facts of one version, as plain values that can be kept and compared."""

    digest: bytes
    """Content digest: ``weft.v1.ContentDigest.value``."""
    message: bytes
    """Serialized ``weft.v1.VersionFacts``."""

    def to_proto(self) -> types_pb2.VersionFacts:
        """Return the facts as the message that the coordinator takes."""
        return types_pb2.VersionFacts.FromString(self.message)


@dataclass(frozen=True, kw_only=True)
class PromptImage:
    """Image of a prompt: a file, or pixels."""

    file: bytes = b""
    """PNG, JPEG or WebP file; empty where ``rgb`` is given."""
    height: int = 0
    width: int = 0
    rgb: bytes = b""
    """Pixels, three bytes each, row by row from the top."""


@dataclass(frozen=True, kw_only=True)
class GenerateOrder:
    """Prompt to complete, with the adapter and the sampling to complete it with."""

    prompt: str | list[int]
    """Prompt as text, or as tokens."""
    images: Sequence[Any] = ()
    """Images of the prompt's placeholders, as ``Engine.read_images`` returned them."""
    adapter: PolicyVersion | None = None
    """Adapter version to complete it with; None for the base model itself."""
    num_samples: int = 1
    """Number of samples of the prompt."""
    sampling: Sampling = field(default_factory=Sampling)
    strict: bool = False
    """True if the answer ends when the base changes before its last token."""
    exact_base: bool = False
    """True if the answer ends when the base changes before its first token: the request named a
    version of the base."""
    chunk_tokens: int = 0
    """Least number of tokens in a chunk, except a sample's first and last; 0 sends tokens as they
    come."""


class FinishReason(enum.Enum):
    """Reason why a sample has ended."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


@dataclass(frozen=True)
class BaseSpan:
    """Span of a sample's tokens, ``[start, end)``, that were sampled under one version of the
    base."""

    version: int
    start: int
    end: int
    older_cache: bool = False
    """True if the sample's cache was kept from an earlier version."""


@dataclass(frozen=True, kw_only=True)
class SampleChunk:
    """Further tokens of one sample."""

    index: int
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: FinishReason | None = None
    """Reason of the end; set on the last chunk only."""
    base_spans: tuple[BaseSpan, ...] = ()
    """Spans of all the sample's tokens, without gaps; set on the last chunk only."""


class Generation(Protocol):
    """Generation that an engine is making. It counts as a running request from its creation until
    ``end``."""

    base: int
    """Version of the base when the answer was requested."""
    prompt_token_ids: Sequence[int]
    """Tokens of a text prompt, known with the first chunks; empty before, and for a prompt of
    tokens."""

    def chunks(self) -> AsyncGenerator[Sequence[SampleChunk], None]:
        """Yield the chunks sampled since the last iteration; to be iterated once. Ends when every
        sample has had its last chunk.

        Raises:
            InvalidRequestError: The engine refuses the prompt; nothing was sampled.
            CapacityError: ``TOO_MANY_CALLS``: the engine's own bounds are met.
            VersionChangedError: The base has changed, and the order is strict. The tokens that came
                are of the version before.
            PeerUnavailableError: The engine has died.
        """

    def end(self) -> None:
        """End the answer in the engine, wherever it is; idempotent."""


@dataclass(frozen=True, kw_only=True)
class AliasRefusals:
    """Aliases to refuse: the version each stands for in the pool is not served here, or is
    unknown."""

    every: str = ""
    """Reason to refuse all aliases; empty if they are not all refused."""
    is_away: bool = False
    """True if ``every`` is due to lost contact with the coordinator."""
    named: Mapping[str, str] = field(default_factory=dict)
    """Reasons to refuse single aliases, by policy."""

    def why(self, policy: str) -> str:
        """Return the reason to refuse a policy's alias; empty if it is not refused."""
        return self.every or self.named.get(policy, "")

    @property
    def reason(self) -> str:
        """Reason code of the error that refuses an alias."""
        return "COORDINATOR_AWAY" if self.is_away else "REFUSING"


@dataclass(frozen=True, kw_only=True)
class JoinOrder:
    """Side group that the receivers are to join; receiver ``i`` has the ticket's rank + i."""

    ticket: GroupTicket
    trainer_id: str
    """Trainer that owns the group; a new group replaces the trainer's old one."""
    is_probe: bool = False
    """True if the group only asks whether the receivers answer; see ``probe``."""


@dataclass(frozen=True, kw_only=True)
class MemoryUsage:
    """Bytes held for Weft, in host memory or where bases are staged."""

    adapter_bytes: int
    staging_bytes: int
    """Bytes that are staged or retained; retained copies give way to a push."""
    free_bytes: int = 0
    """Bytes that are kept for the next push."""
    staged_transfer_ids: tuple[str, ...] = ()
    """Transfers with bytes that are staged, whole or in part, or loaded in place."""
    retained_bases: tuple[int, ...] = ()
    """Base versions with a held copy, last used first."""
    undo_bases: tuple[int, ...] = ()
    """Base versions that the served one can be switched to in place, nearest first."""
    takes_deltas: bool = False
    """True if the served base takes deltas where it lies, whether or not a copy is held."""
    pinned_base_bytes: int = 0
    """Bytes of the pinned copies of bases."""
    spilled: tuple[HeldVersion, ...] = ()
    """Copies that lie whole in the spill directory; bounded. One version may have several."""


@dataclass(frozen=True, kw_only=True)
class SwitchTimes:
    """Times and interrupted requests of a switch."""

    pause_seconds: float = 0.0
    """Seconds that generation was paused."""
    load_seconds: float = 0.0
    num_begun: int = 0
    """Requests that had tokens when the base changed."""


@dataclass(frozen=True, kw_only=True)
class SpillOrder:
    """Versions that a replica's spill directory is to hold, or to lose."""

    keep: tuple[PolicyVersion, ...] = ()
    """Versions to write, in this order; those that are no longer held are skipped."""
    retired: tuple[PolicyVersion, ...] = ()
    """Adapter versions to remove."""
    served_base: int = 0
    serves_all: bool = False
    """True if the replica serves what the pool does. Only then it is known which bases nobody
    needs, and these are removed."""


@dataclass(frozen=True, kw_only=True)
class SendOrder:
    """Version that a replica is to send as rank 0 of a side group."""

    ticket: GroupTicket
    transfer_id: str
    version: PolicyVersion
    nonce: int
    timeout_seconds: float


@dataclass(frozen=True, kw_only=True)
class SleepOrder:
    """Order to put an engine to sleep."""

    trainer_id: str
    """Trainer that wants the engine to sleep; empty for an operator."""
    level: int = field(default=1, metadata={"unset": 1})
    """Sleep level: 1 moves the weights to host memory, 2 discards them."""
    aborts: bool
    """True to abort running requests, False to let them finish."""
    timeout_seconds: float
    """Seconds that running requests may take to end."""


class EngineWork(NamedTuple):
    """Oldest unanswered call to an engine, and the time of the engine's last progress."""

    owed: str
    """Description of the oldest unanswered call, for messages; empty if there is none."""
    seen_at: float
    """``time.monotonic()`` of the engine's last known progress: it answered a call, took the oldest
    one, or one of its loading threads reported."""


class Engine(Protocol):
    """Running inference engine. Its coroutines run on the agent's event loop, and the engine's own
    step time bounds each. Only ending the process may cancel one: cancel nothing, set deadlines
    around it and quarantine on overrun."""

    capabilities: Capabilities
    reference: Reference
    model_name: str
    """Name of the base model in the OpenAI API."""
    spills: bool
    """True if it has a spill directory."""

    @property
    def checkpoint(self) -> Checkpoint:
        """Checkpoint that the engine was started with, as far as its files were read; does not
        block."""

    @property
    def dirty_reason(self) -> str:
        """Reason why the weights may be mixed; empty if they are not. Set by a switch that fails
        with mixed weights, and by a load in place that ends before its commit."""

    @property
    def work(self) -> EngineWork:
        """Oldest unanswered call, and the engine's last progress. Any thread may read it; it asks
        no worker."""

    @property
    def base_version(self) -> int:
        """Version of the base that tokens are sampled under from now on."""

    @property
    def report(self) -> EngineReport:
        """Facts that the engine tells of itself to the pool."""

    def draft_counts(self) -> tuple[int, int]:
        """Return how many tokens the engine has drafted, and how many of them were accepted."""

    @property
    def loading(self) -> str:
        """Transfer for which ``load_in_place`` has paused generation; else empty."""

    @property
    def asleep(self) -> Sleep | None:
        """Sleep state; None if it is awake. It answers no requests while it sleeps. A switch wakes
        the weights only; adapters stay until the weights are awake."""

    @property
    def lacks_base(self) -> bool:
        """True while it sleeps without a base, which was discarded and not loaded since."""

    async def end_requests(self, order: SleepOrder, is_wanted: Callable[[], bool]) -> None:
        """Refuse new requests and let running ones end, before ``fall_asleep``. Switches may come
        meanwhile. New requests stay refused until ``wake_up`` or ``take_requests``, unless this
        fails.

        Args:
            order: Its ``timeout_seconds`` bounds this call.
            is_wanted: Called often; the call returns early if it is False.

        Raises:
            NotReadyError: ``SLEEP_DISABLED``: the engine cannot sleep; or ``TRANSFER_UNDER_WAY``: a
                base is being loaded in place. Nothing changed.
            TransferTimeoutError: Requests have not ended in time; the engine takes new ones again.
        """

    def take_requests(self) -> None:
        """Take new requests again if only ``end_requests`` refuses them: the engine is not to
        sleep. Nothing changes if the engine sleeps, or is falling asleep."""

    async def fall_asleep(self, order: SleepOrder) -> bool:
        """Put the engine to sleep, after ``end_requests``. Resets the prefix cache and gives the
        accelerator's memory back, also that of copies of bases. Weights that are awake are put to
        sleep again; weights that sleep stay as they are.

        Returns:
            Whether it sleeps. If not, requests run, or the weights are being read (cloned, say):
            nothing changed, and the call is to be repeated.

        Raises:
            NotReadyError: As ``end_requests``; the engine takes requests again.
            TransferTimeoutError: The call would be repeated, but no ``timeout_seconds`` are left;
                the engine takes requests again.
            LoadFailedError: The engine is dirty; it may sleep.
        """

    async def wake_up(self) -> None:
        """Take the memory back and take requests again; succeeds if the engine is awake. A base
        that was discarded is loaded as by ``apply_retained``; if that fails, the engine is
        dirty."""

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
        """Load a staged base while generation is paused.

        ``Capabilities.running_requests`` is the treatment of running requests. No request that
        begins uses an older block of the KV cache; every adapter stays served. The copy is
        retained, as far as retention allows. A base that was loaded in place is only made to be
        served. A load in place for another transfer is given up before.

        Raises:
            NotReadyError, DigestMismatchError: Nothing changed.
            LoadFailedError: Metadata ``dirty`` says whether weights are mixed; then the engine
                stays paused.
        """

    async def load_in_place(
        self, transfer_id: str, version: PolicyVersion, timeout_seconds: float
    ) -> None:
        """Pause generation, and load a base's buckets as they arrive; return before any has.

        ``apply_base`` ends it: the version is served. ``discard`` ends it: generation resumes if
        nothing was loaded yet, else the engine is dirty and stays paused. If neither comes within
        the timeout, it ends as by ``discard``; but a base that was loaded whole by then can still
        be applied. Meanwhile no adapter can be loaded or dropped. Idempotent by transfer; a load
        for another transfer is given up.

        Raises:
            NotReadyError: Nothing of the transfer was prepared, or it has ended; nothing changed.
            LoadFailedError: As ``apply_base``.
        """

    async def apply_retained(self, version: PolicyVersion) -> SwitchTimes:
        """Load a retained copy of the base, as ``apply_base`` loads a staged one. ``base@0`` is
        loaded from the files that the engine was started with.

        Raises:
            NotFoundError: No copy is held; nothing changed.
            LoadFailedError: As ``apply_base``.
        """

    async def set_alias(self, version: PolicyVersion) -> None:
        """Let an adapter's bare name stand for a version that can be requested.

        Raises:
            NotFoundError: It cannot be requested.
        """

    async def drop_alias(self, policy: str) -> None:
        """Let an adapter's bare name stand for nothing; succeeds if it already does."""

    def set_absent(self, policies: Mapping[str, AbsentPolicy]) -> None:
        """Set the policies that are not served any more, with reasons for clients."""

    async def manifest(self, version: PolicyVersion) -> Manifest:
        """Return the manifest of a held adapter or of a retained base.

        Raises:
            NotFoundError: No copy is held.
        """

    def digest_tensors(
        self, version: PolicyVersion
    ) -> AsyncGenerator[Sequence[StoredTensor], None]:
        """Digest every tensor of a held version, or of what the engine was started with
        (``base@0``).

        Yields parts, digested from the bytes that are there at that moment. One version is read at
        a time, beside all else; close an iterator that is not read to its end.

        Raises:
            NotFoundError: The version is not held, or was dropped while it was read.
            NotReadyError: ``NOT_RETAINED``: the files of ``base@0`` cannot be read, or are being
                read.
        """

    async def holds_started_with(self, version: PolicyVersion) -> bool:
        """Return whether the held copy of a base equals the files that the engine was started with.
        Compares known digests, not bytes; False while these files are read, or if they cannot be
        compared.

        Raises:
            NotFoundError: No copy is held.
        """

    async def spilled_facts(self, version: PolicyVersion, content_digest: bytes) -> VersionFacts:
        """Return the facts that the spill directory records of a version.

        Raises:
            NotFoundError: The version does not lie there, or cannot be read.
        """

    async def send(self, order: SendOrder) -> None:
        """Send a held version to a side group, beside all else; returns at once.

        Raises:
            NotFoundError: It is not held.
        """

    async def spill(self, order: SpillOrder) -> None:
        """Set the versions to spill from now on; return at once. Does nothing without a spill
        directory."""

    async def restore(
        self,
        transfer_id: str,
        version: PolicyVersion,
        content_digest: bytes,
        layout_digest: bytes,
    ) -> None:
        """Stage a version from the spill directory as if it had been received; return once it is
        staged. Nothing that is served changes.

        Raises:
            NotReadyError: ``NOT_RETAINED``: the version is not there, or cannot be read.
            DigestMismatchError: The files there are not that version.
            CapacityError: There is no memory for it.
            TransferTimeoutError: It took too long, and was dropped.
        """

    async def pin_bases(self, versions: Sequence[int]) -> None:
        """Pin the held copies of these versions of the base; drop other copies beyond those
        retained."""

    async def discard(self, transfer_id: str) -> None:
        """Drop what a transfer staged and end its load in place; succeeds if there is nothing."""

    def refuse_aliases(self, refused: AliasRefusals) -> None:
        """Refuse requests for these aliases (``math``, ``base``, the model's own names) from now
        on. Exact versions still answer."""

    async def retire(self, version: PolicyVersion) -> bool:
        """Stop taking requests for an adapter version; drop it once unused.

        Returns:
            Whether it is gone; call again later if not.
        """

    async def memory(self) -> MemoryUsage:
        """Return the memory held now, or a moment ago, with the effects of all calls that have
        returned. Asks no worker, so it may be called at any rate."""

    async def read_images(self, images: Sequence[PromptImage]) -> Sequence[Any]:
        """Decode the images of a prompt, for ``GenerateOrder.images``; takes a while.

        Raises:
            InvalidRequestError: One cannot be read, they are too large, or the model takes none.
        """

    def generate(self, order: GenerateOrder) -> Generation:
        """Begin to complete a prompt. It is admitted when this returns; the caller calls
        ``Generation.end`` in the end.

        Raises:
            NotFoundError: The adapter cannot be requested.
            PeerUnavailableError: ``REFUSING``: see ``refuse_requests``.
        """

    def num_requests(self) -> int:
        """Return the number of requests that have begun and not ended."""

    def refuse_requests(self, reason: str) -> None:
        """Refuse new requests for a reason; take them again if it is empty. Running ones
        continue."""
