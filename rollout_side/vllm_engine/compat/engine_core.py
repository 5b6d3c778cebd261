"""Additions to vLLM's EngineCore, in its process, for a replica that keeps running requests.

``EngineCore`` imports and calls what ``--scheduler-cls`` names; that call adds a method to it. It
runs its own methods by the names that the API process sends.
"""

from __future__ import annotations

import copy
import importlib
import time
from typing import Any

#: ``--scheduler-cls``.
SCHEDULER = f"{__name__}.make_scheduler"
#: What ``EngineCore`` can be asked for then; see ``keep_requests``.
KEEP_REQUESTS = "weft_keep_requests"


def make_scheduler(*args: Any, vllm_config: Any, **settings: Any) -> Any:
    """Make vLLM's own scheduler, and add ``keep_requests`` to ``EngineCore``.

    It is the scheduler that vLLM would have chosen.
    """
    core: Any = importlib.import_module("vllm.v1.engine.core").EngineCore
    setattr(core, KEEP_REQUESTS, keep_requests)
    own = copy.copy(vllm_config.scheduler_config)
    own.scheduler_cls = None
    return own.get_scheduler_cls()(*args, vllm_config=vllm_config, **settings)


def keep_requests(core: Any) -> None:
    """Let requests continue on the blocks that they hold, and stop reuse of old cached blocks.

    To be called while generation is paused, after a load. New requests have another salt. Present
    requests take no block from the cache any more, so one that is preempted is computed anew under
    the weights of that time. A request without tokens belongs to no version yet: it gives its
    blocks back, and all of it is computed under the new weights. So does a request that has outputs
    of an encoder still to read, which the new weights make anew.
    """
    scheduler = core.scheduler
    for request in scheduler.requests.values():
        request.skip_reading_prefix_cache = True
    begun: list[Any] = []
    others: list[Any] = []
    for request in scheduler.running:
        is_kept = request.num_output_tokens and not _reads_encoder(scheduler, request)
        (begun if is_kept else others).append(request)
    scheduler.running[:] = begun
    for request in reversed(others):  # each goes to the front of those that wait
        scheduler._preempt_request(request, time.monotonic())
    # The workers are to take them out of their batch, as those of the step before.
    scheduler.prev_step_scheduled_req_ids.difference_update(
        request.request_id for request in others
    )


def _reads_encoder(scheduler: Any, request: Any) -> bool:
    """Return whether a request that has tokens still refers to outputs of an encoder."""
    if scheduler.is_encoder_decoder:  # its manager says so of every request, to its end
        return False
    return bool(scheduler.encoder_cache_manager.get_cached_input_ids(request))
