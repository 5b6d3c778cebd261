"""Start of Weft's part in a worker process, once, and what the worker then declares."""

from __future__ import annotations

import contextlib
import os
import pkgutil
import select
import signal
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from rollout_side.config import Staging
from rollout_side.memory.ranks.handoff import RankServer
from rollout_side.memory.segment import MARGIN_BYTES, Memory, stage_on_device
from rollout_side.memory.store import WorkerStore
from rollout_side.receive.clone_source import Cloner
from rollout_side.spill.folder import SpillFolder, SpillSettings
from rollout_side.spill.spiller import Spiller
from rollout_side.vllm_engine.loading import lora_hook
from rollout_side.vllm_engine.loading.rehearsal import why_not_reloaded
from rollout_side.vllm_engine.worker.holdings import HoldingsReport, HoldingsWriter, ProgressWriter
from rollout_side.vllm_engine.worker.rank_results import RECEIVER_RANK
from rollout_side.vllm_engine.worker.state import WorkerState, look_at, memory_of
from weft_rl import logs
from weft_rl.contract.capabilities import ONE_SIDED, BackendChoice
from weft_rl.contract.errors import UnsupportedError
from weft_rl.contract.tensors import DataType, Reference, TensorMeta
from weft_rl.telemetry.traces import open_tracer
from weft_rl.transport.backends import available_backends, gpu_uuid
from weft_rl.transport.digests.wsum64 import warm
from weft_rl.transport.one_sided.trial import TrialAnswerer


@dataclass(frozen=True, kw_only=True)
class OpenConfig:
    """Configuration that a worker starts with; sent as a plain dict."""

    staging_memory_bytes: int
    adapter_memory_bytes: int
    retain_base: int
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
    architecture: str
    tensors: Sequence[tuple[str, int, Sequence[int]]] = field(default=())
    """Name, ``DataType`` and shape of everything a base must hold."""
    spill: Mapping[str, Any] | None = None
    """``SpillSettings`` of the replica's spill directory, which exists."""
    traced_as: str = ""
    """Replica to name in this worker's spans; empty if it makes none."""

    def reference(self) -> Reference:
        """Return the tensors as contract values."""
        metas = (TensorMeta(n, DataType(d), tuple(s)) for n, d, s in self.tensors)
        return Reference(self.architecture, tuple(metas))


def decide_memory(
    device: torch.device, reference: Reference, settings: OpenConfig
) -> tuple[Memory, int]:
    """Decide where versions are put, and the bound of staged bases there in bytes."""
    bound = settings.staging_memory_bytes
    in_place = settings.staging == "in-place"
    if device.type != "cuda":
        return Memory(in_place=in_place), bound
    free_bytes, _ = torch.cuda.mem_get_info(device)
    model_bytes = sum(meta.num_bytes for meta in reference.tensors)
    on_device = stage_on_device(settings.staging, device, model_bytes, free_bytes)
    if on_device:
        bound = min(bound, max(0, free_bytes - MARGIN_BYTES))
    return Memory(device, on_device, in_place), bound


def usable_backends(device: torch.device, choice: BackendChoice) -> tuple[str, ...]:
    """Return the backends that this worker offers, best first.

    Raises:
        UnsupportedError: It cannot use the one that was chosen.
    """
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

    Raises:
        OSError: There is no such process.
    """
    replica = os.pidfd_open(replica_pid)
    parent = os.getppid()
    # With one worker in the engine's process, the parent is the replica itself.
    engine = os.pidfd_open(parent) if parent_of(parent) == replica_pid else None
    threading.Thread(
        target=_watch, args=(replica, engine), name="weft-watch-replica", daemon=True
    ).start()


def parent_of(pid: int) -> int:
    """Return the pid of a process's parent.

    Raises:
        OSError: There is no such process.
    """
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


def open_worker(worker: Any, settings: OpenConfig) -> tuple[WorkerState, dict[str, Any]]:
    """Start a store on every rank, and on the receiving one what receives, sends and spills.

    Args:
        worker: vLLM's worker.

    Returns:
        State of the worker, to be closed with it; and the worker's answer, as plain values.

    Raises:
        WeftError: Memory, spill directory or backend cannot be as configured.
    """
    logs.configure_as_parent()
    end_with(settings.replica_pid)
    reference = settings.reference()
    memory, staging_bytes = decide_memory(worker.device, reference, settings)
    store = WorkerStore(
        staging_capacity_bytes=staging_bytes,
        adapter_capacity_bytes=settings.adapter_memory_bytes,
        retain_base=settings.retain_base,
        memory=memory,
        num_ranks=worker.parallel_config.world_size,
    )
    state = WorkerState(store, reference, settings.ranks_secret)
    state.progress = ProgressWriter(settings.holdings_path, worker.rank)
    state.base_refusal = why_not_reloaded(worker, reference)
    warm()
    backends = list(usable_backends(worker.device, settings.backend))
    if worker.local_rank == RECEIVER_RANK:
        _start_receiving(state, settings, backends)
    manager = getattr(worker.model_runner, "lora_manager", None)
    expected: set[str] = set()
    unapplied: list[str] = []
    if manager is not None:
        expected, unapplied = lora_modules(manager._adapter_manager, reference)
    return state, {
        "pid": os.getpid(),
        "is_receiver": state.receiver is not None,
        "lora_modules": sorted(expected),
        "lora_unapplied": unapplied,
        "base_refusal": state.base_refusal,
        "staging_bytes": staging_bytes,
        "backends": backends,
        "trial_name": "" if state.trials is None else state.trials.name,
        "gpu_uuid": gpu_uuid(worker.device),
    }


def lora_modules(adapters: Any, reference: Reference) -> tuple[set[str], list[str]]:
    """Return ``Capabilities.lora_modules``, as vLLM's loader names them, and ``lora_unapplied``."""
    names = [m.name.removesuffix(".weight") for m in reference.tensors if len(m.shape) == 2]
    carry, ignored = lora_hook.lora_targets(adapters, names)
    kinds = {name.rpartition(".")[2] for name in carry}
    never = {name.rpartition(".")[2] for name in ignored} - kinds
    some = [name for name in ignored if name.rpartition(".")[2] in kinds]
    prefixes = lora_hook.shortest_prefixes(some, carry)
    return lora_hook.expected_modules(adapters) - never, prefixes


def _start_receiving(state: WorkerState, settings: OpenConfig, backends: list[str]) -> None:
    store = state.store
    if settings.traced_as:
        state.tracer = open_tracer("weft-replica", settings.traced_as)
    receiver_factory = pkgutil.resolve_name(settings.receiver_factory)
    state.receiver = receiver_factory(store, state.tracer)
    state.cloner = Cloner(store)
    if store.memory.in_place and store.num_ranks > 1:
        state.ranks = RankServer(settings.ranks_secret, store.handoff.of)
    if ONE_SIDED in backends:
        state.trials = TrialAnswerer(store.memory.device_of(ONE_SIDED))
    if settings.spill is not None:
        folder = SpillFolder(SpillSettings(**settings.spill), state.reference.fingerprint)
        state.spiller = Spiller(store, folder, settings.retain_base)
    writer = HoldingsWriter(settings.holdings_path)
    state.report = HoldingsReport(writer, partial(look_at, state), partial(memory_of, state))
    state.report.start()
