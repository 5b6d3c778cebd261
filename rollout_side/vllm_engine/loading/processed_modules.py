"""Layers that hold their weights otherwise than they are loaded: quantised as they are loaded, say.

vLLM loads such a layer in its *loading form*, parameters as a checkpoint has them, and the layer's
method then makes from these what the layer computes with. A copy plan does the same a layer at a
time: it fills the loading form with copies, calls the same method, and writes what that has made to
where the layer's tensors lie, so that captured graphs stay valid. The bits are vLLM's own.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

#: Function by which methods agree on a scale: vLLM 0.32's of FP8.
_SHARED_AMAX = "amax_for_tp_weight_quant"
_RELOAD = "vllm.model_executor.model_loader.reload"
_LAYERWISE = f"{_RELOAD}.layerwise"
#: Set by vLLM's methods, which do nothing where it is.
_IS_PROCESSED = "_already_called_process_weights_after_loading"
#: Methods that leave what was loaded as it is: they need no copy of it.
_ONLY_READ = frozenset(
    {
        "Fp8PerTensorOnlineLinearMethod",
        "Fp8PerBlockOnlineLinearMethod",
        "Fp8PtpcOnlineLinearMethod",
    }
)
_Tensors = dict[str, torch.Tensor]
#: Parameters of a layer as it is loaded, on the meta device, by name.
LoadingForm = Mapping[str, torch.Tensor]


def storage_of(tensor: torch.Tensor) -> int:
    """Return an identifier of a tensor's storage, valid while that lives; views share it. It is not
    the address: storages of the meta device have none."""
    return int(tensor.untyped_storage()._cdata)


class ProcessedModule:
    """A linear layer whose method processes what was loaded, and its loading form.

    Raises:
        ValueError: Its method keeps tensors beside the layer's own, or asks other ranks, which may
            have no plan and would not answer; or more than parameters are loaded, or none.
    """

    def __init__(self, name: str, layer: torch.nn.Module) -> None:
        self.name, self.layer = name, layer
        self._method: Any = layer.quant_method
        kind = type(self._method).__name__
        linear = sys.modules.get("vllm.model_executor.layers.linear")  # imported, if there are any
        if linear is None or not isinstance(layer, linear.LinearBase):
            raise ValueError(f"{name} is held by {kind}")
        if getattr(layer, "tp_size", 1) > 1 and hasattr(
            sys.modules[type(self._method).__module__], _SHARED_AMAX
        ):
            raise ValueError(f"{kind} of {name} agrees on a scale with the other ranks")
        self.form: LoadingForm = loading_form(layer)
        if not self.form:
            raise ValueError(f"{name} loads no parameters")
        if _noted(layer)[1]:
            raise ValueError(f"{name} is not loaded as parameters alone")
        held = [*vars(self._method).values(), getattr(layer, "scheme", None)]
        held += [value for each in held for value in getattr(each, "__dict__", {}).values()]
        if any(isinstance(value, torch.Tensor) for value in held):
            raise ValueError(f"{kind} of {name} keeps tensors of its own")
        self.only_reads = kind in _ONLY_READ
        """True if the method certainly leaves the loading form as it is."""
        skipped = importlib.import_module(f"{_RELOAD}.meta").SKIP_TENSORS
        self._plain = {
            name: parameter
            for name, parameter in layer._parameters.items()
            if parameter is not None and name in skipped and name not in self.form
        }
        self.served: _Tensors = self._served_tensors(layer)
        """Tensors that the method makes, by name; written to by ``write``. Not those that vLLM
        loads in place (biases from 0.32 on)."""

    @property
    def device(self) -> torch.device:
        """Device that the layer computes on."""
        return next(iter(self.served.values())).device

    def allocate(self, name: str) -> torch.Tensor:
        """Return memory for one tensor of the loading form, without values."""
        meta = self.form[name]
        return torch.empty_strided(meta.shape, meta.stride(), dtype=meta.dtype, device=self.device)

    def process(self, loaded: Mapping[str, torch.Tensor]) -> _Tensors:
        """Return what the layer's method makes of a loading form, by the names in ``served``.

        It works on a double of the layer, which may compute meanwhile. On CUDA this is given to the
        calling thread's current stream, and not waited for.

        Args:
            loaded: Tensors of the loading form; written to unless ``only_reads``.
        """
        double = object.__new__(type(self.layer))
        vars(double).update(vars(self.layer))
        vars(double).pop(_IS_PROCESSED, None)
        self._set_form(double, loaded)
        self._method.process_weights_after_loading(double)
        made = self._served_tensors(double)
        self._check(made, double)
        return made

    def write(self, made: Mapping[str, torch.Tensor]) -> None:
        """Copy what ``process`` has returned to the tensors that the layer computes with."""
        for name, tensor in self.served.items():
            tensor.copy_(made[name], non_blocking=True)

    def set_form(self, loaded: Mapping[str, torch.Tensor]) -> None:
        """Give the layer these tensors as its loading form, beside what is loaded in place."""
        self._set_form(self.layer, loaded)

    def _set_form(self, layer: torch.nn.Module, loaded: Mapping[str, torch.Tensor]) -> None:
        set_form(layer, self.form, loaded)
        layer._parameters.update(self._plain)

    def _served_tensors(self, layer: torch.nn.Module) -> _Tensors:
        own = (*layer._parameters.items(), *layer._buffers.items())
        return {n: t.data for n, t in own if t is not None and n not in self._plain}

    def _check(self, made: _Tensors, double: torch.nn.Module) -> None:
        before = vars(self.layer)
        if {n: (t.shape, t.dtype) for n, t in made.items()} != {
            n: (t.shape, t.dtype) for n, t in self.served.items()
        }:
            raise ValueError(f"{self.name} is processed to other tensors than it has")
        for key, value in vars(double).items():
            is_number = isinstance(value, int | float) and key != _IS_PROCESSED
            if isinstance(value, torch.Tensor) and value is not before.get(key):
                raise ValueError(f"{self.name} keeps {key!r}, which is made anew")
            if is_number and value != before.get(key, value):
                raise ValueError(f"{self.name} keeps {key!r}, which depends on what is loaded")


def loading_form(layer: torch.nn.Module) -> LoadingForm:
    """Return the parameters that a layer is loaded as; empty if vLLM has noted none."""
    return _noted(layer)[0]


def _noted(layer: torch.nn.Module) -> tuple[_Tensors, _Tensors]:
    """Return the parameters and buffers that vLLM has noted before it processed a layer."""
    layerwise = importlib.import_module(_LAYERWISE)
    parameters, buffers = layerwise.get_layerwise_info(layer).restore_metadata
    return parameters, buffers


def set_form(layer: torch.nn.Module, form: LoadingForm, loaded: Mapping[str, torch.Tensor]) -> None:
    """Give a layer these tensors as its parameters, and nothing else. They are of the classes, and
    have the attributes, that vLLM gives to those of its loading form."""
    sanitize = importlib.import_module(f"{_RELOAD}.sanitize")
    layer._parameters, layer._buffers = {}, {}
    for name, tensor in loaded.items():
        meta = sanitize.restore_layer_refs(form[name], layer)
        own = tensor.view_as(tensor)  # an object of its own, over the same memory
        own.__class__ = meta.__class__
        vars(own).update(vars(meta))
        layer._parameters[name] = own  # type: ignore[assignment]


@contextlib.contextmanager
def in_loading_form(
    processed: Iterable[ProcessedModule], unfilled: Iterable[tuple[torch.nn.Module, LoadingForm]]
) -> Iterator[None]:
    """Let layers have their loading forms, on the meta device, with the loaders that fill them."""
    with contextlib.ExitStack() as stack:
        for layer in (*(each.layer for each in processed), *(layer for layer, _ in unfilled)):
            stack.callback(vars(layer).update, dict(vars(layer)))
        for each in processed:
            each.set_form(each.form)
            _set_loaders(each.layer, each.form)
        for layer, form in unfilled:
            buffers = layer._buffers
            set_form(layer, form, form)
            layer._buffers = buffers  # which no weight is loaded to
            _set_loaders(layer, form)
        yield


def _set_loaders(layer: torch.nn.Module, names: Iterable[str]) -> None:
    layerwise = importlib.import_module(_LAYERWISE)
    for name in names:
        parameter: Any = layer._parameters[name]
        parameter.weight_loader = layerwise._get_original_loader(parameter)
