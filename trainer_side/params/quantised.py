"""Weights in 4 or 8 bits of bitsandbytes, dequantised tensor by tensor on the way out."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from trainer_side.params.params import (
    Params,
    WholeElements,
    as_meta,
    check_readable,
    copy_into,
    is_quantised,
    own_class,
)


def has_quantised_layers(module: torch.nn.Module) -> bool:
    """Return whether a model has bitsandbytes' linears, however their weights lie."""
    kinds = {own_class(part).__name__ for part in module.modules()}
    return not kinds.isdisjoint(("Linear4bit", "Linear8bitLt"))


class DequantisedParams(Params):
    """Whole parameters, some of them packed; see ``Params``.

    Shapes and dtypes are those of the weights that the packed bytes stand for.

    Args:
        module: Module that owns the parameters; kept by reference.
        tensors: Parameters by unwrapped name; at least one ``is_quantised``.
        kind: Kind of trainer that holds them, for messages.
    """

    is_collective = False

    def __init__(
        self, module: torch.nn.Module, tensors: Mapping[str, torch.Tensor], kind: str
    ) -> None:
        self._tensors = dict(tensors)
        self._owners = {
            id(param): part
            for part in module.modules()
            for param in part.parameters(recurse=False)
            if is_quantised(param)
        }
        bits = sorted({_bits(p) for p in self._tensors.values() if is_quantised(p)})
        self.kind = f"{kind} quantised to {' and '.join(map(str, bits))} bits"
        self.metas = {name: _meta(param) for name, param in self._tensors.items()}

    def fetch(
        self,
        names: Sequence[str],
        dtypes: Sequence[torch.dtype],
        outs: Sequence[torch.Tensor] | None,
    ) -> None:
        """See ``Params.fetch``; extra memory is that of the largest weight."""
        if outs is None:
            return
        plain = [i for i, name in enumerate(names) if not is_quantised(self._tensors[name])]
        if plain:
            copy_into([outs[i] for i in plain], [self._tensors[names[i]].detach() for i in plain])
        for name, out in zip(names, outs, strict=True):
            if is_quantised(self._tensors[name]):
                copy_into([out], [self.whole(name)])

    def elements(self, name: str) -> WholeElements | None:
        """See ``Params.elements``; None for a packed one."""
        param = self._tensors[name]
        return None if is_quantised(param) else WholeElements(param)

    def whole(self, name: str) -> torch.Tensor:
        """See ``Params.whole``; a packed parameter is returned as a new tensor."""
        param: Any = self._tensors[name]
        if not is_quantised(param):
            return param.detach()  # type: ignore[no-any-return]
        with torch.no_grad():
            return _dequantised(param, self._owners[id(param)])

    def local(self) -> Iterator[tuple[str, torch.Tensor]]:
        """See ``Params.local``; packed parameters are left out."""
        for name, param in self._tensors.items():
            if not is_quantised(param):
                yield name, param.detach()

    def check(self, names: Iterable[str]) -> None:
        for name in names:
            check_readable(name, self._tensors[name])


def _bits(param: torch.Tensor) -> int:
    return 4 if type(param).__name__ == "Params4bit" else 8


def _meta(param: Any) -> torch.Tensor:
    if not is_quantised(param):
        return as_meta(param)
    if _bits(param) == 4:
        state = param.quant_state
        return torch.empty(state.shape, dtype=state.dtype, device="meta")
    return torch.empty(param.shape, dtype=torch.float32, device="meta")


def _dequantised(param: Any, owner: Any) -> torch.Tensor:
    import bitsandbytes.functional as bnb

    whole: torch.Tensor
    if _bits(param) == 4:
        whole = bnb.dequantize_4bit(param.data, param.quant_state)
        return whole
    # The first forward moves the scales from the parameter to its module. Each row's
    # 127 stands for its largest absolute value (LLM.int8()).
    scales = param.SCB if param.SCB is not None else owner.state.SCB
    whole = param.data.to(torch.float32) * (scales.to(torch.float32)[:, None] / 127)
    return whole
