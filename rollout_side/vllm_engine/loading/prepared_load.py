"""Load that is prepared while the former base is served: the switch writes only what differs.

All that a copy plan would write is made beside the engine's tensors, by the layers' own methods,
and compared with what lies there. So the bits are those of the plan, quantised or not, and
generation pauses for the few that have changed. It holds as long as nothing else writes to the
weights.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import NamedTuple

import torch

from rollout_side.vllm_engine.loading.copy_plan import CopyPlan, bits, wait_for_copies

_log = logging.getLogger(__name__)

#: A tensor is written whole where one word in so many has changed: each takes that of its place,
#: too. Where the scale of a quantised one has changed, nearly all have.
WHOLE_SHARE = 16


class _ChangedPart(NamedTuple):
    """Words of a part of the engine's tensors, and what they become."""

    target: torch.Tensor
    """View of it; see ``_words``."""
    places: tuple[torch.Tensor, ...] | None
    """int64, the indices of the words in each dimension; None for all."""
    new: torch.Tensor

    @property
    def num_bytes(self) -> int:
        return self.new.nbytes + sum(indices.nbytes for indices in self.places or ())

    def write(self) -> None:
        if self.places is None:
            self.target.copy_(self.new, non_blocking=True)
        else:
            self.target[self.places] = self.new  # in whatever mode of torch: no place comes twice


class PreparedLoad:
    """Words that differ between what an engine holds and another base.

    Args:
        plan: Plan of that base.
        parts: All that differs.
        compared_bytes: Bytes of what was compared.
    """

    def __init__(
        self, plan: CopyPlan, parts: tuple[_ChangedPart, ...], compared_bytes: int
    ) -> None:
        self._plan, self._parts, self._compared_bytes = plan, parts, compared_bytes

    @property
    def num_bytes(self) -> int:
        """Bytes of memory that it takes."""
        return sum(part.num_bytes for part in self._parts)

    @property
    def num_parts(self) -> int:
        """Number of parts of the weights that it writes to."""
        return len(self._parts)

    def write(self) -> None:
        """Write what differs to the engine's tensors; returns when it is done. Call it while
        paused."""
        with torch.no_grad():
            for part in self._parts:
                part.write()
        wait_for_copies(self._plan.device)
        _log.debug(
            "%d of %d bytes were written, to %d parts of the weights",
            sum(part.new.nbytes for part in self._parts), self._compared_bytes, self.num_parts,
        )  # fmt: skip


def prepare_load(
    plan: CopyPlan, data: torch.Tensor, most_bytes: int, on_progress: Callable[[], None]
) -> PreparedLoad | None:
    """Compare a segment of a plan's layout with what the engine holds; return None where what
    differs takes more than ``most_bytes``. Only reads the engine's tensors; blocks.

    Args:
        data: uint8, the segment, on any device.
        on_progress: Called at each bucket.

    Raises:
        torch.OutOfMemoryError: There is no memory to make a layer's tensors in.
    """
    parts, num_bytes, compared_bytes = list[_ChangedPart](), 0, 0
    with torch.no_grad():
        for target, source in plan.pairs(data, on_progress):
            compared_bytes += target.nbytes
            part = _changed(target, source)
            if part is None:
                continue
            num_bytes += part.num_bytes
            if num_bytes > most_bytes:
                return None
            parts.append(part)
    wait_for_copies(plan.device)
    return PreparedLoad(plan, tuple(parts), compared_bytes)


def _changed(target: torch.Tensor, source: torch.Tensor) -> _ChangedPart | None:
    held, new = _words(target, source)
    places = (held != new).nonzero(as_tuple=True)
    num_changed = places[0].numel()
    if not num_changed:
        return None
    if num_changed * WHOLE_SHARE > held.numel():
        return _ChangedPart(held, None, new.clone())
    return _ChangedPart(held, places, new[places])


def _words(target: torch.Tensor, source: torch.Tensor) -> list[torch.Tensor]:
    """Return views of both as integers, of 8 bytes where both lie in one order without gaps: fewer
    are compared, and none is moved to be."""
    order = sorted(range(target.dim()), key=target.stride, reverse=True)
    both = [tensor.permute(order) for tensor in (target, source)]
    if all(t.is_contiguous() and not t.nbytes % 8 and not t.data_ptr() % 8 for t in both):
        return [tensor.view(-1).view(torch.int64) for tensor in both]
    return [bits(tensor) for tensor in both]
