"""Start of Weft's part in a worker process, once, and what the worker then tells of itself."""

from __future__ import annotations

import os
import pkgutil
from functools import partial
from typing import Any

from rollout_side.memory.ranks.handoff import RankServer
from rollout_side.memory.store import WorkerStore
from rollout_side.receive.clone_source import Cloner
from rollout_side.spill.folder import SpillFolder, SpillSettings
from rollout_side.spill.spiller import Spiller
from rollout_side.vllm_engine.loading import lora_hook
from rollout_side.vllm_engine.loading.rehearsal import why_not_reloaded
from rollout_side.vllm_engine.worker import orphans
from rollout_side.vllm_engine.worker.answers import RECEIVER_RANK
from rollout_side.vllm_engine.worker.config import OpenConfig, decide_memory, usable_backends
from rollout_side.vllm_engine.worker.holdings_page import HoldingsWriter, ProgressWriter
from rollout_side.vllm_engine.worker.holdings_report import HoldingsReport
from rollout_side.vllm_engine.worker.state import WorkerState, look_at, memory_of
from weft_rl import logs
from weft_rl.contract.capabilities import ONE_SIDED
from weft_rl.contract.tensors import Reference
from weft_rl.telemetry.traces import open_tracer
from weft_rl.transport.backends import gpu_uuid
from weft_rl.transport.digests.wsum64 import warm
from weft_rl.transport.one_sided.trial import TrialAnswerer


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
    orphans.end_with(settings.replica_pid)
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
