"""Loading a base by plain copies, where the engine holds weights as they travel.

vLLM's layerwise reload costs Python and launches for every parameter, on every push.
What it does for unquantised weights are copies: from a tensor, or a slice of it, to a
slice of a parameter. So they are learnt once a layout, by watching the model's own
``load_weights`` with every copy held back, and repeated from then on.

A plan is believed only when it is proven: the layout was just loaded by vLLM itself,
the copies cover every parameter once, and each destination holds its source's bits. No
plan is made for a model whose layers make something else of their weights.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from rollout_side.staged import StagedVersion

_log = logging.getLogger(__name__)

#: Ways of holding weights that keep them as they were loaded.
_PLAIN_METHODS = frozenset(
    {"UnquantizedLinearMethod", "UnquantizedEmbeddingMethod", "UnquantizedFusedMoEMethod"}
)
_LARGE_BYTES = 2**20


@dataclass(frozen=True)
class _Piece:
    """A copy: part of the wire's bytes to part of a parameter."""

    target: torch.Tensor
    offset: int
    """Of the source in the segment, in elements of its dtype."""
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    def source(self, data: torch.Tensor) -> torch.Tensor:
        """The view of a segment's bytes that is copied from."""
        typed = data.view(self.target.dtype)
        return typed.as_strided(self.shape, self.stride, typed.storage_offset() + self.offset)


class DirectPlan:
    """The copies that load one layout into one model; proven by ``learn``."""

    def __init__(self, layout_digest: bytes, pieces: list[_Piece]) -> None:
        self.layout_digest = layout_digest
        self._pieces = pieces

    def load(self, data: torch.Tensor) -> None:
        """Copy a segment of this layout into the model's parameters; returns when done.

        Args:
            data: uint8, the segment; of this device, or of one that it can read.
        """
        small: list[_Piece] = []
        with torch.no_grad():
            for piece in self._pieces:
                if piece.target.numel() * piece.target.element_size() < _LARGE_BYTES:
                    small.append(piece)
                else:
                    piece.target.copy_(piece.source(data), non_blocking=True)
            if small:
                sources = [piece.source(data) for piece in small]
                torch._foreach_copy_([piece.target for piece in small], sources)
        device = self._pieces[0].target.device
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()

    def holds(self, data: torch.Tensor) -> bool:
        """Whether the model's parameters are, bit for bit, what ``load`` would make them."""
        target = self._pieces[0].target
        differs = torch.zeros((), dtype=torch.bool, device=target.device)
        for piece in self._pieces:
            source = piece.source(data).to(target.device)
            differs |= (bits(piece.target) != bits(source)).any()
        return not bool(differs)


def learn(
    model: torch.nn.Module, staged: StagedVersion, rename: Callable[[str], str]
) -> DirectPlan | None:
    """The plan of a version's layout, which the model has just loaded; None if it cannot
    be loaded so. Nothing that the model computes with changes.

    Args:
        model: vLLM's, as it serves.
        staged: Of the base that it serves now.
        rename: From the manifest's names to those its ``load_weights`` knows.
    """
    why = _not_plain(model)
    if not why:
        try:
            pieces = _watch(model, staged, rename)
            plan = DirectPlan(staged.manifest.layout_digest, pieces)
            if not plan.holds(staged.segment.data):
                why = "a parameter does not hold what was loaded into it"
        except Exception as error:  # noqa: BLE001 (a faster way only; the safe one remains)
            why = f"{type(error).__name__}: {error}"
    if why:
        _log.info("bases are loaded layer by layer: %s", why)
        return None
    _log.info("bases of this layout are loaded by %d plain copies", len(pieces))
    return plan


def _not_plain(model: torch.nn.Module) -> str:
    """A layer that makes something of its weights after they were loaded; empty if none."""
    for name, layer in model.named_modules():
        method = getattr(layer, "quant_method", None)
        if method is not None and type(method).__name__ not in _PLAIN_METHODS:
            return f"{name} is held by {type(method).__name__}"
        if "MLA" in type(layer).__name__:
            return f"{name} derives matrices from its weights"
    return ""


def _watch(
    model: torch.nn.Module, staged: StagedVersion, rename: Callable[[str], str]
) -> list[_Piece]:
    """What ``load_weights`` would copy.

    Raises:
        ValueError: It would do more than copy, or not fill every parameter once.
    """
    watcher = _Watcher(staged.segment.data, model.parameters())
    with torch.no_grad(), watcher:
        model.load_weights(  # type: ignore[operator]
            (rename(name), tensor) for name, tensor in staged.tensors()
        )
    watcher.check_covered()
    return watcher.pieces


class _Watcher(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Holds back writes to parameters and notes where their values come from."""

    def __init__(self, data: torch.Tensor, parameters: Iterable[torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.pieces: list[_Piece] = []
        self._data = data
        self._wire = storage_of(data)
        #: Bytes of each parameter that nothing was copied to yet, by where it lies.
        self._left = {storage_of(p): p.numel() * p.element_size() for p in parameters}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Let views through, note copies from the wire, refuse all else that would change a
        parameter or make something of a tensor."""
        kwargs = kwargs or {}
        given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        storages = [storage_of(x) for x in given]
        name = func.overloadpacket.__name__
        if func._schema.is_mutable and any(where in self._left for where in storages):
            target = given[0]
            if name == "copy_" and storages[0] in self._left:
                self._note(target, args[1])
            elif storages[0] in self._left and _is_zeroing(name, args):
                self._count(target)  # padding
            else:
                raise ValueError(f"its weights are loaded by {func}")
            return target
        if self._wire not in storages:
            return func(*args, **kwargs)
        if func._schema.is_mutable:
            raise ValueError(f"its tensors go elsewhere by {func}")
        result = func(*args, **kwargs)
        made = tree_leaves(result)
        if not all(isinstance(x, torch.Tensor) and storage_of(x) == self._wire for x in made):
            raise ValueError(f"something is computed from its tensors by {func}")
        return result

    def check_covered(self) -> None:
        """Refuse unless every parameter is filled once."""
        if wrong := [size for size in self._left.values() if size]:
            raise ValueError(f"{len(wrong)} parameters are not filled exactly once by copies")

    def _note(self, target: torch.Tensor, source: torch.Tensor) -> None:
        if storage_of(source) != self._wire or source.dtype != target.dtype:
            raise ValueError("a parameter is filled with what was computed from a tensor")
        if source.shape != target.shape:
            source = source.expand(target.shape)
        # Relative to the segment: another one has the same layout, not the same place.
        begin = source.data_ptr() - self._data.data_ptr()
        offset, rest = divmod(begin, source.element_size())
        if rest:
            raise ValueError("a tensor is not aligned in its segment")
        self._count(target)
        self.pieces.append(_Piece(target, offset, tuple(source.shape), source.stride()))

    def _count(self, target: torch.Tensor) -> None:
        self._left[storage_of(target)] -= target.numel() * target.element_size()


def _is_zeroing(name: str, args: tuple[Any, ...]) -> bool:
    return name == "zero_" or (name == "fill_" and float(args[1]) == 0)


def storage_of(tensor: torch.Tensor) -> int:
    """Where a tensor's storage begins: views of it share that."""
    return tensor.untyped_storage().data_ptr()


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The same elements as integers: a NaN equals itself there."""
    return tensor.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[
        tensor.element_size()
    ])  # fmt: skip
