"""Trial of an engine before it serves: the reason of a step that fails in a worker."""

from __future__ import annotations

import importlib
import logging
import re
import traceback
from collections.abc import Callable
from typing import Any

from rollout_side.vllm_engine.loading import lora_hook
from rollout_side.vllm_engine.worker.rank_results import error_text
from weft_rl.contract.names import PolicyVersion

_log = logging.getLogger(__name__)

#: Adapter of a trial, which is loaded as vLLM does to warm up, and adds nothing.
TRIAL_ADAPTER = PolicyVersion("weft-trial", 0)
# Its rank, or the largest that the engine takes.
_RANK = 8
_MAX_CHARS = 500
#: torch's words for an operation that no library has registered.
_NO_OPERATION = re.compile(r"'_OpNamespace' '\w+' object has no attribute '(?P<name>\w+)'")


class Trial:
    """Watch over a worker's steps while a replica asks its own engine for tokens.

    A step that raises would end the engine, which says why only in its log, in a hundred lines.
    During a trial the requests of such a step get tokens without a meaning, and the reason is kept.
    """

    def __init__(self, worker: Any) -> None:
        self._worker = worker
        #: Reason of the first step that failed; empty if none did.
        self.failure = ""
        self._ids: tuple[str, ...] = ()
        self._adapter = 0
        self._execute, self._sample = worker.execute_model, worker.sample_tokens
        worker.execute_model, worker.sample_tokens = self._execute_model, self._sample_tokens

    def add_adapter(self, lora_int_id: int) -> bool:
        """Load ``TRIAL_ADAPTER``; return False where vLLM cannot make one for this model."""
        rank = min(_RANK, self._worker.lora_config.max_lora_rank)
        request = lora_hook.lora_request(TRIAL_ADAPTER, lora_int_id)
        try:
            manager = self._worker.model_runner.lora_manager
            manager.add_dummy_lora(request, rank=manager.get_dummy_lora_warmup_rank(rank))
        except Exception:  # noqa: BLE001 - of whatever model; adapters that are pushed are checked
            _log.debug("vLLM makes no adapter to try this model with", exc_info=True)
            return False
        self._adapter = lora_int_id
        return True

    def end(self) -> None:
        """Give the worker its own methods back, and its slot."""
        del self._worker.execute_model, self._worker.sample_tokens
        if self._adapter:
            self._worker.remove_lora(self._adapter)

    def _execute_model(self, scheduler_output: Any, *args: Any, **more: Any) -> Any:
        self._ids = tuple(scheduler_output.num_scheduled_tokens)
        return self._step(self._execute, scheduler_output, *args, **more)

    def _sample_tokens(self, *args: Any, **more: Any) -> Any:
        return self._step(self._sample, *args, **more)

    def _step(self, method: Callable[..., Any], *args: Any, **more: Any) -> Any:
        if not self.failure:
            try:
                return method(*args, **more)
            except Exception as error:  # noqa: BLE001 - whatever the layers of a model raise
                _log.debug("a step of the trial failed", exc_info=True)
                self.failure = _reason(error)
        return _made_up(self._ids)


def _made_up(ids: tuple[str, ...]) -> Any:
    """Return vLLM's ``ModelRunnerOutput`` with the token 0 for each request."""
    output = importlib.import_module("vllm.v1.outputs").ModelRunnerOutput
    index = {request_id: number for number, request_id in enumerate(ids)}
    return output(req_ids=list(ids), req_id_to_index=index, sampled_token_ids=[[0] for _ in ids])


def _reason(error: Exception) -> str:
    """Return an error in one line: what this machine lacks, or else what was raised and where."""
    missing = _NO_OPERATION.search(str(error))
    if missing is not None:
        return (
            f"vLLM's build for this machine has no operation {missing['name']}, which the model "
            "needs; serve it on another machine"
        )
    said = error_text(error).splitlines()[0][:_MAX_CHARS]
    frames = traceback.extract_tb(error.__traceback__)
    return f"{said} (in {frames[-1].name}, {_place(frames[-1])})" if frames else said


def _place(frame: traceback.FrameSummary) -> str:
    file = frame.filename.rpartition("site-packages/")[2]
    return f"{file}:{frame.lineno}"
