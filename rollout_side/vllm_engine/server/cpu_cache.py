"""Size of the KV cache on a CPU, where vLLM by itself takes 92 % of the machine's memory."""

from __future__ import annotations

import logging
from argparse import Namespace
from collections.abc import MutableMapping
from typing import Any, Final

from weft_rl.host_memory import available_memory

_log = logging.getLogger(__name__)

#: Read by vLLM in each of its processes; GiB for each rank, a whole number.
VARIABLE: Final = "VLLM_CPU_KVCACHE_SPACE"
_GIB = 2**30
_SHARE = 4
#: vLLM's other options for the size of the cache.
_SIZES = ("kv_cache_memory_bytes", "num_gpu_blocks_override")


class _DefaultOption(float):
    """Default of an option, told from the same number that a user has given."""


def mark_default(parser: Any) -> None:
    """Have a parser of vLLM's tell whether ``--gpu-memory-utilization`` was given."""
    fraction = parser.get_default("gpu_memory_utilization")
    parser.set_defaults(gpu_memory_utilization=_DefaultOption(fraction))


def is_sized(args: Namespace, environ: MutableMapping[str, str]) -> bool:
    """Return whether the user has chosen the size, by an option or by the environment."""
    if environ.get(VARIABLE):
        return True
    given = not isinstance(args.gpu_memory_utilization, _DefaultOption)
    return given or any(getattr(args, name, None) is not None for name in _SIZES)


def cache_gib(available_bytes: int, num_ranks: int) -> int:
    """Return the size for each rank: a quarter of what is available, and 1 GiB at least."""
    return max(1, available_bytes // _SHARE // num_ranks // _GIB)


def size_cache(args: Namespace, environ: MutableMapping[str, str]) -> None:
    """Set the size by the environment of vLLM's processes, unless the user has."""
    if is_sized(args, environ):
        return
    available, limit = available_memory()
    gib = cache_gib(available, getattr(args, "tensor_parallel_size", None) or 1)
    environ[VARIABLE] = str(gib)
    _log.info(
        "on a CPU: a KV cache of %d GiB a rank (%.1f GiB free: %s); %s or --kv-cache-memory-bytes "
        "sets another size",
        gib,
        available / _GIB,
        limit,
        VARIABLE,
    )
