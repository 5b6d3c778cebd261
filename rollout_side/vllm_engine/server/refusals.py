"""Refusals of a replica before its engine starts, and the vLLM endpoints that it closes.

Each refused setting would change weights without a version, or fail minutes later.
"""

from __future__ import annotations

import contextlib
import importlib
import itertools
import logging
import re
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollout_side.vllm_engine.compat import bridges
from weft_rl.contract.backends import BackendChoice
from weft_rl.contract.errors import InvalidRequestError, UnsupportedError, WeftError

_log = logging.getLogger(__name__)

#: Environment variables of vLLM that open endpoints which change weights, and those endpoints.
_OPENING = {
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "/v1/load_lora_adapter and the adapter resolvers",
    "VLLM_SERVER_DEV_MODE": "/collective_rpc, /update_weights, /sleep and others",
}
#: Files of which a model's directory has one; the first is the usual one.
_MODEL_FILES = ("config.json", "params.json", "model_index.json")
_MAX_CHARS = 500
#: vLLM's words, 0.26 to 0.33, for an engine whose process ended as it started.
_ENGINE_ENDED = "Engine core initialization failed"
_OFF = {"", "0", "false", "no", "off"}
#: Endpoints of vLLM that are removed: they would change the engine's workers.
_CLOSED = frozenset({"/scale_elastic_ep"})
#: Connector of vLLM's whose ``reset_cache`` empties all its blocks, if they are in this process:
#: its tiers of files and of other machines keep theirs.
_RESETTABLE = "OffloadingConnector"
_RESETTABLE_SPEC = "CPUOffloadingSpec"


@dataclass(frozen=True, kw_only=True)
class RefusedOption:
    """Option of vLLM that a replica refuses."""

    why: str
    """Reason, and the way out."""
    short: str = ""
    """Name in short."""
    taken: tuple[str, ...] = ()
    """Values with which the engine is what it is without the argument."""


_OVER_TCP = "the replica serves OpenAI's API over TCP; leave it out"
_ONE_ENGINE = "a replica has one engine; start more replicas instead"
_ONE_OF_ONE = (
    "it is for one of several engines, and a replica has one; leave it out, and start more replicas"
)
_ONE_HOST = (
    "a replica is one host, whose ranks map what one of them has received; leave it out, and start "
    "a replica on each host"
)
#: Options of vLLM that are refused, by name. The chart has the same in files/vllm_options.yaml.
REFUSED_OPTIONS: Mapping[str, RefusedOption] = {
    "--data-parallel-size": RefusedOption(short="-dp", taken=("1",), why=_ONE_ENGINE),
    "--data-parallel-size-local": RefusedOption(short="-dpl", taken=("1",), why=_ONE_ENGINE),
    "--data-parallel-rank": RefusedOption(short="-dpn", why=_ONE_OF_ONE),
    "--data-parallel-start-rank": RefusedOption(short="-dpr", why=_ONE_OF_ONE),
    "--data-parallel-address": RefusedOption(short="-dpa", why=_ONE_OF_ONE),
    "--data-parallel-rpc-port": RefusedOption(short="-dpp", why=_ONE_OF_ONE),
    "--data-parallel-backend": RefusedOption(short="-dpb", taken=("mp",), why=_ONE_OF_ONE),
    "--data-parallel-hybrid-lb": RefusedOption(short="-dph", why=_ONE_OF_ONE),
    "--data-parallel-external-lb": RefusedOption(short="-dpe", why=_ONE_OF_ONE),
    "--data-parallel-multi-port-external-lb": RefusedOption(short="-dpm", why=_ONE_OF_ONE),
    "--pipeline-parallel-size": RefusedOption(
        short="-pp",
        taken=("1",),
        why="Weft cannot load ranks that lack layers; use --tensor-parallel-size",
    ),
    "--prefill-context-parallel-size": RefusedOption(
        short="-pcp",
        taken=("1",),
        why=(
            "Weft never loaded ranks that hold the same part of a model; use --tensor-parallel-size"
        ),
    ),
    "--api-server-count": RefusedOption(
        short="-asc",
        taken=("1",),
        why="a replica has one API server, in its own process; leave it out",
    ),
    "--nnodes": RefusedOption(short="-n", taken=("1",), why=_ONE_HOST),
    "--node-rank": RefusedOption(short="-r", taken=("0",), why=_ONE_HOST),
    "--master-addr": RefusedOption(taken=("127.0.0.1",), why=_ONE_HOST),
    "--master-port": RefusedOption(taken=("29501",), why=_ONE_HOST),
    "--distributed-executor-backend": RefusedOption(
        taken=("mp", "uni"),
        why=(
            "the ranks of a replica are processes that vLLM itself starts on one host (mp, uni), "
            "and map what one of them has received; leave it out"
        ),
    ),
    "--headless": RefusedOption(why=_OVER_TCP),
    "--grpc": RefusedOption(why=_OVER_TCP),
    "--uds": RefusedOption(why=_OVER_TCP),
    "--enable-eplb": RefusedOption(
        why=(
            "vLLM moves experts between ranks as it serves: its loader puts those of a base where "
            "they were at the start, and the factors of adapters on experts stay where they were, "
            "so that tokens would go to other experts, or adapters, than those they chose; leave "
            "it out"
        )
    ),
    "--enable-elastic-ep": RefusedOption(
        why="vLLM adds and removes ranks as it serves, which would lack a base; leave it out"
    ),
    "--enable-mixed-moe-lora-format": RefusedOption(
        why=(
            "Weft takes adapters of experts in both forms without it, and tells them apart by "
            "itself; leave it out"
        )
    ),
    "--enable-moe-shared-loras": RefusedOption(
        why="Weft knows no adapters whose experts share a factor; leave it out"
    ),
    "--offload-group-size": RefusedOption(
        taken=("0",),
        why=(
            "before each use vLLM copies such layers from the host's memory, where its reload puts "
            "no base: answers would be mixed; leave it out"
        ),
    ),
}
#: Environment variables by which vLLM makes an engine one of several, and the value that does not.
_ONE_OF_SEVERAL = {"VLLM_DP_SIZE": "1", "VLLM_DP_RANK": "0"}
# Names in a model's config, of which it has at most one.
_NUM_EXPERTS = ("num_experts", "moe_num_experts", "n_routed_experts", "num_local_experts")


def refuse_environment(environ: Mapping[str, str], *, allow: bool) -> None:
    """Refuse an environment in which vLLM's server takes weights not only from Weft, or its engine
    is one of several.

    Args:
        environ: Environment of this process; vLLM reads the same.
        allow: Whether to warn of the former instead.
    """
    for name, taken in _ONE_OF_SEVERAL.items():
        if (given := environ.get(name, "").strip()) not in ("", taken):
            raise UnsupportedError(
                f"{name}={given} is for one of several engines, and a replica has one; unset "
                f"{name}, and start more replicas"
            )
    opening = [name for name in _OPENING if environ.get(name, "").strip().lower() not in _OFF]
    if not opening:
        return
    opens = "; ".join(f"{name} opens {_OPENING[name]}" for name in opening)
    if allow:
        _log.warning("these endpoints change weights without a version: %s", opens)
        return
    raise UnsupportedError(
        f"{opens}: they would change weights while answers carry the old version; unset "
        f"{' and '.join(opening)}, or give --allow-unversioned-changes"
    )


def refuse_sleep_without_gpu() -> None:
    """Refuse sleep on a machine without a GPU whose memory could be freed."""
    platform = importlib.import_module("vllm.platforms").current_platform
    if not platform.is_sleep_mode_available():
        raise UnsupportedError(
            "--enable-sleep: vLLM has no sleep mode on this machine; start the replica without it"
        )


def refuse_backend(choice: BackendChoice) -> None:
    """Refuse a backend that no worker on this machine could use."""
    if choice == "auto":
        return
    import torch  # not where the options alone are read: the chart's tests have none

    from weft_rl.transport.backends import why_unavailable

    platform = importlib.import_module("vllm.platforms").current_platform
    if why := why_unavailable(choice, torch.device("cuda" if platform.is_cuda() else "cpu")):
        raise UnsupportedError(
            f"--backend {choice} cannot be used: {why}; leave it out, or choose gloo"
        )


def refuse_unsupported(args: Namespace) -> None:
    """Refuse arguments of vLLM that a replica cannot honour."""
    for name, refused in REFUSED_OPTIONS.items():
        given = getattr(args, name.removeprefix("--").replace("-", "_"), None)
        if given is None or given is False or str(given) in ("", *refused.taken):
            continue
        value = "" if given is True else f" {given}"
        raise UnsupportedError(f"{name}{value}: {refused.why}")


def refuse_missing_model(model: str) -> None:
    """Refuse a model path that does not exist, or is no model."""
    path = Path(model).expanduser()
    is_path = path.is_absolute() or model.startswith((".", "~")) or path.is_dir()
    if "://" in model or not is_path:
        return
    if not path.exists():
        raise InvalidRequestError(f"there is no model at {path}")
    if path.is_dir() and not any((path / name).exists() for name in _MODEL_FILES):
        raise InvalidRequestError(
            f"there is no model at {path}: the directory has no {_MODEL_FILES[0]}"
        )


@contextlib.contextmanager
def plain_errors(model: str) -> Iterator[None]:
    """Turn vLLM's errors about the model or its arguments into errors of one sentence. vLLM raises
    them before it starts its engine's processes. Any other error passes."""
    try:
        yield
    except WeftError:
        raise
    except Exception as error:
        missing = [e for e in (error, *_causes(error)) if _is_missing_model(e)]
        if missing:
            why = f"it is no directory here, and {_first_words(missing[-1])}"
            raise InvalidRequestError(f"the model {model!r} cannot be found: {why}") from error
        if isinstance(error, ValueError):  # pydantic's, too
            said = _first_words(error)
            raise InvalidRequestError(
                f"vLLM refuses {model!r}, or its arguments: {said}"
            ) from error
        if isinstance(error, RuntimeError) and _ENGINE_ENDED in str(error):
            raise UnsupportedError(
                f"vLLM cannot start the engine of {model!r}: its processes ended, with the reason "
                "above"
            ) from error
        raise


@contextlib.contextmanager
def plain_argument_errors(words: Sequence[str]) -> Iterator[None]:
    """Turn whatever vLLM raises as it reads its arguments into an error of one sentence.

    Args:
        words: Arguments. Only the names of options are told: a value may be an API key.
    """
    names = " ".join(word.partition("=")[0] for word in words if word.startswith("--"))
    try:
        yield
    except SystemExit as stop:
        if stop.code in (0, None):
            raise  # --help
        raise InvalidRequestError(
            f"vLLM refused its arguments ({names}); its message is above"
        ) from None
    except Exception as error:
        raise InvalidRequestError(
            f"vLLM refused its arguments ({names}): {_without_secrets(_first_words(error), words)}"
        ) from error


#: Options whose values are shown nowhere.
_SECRETS = re.compile(r"--[a-z-]*(?:key|token|password|secret)$")


def _without_secrets(said: str, words: Sequence[str]) -> str:
    """Return a text without the values of options that are secrets."""
    for i, word in enumerate(words):
        name, equals, value = word.partition("=")
        if _SECRETS.match(name.replace("_", "-")):
            for secret in [value] if equals else _values(words[i + 1 :]):
                said = said.replace(secret, "…") if secret else said
    return said


def _values(words: Sequence[str]) -> list[str]:
    """Return the words up to the next option, and the first one whatever it is."""
    return [*words[:1], *itertools.takewhile(lambda word: not word.startswith("--"), words[1:])]


def _is_missing_model(error: BaseException) -> bool:
    """Return whether an error means that a model is missing. Known are errors of the hub's client
    and of transformers."""
    if type(error).__module__.startswith("huggingface_hub"):
        return True
    return isinstance(error, OSError) and "model identifier" in str(error)


def _causes(error: BaseException) -> Iterator[BaseException]:
    while (cause := error.__cause__ or error.__context__) is not None:
        yield cause
        error = cause


def _first_words(error: BaseException) -> str:
    errors = getattr(error, "errors", None)  # of pydantic's
    found = errors() if callable(errors) else []
    said = str(found[0].get("msg", "")) if found else str(error)
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    return (lines[0] if lines else type(error).__name__)[:_MAX_CHARS]


def refuse_keep(args: Namespace) -> None:
    """Refuse arguments that contradict ``--running-requests keep``. They let the requests' blocks
    be found elsewhere, or ask for another scheduler than vLLM's."""
    for name in ("scheduler_cls", "kv_transfer_config", "kv_offloading_size"):
        if getattr(args, name, None):
            raise UnsupportedError(
                f"--{name.replace('_', '-')} with --running-requests keep: only vLLM's own "
                "scheduler can keep blocks of running requests apart, in the engine's own cache; "
                "use --running-requests recompute"
            )


def refuse_caches_beyond_reach(args: Namespace, environ: Mapping[str, str]) -> None:
    """Refuse caches of computed values that a switch cannot empty. They are found by tokens or an
    image alone, so answers would be of a former base."""
    name, flag = _connector(args, environ)
    why = _why_beyond_reach(name, args)
    if why:
        raise UnsupportedError(
            f"{flag} {name}: {why}. Blocks of the KV cache that a former base has computed would "
            "be used under a new one; start the replica without it, or offload to the host's "
            "memory: --kv-offloading-size GIB"
        )
    if getattr(args, "ec_transfer_config", None):
        raise UnsupportedError(
            "--ec-transfer-config: a switch of the base cannot empty this cache of encoder "
            "outputs, which would be used under the next base; start the replica without it"
        )
    if getattr(args, "calculate_kv_scales", False):
        raise UnsupportedError(
            "--calculate-kv-scales: the scales of the KV cache are measured under the first base "
            "and kept for the next ones; start the replica without it"
        )


def _connector(args: Namespace, environ: Mapping[str, str]) -> tuple[str, str]:
    """Return the names of the KV connector that vLLM will take, if any, and of its argument.

    Source: vllm.config.VllmConfig._post_init_kv_transfer_config.
    """
    if getattr(args, "kv_offloading_size", None) is not None:
        if getattr(args, "kv_offloading_backend", "native") != "native":
            return "LMCacheMPConnector", "--kv-offloading-backend"
        is_simple = environ.get("VLLM_USE_SIMPLE_KV_OFFLOAD", "").strip().lower() not in _OFF
        name = "SimpleCPUOffloadConnector" if is_simple else _RESETTABLE
        return name, "VLLM_USE_SIMPLE_KV_OFFLOAD" if is_simple else "--kv-offloading-size"
    transfer = getattr(args, "kv_transfer_config", None)
    return (getattr(transfer, "kv_connector", None) or ""), "--kv-transfer-config"


def _why_beyond_reach(name: str, args: Namespace) -> str:
    """Return why a switch cannot empty a connector of every block; empty if it can."""
    if not name:
        return ""
    if name != _RESETTABLE:
        return "a switch cannot empty it of all blocks, those of other replicas included"
    transfer = getattr(args, "kv_transfer_config", None)
    if getattr(transfer, "kv_connector_module_path", None):
        return "it is not vLLM's own, so its reset may leave blocks"
    extra = getattr(transfer, "kv_connector_extra_config", None) or {}
    spec = extra.get("spec_name", _RESETTABLE_SPEC)
    if spec != _RESETTABLE_SPEC:
        return (
            f"its {spec} keeps blocks in files or on other machines, which a reset does not empty"
        )
    v1 = "vllm.distributed.kv_transfer.kv_connector.v1"
    base = importlib.import_module(f"{v1}.base").KVConnectorBase_V1
    own = getattr(importlib.import_module(f"{v1}.offloading_connector"), name)
    if own.reset_cache is getattr(base, "reset_cache", None):
        return "this version of vLLM cannot empty it at a switch"
    return ""


def refuse_ranks_on_cpu(args: Namespace) -> None:
    """Refuse splits of a model over ranks that vLLM cannot serve on a CPU. Its engine would fail
    minutes later, or at the first request. Reads the model's config."""
    if not bridges.is_cpu():
        return
    if (number := getattr(args, "decode_context_parallel_size", None) or 1) > 1:
        raise UnsupportedError(
            f"--decode-context-parallel-size {number} on a CPU: vLLM has no attention there whose "
            "ranks share a context; leave it out"
        )
    num_ranks = getattr(args, "tensor_parallel_size", None) or 1
    if getattr(args, "enable_expert_parallel", False) and num_ranks > 1:
        experts = num_experts(_model_config(args))
        if experts:
            raise UnsupportedError(
                f"--enable-expert-parallel with {args.model}, a mixture of {experts} experts, on "
                f"{num_ranks} ranks of a CPU: vLLM's kernel there looks for every expert on every "
                "rank, and ends the engine at the first request; leave it out, "
                "--tensor-parallel-size splits each expert, or start on GPUs"
            )


def refuse_experts_without_triton(args: Namespace) -> None:
    """Refuse LoRA on a mixture of experts where vLLM lacks Triton, as CPU builds do. vLLM's LoRA
    layers for experts need it: the engine would fail minutes later. Reads the model's config."""
    if not getattr(args, "enable_lora", False) or not bridges.is_cpu() or _has_triton():
        return
    experts = num_experts(_model_config(args))
    if experts:
        raise UnsupportedError(
            f"--enable-lora with {args.model}, a mixture of {experts} experts, on a CPU: vLLM's "
            "LoRA layers for experts need Triton; start without --enable-lora (pushes of the base "
            "still work), or on a GPU"
        )


def num_experts(hf_config: Any) -> int:
    """Return the largest number of experts in a layer; 0 for a dense model, or for None."""
    if hf_config is None:
        return 0
    config = hf_config.get_text_config()
    found = next((value for name in _NUM_EXPERTS if (value := getattr(config, name, None))), 0)
    return int(max(found, default=0) if isinstance(found, list) else found)


def close_endpoints(app: Any) -> None:
    """Remove vLLM's endpoints that would change the engine; they answer 404."""
    routes = app.router.routes
    routes[:] = [route for route in routes if getattr(route, "path", "") not in _CLOSED]


def _has_triton() -> bool:
    return bool(importlib.import_module("vllm.triton_utils").HAS_TRITON)


def _model_config(args: Namespace) -> Any:
    """Return transformers' config of the model; None if it cannot be read, which vLLM reports."""
    get_config = importlib.import_module("vllm.transformers_utils.config").get_config
    try:
        return get_config(args.model, args.trust_remote_code, args.revision)
    except Exception:  # noqa: BLE001 - of any kind, from code that comes with the model
        return None
