"""What tests ask of a real vLLM's workers, beside Weft's own methods: on every rank.

For vLLM's workers alone: it imports vLLM.
"""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

from rollout_side.vllm_engine.loading.reload import load_in_place
from rollout_side.vllm_engine.loading.reload_proof import why_not_repeated
from rollout_side.vllm_engine.worker.extension import WeftWorker
from rollout_side.vllm_engine.worker.rank_results import guarded
from tests.e2e.arriving_file import FromFile
from tests.e2e.staging_receiver import break_next_load
from weft_rl.contract.names import PolicyVersion
from weft_rl.contract.tensors import Reference


@guarded
def _load(worker: Any, version: str, file: str, fail_at: int) -> dict[str, Any]:
    """Load a file in a thread; a transfer that fails does so at bucket ``fail_at``."""
    arriving = FromFile(PolicyVersion.parse(version), Path(file), fail_at)
    errors: list[BaseException] = []
    plans: list[object] = []

    def load() -> None:
        try:
            plans.append(load_in_place(worker, arriving, worker.weft_state.reference))
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=load, name="in-place")
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return {"qkv_buckets": arriving.buckets_of("layers.0.self_attn"), "has_plan": plans != [()]}


@guarded
def _arriving(worker: Any) -> dict[str, Any]:
    """How far the load in place that is under way has come."""
    handoff = worker.weft_state.load.handoff
    found = {"begun": handoff.is_begun, "complete": handoff.is_complete}
    return found if handoff.error is None else {**found, "error": handoff.error.message}


@guarded
def _break(worker: Any, rank: int, after: int) -> None:
    """One rank's next base load fails once so many tensors were taken."""
    if worker.rank == rank:
        break_next_load(after)


@guarded
def _compare(worker: Any) -> dict[str, Any]:
    """Why the weights are not those of the files that the engine was started with.

    They are compared on a GPU, too: no copy plan fills a model from no tensors.
    """
    return {"why": why_not_repeated(worker, Reference("", ()))}


class WorkerUnderTest(WeftWorker):
    """What ``EngineProcess`` has mixed into vLLM's workers."""

    weft_test_arriving = _arriving
    weft_test_break = _break
    weft_test_compare = _compare
    weft_test_load_in_place = _load
