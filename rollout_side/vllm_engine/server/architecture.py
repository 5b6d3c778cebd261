"""Tensors of an architecture by transformers' model of its configuration, which has no memory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rollout_side.vllm_engine.loading.linear_modules import MemoryModule
from weft_rl.contract.errors import UnsupportedError
from weft_rl.contract.tensors import Reference

_WEIGHT = ".weight"


class ArchitectureModel:
    """Tensors of a configuration, without memory."""

    def __init__(self, hf_config: Any) -> None:
        try:
            model = _make_model(hf_config)
            self.in_memory: Mapping[str, Any] = dict(model.named_parameters())
            kept = model.state_dict()
            buffers = {name: each for name, each in model.named_buffers() if name in kept}
            self.saved = _saved_names(model, {**self.in_memory, **buffers})
            self._model = model
        except Exception as error:  # any model's own code may run here
            raise UnsupportedError(
                f"transformers cannot describe the served model ({type(error).__name__}: {error})"
            ) from error

    def linear_modules(self, reference: Reference) -> list[MemoryModule]:
        """Return the linear modules; of those that are parts in memory, as experts are, only those
        whose weight is not in the reference."""
        names = {id(tensor): name for name, tensor in self.in_memory.items()}
        of_files = self.saved
        if not of_files.keys() <= reference.by_name.keys():
            try:
                published = _published_names(self._model, self.in_memory)
            except Exception as error:  # any model's own code may run here
                raise UnsupportedError(
                    f"transformers cannot name the served model's tensors as its files do "
                    f"({type(error).__name__}: {error})"
                ) from error
            names_of = (of_files, published)
            of_files = max(names_of, key=lambda saved: len(reference.by_name.keys() & saved.keys()))
        return [
            MemoryModule(
                names.get(id(tensor), saved).removesuffix(_WEIGHT),
                saved.removesuffix(_WEIGHT),
                tuple(tensor.shape),
            )
            for saved, tensor in of_files.items()
            if tensor.dim() == 2
            and saved.endswith(_WEIGHT)
            and (id(tensor) in names or saved not in reference.by_name)
        ]


def _make_model(hf_config: Any) -> Any:
    import torch
    import transformers

    own = getattr(transformers, (hf_config.architectures or [""])[0], None)
    with torch.device("meta"):
        if own is not None:
            return own._from_config(hf_config)
        return transformers.AutoModelForCausalLM.from_config(hf_config)


def _saved_names(model: Any, tensors: Mapping[str, Any]) -> Mapping[str, Any]:
    """Undo the renames and merges that transformers makes when it loads."""
    from transformers.core_model_loading import revert_weight_conversion

    reverted: Mapping[str, Any] = revert_weight_conversion(model, dict(tensors))
    return reverted


def _published_names(model: Any, tensors: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the names of files that transformers can load, but saves otherwise from a model that
    it has not loaded: ``vision_tower.vision_model.`` of LLaVA's and PaliGemma's encoders."""
    from transformers.conversion_mapping import get_model_conversion_mapping

    model._weight_conversions = get_model_conversion_mapping(model, add_legacy=False) or None
    return _saved_names(model, tensors)
