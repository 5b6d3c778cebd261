"""Names in vLLM that Weft calls, reads or replaces, each by all that it has been called.

A name that vLLM has renamed is often found by nobody: ``getattr(manager, name, None)`` then skips a
check without a word. So every such name is declared here, and looked for in vLLM's files before an
engine starts: nothing is imported for it.
"""

from __future__ import annotations

import importlib
import re
from dataclasses import dataclass
from pathlib import Path

from weft_rl.contract.errors import UnsupportedError

#: Releases that Weft is tested with, oldest first; it runs with no others.
RELEASES = ((0, 26), (0, 32), (0, 33))


@dataclass(frozen=True)
class VllmPlace:
    """Place in vLLM that Weft depends on."""

    use: str
    """Use that Weft makes of it, as a clause after "by which Weft"."""
    names: tuple[str, ...]
    """Alternatives, of which one is needed: ``module:Class.member`` below ``vllm``, or
    ``module:.name`` of an attribute that the module reads or sets on objects of others."""
    since: tuple[int, int] = RELEASES[0]
    """First of ``RELEASES`` that has it; Weft does without in former ones."""
    until: tuple[int, int] = (0, 34)
    """First release that does without."""


# Code of a module, as opposed to that of a class, or to the end of a class's first lines.
_AT_MARGIN = re.compile(r"^[a-zA-Z@]", re.M)

_ARGUMENTS = ("entrypoints.common.cli_args", "entrypoints.launchers.cli_args")
_LAUNCHERS = "entrypoints.launchers.api_server"
_SERVER = "entrypoints.openai.api_server"
_MANAGER = "lora.model_manager:LoRAModelManager"
_LOADER = "lora.worker_manager:WorkerLoRAManager"
_ASYNC = "v1.engine.async_llm:AsyncLLM"
_STATE = "v1.engine.output_processor:RequestState"
_RUNNER = "v1.worker.gpu_model_runner:GPUModelRunner"
_OPTIONS = "engine.arg_utils:EngineArgs"
_FILES = "model_executor.model_loader.default_loader"
_MOE = "model_executor.layers.fused_moe"
_SENDERS = (
    "multimodal.cache:MultiModalProcessorSenderCache",
    "multimodal.cache.lru:LruKeyReplicatedSenderCache",
)
_RELOAD = "model_executor.model_loader.reload"

PLACES = (
    # The OpenAI server.
    VllmPlace(
        "reads vLLM's arguments",
        tuple(f"{m}:make_arg_parser" for m in (*_ARGUMENTS, "entrypoints.openai.cli_args")),
    ),
    VllmPlace(
        "checks vLLM's arguments",
        tuple(
            f"{m}:validate_parsed_serve_args" for m in (*_ARGUMENTS, "entrypoints.openai.cli_args")
        ),
    ),
    VllmPlace(
        "starts an engine",
        (f"{_LAUNCHERS}.entry:build_async_engine_client", f"{_SERVER}:build_async_engine_client"),
    ),
    VllmPlace(
        "fills the server's state",
        (f"{_LAUNCHERS}.app_state:init_app_state", f"{_SERVER}:init_app_state"),
    ),
    VllmPlace("builds the server", ("entrypoints.launchers.app:build_app", f"{_SERVER}:build_app")),
    VllmPlace(
        "lists models",
        ("entrypoints.openai.models.serving:OpenAIServingModels.show_available_models",),
    ),
    VllmPlace(
        "finds a base model by name",
        ("entrypoints.openai.models.serving:OpenAIServingModels.is_base_model",),
    ),
    VllmPlace(
        "finds an adapter by name",
        ("entrypoints.openai.models.serving:OpenAIServingModels.lora_requests",),
    ),
    VllmPlace(
        "ends a request with a status",
        ("exceptions:GenerationError", "entrypoints.openai.engine.protocol:GenerationError"),
    ),
    VllmPlace("ends a request as retryable", ("exceptions:RetryableRequestError",), since=(0, 32)),
    VllmPlace("knows a client's mistake", ("exceptions:VLLMClientError",), since=(0, 32)),
    VllmPlace("knows that vLLM is full", ("exceptions:GracefulHTTPError",), since=(0, 32)),
    VllmPlace("knows a failed request", ("v1.engine.exceptions:EngineGenerateError",)),
    VllmPlace("knows a dead engine", ("v1.engine.exceptions:EngineDeadError",)),
    # Options that are refused, or that decide what is.
    *(
        VllmPlace(f"reads --{name.replace('_', '-')}", (f"{_OPTIONS}.{name}",))
        for name in (
            "decode_context_parallel_size",
            "ec_transfer_config",
            "enable_expert_parallel",
            "enable_lora",
            "enable_sleep_mode",
            "kv_offloading_backend",
            "kv_offloading_size",
            "kv_transfer_config",
            "load_format",
            "scheduler_cls",
            "tensor_parallel_size",
            "worker_extension_cls",
        )
    ),
    VllmPlace("reads --calculate-kv-scales", (f"{_OPTIONS}.calculate_kv_scales",), until=(0, 32)),
    # The engine, in the API process.
    VllmPlace("sends requests", ("v1.engine.core_client:AsyncMPClient.add_request_async",)),
    VllmPlace("pauses generation", ("v1.engine.core_client:AsyncMPClient.pause_scheduler_async",)),
    VllmPlace(
        "resumes generation", ("v1.engine.core_client:AsyncMPClient.resume_scheduler_async",)
    ),
    VllmPlace(
        "asks the engine's process", ("v1.engine.core_client:AsyncMPClient.call_utility_async",)
    ),
    VllmPlace("stops its output handler", (f"{_ASYNC}.output_handler",)),
    VllmPlace("leaves its own requests out of metrics", (f"{_ASYNC}.logger_manager",)),
    VllmPlace("admits requests for tokens", (f"{_ASYNC}.generate",)),
    VllmPlace("admits requests of pooling models", (f"{_ASYNC}.encode",)),
    VllmPlace("names the base in outputs", (f"{_ASYNC}.update_weight_version",), since=(0, 32)),
    VllmPlace("learns the base of each token", (f"{_STATE}.weight_version_starts",), since=(0, 32)),
    VllmPlace("knows who asked", (f"{_STATE}.external_req_id",)),
    VllmPlace("keeps an adapter that is used", (f"{_STATE}.lora_name",)),
    VllmPlace(
        "asks for pieces", ("sampling_params:SamplingParams.stream_interval",), since=(0, 32)
    ),
    *(
        VllmPlace(
            "knows which images the engine has", tuple(f"{cache}.{name}" for cache in _SENDERS)
        )
        for name in ("is_cached_item", "get_and_update_item", "_cache")
    ),
    VllmPlace("knows a request's images", ("v1.engine:EngineCoreRequest.mm_features",)),
    *(
        VllmPlace("knows an image", (f"multimodal.inputs:MultiModalFeatureSpec.{name}",))
        for name in ("data", "mm_hash", "identifier")
    ),
    VllmPlace("finds the cache of images", ("renderers.base:BaseRenderer.mm_processor_cache",)),
    VllmPlace("tries an engine with an image", ("renderers.base:BaseRenderer.get_mm_processor",)),
    VllmPlace(
        "knows what items a model takes",
        ("multimodal.processing.context:BaseProcessingInfo.allowed_mm_limits",),
    ),
    VllmPlace("sleeps in part", ("v1.executor.abstract:Executor.is_sleeping",)),
    # The engine's core.
    VllmPlace("keeps running requests", ("v1.core.sched.scheduler:Scheduler._preempt_request",)),
    VllmPlace(
        "keeps blocks apart",
        ("v1.request:Request.skip_reading_prefix_cache",),
    ),
    # A worker.
    VllmPlace("watches a step", ("v1.worker.worker_base:WorkerBase.execute_model",)),
    VllmPlace("watches sampling", ("v1.worker.worker_base:WorkerBase.sample_tokens",)),
    VllmPlace("finds the draft", (f"{_RUNNER}.get_draft_model", f"{_RUNNER}.drafter")),
    VllmPlace(
        "leaves a draft as it is",
        (
            "v1.spec_decode.llm_base_proposer:SpecDecodeBaseProposer."
            "parallel_drafting_hidden_state_tensor",
        ),
    ),
    VllmPlace(
        "drops what adapters derived from a base",
        ("v1.worker.lora_model_runner_mixin:LoRAModelRunnerMixin.reset_lora_state",),
        since=(0, 32),
    ),
    VllmPlace(
        "reads a checkpoint again",
        (f"{_FILES}:DefaultModelLoader.get_all_weights",),
    ),
    VllmPlace("reads a part of a file", ("config.load:LoadConfig.safetensors_load_strategy",)),
    VllmPlace("reads it without a word", ("config.load:LoadConfig.use_tqdm_on_load",)),
    VllmPlace(
        "knows what reads files whole", ("config.load:LoadConfig.model_loader_extra_config",)
    ),
    VllmPlace("knows a model's other files", (f"{_FILES}:.secondary_weights",)),
    VllmPlace("knows which files a model has", (f"{_FILES}:.allow_patterns_overrides",)),
    VllmPlace("finds a wrapped draft", ("compilation.cuda_graph:CUDAGraphWrapper.unwrap",)),
    VllmPlace("reads a draft's files", ("config.speculative:SpeculativeConfig.draft_load_config",)),
    VllmPlace("reloads layers", (f"{_RELOAD}.layerwise:get_layerwise_info",)),
    VllmPlace(
        "reloads buffers", (f"{_RELOAD}.types:LayerReloadingInfo.kernel_non_persistent_buffers",)
    ),
    VllmPlace("keeps proofs of reloads apart", ("envs:compile_factors",)),
    # Adapters.
    VllmPlace("loads adapters", (f"{_LOADER}._load_adapter",)),
    VllmPlace("tries an engine with an adapter", (f"{_LOADER}.add_dummy_lora",)),
    VllmPlace("shows a loader the model as built", ("lora.layers.base:BaseLayerWithLoRA",)),
    VllmPlace(
        "loads experts beside adapters",
        ("model_executor.layers.fused_moe.routed_experts:RoutedExperts.lora_base_layer_prefix",),
    ),
    VllmPlace(
        "renames an adapter's modules",
        (
            "model_executor.models.utils:WeightsMapper.get_rename_mapper",
            "model_executor.models.utils:WeightsMapper.get_unstacked_mapper",
        ),
    ),
    VllmPlace("divides experts", (f"{_MANAGER}.moe_ep_load_spec",)),
    VllmPlace("leaves out other ranks' experts", ("lora.lora_model:_is_remote_expert_key",)),
    VllmPlace(
        "scales by PEFT's patterns",
        ("lora.peft_helper:PEFTHelper.get_rank_and_scaling",),
        since=(0, 32),
    ),
    VllmPlace(
        "checks an adapter's experts", (f"{_MANAGER}._validate_moe_lora_format",), since=(0, 32)
    ),
    VllmPlace(
        "checks an adapter's heads",
        (
            f"{_MANAGER}._validate_classification_head_lora",
            f"{_MANAGER}._validate_modules_to_save",
        ),
        since=(0, 32),
    ),
    VllmPlace(
        "checks an adapter's head of tokens",
        (
            f"{_MANAGER}._validate_classification_head_lora",
            f"{_MANAGER}._validate_token_classification_lora",
        ),
        since=(0, 32),
    ),
    VllmPlace(
        "marks an adapter's slots", ("lora.layers.fused_moe:FusedMoEWithLoRA.adapter_enabled",)
    ),
    VllmPlace("knows a model's renames", ("lora.worker_manager:.hf_to_vllm_mapper",)),
    VllmPlace("leaves out modules", ("lora.worker_manager:.lora_skip_prefixes",)),
    # The CPU.
    VllmPlace("looks at prompts", (f"{_RUNNER}._get_prompt_logprobs_dict",)),
    VllmPlace("knows which prompts to look at", (f"{_RUNNER}.num_prompt_logprobs",)),
    VllmPlace(
        "computes a prompt's logits on a CPU",
        ("lora.punica_wrapper.punica_cpu:PunicaWrapperCPU.add_lora_logits",),
    ),
    VllmPlace(
        "finds a request's adapter",
        ("v1.worker.gpu_input_batch:InputBatch.request_lora_mapping",),
    ),
    VllmPlace("finds an adapter's slot", (f"{_MANAGER}.lora_index_to_id",)),
    VllmPlace(
        "finds a worker's adapters",
        ("v1.worker.lora_model_runner_mixin:LoRAModelRunnerMixin.lora_manager",),
    ),
    VllmPlace("prepares experts again", (f"{_MOE}.fused_moe_method_base:.moe_kernel",)),
    VllmPlace("packs a tied head again", ("model_executor.layers.utils:.cpu_linear",)),
    VllmPlace(
        "fills a packed weight again",
        (
            "model_executor.layers.attention.mla_attention:._cpu_skip_gemm_dispatch",
            "model_executor.kernels.linear.scaled_mm.cpu:._cpu_skip_gemm_dispatch",
        ),
        since=(0, 32),
    ),
    VllmPlace("masks rows on a CPU", ("lora.ops.torch_ops.lora_ops:bgmv_shrink",)),
)


def missing(root: Path, release: tuple[int, int]) -> list[VllmPlace]:
    """Return the places that a release should have, of which no name is found in its files.

    Args:
        root: Folder of the package ``vllm``.
        release: Its major and minor number.
    """
    sources: dict[str, str] = {}
    return [
        place
        for place in PLACES
        if place.since <= release < place.until
        and not any(has_name(root, name, sources) for name in place.names)
    ]


def check(version: str, release: tuple[int, int]) -> None:
    """Refuse a vLLM in which a name that Weft depends on cannot be found."""
    lost = missing(Path(str(importlib.import_module("vllm").__file__)).parent, release)
    if not lost:
        return
    names = " or ".join(f"vllm.{name.replace(':', '.')}" for name in lost[0].names)
    more = f" ({len(lost) - 1} more such)" if len(lost) > 1 else ""
    raise UnsupportedError(
        f"vLLM {version} has no {names}, by which Weft {lost[0].use}{more}: it is not the vLLM "
        "that this Weft was made for; install another release of it, or another Weft",
        metadata={"found": version},
    )


def has_name(root: Path, path: str, sources: dict[str, str] | None = None) -> bool:
    """Return whether the package has a name, as ``VllmPlace.names`` has it."""
    sources = {} if sources is None else sources
    module, _, name = path.partition(":")
    if module not in sources:
        sources[module] = _source(root, module)
    owner, dot, member = name.rpartition(".")
    if dot and not owner:
        return re.search(rf"[.\"']{member}\b", sources[module]) is not None
    if not owner:
        return _is_defined(member, sources[module])
    return _is_member(member, _body(owner, sources[module]))


def _source(root: Path, module: str) -> str:
    base = root.joinpath(*module.split("."))
    for file in (base.with_suffix(".py"), base / "__init__.py"):
        if file.is_file():
            return file.read_text(encoding="utf-8")
    return ""


def _body(name: str, source: str) -> str:
    begin = re.search(rf"^class {name}\b", source, re.M)
    if begin is None:
        return ""
    end = _AT_MARGIN.search(source, begin.end())
    return source[begin.start() : end.start() if end else len(source)]


def _is_defined(name: str, source: str) -> bool:
    """Return whether a module defines a name, or imports it to pass it on."""
    return bool(
        re.search(rf"^(?:async )?(?:def|class) {name}\b|^{name}\s*[:=]", source, re.M)
        or re.search(rf"^from \S+ import (?:\([^)]*\b{name}\b|.*\b{name}\b)", source, re.M)
    )


def _is_member(name: str, body: str) -> bool:
    """Return whether a class has a method, a field or an attribute that it sets itself."""
    return bool(
        re.search(
            rf"^\s+(?:async )?def {name}\b|^\s+{name}\s*[:=]|\bself\.{name}\s*(?::[^=\n]*)?=",
            body,
            re.M,
        )
    )
