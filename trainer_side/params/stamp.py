"""Stamp of a model at one moment, by which a later look tells what has changed since.

Nothing is copied: of each tensor its place, its version counter and a few of its elements are kept.
torch counts in-place changes, but not those by ``.data``, by fused optimizers, or by kernels that
are given an address: the elements tell of these.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from trainer_side.params.params import is_quantised
from weft_rl.contract.errors import ModelChangedError

#: Elements of each tensor that are kept, from its middle.
_NUM_ELEMENTS = 16
_MAX_NAMED = 3

#: Settings of a model that a push depends on, by what they are called in messages.
Settings = Mapping[str, object]


@dataclass(frozen=True)
class TensorStates:
    """States of tensors at one moment, as values; they keep no tensor alive."""

    places: Mapping[str, tuple[object, ...]]
    """Object, address, shape, dtype and device of each tensor."""
    versions: Mapping[str, int]
    """Number of in-place changes that torch has counted."""
    elements: Mapping[str, bytes]
    """Some elements of each; none of a tensor that does not lie in a row."""

    @classmethod
    def of(cls, tensors: Mapping[str, torch.Tensor]) -> TensorStates:
        """Look at tensors by the names of their parameters; waits for an accelerator."""
        held: dict[str, torch.Tensor] = {}
        places: dict[str, tuple[object, ...]] = {}
        for name, param in tensors.items():
            for own, tensor in ((name, param), *_parts(name, param)):
                held[own] = tensor
                address = 0 if tensor.is_meta else tensor.data_ptr()
                places[own] = (id(param), address, tensor.shape, tensor.dtype, tensor.device)
        versions = {n: -1 if t.is_inference() else t._version for n, t in held.items()}
        return cls(places, versions, _elements(held))

    def moved(self, now: TensorStates) -> dict[str, str]:
        """Map the names of tensors that changed since to what became of them."""
        found: dict[str, str] = {}
        for name, place in self.places.items():
            other = now.places.get(name)
            if other is None:
                found[name] = "is gone"
            elif other != place:
                found[name] = "was replaced"
            elif (now.versions[name], now.elements.get(name)) != (
                self.versions[name],
                self.elements.get(name),
            ):
                found[name] = "was changed in place"
        return found


class ModelStamp:
    """Stamp of those tensors and settings of a model that a push reads in place.

    Args:
        tensors: Tensors that are read, then and later; referenced. Whatever takes their place in
            the model is not read.
        settings: Function that returns the settings, then and later.
    """

    def __init__(
        self, tensors: Mapping[str, torch.Tensor], settings: Callable[[], Settings] = dict
    ) -> None:
        self._tensors, self._read_settings = dict(tensors), settings
        self._settings = dict(settings())
        self.states = TensorStates.of(self._tensors)

    def moved(self) -> list[str]:
        """Return a phrase for each tensor and setting that changed since; empty if none did."""
        moved = self.states.moved(TensorStates.of(self._tensors))
        found = [f"{name!r} {how}" for name, how in moved.items()]
        now = self._read_settings()
        return found + [
            f"{name} was {value!s:.100}, is {now.get(name)!s:.100}"
            for name, value in self._settings.items()
            if now.get(name) != value
        ]

    def check(self) -> None:
        """Refuse a model that changed since.

        Raises:
            ModelChangedError: Names what changed.
        """
        try:
            moved = self.moved()
        except Exception as error:  # noqa: BLE001 (a model that cannot be looked at any more)
            moved = [f"it cannot be looked at any more ({error!r:.200})"]
        if moved:
            raise model_changed(moved)


def model_changed(moved: Collection[str]) -> ModelChangedError:
    """Return the error of a push whose content changed while it was read."""
    named = list(moved)
    more = f" and {len(named) - _MAX_NAMED} more" if len(named) > _MAX_NAMED else ""
    return ModelChangedError(
        f"what is pushed was changed while it was read: {'; '.join(named[:_MAX_NAMED])}{more}. "
        "Nothing was committed: push again, and let nothing change it until the push has returned "
        "(an async push copies it first, where the host has room)",
        metadata={"first": named[0][:200], "num_changed": str(len(named))},
    )


def _parts(name: str, param: Any) -> list[tuple[str, torch.Tensor]]:
    """Return the tensors that a packed parameter's values are computed with, besides its own."""
    if not is_quantised(param):
        return []
    found: list[tuple[str, torch.Tensor]] = []
    waiting = [("state", getattr(param, "quant_state", None)), ("SCB", getattr(param, "SCB", None))]
    while waiting:
        key, value = waiting.pop()
        if isinstance(value, torch.Tensor):
            found.append((f"{name} ({key})", value))
        elif value is not None:
            waiting += [(key, getattr(value, own, None)) for own in ("absmax", "code", "offset")]
            waiting.append((f"{key}2", getattr(value, "state2", None)))
    return found


def _elements(tensors: Mapping[str, torch.Tensor]) -> dict[str, bytes]:
    """Return some elements of each tensor, with one copy for each dtype and device."""
    groups: dict[tuple[torch.dtype, torch.device], dict[str, torch.Tensor]] = {}
    for name, tensor in tensors.items():
        if tensor.is_meta or not tensor.numel() or not tensor.is_contiguous():
            continue
        flat = tensor.detach().view(-1)
        begin = max(0, flat.numel() // 2 - _NUM_ELEMENTS // 2)
        part = flat[begin : begin + _NUM_ELEMENTS]
        groups.setdefault((tensor.dtype, tensor.device), {})[name] = part
    found: dict[str, bytes] = {}
    for parts in groups.values():
        joined = torch.cat(list(parts.values())).view(torch.uint8).cpu().numpy().tobytes()
        at = 0
        for name, part in parts.items():
            end = at + part.numel() * part.element_size()
            found[name] = joined[at:end]
            at = end
    return found
