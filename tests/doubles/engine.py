"""An engine in vLLM's place: receives, stages and "serves" as a worker does, without a model."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from rollout_side.engine import (
    AliasRefusals,
    EngineWork,
    GenerateOrder,
    JoinOrder,
    MemoryUsage,
    PromptImage,
    SendOrder,
    SleepOrder,
    SpillOrder,
    SwitchTimes,
    VersionFacts,
)
from rollout_side.memory.digest_reading import DigestReader
from rollout_side.memory.handoff import Handoff, InPlaceLoad
from rollout_side.memory.segment import Memory
from rollout_side.memory.served_delta import StagedDelta
from rollout_side.memory.store import WorkerStore
from rollout_side.memory.versions import ElementPlace, ServedBase, StagedVersion, tensor_in
from rollout_side.receive.clone_source import Cloner
from rollout_side.receive.receiver import Receiver
from rollout_side.spill.folder import SpillFolder, SpillSettings
from rollout_side.spill.spiller import Spiller
from rollout_side.waits import UnansweredCalls
from tests.doubles.answers import AnswerDouble
from trainer_side.sources.source import CastRule, make_metas
from weft_rl.checkpoints.reader import digest_in_layout
from weft_rl.contract.backends import ONE_SIDED
from weft_rl.contract.capabilities import Capabilities
from weft_rl.contract.checkpoint import StoredTensor, not_compared
from weft_rl.contract.errors import (
    LoadFailedError,
    NotFoundError,
    NotReadyError,
    PeerUnavailableError,
    TransferTimeoutError,
    WeftError,
)
from weft_rl.contract.manifest import Manifest
from weft_rl.contract.names import STARTED_WITH, PolicyVersion
from weft_rl.contract.replica_report import AbsentPolicy, EngineReport, Sleep
from weft_rl.contract.tensors import DataType, Reference, TensorMeta
from weft_rl.tracing import NO_TRACER, Tracer
from weft_rl.transport.backends import available_backends
from weft_rl.transport.digests.wsum64 import content_digest, tensor_digest
from weft_rl.transport.group import CPU, num_parked_groups
from weft_rl.transport.one_sided.trial import TrialAnswerer


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


class EngineDouble:
    """Receives and stages like a worker; "serving" is keeping what was loaded."""

    model_name = "double"
    checkpoint = not_compared("the double has no files")

    def __init__(
        self,
        weights: Mapping[str, torch.Tensor],
        *,
        keep_base: bool = True,
        base_copies: int = 0,
        spill: SpillSettings | None = None,
        in_place: bool = False,
        is_readable: bool = False,
        tracer: Tracer = NO_TRACER,
        **capabilities: Any,
    ) -> None:
        self._keep_base = keep_base
        self.tracer = tracer
        #: Whether tensors lie in two pieces of the weights, and not in one.
        self.lies_in_two = True
        #: Whether what was loaded can be read back, to be cloned and changed by deltas.
        self._is_readable = is_readable
        metas = make_metas(weights, CastRule(enabled=False))
        self.reference = Reference("Model", metas)
        #: As a worker has it that offers ``one-sided``.
        self.trials: TrialAnswerer | None = None
        if ONE_SIDED in capabilities.setdefault("backends", available_backends(CPU)):
            self.trials = TrialAnswerer()
            capabilities.setdefault("trial_name", self.trials.name)
        settings: dict[str, Any] = {
            "engine_version": "double",
            "base_fingerprint": self.reference.fingerprint,
            "reference_digest": self.reference.details_digest,
            "architecture": "Model",
            "base_dtype": DataType.FLOAT32,
            "adapter_dtype": DataType.FLOAT32,
            "lora_enabled": True,
            "max_lora_rank": 16,
            "lora_modules": ("q_proj", "v_proj"),
            "staging_capacity_bytes": 2**32,
            "adapter_capacity_bytes": 2**30,
            "loads_in_place": in_place,
        }
        self.capabilities = Capabilities(**settings | capabilities)
        self.store = WorkerStore(
            self.capabilities.staging_capacity_bytes,
            self.capabilities.adapter_capacity_bytes,
            base_copies,
            Memory(in_place=in_place),
        )
        self.receiver = Receiver(self.store, tracer)
        self.cloner = Cloner(self.store)
        self.folder: SpillFolder | None = None
        self.spiller: Spiller | None = None
        self.spills = spill is not None
        if spill is not None:
            self.folder = SpillFolder(spill, self.reference.fingerprint)
            self.folder.open()
            self.spiller = Spiller(self.store, self.folder, base_copies)
            self.store.writes_copies = True
        self.base: dict[str, torch.Tensor] = dict(weights)
        self._files = {name: tensor.clone() for name, tensor in weights.items()}
        self.refused_aliases = AliasRefusals()
        self.fail_next_load: LoadFailedError | None = None
        self.in_use: set[PolicyVersion] = set()
        self.aliases: dict[str, int] = {}
        self.absent: Mapping[str, AbsentPolicy] = {}
        self.running = 0
        self.base_version = 0
        self.report, self.drafted = EngineReport(), (0, 0)
        self.answers: set[AnswerDouble] = set()
        #: Cleared, no token is sampled.
        self.stepping = asyncio.Event()
        self.stepping.set()
        self.refuse_reason = ""
        self.dirty_reason = ""
        self.load: InPlaceLoad | None = None
        self.asleep: Sleep | None = None
        self.lacks_base = False
        #: Whether it refuses requests, to sleep once those that run have ended.
        self.is_to_sleep = False
        #: What the engine's memory went through.
        self.sleeps: list[str] = []
        #: Nothing, since all is done on the agent's loop.
        self.owed = UnansweredCalls()
        #: Called before each bucket that is loaded in place.
        self.before_bucket: Callable[[int], None] = lambda index: None

    def describe_draft(self, metas: Sequence[TensorMeta], prefixes: tuple[str, ...] = ()) -> None:
        """Draft tokens with a model of these tensors."""
        draft = tuple(metas)
        self.reference = dataclasses.replace(self.reference, draft=draft, draft_prefixes=prefixes)
        self.capabilities = dataclasses.replace(
            self.capabilities,
            draft_fingerprint=self.reference.draft_fingerprint,
            reference_digest=self.reference.details_digest,
        )

    @property
    def work(self) -> EngineWork:
        return self.owed.work

    @property
    def loading(self) -> str:
        return self.load.transfer_id if self.load else ""

    def num_requests(self) -> int:
        return self.running + len(self.answers)

    async def read_images(self, images: Sequence[PromptImage]) -> Sequence[PromptImage]:
        return images

    def generate(self, order: GenerateOrder) -> AnswerDouble:
        is_asleep = self.is_to_sleep or self.asleep is not None
        if reason := self.refuse_reason or ("it sleeps" if is_asleep else ""):
            raise PeerUnavailableError(reason, reason="REFUSING")
        if order.adapter and self.store.adapter(order.adapter) is None:
            raise NotFoundError(f"{order.adapter} is not here")
        answer = AnswerDouble(self, order)
        self.answers.add(answer)
        return answer

    async def end_requests(self, order: SleepOrder, is_wanted: Callable[[], bool]) -> None:
        self._check_can_sleep()
        self.is_to_sleep = True
        end = asyncio.get_running_loop().time() + order.timeout_seconds
        if order.aborts:
            self.running = 0
        while self.num_requests() and is_wanted():
            if asyncio.get_running_loop().time() >= end:
                self.is_to_sleep = False
                raise TransferTimeoutError("requests have not ended in time")
            await asyncio.sleep(0.005)

    def take_requests(self) -> None:
        self.is_to_sleep = False

    def _check_can_sleep(self) -> None:
        if not self.capabilities.can_sleep:
            raise NotReadyError("it cannot sleep", reason="SLEEP_DISABLED")
        if self.load is not None:
            self.take_requests()
            raise NotReadyError("it loads in place", reason="TRANSFER_UNDER_WAY")

    async def fall_asleep(self, order: SleepOrder) -> bool:
        self._check_can_sleep()
        is_free = not self.num_requests()
        if not is_free or not self.store.fall_asleep(keep_newest=order.level == 2):
            if order.timeout_seconds <= 0:
                self.take_requests()
                raise TransferTimeoutError("the weights are being read, or requests run")
            return False
        self.lacks_base = self.lacks_base or order.level == 2
        self.asleep = Sleep(order.trainer_id, level=order.level)
        self.is_to_sleep = False
        self.sleeps.append("sleep" if order.level == 1 else "sleep 2")
        if order.level == 2:
            self.base = {name: torch.full_like(t, 9.0) for name, t in self.base.items()}
        return True

    async def wake_up(self) -> None:
        self._wake_weights()
        former, self.asleep = self.asleep, None
        if former is None:
            return
        self.sleeps.append("kv_cache")
        lacks_base, self.lacks_base = self.lacks_base, False
        if lacks_base:
            self.dirty_reason = "its weights were discarded as it slept"
            with contextlib.suppress(NotFoundError):
                await self.apply_retained(PolicyVersion("base", self.base_version))

    def draft_counts(self) -> tuple[int, int]:
        return self.drafted

    def _wake_weights(self) -> None:
        if self.asleep is not None and not self.asleep.weights_awake:
            self.asleep = dataclasses.replace(self.asleep, weights_awake=True)
            self.sleeps.append("weights")
            self.store.served.wake_up(discarded=self.asleep.level == 2)

    def refuse_requests(self, reason: str) -> None:
        self.refuse_reason = reason

    def adapter(self, version: str) -> dict[str, torch.Tensor]:
        """Copies of a served adapter's tensors."""
        entry = self.store.adapter(PolicyVersion.parse(version))
        assert entry is not None, f"{version} is not here"
        return {name: tensor.clone() for name, tensor in entry.staged.tensors()}

    async def join_group(self, order: JoinOrder) -> None:
        self.receiver.join(order)

    async def load_adapter(
        self,
        transfer_id: str,
        version: PolicyVersion,
        config_json: str,
        content_digest: bytes,
        alias: int = 0,
    ) -> SwitchTimes:
        self._wake_weights()
        self.store.staged(transfer_id, content_digest)
        self._maybe_fail()
        self.store.keep_adapter(transfer_id, config_json)
        self.aliases[version.policy] = alias or version.version
        return SwitchTimes()

    async def apply_base(
        self, transfer_id: str, version: PolicyVersion, content_digest: bytes
    ) -> SwitchTimes:
        self._wake_weights()
        times = self._apply_base(transfer_id, content_digest)
        self.base_version = version.version
        self.lacks_base = False
        return times

    def _apply_base(self, transfer_id: str, content_digest: bytes) -> SwitchTimes:
        if self.loading == transfer_id:
            return self._commit_in_place(content_digest)
        if self.store.served.switch_to(transfer_id, content_digest):
            self.dirty_reason = ""
            return SwitchTimes(pause_seconds=0.001)
        staged = self.store.staged(transfer_id, content_digest)
        self._maybe_fail()
        if isinstance(staged, StagedDelta):
            self.store.served.apply(staged)
            self.store.keep_base(transfer_id)
            return SwitchTimes(pause_seconds=0.001)
        self.store.served.set(None)
        if self._keep_base:
            self.base = {name: tensor.clone() for name, tensor in staged.tensors()}
        self.dirty_reason = ""
        if self._is_readable:
            self._set_served(staged, staged.tensor_digests, content_digest)
        self.store.keep_base(transfer_id)
        return SwitchTimes(pause_seconds=0.001)

    async def load_in_place(
        self, transfer_id: str, version: PolicyVersion, timeout_seconds: float
    ) -> None:
        if self.load is not None and self.load.transfer_id == transfer_id:
            self.load.check()
            return
        handoff = self.store.handoff.of(transfer_id)
        if handoff is None:
            raise NotReadyError(f"{transfer_id} was not prepared")
        self._wake_weights()
        if self.load is not None:
            await self.discard(self.load.transfer_id)
        self.store.served.set(None)
        self.load = InPlaceLoad(handoff, self._take_in_place)
        self.store.threads.add(self.load.thread)

    def _take_in_place(self, handoff: Handoff) -> None:
        """As a model does: what arrives replaces what is served, bucket by bucket."""
        try:
            for index, wire in handoff.buckets():
                self.before_bucket(index)
                self._load_bucket(handoff.manifest, index, wire)
        except WeftError as error:
            if not handoff.is_begun:
                raise
            raise LoadFailedError(error.message, metadata={"dirty": "true"}) from error

    def _load_bucket(self, manifest: Manifest, index: int, wire: torch.Tensor) -> None:
        for slot in [slot for slot in manifest.tensors if slot.bucket == index]:
            self.base[slot.meta.name] = tensor_in(slot, wire).clone()

    def _commit_in_place(self, content_digest: bytes) -> SwitchTimes:
        assert self.load is not None
        self._maybe_fail()
        load, self.load = self.load, None
        self.store.handoff.forget(load.transfer_id)
        try:
            seconds = load.confirm(content_digest)
        except LoadFailedError as error:
            self.dirty_reason = error.message
            raise
        self.dirty_reason = ""
        if self._is_readable:
            self._set_served(load.handoff, load.handoff.tensor_digests, content_digest)
        return SwitchTimes(pause_seconds=seconds, load_seconds=seconds)

    def _set_served(
        self, loaded: Handoff | StagedVersion, digests: Sequence[int], content_digest: bytes
    ) -> None:
        manifest = loaded.manifest
        served = ServedBase(
            loaded.transfer_id,
            loaded.version,
            manifest,
            content_digest,
            partial(self._read, manifest),
            tuple(digests),
            partial(self._places, manifest),
        )
        self.store.served.set(served)

    def _places(self, manifest: Manifest, tensor: int) -> list[ElementPlace]:
        """Where a tensor's elements lie: one behind the other, in one piece or two."""
        own = self.base[manifest.tensors[tensor].meta.name].view(-1)
        bits = own.view({2: torch.int16, 4: torch.int32}[own.itemsize])
        middle = len(bits) // 2 if self.lies_in_two else 0
        halves = (0, middle), (middle, len(bits))
        return [ElementPlace(begin, end, bits[begin:end]) for begin, end in halves if begin < end]

    def _read(self, manifest: Manifest, index: int, out: torch.Tensor) -> torch.Tensor:
        payload = out[: manifest.buckets[index].payload_bytes].zero_()
        for slot in manifest.tensors:
            if slot.bucket == index:
                raw = self.base[slot.meta.name].contiguous().view(-1).view(torch.uint8)
                payload[slot.offset_bytes :][: slot.meta.num_bytes] = raw
        return payload

    async def apply_retained(self, version: PolicyVersion) -> SwitchTimes:
        if version == STARTED_WITH:
            self.base = {name: tensor.clone() for name, tensor in self._files.items()}
            self.dirty_reason = ""
            return SwitchTimes()
        held = self.store.retained(version)
        return await self.apply_base(held.transfer_id, version, held.content_digest)

    async def set_alias(self, version: PolicyVersion) -> None:
        self.store.held(version)
        self.aliases[version.policy] = version.version

    def set_absent(self, policies: Mapping[str, AbsentPolicy]) -> None:
        self.absent = policies

    async def drop_alias(self, policy: str) -> None:
        self.aliases.pop(policy, None)

    async def spilled_facts(self, version: PolicyVersion, content_digest: bytes) -> VersionFacts:
        assert self.folder is not None
        return self.folder.facts(version, content_digest)

    async def manifest(self, version: PolicyVersion) -> Manifest:
        return self.store.sendable(version).manifest

    async def holds_started_with(self, version: PolicyVersion) -> bool:
        held = self.store.sendable(version)
        dtypes = {slot.meta.name: slot.meta.dtype for slot in held.manifest.tensors}
        stored = [
            StoredTensor(
                name,
                dtypes[name].safetensors_name,
                tuple(tensor.shape),
                tensor_digest(_bytes_of(tensor)),
            )
            for name, tensor in self._files.items()
        ]
        return digest_in_layout(held.manifest, stored) == held.content_digest

    async def digest_tensors(
        self, version: PolicyVersion
    ) -> AsyncGenerator[Sequence[StoredTensor], None]:
        if version == STARTED_WITH:
            raise NotReadyError("the double has no files", reason="NOT_RETAINED")
        reading, is_all = DigestReader(self.store, version), False
        try:
            while not is_all:
                part = reading.take()
                is_all = part.is_all
                yield part.tensors
                await asyncio.sleep(0.001)
        finally:
            reading.close()

    async def spill(self, order: SpillOrder) -> None:
        assert self.spiller is not None
        self.spiller.follow(order)

    async def restore(
        self,
        transfer_id: str,
        version: PolicyVersion,
        content_digest: bytes,
        layout_digest: bytes,
    ) -> None:
        assert self.spiller is not None
        self.spiller.restore(transfer_id, version, content_digest, layout_digest)
        with self.owed.elsewhere():
            while not self.spiller.restored(transfer_id):
                await asyncio.sleep(0.005)

    def close(self) -> None:
        """End its threads."""
        if self.trials is not None:
            self.trials.close()
        if self.load is not None:
            self.load.end()
        self.receiver.close()
        self.cloner.close()
        if self.spiller is not None:
            self.spiller.close()

    async def send(self, order: SendOrder) -> None:
        self.cloner.send(order)

    async def pin_bases(self, versions: Sequence[int]) -> None:
        self.store.pin_bases(versions)

    async def discard(self, transfer_id: str) -> None:
        self.store.discard(transfer_id)
        if self.loading == transfer_id:
            assert self.load is not None
            changed, self.load = self.load.end(), None
            if changed:
                self.dirty_reason = f"loading {transfer_id} in place was given up"

    def refuse_aliases(self, refused: AliasRefusals) -> None:
        self.refused_aliases = refused

    async def retire(self, version: PolicyVersion) -> bool:
        is_asleep = self.asleep is not None and not self.asleep.weights_awake
        if version in self.in_use or is_asleep:
            return False
        self.store.drop_adapter(version)
        return True

    async def memory(self) -> MemoryUsage:
        return replace(self.store.usage(), spilled=self.spiller.copies if self.spiller else ())

    async def holds(self) -> dict[str, Any]:
        """For tests: the first element of each base tensor, the content digests of the base and of
        each adapter, and what else is here."""
        adapters = {
            str(version): [tensor for _, tensor in entry.staged.tensors()]
            for version, entry in self.store._adapters.items()
        }
        readable = self.store.served.base
        slots = readable.manifest.tensors if readable is not None else ()
        names = [slot.meta.name for slot in slots] or list(self.base)
        served = {"base": [self.base[name] for name in names], **adapters}
        return {
            "digests": {
                name: content_digest([tensor_digest(_bytes_of(tensor)) for tensor in tensors]).hex()
                for name, tensors in served.items()
            },
            "firsts": sorted({float(t.flatten()[0]) for t in self.base.values()}),
            "is_whole": all(bool((t == t.flatten()[0]).all()) for t in self.base.values()),
            "staging_bytes": self.store.usage().staging_bytes
            - self.store._bases.num_bytes
            - self.store.served.undo_bytes,
            "parked_groups": num_parked_groups(),
        }

    def _maybe_fail(self) -> None:
        error, self.fail_next_load = self.fail_next_load, None
        if error is not None:
            if error.metadata.get("dirty") == "true":
                self.dirty_reason = error.message
            raise error
