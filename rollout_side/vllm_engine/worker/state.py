"""State that a worker process keeps for Weft between two calls."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from rollout_side.engine import JoinOrder
from rollout_side.memory.digest_reading import DigestReading
from rollout_side.memory.handoff import Handoff, InPlaceLoad
from rollout_side.memory.ranks.handoff import RankServer
from rollout_side.memory.store import WorkerStore
from rollout_side.memory.versions import ServedBase
from rollout_side.receive.clone_source import Cloner
from rollout_side.spill.spiller import Spiller
from rollout_side.vllm_engine.loading.copy_plan import CopyPlan
from rollout_side.vllm_engine.loading.kept_tensors import KeptTensors
from rollout_side.vllm_engine.loading.lora_copy_plan import AdapterLoader
from rollout_side.vllm_engine.loading.reload import load_in_place
from rollout_side.vllm_engine.worker.holdings import HoldingsReport, ProgressWriter
from weft_rl.contract.errors import LoadFailedError, NotReadyError, WeftError
from weft_rl.contract.tensors import Reference
from weft_rl.tracing import NO_TRACER, Tracer
from weft_rl.transport.group import on_device
from weft_rl.transport.one_sided.trial import TrialAnswerer


class ReceiverLike(Protocol):
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
    receiver: ReceiverLike | None = None
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
    reading: DigestReading | None = None
    """Reading, on the receiving rank, of the version whose tensors are digested, or were last."""
    adapters: AdapterLoader = field(default_factory=AdapterLoader)
    copy_plan: CopyPlan | None = None
    """Plan by which the base that was loaded last can be loaded by copies alone."""
    kept: KeptTensors | None = None
    """Tensors that no base brings, kept over a sleep that discards weights."""
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

    def end_reading(self) -> None:
        """Stop the digesting that is under way."""
        if self.reading is not None:
            self.reading.close()

    def close(self) -> None:
        """End all threads; blocks some seconds at most."""
        for server in (self.trials, self.ranks):
            if server is not None:
                server.close()
        if self.load is not None:
            self.load.end()
        for each in (self.reading, self.spiller, self.cloner, self.receiver, self.report):
            if each is not None:
                each.close()
        self.tracer.close()

    def check_takes_bases(self) -> None:
        """Refuse a base that would leave mixed weights.

        Raises:
            LoadFailedError: Nothing has changed.
        """
        if self.base_refusal:
            raise LoadFailedError(f"this replica can load no base: {self.base_refusal}")

    def check_idle(self) -> None:
        """Refuse to touch weights while a loader that was ended still runs.

        Raises:
            LoadFailedError: Metadata ``dirty`` "true".
        """
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


def look_at(state: WorkerState) -> tuple[object, ...]:
    """Return what ``memory_of`` would report, in a form that is cheap to compare."""
    loading = state.load.transfer_id if state.load is not None else ""
    spiller = state.spiller
    spilled = (spiller.listed, spiller.digests, spiller.ended_restore) if spiller else ()
    return state.store.usage(), state.store.retained_bases(), loading, spilled


def memory_of(state: WorkerState) -> dict[str, Any]:
    """Return ``MemoryUse`` as plain values, of the receiving rank, which holds for all."""
    usage = state.store.usage()
    loading = {state.load.transfer_id} if state.load is not None else set()
    return {
        "adapter_bytes": usage.adapter_bytes,
        "staging_bytes": usage.staging_bytes + usage.free_bytes,
        "transfer_ids": sorted({*usage.transfer_ids, *loading}),
        "retained_bases": list(state.store.retained_bases()),
        "spilled": [str(v) for v in state.spiller.listed] if state.spiller else [],
        "spilled_digests": (
            [(str(v), digest.hex()) for v, digest in state.spiller.digests] if state.spiller else []
        ),
        "pinned_base_bytes": usage.pinned_bytes,
        "ended_restore": state.spiller.ended_restore if state.spiller else "",
    }


def loader(worker: Any, state: WorkerState) -> Callable[[Handoff], None]:
    """Return a function that loads a hand-off on a thread of its own.

    The load begins after all that the engine's thread, which calls this, has given to the device.
    """
    device: torch.device = worker.device
    given = torch.cuda.current_stream(device).record_event() if device.type == "cuda" else None

    def load(handoff: Handoff) -> None:
        # Forgotten until the load is done: one that fails midway leaves nothing to rely on.
        plan, state.copy_plan = state.copy_plan, None
        served = state.store.served.set(None)
        try:
            with on_device(device):
                if given is not None:
                    torch.cuda.current_stream(device).wait_event(given)
                state.copy_plan = load_in_place(worker, handoff, state.reference, plan)
        except WeftError as error:
            if error.metadata.get("dirty") != "true":  # nothing has changed
                state.copy_plan = plan
                state.store.served.set(served)
            raise

    return load


def served_base(state: WorkerState, handoff: Handoff, content_digest: bytes) -> ServedBase | None:
    """Return a base that was loaded in place, for clones from the engine's parameters; None if
    they do not hold all its bytes unchanged."""
    plan, manifest = state.copy_plan, handoff.manifest
    if plan is None or plan.layout_digest != manifest.layout_digest or not plan.is_readable:
        return None
    return ServedBase(
        handoff.transfer_id, handoff.version, manifest, content_digest, plan.read_bucket
    )
