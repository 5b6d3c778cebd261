"""Weft's part in a worker process: its configuration, its start, and the state that it keeps."""

from __future__ import annotations

import contextlib
import logging
import os
import pkgutil
import select
import signal
import threading
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch

from rollout_side.config import Staging
from rollout_side.engine import JoinOrder
from rollout_side.memory.digest_reading import DigestReader
from rollout_side.memory.handoff import Handoff, InPlaceLoad, RankServer
from rollout_side.memory.rank_deltas import DeltaFollower
from rollout_side.memory.segment import MARGIN_BYTES, Memory, spare_bytes, stage_on_device
from rollout_side.memory.store import WorkerStore
from rollout_side.memory.versions import PreparedSwitch, ServedBase, StagedVersion
from rollout_side.receive.clone_source import Cloner
from rollout_side.spill.folder import SpillFolder, SpillSettings
from rollout_side.spill.spiller import Spiller
from rollout_side.vllm_engine.loading import lora_hook
from rollout_side.vllm_engine.loading.copy_plan import CopyPlan
from rollout_side.vllm_engine.loading.drafted_model import DraftedModel
from rollout_side.vllm_engine.loading.kept_tensors import KeptTensors
from rollout_side.vllm_engine.loading.layerwise import facts_of
from rollout_side.vllm_engine.loading.linear_modules import MemoryModule, ModuleTable, vllm_namer
from rollout_side.vllm_engine.loading.lora_copy_plan import AdapterLoader
from rollout_side.vllm_engine.loading.rehearsal import drafted_model, why_not_reloaded
from rollout_side.vllm_engine.loading.reload import load_in_place, prepare_base
from rollout_side.vllm_engine.loading.reload_proof import why_not_repeated
from rollout_side.vllm_engine.worker.holdings import (
    HoldingsReport,
    HoldingsWriter,
    ProgressWriter,
    WorkerUsage,
)
from rollout_side.vllm_engine.worker.rank_results import RECEIVER_RANK
from rollout_side.vllm_engine.worker.trial import Trial
from weft_rl import logs
from weft_rl.contract.backends import NCCL, ONE_SIDED, BackendChoice
from weft_rl.contract.errors import LoadFailedError, NotReadyError, UnsupportedError, WeftError
from weft_rl.contract.manifest import Manifest
from weft_rl.contract.tensors import LinearModule, Reference, TensorMeta
from weft_rl.telemetry.traces import open_tracer
from weft_rl.tracing import NO_TRACER, Tracer
from weft_rl.transport.backends import available_backends, gpu_uuid
from weft_rl.transport.digests.wsum64 import warm
from weft_rl.transport.group import on_device
from weft_rl.transport.nccl_network import nccl_network
from weft_rl.transport.one_sided.trial import TrialAnswerer

_log = logging.getLogger(__name__)

#: Of what a replica declares, at most: ``Capabilities.base_refusal``.
_MAX_REFUSAL_CHARS = 480


@dataclass(frozen=True, kw_only=True)
class OpenConfig:
    """Configuration that a worker starts with."""

    staging_memory_bytes: int
    adapter_memory_bytes: int
    base_copies: int
    receiver_factory: str
    """Dotted path ``module:name`` of a callable from a ``WorkerStore`` and a ``Tracer`` to a
    receiver."""
    staging: Staging
    backend: BackendChoice
    replica_pid: int
    """Pid of the process that the engine belongs to and ends with."""
    holdings_path: str
    """Path at which that process reads what the receiving rank holds: ``HoldingsPage.path``."""
    ranks_secret: str
    """Secret by which the replica's ranks find and recognise each other to load in place."""
    reference: Reference
    """Everything that a base must hold."""
    draft_files: tuple[TensorMeta, ...]
    """Tensors of the files of the model that drafts tokens, by their names in a base."""
    in_memory: tuple[MemoryModule, ...]
    """Linear modules of the architecture as a trainer has them in memory."""
    spill: SpillSettings | None
    """Spill directory of the replica, which exists."""
    traced_as: str = ""
    """Replica to name in this worker's spans; empty if it makes none."""
    reload_verdict: str | None = None
    """Result of ``why_not_repeated`` at an earlier start of the same; None to prove it now."""


@dataclass(frozen=True, kw_only=True)
class WorkerDeclaration:
    """Facts that a worker declares once it is open."""

    pid: int
    expected_modules: tuple[str, ...]
    """Modules that can carry a LoRA, as vLLM's loader names them."""
    lora_unapplied: tuple[str, ...]
    """Name prefixes of modules that no LoRA is applied to."""
    sent_as_float32: tuple[str, ...]
    untold_modules: tuple[LinearModule, ...]
    base_refusal: str
    """Reason why this worker can load no base; empty if it can."""
    reload_verdict: str | None
    """Verdict of the proof at this start or an earlier one; None where there was none."""
    draft: tuple[str, ...]
    """Tensors of the model that drafts tokens which it loads."""
    staging_bytes: int
    backends: tuple[str, ...]
    trial_name: str
    """Name under which the receiving worker answers trials."""
    gpu_uuid: str
    nccl_network: str


def decide_memory(
    device: torch.device, reference: Reference, settings: OpenConfig
) -> tuple[Memory, int]:
    """Decide where versions are put, and the bound of staged bases there in bytes."""
    bound = settings.staging_memory_bytes
    in_place = settings.staging == "in-place"
    if device.type != "cuda":
        return Memory(in_place=in_place), bound
    free_bytes, _ = torch.cuda.mem_get_info(device)
    metas = (*reference.tensors, *settings.draft_files)
    model_bytes = sum(meta.num_bytes for meta in metas)
    on_device = stage_on_device(settings.staging, device, model_bytes, free_bytes)
    if on_device:
        bound = min(bound, max(0, free_bytes - MARGIN_BYTES))
    return Memory(device, on_device, in_place), bound


def usable_backends(device: torch.device, choice: BackendChoice) -> tuple[str, ...]:
    """Return the backends that this worker offers, best first."""
    have = available_backends(device)
    offered = tuple(name for name in have if choice in ("auto", name))
    if not offered:
        raise UnsupportedError(
            f"--backend {choice} cannot be used: a worker on {device.type} has {', '.join(have)}; "
            "leave it out, or choose one of these"
        )
    return offered


def end_with(replica_pid: int) -> None:
    """Let this worker, and the engine's process above it, end when ``replica_pid`` has.

    Returns at once; the watch is a thread. Processes are held by descriptors, so a
    pid that is used again is never mistaken for the old one.
    """
    replica = os.pidfd_open(replica_pid)
    parent = os.getppid()
    # With one worker in the engine's process, the parent is the replica itself.
    engine = os.pidfd_open(parent) if parent_of(parent) == replica_pid else None
    threading.Thread(
        target=_watch, args=(replica, engine), name="weft-watch-replica", daemon=True
    ).start()


def parent_of(pid: int) -> int:
    """Return the pid of a process's parent."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[1])


def _watch(replica: int, engine: int | None) -> None:
    poll = select.poll()
    poll.register(replica, select.POLLIN)
    poll.poll()
    if engine is not None:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(engine, signal.SIGKILL)
    os._exit(1)  # nothing is left to clean up, and nobody to report to


def open_worker(worker: Any, settings: OpenConfig) -> tuple[WorkerState, WorkerDeclaration]:
    """Start a store on every rank, and on the receiving one what receives, sends and spills."""
    logs.configure_as_parent()
    end_with(settings.replica_pid)
    reference = settings.reference
    memory, staging_bytes = decide_memory(worker.device, reference, settings)
    store = WorkerStore(
        staging_capacity_bytes=staging_bytes,
        adapter_capacity_bytes=settings.adapter_memory_bytes,
        base_copies=settings.base_copies,
        memory=memory,
        num_ranks=worker.parallel_config.world_size,
    )
    state = WorkerState(store, reference, settings.ranks_secret)
    state.progress = ProgressWriter(settings.holdings_path, worker.rank)
    state.base_refusal = why_not_reloaded(worker, reference)
    as_float32 = facts_of(worker.model_runner.get_model()).held_as_float32
    state.reference = reference = reference.sent_as_float32(as_float32)
    verdict = settings.reload_verdict
    if verdict is None and not state.base_refusal:
        verdict = why_not_repeated(worker, reference)
    state.base_refusal = (state.base_refusal or verdict or "")[:_MAX_REFUSAL_CHARS]
    if state.base_refusal:
        _log.info("this replica takes no base: %s", state.base_refusal)
    if not state.base_refusal:
        state.drafted = drafted_model(worker, reference, settings.draft_files)
    if state.drafted is not None:
        as_float32 |= facts_of(state.drafted).held_as_float32
    if worker.device.type == "cuda" and store.num_ranks == 1:  # others load the same copy
        store.prepare_switch = switch_preparer(worker, state)
    warm()
    backends = usable_backends(worker.device, settings.backend)
    if worker.local_rank == RECEIVER_RANK:
        _start_receiving(state, settings, backends)
    vllm_name = vllm_namer(worker.model_runner.get_model())
    names = ModuleTable(reference, settings.in_memory, vllm_name)
    lora_hook.set_renames(names.renames())
    manager = getattr(worker.model_runner, "lora_manager", None)
    expected: set[str] = set()
    unapplied: list[str] = []
    if manager is not None:
        whole = replace(reference, untold_modules=names.untold)
        expected, unapplied = lora_modules(manager._adapter_manager, whole)
    return state, WorkerDeclaration(
        pid=os.getpid(),
        expected_modules=tuple(sorted(expected)),
        lora_unapplied=tuple(unapplied),
        sent_as_float32=tuple(sorted(as_float32)),
        untold_modules=names.untold,
        base_refusal=state.base_refusal,
        reload_verdict=verdict,
        draft=() if state.drafted is None else tuple(state.drafted.reference.draft_by_name),
        staging_bytes=staging_bytes,
        backends=backends,
        trial_name="" if state.trials is None else state.trials.name,
        gpu_uuid=gpu_uuid(worker.device),
        nccl_network=nccl_network() if NCCL in backends else "",
    )


def lora_modules(adapters: Any, reference: Reference) -> tuple[set[str], list[str]]:
    """Return ``Capabilities.lora_modules``, as vLLM's loader names them, and ``lora_unapplied``."""
    names = [module.name for module in reference.modules]
    carry, ignored = lora_hook.lora_targets(adapters, names)
    kinds = {name.rpartition(".")[2] for name in carry}
    never = {name.rpartition(".")[2] for name in ignored} - kinds
    # One in each layer, of a kind that carries none anywhere, is refused by that: not one by one.
    known = {name for name in ignored if name.rpartition(".")[2] in never}
    prefixes = [p for p in lora_hook.shortest_prefixes(ignored, carry) if p not in known]
    return lora_hook.expected_modules(adapters) - never, prefixes


def _start_receiving(state: WorkerState, settings: OpenConfig, backends: Collection[str]) -> None:
    store = state.store
    if settings.traced_as:
        state.tracer = open_tracer("weft-replica", settings.traced_as)
    receiver_factory = pkgutil.resolve_name(settings.receiver_factory)
    state.receiver = receiver_factory(store, state.tracer)
    state.cloner = Cloner(store)
    if store.memory.in_place and store.num_ranks > 1:
        followers = store.followers
        state.ranks = RankServer(settings.ranks_secret, store.handoff.of, followers.serve)
        followers.on_change = state.notify_holdings
    if ONE_SIDED in backends:
        state.trials = TrialAnswerer(store.memory.device_of(ONE_SIDED))
    if settings.spill is not None:
        folder = SpillFolder(settings.spill, state.reference.fingerprint)
        state.spiller = Spiller(store, folder, settings.base_copies)
        store.writes_copies = True
    writer = HoldingsWriter(settings.holdings_path)
    state.report = HoldingsReport(writer, partial(usage_of, state))
    state.report.start()


class WorkerReceiver(Protocol):
    """Part of ``rollout_side.receive.receiver.Receiver`` that a worker needs."""

    def join(self, order: JoinOrder) -> None:
        """Join a side group in a thread of its own; returns at once."""

    def close(self) -> None:
        """End the thread."""


@dataclass
class WorkerState:
    """State that a worker process keeps for Weft."""

    store: WorkerStore
    reference: Reference
    ranks_secret: str = ""
    """``OpenConfig.ranks_secret``."""
    base_refusal: str = ""
    """Reason why no base can be loaded into the running model in any way; empty where one can."""
    receiver: WorkerReceiver | None = None
    cloner: Cloner | None = None
    """Sender of clones, on the receiving rank, which holds every copy."""
    ranks: RankServer | None = None
    """Server on the receiving rank that gives the other ranks what is loaded in place."""
    trials: TrialAnswerer | None = None
    """Answerer on the receiving rank for trainers that try whether this host is theirs."""
    spiller: Spiller | None = None
    """Spiller on the receiving rank, if the replica has a spill directory."""
    report: HoldingsReport | None = None
    """Reporter on the receiving rank that tells the replica's process what is held."""
    progress: ProgressWriter | None = None
    """Writer on every rank that tells the replica's process of this rank's progress."""
    reading: DigestReader | None = None
    """Reading, on the receiving rank, of the version whose tensors are digested, or were last."""
    adapters: AdapterLoader = field(default_factory=AdapterLoader)
    drafted: DraftedModel | None = None
    """Model with the one that drafts for it, where a base can bring both."""
    copy_plans: tuple[CopyPlan, ...] = ()
    """Plans by which a base can be loaded by copies alone: one for each set of names."""
    kept: KeptTensors | None = None
    """Tensors that no base brings, kept over a sleep that discards weights."""
    trial: Trial | None = None
    """Watch over the first steps, while the replica asks its own engine for tokens."""
    follower: DeltaFollower | None = None
    """Thread of a rank that does not receive, while its weights take deltas."""
    load: InPlaceLoad | None = None
    """In-place load that runs, or is complete and waits for its commit."""
    tracer: Tracer = NO_TRACER
    """Tracer of what is received here; closed with the worker."""

    def notify_holdings(self) -> None:
        """Tell the replica's process what is held now; never raises."""
        if self.report is not None:
            self.report.notify()

    def report_progress(self) -> None:
        """Report that the calling thread makes progress with a call to this worker."""
        if self.progress is not None:
            self.progress.report_progress()

    def follow(self, rank: int) -> None:
        """Take deltas of the base that was just loaded in place, unless this rank receives."""
        former, self.follower = self.follower, None
        if former is not None:
            former.close()
        served = self.store.served
        if self.receiver is None and served.base is not None and served.base.takes_deltas:
            self.follower = DeltaFollower(
                self.ranks_secret, rank, served.base, lambda: served.base, self.store.put_staged
            )
            self.store.threads.add(self.follower.thread)

    def end_reading(self) -> None:
        """Stop the digesting that is under way."""
        if self.reading is not None:
            self.reading.close()

    def close(self) -> None:
        """End all threads; blocks some seconds at most."""
        self.store.followers.close()
        for server in (self.trials, self.ranks, self.follower):
            if server is not None:
                server.close()
        if self.load is not None:
            self.load.end()
        for each in (self.reading, self.spiller, self.cloner, self.receiver, self.report):
            if each is not None:
                each.close()
        self.tracer.close()

    def brings_draft(self, manifest: Manifest) -> bool:
        """Return whether a base is loaded into the model that drafts tokens, too."""
        metas = [slot.meta for slot in manifest.tensors]
        return self.drafted is not None and self.drafted.reference.brings_draft(metas)

    def applied(self, began: float) -> dict[str, Any]:
        """Describe the switch to a base that was written where it is served: when it began, by
        ``time.perf_counter()``, and whether the model that drafts tokens is of it, too."""
        base = self.store.served.base
        has_draft = base is not None and self.brings_draft(base.manifest)
        return {"load_seconds": time.perf_counter() - began, "has_draft": has_draft}

    def check_takes_bases(self) -> None:
        """Refuse a base that would leave mixed weights."""
        if self.base_refusal:
            raise LoadFailedError(f"this replica can load no base: {self.base_refusal}")

    def check_idle(self) -> None:
        """Refuse to touch weights while a loader that was ended still runs."""
        if self.load is not None and self.load.is_running:
            raise LoadFailedError(
                f"{self.load.handoff.version} is still being loaded in place",
                metadata={"dirty": "true"},
            )


def state_of(worker: Any) -> WorkerState:
    state: WorkerState | None = getattr(worker, "weft_state", None)
    if state is None:
        raise NotReadyError("weft_open was not called on this worker")
    return state


def usage_of(state: WorkerState) -> WorkerUsage:
    """Return what the receiving rank holds, which holds for all."""
    usage, spiller = state.store.usage(), state.spiller
    loading = {state.load.transfer_id} if state.load is not None else set()
    memory = replace(
        usage,
        staging_bytes=usage.staging_bytes + usage.free_bytes,
        staged_transfer_ids=tuple(sorted({*usage.staged_transfer_ids, *loading})),
        spilled=spiller.copies if spiller else (),
    )
    return WorkerUsage(memory, spiller.ended_restore if spiller else "")


def loader(worker: Any, state: WorkerState) -> Callable[[Handoff], None]:
    """Return a function that loads a hand-off on a thread of its own. The load begins after all
    that the engine's thread, which calls this, has given to the device."""
    device: torch.device = worker.device
    given = torch.cuda.current_stream(device).record_event() if device.type == "cuda" else None

    def load(handoff: Handoff) -> None:
        # Forgotten until the load is done: one that fails midway leaves nothing to rely on.
        plans, state.copy_plans = state.copy_plans, ()
        served = state.store.served.set(None)
        try:
            with on_device(device):
                if given is not None:
                    torch.cuda.current_stream(device).wait_event(given)
                state.copy_plans = load_in_place(
                    worker, handoff, state.reference, plans, state.drafted
                )
        except WeftError as error:
            if error.metadata.get("dirty") != "true":  # nothing has changed
                state.copy_plans = plans
                state.store.served.set(served, is_loaded=True)
            raise

    return load


def switch_preparer(
    worker: Any, state: WorkerState
) -> Callable[[StagedVersion, Callable[[], None]], None]:
    """Return what a store prepares switches by: on a GPU that has memory to spare for it."""
    store, device = state.store, worker.device

    def prepare(staged: StagedVersion, on_progress: Callable[[], None]) -> None:
        largest = max(bucket.payload_bytes for bucket in staged.manifest.buckets)
        with store.served.reading() as era:
            # A bucket's bytes, what a layer makes of them, and as much again for the comparison.
            room = (spare_bytes(device) if era else 0) - 3 * largest
            if room <= 0:
                return
            try:
                write = prepare_base(
                    worker, staged, state.reference, state.copy_plans, on_progress, state.drafted,
                    room // 2,
                )  # fmt: skip
            except Exception as error:  # noqa: BLE001 (whatever failed, all is loaded while paused)
                _log.warning("the switch to %s is not prepared: %s", staged.version, error)
                return
        if write is not None:
            staged.prepared.append(PreparedSwitch(era, write))

    return prepare


def served_base(
    state: WorkerState,
    loaded: Handoff | StagedVersion,
    content_digest: bytes,
    tensor_digests: Sequence[int],
) -> ServedBase | None:
    """Return a base that was loaded, for clones and deltas of the engine's parameters; None if they
    do not hold all its bytes unchanged."""
    manifest = loaded.manifest
    own = (plan for plan in state.copy_plans if plan.layout_digest == manifest.layout_digest)
    plan = next(own, None)
    is_shared = state.store.num_ranks > 1
    takes_deltas = plan is not None and (plan.has_shards if is_shared else plan.is_contiguous)
    if plan is None or not (plan.is_readable or takes_deltas):
        return None
    return ServedBase(
        loaded.transfer_id,
        loaded.version,
        manifest,
        content_digest,
        plan.read_bucket,
        tuple(tensor_digests) if takes_deltas else (),
        plan.places,
        is_whole=plan.is_readable,
        device=plan.device,
    )
