"""Running vLLM engine with its OpenAI server, as ``rollout_side.engine.Engine``."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from typing import Any

from rollout_side.engine import (
    AliasRefusals,
    Engine,
    EngineWork,
    GenerateOrder,
    Generation,
    JoinOrder,
    MemoryUsage,
    PromptImage,
    SendOrder,
    SleepOrder,
    SpillOrder,
    SwitchTimes,
    VersionFacts,
)
from rollout_side.memory.digest_reading import TensorDigests
from rollout_side.memory.messages import unpacked
from rollout_side.spill.folder import SpillFolder
from rollout_side.vllm_engine.compat import bridges
from rollout_side.vllm_engine.http.middleware import RequestTracker
from rollout_side.vllm_engine.http.served_models import ServedModels
from rollout_side.vllm_engine.http.server import OpenAiServer
from rollout_side.vllm_engine.loading import lora_hook
from rollout_side.vllm_engine.server.base_switch import BaseSwitch, learn_copies
from rollout_side.vllm_engine.server.generations import Generations
from rollout_side.vllm_engine.server.in_place_session import InPlaceSession
from rollout_side.vllm_engine.server.initial_checkpoint import InitialCheckpoint
from rollout_side.vllm_engine.server.request_gate import RequestGate
from rollout_side.vllm_engine.server.requests_at_switch import RequestsAtSwitch
from rollout_side.vllm_engine.server.sleeper import Sleeper
from rollout_side.vllm_engine.server.worker_calls import Deadlines, WorkerCalls
from rollout_side.vllm_engine.worker.holdings import HoldingsPage
from rollout_side.vllm_engine.worker.rank_results import FROM_FILES
from rollout_side.waits import answer_within, seconds_to_tick
from weft_rl.checkpoints.reader import digest_in_layout
from weft_rl.contract.capabilities import Capabilities
from weft_rl.contract.checkpoint import Checkpoint, StoredTensor
from weft_rl.contract.errors import (
    DigestMismatchError,
    InvalidManifestError,
    NotFoundError,
    NotReadyError,
    PeerUnavailableError,
    TransferTimeoutError,
    WeftError,
)
from weft_rl.contract.manifest import Manifest
from weft_rl.contract.names import BASE_POLICY, STARTED_WITH, PolicyVersion
from weft_rl.contract.replica_report import AbsentPolicy, EngineReport, Sleep
from weft_rl.contract.tensors import Reference
from weft_rl.ipc.bytes_codec import bytes_codec

_log = logging.getLogger(__name__)

#: The engine may run one more step between a request's last output and its end, so an adapter
#: is dropped only after this long without a request.
GRACE_SECONDS = 0.1
_STOP_SECONDS = 15.0
_NOTHING_DONE = (NotReadyError, DigestMismatchError)
_RESTORE_LOOK_SECONDS = 0.05
# Deadlines of reading the facts of a spilled version, and the files of the initial checkpoint.
_FACTS_SECONDS, _FILES_SECONDS = 10.0, 600.0
# First and longest wait between two requests for digests: a small version is digested at once.
_DIGEST_LOOK_SECONDS = (0.01, 0.25)


@dataclasses.dataclass(frozen=True)
class HeldCopy:
    """Description of a copy that the receiving rank holds."""

    transfer_id: str
    content_digest: bytes
    packed_manifest: bytes

    def manifest(self) -> Manifest:
        """Decode the manifest, which a switch does not need."""
        return unpacked(Manifest, self.packed_manifest)


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineParts:
    """Parts that ``launch.open_engine`` has started; a ``VllmReplica`` takes them over."""

    engine: Any
    """vLLM's ``AsyncLLM``."""
    holdings: HoldingsPage
    """Page on which its workers report what they hold."""
    models: ServedModels
    """Models that its OpenAI server answers for."""
    http: OpenAiServer
    tracker: RequestTracker
    requests: RequestsAtSwitch
    initial_checkpoint: InitialCheckpoint
    cleanup: contextlib.AsyncExitStack
    """Exit stack that ends the engine's processes."""


class VllmReplica(Engine):
    """One vLLM engine. Every method runs on the event loop that opened it.

    Switches of weights are serialised here; generation continues beside them, except
    for the pause that ``apply_base`` reports.
    """

    def __init__(
        self,
        parts: EngineParts,
        *,
        capabilities: Capabilities,
        reference: Reference,
        model_name: str,
        worker_pids: tuple[int, ...],
        deadlines: Deadlines,
        spill_folder: SpillFolder | None = None,
    ) -> None:
        workers = WorkerCalls(
            parts.engine,
            deadlines,
            num_ranks=capabilities.tensor_parallel_size,
            progress_at=parts.holdings.progress_at,
        )
        self._workers, self._holdings = workers, parts.holdings
        self._initial_checkpoint = parts.initial_checkpoint
        self._digesting = asyncio.Lock()
        #: Folder that versions are spilled to; None if they are not spilled.
        self.spill_folder = spill_folder
        self.spills = spill_folder is not None
        self._restore_seconds = deadlines.restore_seconds
        self.capabilities = capabilities
        self.reference = reference
        self.model_name = model_name
        self.worker_pids = worker_pids
        self.engine = parts.engine
        self.tracker = parts.tracker
        self.models = parts.models
        self._http = parts.http
        self._cleanup = parts.cleanup
        self._gate = RequestGate(parts.engine, workers, parts.tracker, parts.requests.caches)
        self._in_place = InPlaceSession(workers, self._gate)
        generate = parts.requests.generate
        self._answers = Generations(parts.engine, generate, parts.tracker, parts.models)
        self._sleeper = Sleeper(
            parts.engine,
            workers,
            self._gate,
            parts.tracker,
            self._in_place,
            enabled=capabilities.can_sleep,
        )
        self.base_switch = BaseSwitch(
            parts.engine,
            workers,
            self._gate,
            self._in_place,
            self._sleeper,
            parts.requests,
            self._answers,
            updates_draft=bool(capabilities.draft_fingerprint),
        )

        self._learning: asyncio.Task[None] | None = None

    # -- the process ----------------------------------------------------------

    @property
    def http_port(self) -> int:
        """Port of the OpenAI server."""
        return self._http.port

    @property
    def checkpoint(self) -> Checkpoint:
        return self._initial_checkpoint.checkpoint

    @property
    def dirty_reason(self) -> str:
        return self._gate.dirty_reason

    @property
    def work(self) -> EngineWork:
        return self._workers.owed.work

    @property
    def base_version(self) -> int:
        return self.models.base.version

    @property
    def report(self) -> EngineReport:
        return self.base_switch.report

    def draft_counts(self) -> tuple[int, int]:
        return bridges.draft_counts()

    @property
    def loading(self) -> str:
        return self._in_place.loading

    @property
    def asleep(self) -> Sleep | None:
        return self._sleeper.asleep

    @property
    def lacks_base(self) -> bool:
        return self._sleeper.lacks_base

    @property
    def is_alive(self) -> bool:
        """True if the engine's processes run."""
        return not self.engine.errored

    async def start_http(self) -> None:
        """Start the OpenAI server; return once it takes connections.

        Raises:
            PeerUnavailableError: It did not start.
        """
        await self._http.start()
        # One rank of several holds parts of tensors; a CPU holds them packed.
        if self.capabilities.gpu_uuids and self.capabilities.tensor_parallel_size == 1:
            learning = learn_copies(
                self._initial_checkpoint, self._workers, self._gate, self._has_started_with
            )
            self._learning = asyncio.create_task(learning)

    async def serve_http(self) -> None:
        """Start the OpenAI server, and return when it has stopped (``shutdown``).

        Raises:
            PeerUnavailableError: The server did not start, or the engine has died.
        """
        await self.start_http()
        while not await self._http.stopped(seconds_to_tick()):
            if not self.is_alive:
                raise PeerUnavailableError(
                    "vLLM's engine has died; its log gives the cause", metadata={"member": "engine"}
                )

    async def shutdown(self, timeout_seconds: float = 10.0) -> None:
        """Stop listening, let running requests end until the deadline, end the engine. Succeeds if
        it was called before."""
        if self._learning is not None:
            self._learning.cancel()
        self._in_place.close()
        await self._http.stop(timeout_seconds)
        if self.is_alive:
            with contextlib.suppress(WeftError):
                await self._workers.call("weft_close", timeout_seconds=_STOP_SECONDS)
        await bridges.end(self.engine, _STOP_SECONDS)
        await self._cleanup.aclose()

    def _has_started_with(self) -> bool:
        """Return whether the engine has base@0, awake and whole."""
        is_other = self.base_version or self.loading or self.dirty_reason
        return not is_other and self.asleep is None

    # -- held versions: methods of ``Engine`` that change nothing of what is served ----

    async def memory(self) -> MemoryUsage:
        return self._holdings.read().memory

    async def join_group(self, order: JoinOrder) -> None:
        await self._workers.call("weft_join", bytes_codec(JoinOrder).pack(order))

    async def send(self, order: SendOrder) -> None:
        await self._workers.call("weft_send", bytes_codec(SendOrder).pack(order))

    async def pin_bases(self, versions: Sequence[int]) -> None:
        await self._workers.call("weft_pin_bases", list(versions))

    async def manifest(self, version: PolicyVersion) -> Manifest:
        return (await self.held(version)).manifest()

    async def held(self, version: PolicyVersion) -> HeldCopy:
        """Return the receiving rank's description of the copy that it holds of a version.

        Raises:
            NotFoundError: No copy is held.
        """
        values = await self._workers.call("weft_held", version.policy, version.version)
        value = next(value for value in values if value["manifest"])
        return HeldCopy(value["transfer_id"], value["content_digest"], value["manifest"])

    async def digest_tensors(
        self, version: PolicyVersion
    ) -> AsyncGenerator[Sequence[StoredTensor], None]:
        if version == STARTED_WITH:
            yield await answer_within(
                _FILES_SECONDS, "the checkpoint", self._initial_checkpoint.tensors
            )
            return
        async with self._digesting:
            await self._workers.call("weft_digest", version.policy, version.version)
            wait_seconds, longest = _DIGEST_LOOK_SECONDS
            while True:
                values = await self._workers.call("weft_digested")
                packed = next(value["digests"] for value in values if value["digests"])
                part = unpacked(TensorDigests, packed)
                if part.tensors:
                    yield part.tensors
                if part.is_all:
                    return
                await asyncio.sleep(wait_seconds)
                wait_seconds = min(2 * wait_seconds, longest)

    async def holds_started_with(self, version: PolicyVersion) -> bool:
        stored = self._initial_checkpoint.known_tensors
        if not stored:
            return False
        held = await self.held(version)
        return digest_in_layout(held.manifest(), stored) == held.content_digest

    async def spill(self, order: SpillOrder) -> None:
        await self._workers.call("weft_spill", bytes_codec(SpillOrder).pack(order))

    async def spilled_facts(self, version: PolicyVersion, content_digest: bytes) -> VersionFacts:
        folder = self.spill_folder
        if folder is None:
            raise NotFoundError(f"{version} is not spilled: this replica has no --spill-dir")
        try:
            return await answer_within(
                _FACTS_SECONDS, str(version), lambda: folder.facts(version, content_digest)
            )
        except (OSError, InvalidManifestError, TransferTimeoutError) as error:
            raise NotFoundError(
                f"the spilled files of {version} cannot be read: {error}"
            ) from error

    async def restore(
        self,
        transfer_id: str,
        version: PolicyVersion,
        content_digest: bytes,
        layout_digest: bytes,
    ) -> None:
        if not self.spills:
            raise NotReadyError(
                f"{version} cannot be restored: this replica has no --spill-dir",
                reason="NOT_RETAINED",
            )
        call = self._workers.call
        await call("weft_restore", transfer_id, str(version), content_digest, layout_digest)
        deadline = time.monotonic() + self._restore_seconds
        with self._workers.owed.elsewhere():
            while self._holdings.read().ended_restore != transfer_id:
                if time.monotonic() > deadline:
                    await call("weft_discard", transfer_id)
                    raise TransferTimeoutError(
                        f"{version} was not read from the spill directory within "
                        f"{self._restore_seconds:g} s"
                    )
                await asyncio.sleep(_RESTORE_LOOK_SECONDS)
        await call("weft_restored", transfer_id)

    # -- what is served: the other methods of ``Engine`` -------------------------------

    async def discard(self, transfer_id: str) -> None:
        if not self.capabilities.loads_in_place:
            await self._workers.call("weft_discard", transfer_id)
            return
        async with self._gate.exclusive():
            if self._in_place.is_pending(transfer_id):
                await self._in_place.end()
            else:
                await self._workers.call("weft_discard", transfer_id)

    async def end_requests(self, order: SleepOrder, is_wanted: Callable[[], bool]) -> None:
        await self._sleeper.end_requests(order, is_wanted)

    def take_requests(self) -> None:
        self._sleeper.take_requests()

    async def fall_asleep(self, order: SleepOrder) -> bool:
        async with self._gate.exclusive():
            return await self._sleeper.fall_asleep(order)

    async def wake_up(self) -> None:
        async with self._gate.exclusive():
            has_base = await self._sleeper.wake_up()
        if not has_base:
            base = PolicyVersion(BASE_POLICY, self.base_version)
            try:
                await self.apply_retained(base)
            except WeftError as error:  # it stays dirty, and the coordinator repairs it
                _log.warning("%s cannot be loaded from a copy held here: %s", base, error)

    async def set_alias(self, version: PolicyVersion) -> None:
        async with self._gate.exclusive():
            self.models.set_alias(version)

    async def drop_alias(self, policy: str) -> None:
        async with self._gate.exclusive():
            self.models.drop_alias(policy)

    def set_absent(self, policies: Mapping[str, AbsentPolicy]) -> None:
        self.models.absent = policies

    async def load_adapter(
        self,
        transfer_id: str,
        version: PolicyVersion,
        config_json: str,
        content_digest: bytes,
        alias: int = 0,
    ) -> SwitchTimes:
        """Load an adapter; one that is served already succeeds at once."""
        async with self._gate.exclusive():
            self.models.check_new(version)
            if self.models.is_served(version, content_digest):
                return SwitchTimes()
            if self.loading:
                raise NotReadyError(
                    f"{version} cannot be loaded while a base is being loaded in place; try again "
                    "after it",
                    reason="TRANSFER_UNDER_WAY",
                )
            await self._sleeper.wake_weights()
            begin = time.perf_counter()
            await self._workers.share(transfer_id, content_digest)
            number = self.models.next_id()
            try:
                await self._workers.load_adapter(transfer_id, config_json, content_digest, number)
            except WeftError as error:
                if not self._gate.mark_if_dirty(error) and not isinstance(error, _NOTHING_DONE):
                    # Ranks that took it must drop it again.
                    await self._workers.drop_adapter(version, number)
                    await self._workers.call("weft_discard", transfer_id)
                raise
            request = lora_hook.lora_request(version, number)
            self.models.add(version, request, content_digest, alias)
            seconds = time.perf_counter() - begin
        _log.debug("loaded policy_version=%s seconds=%.4f", version, seconds)
        return SwitchTimes(load_seconds=seconds)

    async def apply_base(
        self, transfer_id: str, version: PolicyVersion, content_digest: bytes
    ) -> SwitchTimes:
        """Load a base, which repairs a dirty engine, too."""
        async with self._gate.exclusive():
            return await self.base_switch.apply(transfer_id, version, content_digest)

    async def load_in_place(
        self, transfer_id: str, version: PolicyVersion, timeout_seconds: float
    ) -> None:
        async with self._gate.exclusive():
            await self._sleeper.wake_weights()
            await self._in_place.begin(transfer_id, version, timeout_seconds)

    async def apply_retained(self, version: PolicyVersion) -> SwitchTimes:
        if version == STARTED_WITH:
            with self._workers.owed.elsewhere():
                await self._initial_checkpoint.check_unchanged()
            return await self.apply_base(FROM_FILES, version, b"")
        held = await self.held(version)
        return await self.apply_base(held.transfer_id, version, held.content_digest)

    def refuse_aliases(self, refused: AliasRefusals) -> None:
        self.models.refuse_aliases(refused)

    async def retire(self, version: PolicyVersion) -> bool:
        """Retire a version without waiting for requests: True comes from a later call, at least
        ``GRACE_SECONDS`` after the version was first seen unused."""
        served = self.models.remove(version, self.tracker.mark())
        if served is None:
            return True
        assert served.removed_at is not None
        now = time.monotonic()
        if self._in_use(version, served.removed_at):
            served.unused_since = None
            return False
        if served.unused_since is None:
            served.unused_since = now
        if now - served.unused_since < GRACE_SECONDS:
            return False
        async with self._gate.exclusive():
            # Workers that load a base cannot drop it, and its slot may be asleep.
            if self.loading or self._sleeper.weights_asleep:
                return False
            number = served.request.lora_int_id
            await self._workers.drop_adapter(version, number)
            self.models.forget(version)
        _log.debug("retired policy_version=%s", version)
        return True

    def _in_use(self, version: PolicyVersion, removed_at: int) -> bool:
        """Return whether a request may still look the version up, or has it."""
        if not self.tracker.passed(removed_at):
            return True
        return str(version) in bridges.loras_in_use(self.engine)

    async def read_images(self, images: Sequence[PromptImage]) -> Sequence[Any]:
        return await self._answers.read_images(images)

    def generate(self, order: GenerateOrder) -> Generation:
        return self._answers.begin(order)

    def num_requests(self) -> int:
        return self.tracker.num_running

    def refuse_requests(self, reason: str) -> None:
        self._gate.close(reason)
