"""Capabilities of a vLLM engine and tensors of its base model, as a replica declares them."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rollout_side.config import RolloutConfig
from rollout_side.vllm_engine.compat import bridges
from rollout_side.vllm_engine.loading.linear_modules import MemoryModule
from rollout_side.vllm_engine.server.architecture import ArchitectureModel
from rollout_side.vllm_engine.worker.state import WorkerDeclaration
from weft_rl import __version__
from weft_rl.checkpoints.files import local_model_dir, weight_files
from weft_rl.contract.capabilities import Capabilities
from weft_rl.contract.draft_layers import (
    DRAFT_MODEL,
    MAX_DRAFT_PREFIXES,
    draft_prefixes,
    is_draft,
    why_too_large,
)
from weft_rl.contract.errors import UnsupportedError
from weft_rl.contract.tensors import DataType, Reference, TensorMeta, is_kv_scale

_log = logging.getLogger(__name__)

# Tensors of old checkpoints that are computed, never trained; loaders skip them.
_COMPUTED = (".rotary_emb.inv_freq", ".rotary_emb.cos_cached", ".rotary_emb.sin_cached")

_DRAFTS_WITHOUT_WEIGHTS = frozenset({"ngram", "ngram_gpu", "suffix"})


def build_reference(model_dir: Path | None, hf_config: Any, served_dtype: DataType) -> Reference:
    """Describe the served model.

    Args:
        model_dir: Directory of its files. If None, or without safetensors files, the names are
            those that transformers would save.
        hf_config: transformers' config of the model.
        served_dtype: Dtype that the engine serves floats in.

    Returns:
        Every tensor a push must hold, in order of name, with the dtype that a sender
        casts it to.
    """
    architecture = (getattr(hf_config, "architectures", None) or ["unknown"])[0]
    metas = _from_files(model_dir) if model_dir is not None else []
    metas = metas or _from_meta_model(hf_config)
    text_config = hf_config.get_text_config()
    tied = bool(getattr(text_config, "tie_word_embeddings", False))
    num_layers = int(getattr(text_config, "num_hidden_layers", 0) or 0)
    drafts = draft_prefixes((meta.name for meta in metas), num_layers)
    kept = [
        meta
        for meta in metas
        if not _is_skipped(meta.name, tied=tied) and not is_draft(meta.name, drafts)
    ]
    kept.sort(key=lambda meta: meta.name)
    return Reference(architecture, served_dtypes(kept, served_dtype), draft_prefixes=drafts)


def draft_files(
    vllm_config: Any, model_dir: Path | None, reference: Reference
) -> tuple[TensorMeta, ...]:
    """Return the tensors that the files of the model that drafts tokens hold, by their names in a
    base; none where there is no such model, or its safetensors files are not on this machine."""
    drafting = vllm_config.speculative_config
    own = getattr(drafting, "draft_model_config", None)
    if own is None or not draft_method(drafting):
        return ()
    in_checkpoint = bridges.draft_is_in_checkpoint(drafting, vllm_config.model_config)
    download_dir = bridges.draft_load_config(vllm_config).download_dir
    found = model_dir if in_checkpoint else local_model_dir(own.model, own.revision, download_dir)
    try:
        metas = _from_files(found) if found is not None else []
    except UnsupportedError as error:
        _log.warning("the model that drafts tokens stays as it is: %s", error.message)
        return ()
    if in_checkpoint:
        metas = [meta for meta in metas if is_draft(meta.name, reference.draft_prefixes)]
    else:
        metas = [replace(meta, name=DRAFT_MODEL + meta.name) for meta in metas]
    why = why_too_large(len(metas), sum(len(meta.name.encode()) for meta in metas))
    if found is None or not metas:
        why = f"has no safetensors files on this machine ({own.model!r})"
    if why:
        _log.warning("the model that drafts tokens stays as it is: it %s", why)
        return ()
    metas.sort(key=lambda meta: meta.name)
    return served_dtypes(metas, data_type(own.dtype))


def with_draft(
    reference: Reference, files: Sequence[TensorMeta], loaded: Collection[str]
) -> Reference:
    """Return a reference with the model that drafts tokens.

    Args:
        files: Tensors of that model's files.
        loaded: Names of those that it loads; none where no base can bring it.
    """
    unused = (meta.name for meta in files if meta.name not in loaded)
    more = tuple(name for name in unused if not is_draft(name, reference.draft_prefixes))
    prefixes = reference.draft_prefixes + more
    if loaded and len(prefixes) > MAX_DRAFT_PREFIXES:
        _log.warning(
            "the model that drafts tokens stays as it is: it does not load %d tensors of its files "
            "(%r is one)",
            len(more),
            more[0],
        )
    if not loaded or len(prefixes) > MAX_DRAFT_PREFIXES:
        return reference
    draft = tuple(meta for meta in files if meta.name in loaded)
    return replace(reference, draft=draft, draft_prefixes=prefixes)


def memory_modules(hf_config: Any, reference: Reference) -> list[MemoryModule]:
    """Return the linear modules of the served architecture as a trainer has them in memory; none if
    transformers does not know it: adapters then have the names of files or of vLLM."""
    try:
        return ArchitectureModel(hf_config).linear_modules(reference)
    except UnsupportedError as error:
        _log.info("adapters are taken by the names in files and vLLM's alone: %s", error.message)
        return []


def served_dtypes(metas: Iterable[TensorMeta], served_dtype: DataType) -> tuple[TensorMeta, ...]:
    """Replace stored dtypes by those to be sent.

    Floats are sent as they are served, except those that the checkpoint keeps wider than most of
    its elements (a float32 router bias among bfloat16 weights), and scales: of weights that it
    holds quantised, beside other types than floats, and of the KV cache. These keep their own, and
    so does anything else.
    """
    metas = tuple(metas)
    sizes: Counter[DataType] = Counter()
    quantised: set[str] = set()
    for meta in metas:
        if meta.dtype.is_float:
            sizes[meta.dtype] += meta.num_elements
        else:
            quantised.add(_module_of(meta.name))
    usual = sizes.most_common(1)[0][0] if sizes else served_dtype

    def dtype(meta: TensorMeta) -> DataType:
        keeps = (
            not meta.dtype.is_float
            or meta.dtype.itemsize_bytes > usual.itemsize_bytes
            or _module_of(meta.name) in quantised
            or is_kv_scale(meta.name)
        )
        return meta.dtype if keeps else served_dtype

    return tuple(TensorMeta(meta.name, dtype(meta), meta.shape) for meta in metas)


def _module_of(name: str) -> str:
    return name.rpartition(".")[0]


def _is_skipped(name: str, *, tied: bool) -> bool:
    return name.endswith(_COMPUTED) or (tied and name == "lm_head.weight")


def _from_files(model_dir: Path) -> list[TensorMeta]:
    """Read names, shapes and dtypes from the headers; no tensor is read."""
    from safetensors import safe_open

    metas: dict[str, TensorMeta] = {}
    for path in weight_files(model_dir):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - not a mapping
                part = file.get_slice(name)
                dtype = DataType.of_safetensors(str(part.get_dtype()))
                if dtype is None:
                    raise UnsupportedError(
                        f"{name!r} in {path} is {part.get_dtype()}, which cannot be pushed"
                    )
                metas[name] = TensorMeta(name, dtype, tuple(part.get_shape()))
    return list(metas.values())


def _from_meta_model(hf_config: Any) -> list[TensorMeta]:
    """Return the tensors as transformers would save them."""
    try:
        saved = ArchitectureModel(hf_config).saved
    except UnsupportedError as error:
        raise UnsupportedError(
            f"the served model has no safetensors files, and {error.message}; serve it from "
            "safetensors files"
        ) from error
    return [TensorMeta(name, data_type(t.dtype), tuple(t.shape)) for name, t in saved.items()]


def data_type(torch_dtype: object) -> DataType:
    """Return the contract's name for a torch dtype (``torch.bfloat16``)."""
    return DataType[str(torch_dtype).removeprefix("torch.").upper()]


def lora_modules(expected: Iterable[str]) -> tuple[str, ...]:
    """Return the last name components, sorted, of modules that can carry a LoRA.

    Args:
        expected: Modules as vLLM's loader names them (``q_proj``, ``experts.0.up_proj``). Those of
            experts are left out: ``lora_on_experts`` stands for them.
    """
    return tuple(sorted({name for name in expected if not is_expert(name)}))


def is_expert(module: str) -> bool:
    """Return whether a module, named by vLLM's loader, is one of experts."""
    return module.partition(".")[0] == "experts"


def draft_method(speculative_config: Any) -> str:
    """Return how an engine drafts tokens with a model of its own; empty if it does not."""
    method = "" if speculative_config is None else str(speculative_config.method)
    return "" if method in _DRAFTS_WITHOUT_WEIGHTS else method


def make_capabilities(
    vllm_config: Any,
    reference: Reference,
    settings: RolloutConfig,
    declared: Sequence[WorkerDeclaration],
    *,
    engine_version: str,
    served_names: Iterable[str],
) -> Capabilities:
    """Make the capabilities that a replica declares."""
    first = declared[0]
    model, lora = vllm_config.model_config, vllm_config.lora_config
    base_dtype = data_type(model.dtype)
    return Capabilities(
        engine_version=engine_version,
        weft_version=__version__,
        base_fingerprint=reference.fingerprint,
        architecture=reference.architecture,
        base_dtype=base_dtype,
        backends=first.backends,
        trial_name=first.trial_name,
        gpu_uuids=tuple(each.gpu_uuid for each in declared if each.gpu_uuid),
        nccl_network=first.nccl_network,
        adapter_dtype=base_dtype if lora is None else data_type(lora.lora_dtype),
        tensor_parallel_size=vllm_config.parallel_config.tensor_parallel_size,
        lora_enabled=lora is not None,
        max_lora_rank=0 if lora is None else lora.max_lora_rank,
        lora_modules=lora_modules(first.expected_modules),
        lora_unapplied=first.lora_unapplied,
        base_refusal=next((each.base_refusal for each in declared if each.base_refusal), ""),
        lora_on_experts=any(is_expert(name) for name in first.expected_modules),
        staging_capacity_bytes=first.staging_bytes,
        adapter_capacity_bytes=settings.adapter_memory_bytes,
        loads_in_place=settings.staging == "in-place",
        can_sleep=bool(model.enable_sleep_mode),
        draft_method=draft_method(vllm_config.speculative_config),
        draft_fingerprint=reference.draft_fingerprint,
        reference_digest=reference.details_digest,
        quantization=model.quantization or "",
        logprobs_mode=str(model.logprobs_mode),
        logprobs_truncated=str(model.logprobs_mode).startswith("processed_"),
        running_requests=settings.running_requests,
        served_names=tuple(served_names),
    )
