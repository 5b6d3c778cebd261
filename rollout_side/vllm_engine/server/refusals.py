"""What a replica refuses before its engine starts, and which of vLLM's ways it closes.

Each would make answers that no version vouches for, or fail minutes later.
"""

from __future__ import annotations

import importlib
import logging
from argparse import Namespace
from collections.abc import Mapping
from typing import Any

from weft.contract.capabilities import NCCL, ONE_SIDED, BackendChoice
from weft.contract.errors import UnsupportedError
from weft.transport.one_sided.directory import why_unavailable

_log = logging.getLogger(__name__)

#: Environment variables of vLLM that open endpoints which change weights, and those endpoints.
_OPENING = {
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "/v1/load_lora_adapter and the adapter resolvers",
    "VLLM_SERVER_DEV_MODE": "/collective_rpc, /update_weights, /sleep and others",
}
_OFF = {"", "0", "false", "no", "off"}
#: Endpoints of vLLM that are taken away: one engine a replica, whose workers are Weft's.
_CLOSED = frozenset({"/scale_elastic_ep"})
# As vLLM finds them; a model has at most one.
_NUM_EXPERTS = ("num_experts", "moe_num_experts", "n_routed_experts", "num_local_experts")


def refuse_environment(environ: Mapping[str, str], *, allow: bool) -> None:
    """Refuse an environment in which vLLM's server takes weights from others than Weft.

    Args:
        environ: Of this process; vLLM reads the same.
        allow: Warn instead.

    Raises:
        UnsupportedError: Names the variables and the way out.
    """
    opening = [name for name in _OPENING if environ.get(name, "").strip().lower() not in _OFF]
    if not opening:
        return
    opens = "; ".join(f"{name} opens {_OPENING[name]}" for name in opening)
    if allow:
        _log.warning("versions do not vouch for what these endpoints change: %s", opens)
        return
    raise UnsupportedError(
        f"{opens}: they change weights behind Weft's back, and answers would still carry its "
        f"versions; unset {' and '.join(opening)}, or say --allow-unversioned-changes"
    )


def refuse_sleep_without_gpu() -> None:
    """Refuse sleep where the engine has no memory of a GPU to give back.

    Raises:
        UnsupportedError: This machine has no GPU, or none that vLLM can do so on.
    """
    platform = importlib.import_module("vllm.platforms").current_platform
    if not platform.is_sleep_mode_available():
        raise UnsupportedError(
            "--enable-sleep: vLLM has no sleep mode on this machine; start the replica without it"
        )


def refuse_backend(choice: BackendChoice) -> None:
    """Refuse a backend that no worker on this machine could use.

    Raises:
        UnsupportedError: Says why, and the way out.
    """
    why = ""
    if choice == NCCL:
        platform = importlib.import_module("vllm.platforms").current_platform
        why = "" if platform.is_cuda() else "it moves weights between NVIDIA GPUs"
    elif choice == ONE_SIDED:
        why = why_unavailable()
    if why:
        raise UnsupportedError(
            f"--backend {choice}: {why}; leave it out to take what all have, or say gloo"
        )


def refuse_unsupported(args: Namespace) -> None:
    """Refuse what would make a replica wrong.

    Raises:
        UnsupportedError: Names the argument and the way out.
    """
    if (getattr(args, "data_parallel_size", 1) or 1) > 1:
        raise UnsupportedError(
            f"--data-parallel-size {args.data_parallel_size}: one engine a replica; start more "
            "replicas instead, the pool is the data parallelism"
        )
    if (getattr(args, "pipeline_parallel_size", 1) or 1) > 1:
        raise UnsupportedError(
            f"--pipeline-parallel-size {args.pipeline_parallel_size}: no rank would hold all "
            "layers, which Weft cannot load yet; use --tensor-parallel-size"
        )
    if getattr(args, "api_server_count", None) and args.api_server_count > 1:
        raise UnsupportedError(
            f"--api-server-count {args.api_server_count}: adapters are made known to one API "
            "server, which shares the replica's process"
        )
    if getattr(args, "nnodes", 1) and getattr(args, "nnodes", 1) > 1:
        raise UnsupportedError("--nnodes: the ranks of a replica must share one machine")
    for flag in ("headless", "grpc", "uds"):
        if getattr(args, flag, None):
            raise UnsupportedError(f"--{flag}: the replica serves OpenAI's API over TCP")


def refuse_keep(args: Namespace) -> None:
    """Refuse to keep running requests where their blocks could be found elsewhere, or where
    another scheduler is asked for than vLLM's.

    Raises:
        UnsupportedError: Names the argument and the way out.
    """
    for name in ("scheduler_cls", "kv_transfer_config", "kv_offloading_size"):
        if getattr(args, name, None):
            raise UnsupportedError(
                f"--{name.replace('_', '-')} with --running-requests keep: blocks of the KV cache "
                "that running requests keep are told apart by vLLM's own scheduler, in the "
                "engine's own cache; use --running-requests recompute"
            )


def refuse_experts_without_triton(args: Namespace) -> None:
    """Refuse LoRA on a mixture of experts where vLLM's engine would fail minutes later:
    its layers for that need Triton, which CPU builds lack. Reads the model's config.

    Raises:
        UnsupportedError: Names the model and the way out.
    """
    if not getattr(args, "enable_lora", False) or not _lacks_triton():
        return
    experts = num_experts(_model_config(args))
    if experts:
        raise UnsupportedError(
            f"--enable-lora with {args.model}, a mixture of {experts} experts, on a CPU: vLLM has "
            "no LoRA layers for experts without Triton; start without --enable-lora, which takes "
            "pushes of the base, or on a GPU"
        )


def num_experts(hf_config: Any) -> int:
    """How many experts a layer of the model has at most; 0 for a dense one, or for None."""
    if hf_config is None:
        return 0
    config = hf_config.get_text_config()
    found = next((value for name in _NUM_EXPERTS if (value := getattr(config, name, None))), 0)
    return int(max(found, default=0) if isinstance(found, list) else found)


def close_endpoints(app: Any) -> None:
    """Take away vLLM's endpoints that would change the engine under Weft; they answer 404."""
    routes = app.router.routes
    routes[:] = [route for route in routes if getattr(route, "path", "") not in _CLOSED]


def _lacks_triton() -> bool:
    platform: Any = importlib.import_module("vllm.platforms").current_platform
    triton: Any = importlib.import_module("vllm.triton_utils")
    return bool(platform.is_cpu()) and not triton.HAS_TRITON


def _model_config(args: Namespace) -> Any:
    """transformers' config of the model; None if it cannot be read: vLLM says why."""
    get_config = importlib.import_module("vllm.transformers_utils.config").get_config
    try:
        return get_config(args.model, args.trust_remote_code, args.revision)
    except Exception:  # noqa: BLE001 - of any kind, from code that comes with the model
        return None
