"""Additions of Weft to vLLM's workers: their ``worker_extension_cls``.

vLLM mixes ``WeftWorker`` into its worker class; ``collective_rpc`` calls the
methods on the engine's thread, between steps. They return at once (loading
excepted) and never raise: see ``rank_results``. Arguments and values are plain,
since they travel by msgpack; a dataclass is packed.

Importing this module installs the adapter loader and the CPU corrections, so no
plugin entry point is needed.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Sequence
from typing import Any

from rollout_side.engine import JoinOrder, SendOrder, SpillOrder
from rollout_side.memory.digest_reading import DigestReader, TensorDigests
from rollout_side.memory.handoff import Handoff, InPlaceLoad, RankHandoff
from rollout_side.memory.messages import unpacked
from rollout_side.memory.served_delta import StagedDelta
from rollout_side.memory.versions import StagedHandle
from rollout_side.vllm_engine.compat import bridges, cpu_fixes
from rollout_side.vllm_engine.loading import lora_hook
from rollout_side.vllm_engine.loading.kept_tensors import keep
from rollout_side.vllm_engine.loading.plan_proof import learn_from
from rollout_side.vllm_engine.loading.reload import apply_base, reload_files
from rollout_side.vllm_engine.worker.rank_results import FROM_FILES, guarded
from rollout_side.vllm_engine.worker.state import (
    OpenConfig,
    WorkerDeclaration,
    loader,
    open_worker,
    served_base,
    state_of,
)
from rollout_side.vllm_engine.worker.trial import Trial
from weft_rl.contract.errors import NotReadyError, RequestConflictError
from weft_rl.contract.manifest import Manifest
from weft_rl.contract.names import PolicyVersion
from weft_rl.contract.options import DISCARDS
from weft_rl.ipc.bytes_codec import bytes_codec

_log = logging.getLogger(__name__)

lora_hook.install()
cpu_fixes.install_row_mask()
cpu_fixes.install_prompt_rows()


class WeftWorker:
    """Methods that vLLM's workers get; every name begins with ``weft_``. vLLM refuses an extension
    whose attributes its worker class has already."""

    @guarded
    def weft_open(self: Any, settings: bytes) -> dict[str, Any]:
        """Create the store and, on the receiving rank, the receiver, by ``OpenConfig``; once a
        process. Return the ``WorkerDeclaration``."""
        if getattr(self, "weft_state", None) is not None:
            raise RequestConflictError("weft_open was called before on this worker")
        state, declared = open_worker(self, unpacked(OpenConfig, settings))
        self.weft_state = state
        lora_hook.set_store(state.store)
        return {"declaration": bytes_codec(WorkerDeclaration).pack(declared)}

    @guarded
    def weft_keep_draft(self: Any) -> None:
        """Load no base into the model that drafts tokens, whatever comes with it."""
        state_of(self).drafted = None

    @guarded
    def weft_begin_trial(self: Any, lora_int_id: int) -> dict[str, Any]:
        """Keep what fails in the next steps from ending the engine, until ``weft_end_trial``.

        Args:
            lora_int_id: Id of an adapter to load for the trial; 0 for none.

        Returns whether there is that adapter: for some models vLLM makes none.
        """
        trial = state_of(self).trial = Trial(self)
        return {"has_adapter": bool(lora_int_id) and trial.add_adapter(lora_int_id)}

    @guarded
    def weft_end_trial(self: Any) -> dict[str, Any]:
        """Leave the worker as it was; return why a step failed, empty if none did."""
        state = state_of(self)
        trial, state.trial = state.trial, None
        if trial is None:
            raise NotReadyError("weft_begin_trial was not called on this worker")
        trial.end()
        return {"failure": trial.failure}

    @guarded
    def weft_join(self: Any, order: bytes) -> None:
        """Let the receiver join a side group, by a ``JoinOrder``; returns before it has."""
        state, given = state_of(self), unpacked(JoinOrder, order)
        if state.receiver is not None:
            state.receiver.join(given)

    @guarded
    def weft_handle(self: Any, transfer_id: str) -> dict[str, Any]:
        """Return a staged version's handle for the other ranks. Empty from ranks that do not
        receive, and where each rank has its own part."""
        state = state_of(self)
        if state.receiver is None:
            return {"handle": b""}
        handle = state.store.handle(transfer_id)
        return {"handle": b"" if handle is None else bytes_codec(StagedHandle).pack(handle)}

    @guarded
    def weft_adopt(self: Any, handle: bytes, content_digest: bytes) -> None:
        """Map a version that the receiving rank staged, unless this is that rank."""
        state = state_of(self)
        staged = unpacked(StagedHandle, handle)
        if state.receiver is None:
            state.store.adopt(staged)
        state.store.staged(staged.transfer_id, content_digest)

    @guarded
    def weft_load_adapter(
        self: Any, transfer_id: str, config_json: str, content_digest: bytes, lora_int_id: int
    ) -> dict[str, Any]:
        """Move a staged adapter to the store and load it; undone if that fails."""
        state = state_of(self)
        state.check_idle()
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
            request = lora_hook.lora_request(version, lora_int_id)
            state.adapters.load(self, entry, request)
        except BaseException:
            with contextlib.suppress(Exception):
                self.remove_lora(lora_int_id)
            store.drop_adapter(version)
            raise
        seconds = time.perf_counter() - begin
        _log.debug("the engine took %s in %.4f s", version, seconds)
        return {"load_seconds": seconds}

    @guarded
    def weft_drop_adapter(self: Any, policy: str, version: int, lora_int_id: int) -> None:
        """Forget an adapter that no request uses any more."""
        store = state_of(self).store
        with contextlib.suppress(Exception):  # it may not be loaded, or LoRA is off
            self.remove_lora(lora_int_id)
        store.drop_adapter(PolicyVersion(policy, version))

    @guarded
    def weft_apply_base(self: Any, transfer_id: str, content_digest: bytes) -> dict[str, Any]:
        """Load a staged base, which stays staged; call it while paused.

        A base that was loaded in place is already there. ``FROM_FILES`` loads the files that the
        engine was started with.

        Ranks share the receiving rank's copy, so it must not be discarded before every rank has
        answered. Returns whether the model that drafts tokens is of this base now.
        """
        state = state_of(self)
        state.check_takes_bases()
        state.check_idle()
        begin = time.perf_counter()
        if transfer_id == FROM_FILES:
            state.store.served.set(None)
            reload_files(self, state.report_progress, state.drafted)
            state.store.served.set(None, is_loaded=True)
            return {"load_seconds": time.perf_counter() - begin, "has_draft": True}
        served = state.store.served
        if served.switch_to(transfer_id, content_digest):
            return state.applied(begin)
        staged = state.store.staged(transfer_id, content_digest)
        if isinstance(staged, StagedDelta):
            served.apply(staged)
            return state.applied(begin)
        write = served.take_prepared(staged)
        served.set(None)
        # Forgotten until the load is done: one that fails leaves nothing to rely on.
        plans, state.copy_plans = state.copy_plans, ()
        state.copy_plans = apply_base(
            self, staged, state.reference, plans, state.report_progress, state.drafted, write
        )
        base = None
        if state.store.num_ranks == 1:  # else deltas change the copy that all ranks share
            base = served_base(state, staged, content_digest, staged.tensor_digests)
        takes_deltas = base is not None and base.takes_deltas
        served.set(base if takes_deltas else None, is_loaded=True)
        has_draft = state.brings_draft(staged.manifest)
        return {"load_seconds": time.perf_counter() - begin, "has_draft": has_draft}

    @guarded
    def weft_learn_copies(self: Any, stored: bytes) -> dict[str, Any]:
        """Learn a copy plan from base@0, which the engine must still have. Changes nothing; the
        engine's step waits until the parameters are read once."""
        state = state_of(self)
        state.check_idle()
        if not state.copy_plans:
            found = unpacked(TensorDigests, stored)
            learnt = learn_from(self, state.reference, found.tensors)
            state.copy_plans = () if learnt is None else (learnt,)
        return {"has_learnt": bool(state.copy_plans)}

    @guarded
    def weft_load_in_place(self: Any, transfer_id: str, version: str) -> None:
        """Begin to load a base as it arrives; call it while paused.

        Returns at once, and succeeds if it has begun before. Other ranks than the receiving one
        need no prepared transfer: they get no bucket before it has begun.
        """
        state = state_of(self)
        load, receives = state.load, state.receiver is not None
        if load is not None and load.transfer_id == transfer_id and (receives or not load.is_void):
            load.check()
            return
        state.check_takes_bases()
        state.check_idle()
        handoff: Handoff | None = state.store.handoff.of(transfer_id)
        if not receives:
            parsed = PolicyVersion.parse(version)
            handoff = RankHandoff(state.ranks_secret, self.rank, transfer_id, parsed)
        if handoff is None:
            raise NotReadyError(
                f"transfer {transfer_id} was not prepared here, or has ended; push again"
            )
        state.load = InPlaceLoad(handoff, loader(self, state))
        state.store.threads.add(state.load.thread)

    @guarded
    def weft_loaded(self: Any, transfer_id: str, content_digest: bytes) -> dict[str, Any]:
        """Confirm for its commit that a base was loaded in place, whole and as it was sent. Forgets
        its transfer."""
        state = state_of(self)
        load = state.load
        if load is None or load.transfer_id != transfer_id:
            raise NotReadyError(f"transfer {transfer_id} is not loaded in place here")
        try:
            seconds = load.confirm(content_digest)
        finally:
            state.store.handoff.forget(transfer_id)
            state.load = load if load.is_running else None
        loaded = load.handoff
        served = served_base(state, loaded, content_digest, loaded.tensor_digests)
        state.store.served.set(served, is_loaded=True)
        state.follow(self.rank)
        has_draft = state.brings_draft(load.handoff.manifest)
        return {"load_seconds": seconds, "has_draft": has_draft}

    @guarded
    def weft_keep_base(self: Any, transfer_id: str) -> dict[str, Any]:
        """Retain, on the receiving rank, a base that every rank has loaded; others unmap it. Return
        the number of versions that this rank can switch to in place."""
        store, receives = state_of(self).store, state_of(self).receiver is not None
        if receives:
            store.keep_base(transfer_id)
        num_undo = store.keep_delta(transfer_id)
        if not receives:
            store.discard(transfer_id)
        return {"num_undo": num_undo}

    @guarded
    def weft_bound_undo(self: Any, most: int) -> None:
        """Keep no more versions to switch to in place than every rank does."""
        state_of(self).store.keep_delta("", most=most)

    @guarded
    def weft_take_back(self: Any, transfer_id: str) -> dict[str, Any]:
        """Switch in place from a base to what was served before it, since another rank could not
        follow. Return what lies in the weights now; empty where that cannot be read."""
        served = state_of(self).store.served
        if served.base is not None and served.base.transfer_id == transfer_id:
            served.switch_back()
        base = served.base
        if base is None:
            return {"transfer_id": "", "content_digest": b""}
        return {"transfer_id": base.transfer_id, "content_digest": base.content_digest}

    @guarded
    def weft_pin_bases(self: Any, versions: Sequence[int]) -> None:
        """Keep the copies of these versions that the receiving rank holds."""
        state_of(self).store.pin_bases(versions)

    @guarded
    def weft_held(self: Any, policy: str, version: int) -> dict[str, Any]:
        """Return the transfer, digest and manifest of a held version; empty from other ranks than
        the receiving one."""
        state = state_of(self)
        if state.receiver is None:
            return {"transfer_id": "", "content_digest": b"", "manifest": b""}
        held = state.store.retained(PolicyVersion(policy, version))
        return {
            "transfer_id": held.transfer_id,
            "content_digest": held.content_digest,
            "manifest": bytes_codec(Manifest).pack(held.manifest),
        }

    @guarded
    def weft_digest(self: Any, policy: str, version: int) -> None:
        """Begin to digest the tensors of a held version, on the receiving rank; returns at once.
        Ends the reading before."""
        state = state_of(self)
        if state.receiver is not None:
            state.end_reading()
            state.reading = DigestReader(state.store, PolicyVersion(policy, version))

    @guarded
    def weft_digested(self: Any) -> dict[str, Any]:
        """Return the ``TensorDigests`` since the last call; empty from other ranks than the
        receiving one."""
        reading = state_of(self).reading
        if reading is None:
            return {"digests": b""}
        return {"digests": bytes_codec(TensorDigests).pack(reading.take())}

    @guarded
    def weft_send(self: Any, order: bytes) -> None:
        """Begin to send a held version to a side group, by a ``SendOrder``; returns before it is
        sent."""
        state, given = state_of(self), unpacked(SendOrder, order)
        if state.cloner is not None:
            state.cloner.send(given)

    @guarded
    def weft_spill(self: Any, order: bytes) -> None:
        """Take a ``SpillOrder``; returns before anything of it is done."""
        state, given = state_of(self), unpacked(SpillOrder, order)
        if state.spiller is not None:
            state.spiller.follow(given)

    @guarded
    def weft_restore(
        self: Any, transfer_id: str, version: str, content_digest: bytes, layout_digest: bytes
    ) -> None:
        """Begin to read a spilled version; returns before it is read."""
        spiller = state_of(self).spiller
        if spiller is not None:
            parsed = PolicyVersion.parse(version)
            spiller.restore(transfer_id, parsed, content_digest, layout_digest)

    @guarded
    def weft_restored(self: Any, transfer_id: str) -> None:
        """Confirm that a spilled version is staged; call it once the holdings report its end. Fails
        with the error of the read."""
        spiller = state_of(self).spiller
        if spiller is not None and not spiller.restored(transfer_id):
            raise NotReadyError(
                f"transfer {transfer_id} is still being read", reason="NOT_RETAINED"
            )

    @guarded
    def weft_discard(self: Any, transfer_id: str, keep_loaded: bool = False) -> dict[str, Any]:
        """Forget a staged version, whose memory may be reused at once.

        End its load in place, and return whether that has changed the weights.

        Args:
            keep_loaded: Whether a complete load in place keeps waiting for its commit.
        """
        state = state_of(self)
        load = state.load
        if load is None or load.transfer_id != transfer_id:
            state.store.discard(transfer_id)
            return {"changed": False, "kept": False}
        if keep_loaded and load.is_complete:
            return {"changed": True, "kept": True}
        state.store.discard(transfer_id)
        changed = load.end()
        if not load.is_running:
            state.load = None
        return {"changed": changed, "kept": False}

    @guarded
    def weft_sleep(self: Any, level: int) -> dict[str, Any]:
        """Free Weft's memory on the accelerator, before the engine sleeps.

        Returns whether the engine's weights are not being read; call it until they are not. At
        level 2, keeps the tensors that no base brings.
        """
        state = state_of(self)
        is_free = state.store.fall_asleep(keep_newest=level == DISCARDS)
        if is_free:
            state.store.memory.fall_asleep(bridges.waking_bytes())
            if level == DISCARDS:
                state.kept = keep(self.model_runner.get_model(), bridges.weights_memory())
        return {"is_free": is_free}

    @guarded
    def weft_wake(self: Any, discarded: bool) -> None:
        """Record that the weights are awake, or only their memory is (``discarded``). In that case,
        restore the tensors that no base brings."""
        state = state_of(self)
        if discarded:
            state.copy_plans = ()  # a plan sets only what was in the last base
            if state.kept is not None:
                state.kept.restore()
        state.kept = None
        state.store.served.wake_up(discarded=discarded)
        state.store.memory.wake_weights()

    @guarded
    def weft_awake(self: Any) -> None:
        """Record that the KV cache is awake, or that the engine did not sleep after all."""
        state_of(self).store.memory.wake_up()

    @guarded
    def weft_close(self: Any) -> None:
        """End the receiver, clones, spilling and loads."""
        state_of(self).close()
