"""Tensors of the served base model, by checkpoint name.

They are read from the headers of its safetensors files, since a checkpoint's names are what vLLM's
loaders take. Without such files they come from a model built without memory. Neither way needs an
engine.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from weft_rl.checkpoints.files import weight_files
from weft_rl.contract.errors import UnsupportedError
from weft_rl.contract.tensors import DataType, Reference, TensorMeta

# Tensors of old checkpoints that are computed, never trained; loaders skip them.
_COMPUTED = (".rotary_emb.inv_freq", ".rotary_emb.cos_cached", ".rotary_emb.sin_cached")


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

    Raises:
        UnsupportedError: Neither way works; says why.
    """
    architecture = (getattr(hf_config, "architectures", None) or ["unknown"])[0]
    metas = _from_files(model_dir) if model_dir is not None else []
    metas = metas or _from_meta_model(hf_config)
    tied = bool(getattr(hf_config.get_text_config(), "tie_word_embeddings", False))
    kept = [meta for meta in metas if not _is_skipped(meta.name, tied=tied)]
    kept.sort(key=lambda meta: meta.name)
    return Reference(architecture, served_dtypes(kept, served_dtype))


def served_dtypes(metas: Iterable[TensorMeta], served_dtype: DataType) -> tuple[TensorMeta, ...]:
    """Replace stored dtypes by those to be sent.

    Floats are sent as they are served, except those that the checkpoint keeps wider
    than most (a float32 router bias among bfloat16 weights): these keep their own.
    Anything else keeps its own, too.
    """
    metas = tuple(metas)
    sizes = Counter(meta.dtype for meta in metas if meta.dtype.is_float)
    usual = sizes.most_common(1)[0][0] if sizes else served_dtype

    def dtype(meta: TensorMeta) -> DataType:
        wider = meta.dtype.itemsize_bytes > usual.itemsize_bytes
        return meta.dtype if not meta.dtype.is_float or wider else served_dtype

    return tuple(TensorMeta(meta.name, dtype(meta), meta.shape) for meta in metas)


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
    """Return the tensors as transformers would save them, from a model without memory."""
    import torch
    from transformers import AutoModelForCausalLM

    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(hf_config)
        tensors = _saved_names(model, dict(model.named_parameters()))
    except Exception as error:  # any model's own code may run here
        raise UnsupportedError(
            "the served model has no safetensors files, and transformers cannot describe it "
            f"({type(error).__name__}: {error}); serve it from safetensors files"
        ) from error
    return [
        TensorMeta(name, DataType[str(t.dtype).removeprefix("torch.").upper()], tuple(t.shape))
        for name, t in tensors.items()
    ]


def _saved_names(model: Any, tensors: Mapping[str, Any]) -> Mapping[str, Any]:
    """Undo the renames and merges that transformers makes when it loads."""
    try:
        from transformers.core_model_loading import revert_weight_conversion
    except ImportError:  # before 5.0 module names are checkpoint names
        return tensors
    reverted: Mapping[str, Any] = revert_weight_conversion(model, dict(tensors))
    return reverted
