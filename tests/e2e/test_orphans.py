"""Real vLLM: a replica that is killed leaves no process behind."""

from __future__ import annotations

import os
import signal

from rollout_side.vllm_engine.orphans import parent_of
from tests.e2e.conftest import TinyModels
from tests.e2e.engine_process import LORA_ARGS, EngineProcess
from tests.integration.models import until
from tests.processes import is_running


def test_the_engine_ends_with_the_process_that_serves_its_api(qwen2: TinyModels) -> None:
    engine = EngineProcess(qwen2.base, tuple(LORA_ARGS)).start()
    try:
        (worker,) = engine.facts["worker_pids"]
        core = parent_of(worker)
        assert parent_of(core) == engine.process.pid
        os.kill(engine.process.pid, signal.SIGKILL)
        engine.process.join(10)
        until(lambda: not is_running(worker) and not is_running(core))
    finally:
        engine.stop()
