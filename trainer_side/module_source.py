"""Every weight of a plain torch or transformers model, in checkpoint names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from weakref import WeakKeyDictionary

import torch

from trainer_side.names import Conversion, Revert, plan_conversions, reverter, unwrapped_name
from trainer_side.source import CastRule, copy_into, make_metas
from weft.contract.errors import InvalidManifestError
from weft.contract.tensors import TensorMeta


class ModuleSource:
    """Parameters of a module, tied ones once, buffers not.

    Args:
        model: Kept by reference; its parameters are read in place, and must not
            change while a push reads them.
        cast: See ``CastRule``.

    Parameters that transformers holds in another form are converted one at a time:
    extra memory is that of the largest such parameter.

    Raises:
        InvalidManifestError: A parameter is empty (sharded, offloaded or on meta).
    """

    def __init__(self, model: torch.nn.Module, cast: CastRule) -> None:
        self._params = {unwrapped_name(n): p.detach() for n, p in model.named_parameters()}
        for name, param in self._params.items():
            if param.is_meta:
                raise InvalidManifestError(
                    f"parameter {name!r} is on the meta device: its values are elsewhere "
                    "(offloaded?); load it first"
                )
        self._revert = reverter(model)
        self._groups, outputs = cached_conversions(model, self._params, self._revert)
        self.description = f"{type(model).__name__}, {len(self._params)} parameters"
        self.metas = make_metas(
            [(name, outputs[name]) for group in self._groups for name in group.targets], cast
        )
        self._index = [
            (group, position) for group in self._groups for position in range(len(group.targets))
        ]
        self._converted: tuple[Conversion, list[torch.Tensor]] | None = None

    def read(self, first: int, views: Sequence[torch.Tensor]) -> None:
        """See ``Source.read``."""
        entries = self._index[first : first + len(views)]
        if all(group.is_identity for group, _ in entries):
            copy_into(views, [self._params[group.sources[0]] for group, _ in entries])
            return
        for view, (group, position) in zip(views, entries, strict=True):
            copy_into([view], [self._convert(group)[position]])
        if first + len(views) == len(self._index):
            self._converted = None

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """See ``Source.tensors``; in the model's own names, which people know."""
        return iter(self._params.items())

    def _convert(self, group: Conversion) -> list[torch.Tensor]:
        if group.is_identity:
            return [self._params[group.sources[0]]]
        if self._converted is None or self._converted[0] is not group:
            self._converted = None  # free the former before making the next
            self._converted = (group, convert(group, self._params, self._revert))
        return self._converted[1]


def convert(
    group: Conversion, params: Mapping[str, torch.Tensor], revert: Revert | None
) -> list[torch.Tensor]:
    """The checkpoint tensors of one group, in the order of its targets."""
    tensors = {name: params[name] for name in group.sources}
    out = tensors if revert is None else revert(tensors)
    return [out[name] for name in group.targets]


def reference_metas(model: torch.nn.Module, params: Mapping[str, torch.Tensor]) -> list[TensorMeta]:
    """Checkpoint names and shapes of a model's ``params``, without reading them."""
    _, outputs = cached_conversions(model, params, reverter(model))
    return list(make_metas(outputs, CastRule(enabled=False)))


_Signature = tuple[tuple[str, torch.Size], ...]
_Planned = tuple[list[Conversion], dict[str, torch.Tensor]]
_PLANNED: WeakKeyDictionary[torch.nn.Module, tuple[_Signature, _Planned]] = WeakKeyDictionary()


def cached_conversions(
    model: torch.nn.Module, params: Mapping[str, torch.Tensor], revert: Revert | None
) -> _Planned:
    """``plan_conversions``, made once a model: it costs milliseconds a layer."""
    signature = tuple((name, param.shape) for name, param in params.items())
    kept = _PLANNED.get(model)
    if kept is None or kept[0] != signature:
        kept = _PLANNED[model] = (signature, plan_conversions(params, revert))
    return kept[1]
