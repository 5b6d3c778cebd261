"""What Weft adds to vLLM's workers: their ``worker_extension_cls``.

vLLM mixes ``WeftWorker`` into its worker class; ``collective_rpc`` calls the
methods on the engine's thread, between steps. They return at once (loading
excepted) and never raise: see ``answers``. Arguments and values are plain, since
they travel by msgpack.

Importing this module installs the adapter loader and the CPU corrections, so no
plugin entry point is needed.
"""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import pkgutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from rollout_side.cloner import Cloner
from rollout_side.engine import BackendChoice, GroupSpec, SendOrder, SpillOrder
from rollout_side.memory import MARGIN_BYTES, Memory, Staging, stage_on_device
from rollout_side.spill_folder import SpillFolder, SpillSettings
from rollout_side.spiller import Spiller
from rollout_side.staged import StagedHandle
from rollout_side.store import WorkerStore
from rollout_side.vllm_engine import adapter_hook, cpu_fixes, orphans
from rollout_side.vllm_engine.answers import guarded
from rollout_side.vllm_engine.base_loader import apply_base
from rollout_side.vllm_engine.direct_adapter import AdapterLoader
from rollout_side.vllm_engine.direct_load import DirectPlan
from weft.contract import logs
from weft.contract.errors import NotReadyError, RequestConflictError
from weft.contract.names import PolicyVersion
from weft.contract.reference import Reference
from weft.contract.tensors import DataType, TensorMeta
from weft.transport.backends import available_backends

_log = logging.getLogger(__name__)

adapter_hook.install()
cpu_fixes.install_row_mask()

#: The local rank that receives; the others of its machine map what it staged.
RECEIVER_RANK = 0


class ReceiverLike(Protocol):
    """What a worker needs of ``rollout_side.receiver.Receiver``."""

    def join(self, spec: GroupSpec) -> None:
        """Join a side group in a thread of its own; returns at once."""

    def close(self) -> None:
        """End the thread."""


@dataclass
class WorkerState:
    """What a worker process keeps for Weft."""

    store: WorkerStore
    reference: Reference
    receiver: ReceiverLike | None = None
    cloner: Cloner | None = None
    """On the receiving rank, which holds every copy."""
    spiller: Spiller | None = None
    """There, too, if the replica has a spill directory."""
    adapters: AdapterLoader = field(default_factory=AdapterLoader)
    plan: DirectPlan | None = None
    """How the base that was loaded last can be loaded by copies alone."""


@dataclass(frozen=True, kw_only=True)
class OpenConfig:
    """How a worker begins; sent as a plain dict."""

    staging_memory_bytes: int
    adapter_memory_bytes: int
    retain_base: int
    receiver_factory: str
    """Dotted path ``module:name`` of a callable from a ``WorkerStore`` to a receiver."""
    staging: Staging
    backend: BackendChoice
    replica_pid: int
    """The process that the engine belongs to and ends with."""
    architecture: str
    tensors: Sequence[tuple[str, int, Sequence[int]]] = field(default=())
    """Name, ``DataType`` and shape of everything a base must hold."""
    spill: Mapping[str, Any] | None = None
    """``SpillSettings`` of the replica's spill directory, which exists."""

    def reference(self) -> Reference:
        """The tensors as contract values."""
        metas = (TensorMeta(n, DataType(d), tuple(s)) for n, d, s in self.tensors)
        return Reference(self.architecture, tuple(metas))


def plan_memory(
    device: torch.device, reference: Reference, settings: OpenConfig
) -> tuple[Memory, int]:
    """Where versions are put, and the bound of staged bases there in bytes."""
    bound = settings.staging_memory_bytes
    if device.type != "cuda":
        return Memory(), bound
    free_bytes, _ = torch.cuda.mem_get_info(device)
    model_bytes = sum(meta.num_bytes for meta in reference.tensors)
    on_device = stage_on_device(settings.staging, device, model_bytes, free_bytes)
    if on_device:
        bound = min(bound, max(0, free_bytes - MARGIN_BYTES))
    return Memory(device, on_device), bound


def usable_backends(device: torch.device, choice: BackendChoice) -> tuple[str, ...]:
    """Backends that this worker offers, best first."""
    have = available_backends(device)
    return tuple(name for name in have if choice in ("auto", name))


class WeftWorker:
    """Methods that vLLM's workers get; every name begins with ``weft_``.

    vLLM refuses an extension whose attributes its worker class has already.
    """

    @guarded
    def weft_open(self: Any, config: Mapping[str, Any]) -> dict[str, Any]:
        """Create the store and, on the receiving rank, the receiver. Once a process."""
        if getattr(self, "weft_state", None) is not None:
            raise RequestConflictError("weft_open was called before on this worker")
        settings = OpenConfig(**config)
        logs.configure_as_parent()
        orphans.end_with(settings.replica_pid)
        reference = settings.reference()
        memory, staging_bytes = plan_memory(self.device, reference, settings)
        store = WorkerStore(
            staging_capacity_bytes=staging_bytes,
            adapter_capacity_bytes=settings.adapter_memory_bytes,
            retain_base=settings.retain_base,
            memory=memory,
        )
        state = WorkerState(store, reference)
        if self.local_rank == RECEIVER_RANK:
            state.receiver = pkgutil.resolve_name(settings.receiver_factory)(store)
            state.cloner = Cloner(store)
            if settings.spill is not None:
                spill = SpillSettings(**settings.spill)
                folder = SpillFolder(spill, state.reference.fingerprint)
                state.spiller = Spiller(store, folder, settings.retain_base)
        self.weft_state = state
        adapter_hook.set_store(store)
        manager = getattr(self.model_runner, "lora_manager", None)
        expected: set[str] = set()
        if manager is not None:
            expected = adapter_hook.expected_modules(manager._adapter_manager)
        return {
            "pid": os.getpid(),
            "is_receiver": state.receiver is not None,
            "lora_modules": sorted(expected),
            "staging_bytes": staging_bytes,
            "backends": list(usable_backends(self.device, settings.backend)),
        }

    @guarded
    def weft_join(self: Any, spec: Mapping[str, Any]) -> None:
        """Let the receiver join a side group; returns before it has."""
        state = _state(self)
        if state.receiver is not None:
            state.receiver.join(GroupSpec(**spec))

    @guarded
    def weft_handle(self: Any, transfer_id: str) -> dict[str, Any]:
        """A staged version for the other ranks; empty from those that do not receive."""
        state = _state(self)
        if state.receiver is None:
            return {"handle": b""}
        return {"handle": pickle.dumps(state.store.handle(transfer_id))}

    @guarded
    def weft_adopt(self: Any, handle: bytes, content_digest: bytes) -> None:
        """Map what the receiving rank staged, unless this is that rank."""
        state = _state(self)
        staged: StagedHandle = pickle.loads(handle)
        if state.receiver is None:
            state.store.adopt(staged)
        state.store.staged(staged.transfer_id, content_digest)

    @guarded
    def weft_load_adapter(
        self: Any, transfer_id: str, config_json: str, content_digest: bytes, lora_int_id: int
    ) -> dict[str, Any]:
        """Move a staged adapter to the store and load it; undone if that fails."""
        state = _state(self)
        store = state.store
        store.staged(transfer_id, content_digest)
        if self.lora_config is None:
            raise NotReadyError(
                "the replica was started without --enable-lora", reason="LORA_DISABLED"
            )
        entry = store.keep_adapter(transfer_id, config_json)
        version = entry.staged.version
        begin = time.perf_counter()
        try:
            request = adapter_hook.lora_request(version, lora_int_id)
            state.adapters.load(self, entry, request)
        except BaseException:
            with contextlib.suppress(Exception):
                self.remove_lora(lora_int_id)
            store.drop_adapter(version)
            raise
        seconds = time.perf_counter() - begin
        _log.info("the engine took %s in %.4f s", version, seconds)
        return {"load_seconds": seconds}

    @guarded
    def weft_drop_adapter(self: Any, policy: str, version: int, lora_int_id: int) -> None:
        """Forget an adapter that no request uses any more."""
        store = _state(self).store
        with contextlib.suppress(Exception):  # it may not be loaded, or LoRA is off
            self.remove_lora(lora_int_id)
        store.drop_adapter(PolicyVersion(policy, version))

    @guarded
    def weft_apply_base(self: Any, transfer_id: str, content_digest: bytes) -> dict[str, Any]:
        """Load a staged base; call it while paused. It stays staged.

        Ranks share the receiving rank's copy, so it must not be discarded before
        every rank has answered.
        """
        state = _state(self)
        staged = state.store.staged(transfer_id, content_digest)
        begin = time.perf_counter()
        # Forgotten meanwhile: a load that fails leaves nothing that a plan may rely on.
        plan, state.plan = state.plan, None
        state.plan = apply_base(self, staged, state.reference, plan)
        return {"load_seconds": time.perf_counter() - begin}

    @guarded
    def weft_keep_base(self: Any, transfer_id: str) -> dict[str, Any]:
        """Retain a base that every rank has loaded, on the receiving rank; the others
        let go of their mapping. Tells what ``weft_memory`` does."""
        state = _state(self)
        if state.receiver is None:
            state.store.discard(transfer_id)
        else:
            state.store.keep_base(transfer_id)
        return _memory(state)

    @guarded
    def weft_pin_bases(self: Any, versions: Sequence[int]) -> None:
        """Keep the copies of these versions that the receiving rank holds."""
        _state(self).store.pin_bases(versions)

    @guarded
    def weft_held(self: Any, policy: str, version: int) -> dict[str, Any]:
        """A held copy, for ``weft_apply_base`` and its manifest; empty from those ranks
        that do not receive."""
        state = _state(self)
        if state.receiver is None:
            return {"transfer_id": "", "content_digest": b"", "manifest": b""}
        held = state.store.held(PolicyVersion(policy, version))
        return {
            "transfer_id": held.transfer_id,
            "content_digest": held.content_digest,
            "manifest": pickle.dumps(held.manifest),
        }

    @guarded
    def weft_send(self: Any, group: Mapping[str, Any], order: Mapping[str, Any]) -> None:
        """Begin to send a held version to a side group; returns before it is sent."""
        cloner = _state(self).cloner
        if cloner is not None:
            cloner.send(SendOrder(group=GroupSpec(**group), **order))

    @guarded
    def weft_spill(
        self: Any, keep: Sequence[str], retired: Sequence[str], served_base: int, settled: bool
    ) -> None:
        """Take a ``SpillOrder``; returns before anything of it is done."""
        spiller = _state(self).spiller
        if spiller is not None:
            order = SpillOrder(
                keep=tuple(map(PolicyVersion.parse, keep)),
                retired=tuple(map(PolicyVersion.parse, retired)),
                served_base=served_base,
                settled=settled,
            )
            spiller.follow(order)

    @guarded
    def weft_restore(
        self: Any, transfer_id: str, version: str, content_digest: bytes, layout_digest: bytes
    ) -> None:
        """Begin to read a spilled version; returns before it is read."""
        spiller = _state(self).spiller
        if spiller is not None:
            parsed = PolicyVersion.parse(version)
            spiller.restore(transfer_id, parsed, content_digest, layout_digest)

    @guarded
    def weft_restored(self: Any, transfer_id: str) -> dict[str, Any]:
        """Whether a spilled version was read and is staged; fails as the reading did."""
        spiller = _state(self).spiller
        return {"restored": spiller is None or spiller.restored(transfer_id)}

    @guarded
    def weft_discard(self: Any, transfer_id: str) -> None:
        """Forget a staged version; its memory may be reused at once."""
        _state(self).store.discard(transfer_id)

    @guarded
    def weft_memory(self: Any) -> dict[str, Any]:
        """Bytes that this process holds; the receiving rank's count for all."""
        return _memory(_state(self))

    @guarded
    def weft_close(self: Any) -> None:
        """End the receiver, and what is being sent or spilled."""
        state = _state(self)
        if state.spiller is not None:
            state.spiller.close()
        if state.cloner is not None:
            state.cloner.close()
        if state.receiver is not None:
            state.receiver.close()


def _state(worker: Any) -> WorkerState:
    state: WorkerState | None = getattr(worker, "weft_state", None)
    if state is None:
        raise NotReadyError("weft_open has not been called on this worker")
    return state


def _memory(state: WorkerState) -> dict[str, Any]:
    if state.receiver is None:
        return {
            "adapter_bytes": 0,
            "staging_bytes": 0,
            "transfer_ids": [],
            "retained_bases": [],
            "spilled": [],
            "pinned_base_bytes": 0,
        }
    usage = state.store.usage()
    return {
        "adapter_bytes": usage.adapter_bytes,
        "staging_bytes": usage.staging_bytes + usage.free_bytes,
        "transfer_ids": list(usage.transfer_ids),
        "retained_bases": list(state.store.retained_bases()),
        "spilled": [str(v) for v in state.spiller.listed] if state.spiller else [],
        "pinned_base_bytes": usage.pinned_bytes,
    }
