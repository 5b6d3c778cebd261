"""Imports of the server that the processes of engines are forked from.

Each process of an engine (its server, vLLM's core, a worker for each rank) would import vLLM by
itself otherwise, for 7 s of a core each; those of a whole ``weft rollout`` do.
"""

from __future__ import annotations

import os

ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "CUDA_VISIBLE_DEVICES": "",
}
os.environ.update(ENVIRONMENT)  # some of it is read at import

# ruff: noqa: E402
import multiprocessing
import threading
from multiprocessing.connection import Connection
from typing import Any

import vllm.entrypoints.openai.api_server
import vllm.v1.engine.async_llm
import vllm.v1.engine.core
import vllm.v1.engine.utils
import vllm.v1.executor.multiproc_executor
import vllm.v1.worker.cpu_worker

import tests.e2e.worker_methods  # noqa: F401
from rollout_side.vllm_engine import launch  # noqa: F401
from rollout_side.vllm_engine.compat import bridges

bridges.server_parts()

_DIGEST_SECONDS = 60.0


def fork_processes(pipe: Connection) -> None:
    """Have vLLM fork an engine's processes from this one, as it does by default.

    A replica has it spawn them, because of gRPC's threads; here are none.

    Args:
        pipe: To the test, which learns by its end that this process has ended.
    """
    os.register_at_fork(after_in_child=pipe.close)
    for module in (vllm.v1.engine.utils, vllm.v1.executor.multiproc_executor):
        module.get_mp_context = _fork_context


def _fork_context() -> Any:
    # A replica computes its checkpoint's digests as the engine starts. What a thread holds that
    # computes in a forked process, torch's own locks above all, nobody gives back in the child.
    for thread in threading.enumerate():
        if thread.name == "weft-checkpoint":
            thread.join(_DIGEST_SECONDS)
            assert not thread.is_alive(), "the digests of a tiny checkpoint take milliseconds"
    return multiprocessing.get_context("fork")
