"""Model that drafts tokens, loaded with the base that it belongs to: one reload, in one pause."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

import torch

from weft_rl.contract.draft_layers import DRAFT_MODEL
from weft_rl.contract.tensors import Reference, TensorMeta

_Named = tuple[str, torch.Tensor]


class DraftedModel(torch.nn.Module):
    """Served model and the one that drafts for it, as one model to vLLM's reload.

    Layers that both have (embedding and output layer, mostly) are in it once: what is loaded into
    the served model's is the draft's, too, and no tensor of the draft may go there.
    """

    def __init__(
        self,
        target: torch.nn.Module,
        draft: torch.nn.Module,
        reference: Reference,
        tensors: Sequence[TensorMeta],
    ) -> None:
        super().__init__()
        self.target, self.draft = target, draft
        self.reference = replace(reference, draft=tuple(tensors))

    @property
    def shared_layers(self) -> set[torch.nn.Module]:
        """Layers that both models have."""
        return set(self.target.modules()) & set(self.draft.modules())

    def load_weights(self, weights: Iterable[_Named]) -> set[str]:
        """Load both models; return the names of the parameters that were loaded.

        Tensors of the draft that come before the served model has all of its own wait for that.
        Those of another draft, or of layers that this one has no use for, are the served model's to
        skip, as they are in its files.
        """
        waiting: list[_Named] = []
        rest = iter(weights)
        loaded = self.target.load_weights(self._of_target(rest, waiting))  # type: ignore[operator]
        own = ((_own_name(name), t) for name, t in chain(waiting, rest) if self._is_drafts(name))
        drafted = self.draft.load_weights(own)  # type: ignore[operator]
        return {
            *(f"target.{name}" for name in _reported(self.target, loaded)),
            *(f"draft.{name}" for name in _reported(self.draft, drafted)),
        }

    def _of_target(self, weights: Iterator[_Named], waiting: list[_Named]) -> Iterator[_Named]:
        left = set(self.reference.by_name)
        for name, tensor in weights:
            if self._is_drafts(name):
                waiting.append((name, tensor))
            elif not name.startswith(DRAFT_MODEL):
                yield name, tensor
                left.discard(name)
                if not left:
                    return

    def _is_drafts(self, name: str) -> bool:
        return name in self.reference.draft_by_name


def _own_name(name: str) -> str:
    """Return the name that a tensor of a draft has in its own checkpoint."""
    return name.removeprefix(DRAFT_MODEL)


def _reported(model: torch.nn.Module, loaded: Any) -> Iterable[str]:
    """Return what a loader reports as loaded; every parameter where it reports nothing."""
    if isinstance(loaded, set | frozenset | list | tuple):
        return map(str, loaded)
    return [name for name, _ in model.named_parameters()]
