"""Source of a base and of the model that drafts tokens for it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch

from trainer_side.params.elements import Elements
from trainer_side.sources.source import Source
from weft_rl.contract.draft_layers import DRAFT_MODEL, is_draft
from weft_rl.contract.errors import InvalidManifestError, UnsupportedError
from weft_rl.contract.tensors import TensorMeta
from weft_rl.v1 import publish_pb2 as pb


class DraftedSource(Source):
    """Tensors of a base, then those of the model that drafts tokens, by their names in a base.

    Args:
        base: Source of the base.
        draft: Source of the other model, by its own names.
        target: Description of what the pool serves.

    Raises:
        UnsupportedError: The pool takes no such model.
        InvalidManifestError: A tensor is not one of the pool's, or the base has it, too.
    """

    def __init__(self, base: Source, draft: Source, target: pb.DescribeTargetResponse) -> None:
        chosen = list(_chosen(draft.metas, target))
        names = {meta.name for meta in base.metas}
        if both := [meta.name for _, meta in chosen if meta.name in names]:
            raise InvalidManifestError(
                f"{both[0]!r} is in the model and in draft=: push it with one of them"
            )
        self._base, self._draft = base, draft
        self._indices = [index for index, _ in chosen]
        self.metas = (*base.metas, *(meta for _, meta in chosen))
        self.description = f"{base.description}, drafted for by {draft.description}"
        self.is_collective = base.is_collective or draft.is_collective

    def read(self, first: int, count: int, views: Sequence[torch.Tensor] | None) -> None:
        for source, index, number, at in self._parts(first, count):
            if views is not None or source.is_collective:
                part = None if views is None else views[at : at + number]
                source.read(index, number, part)

    def end_reading(self) -> None:
        self._base.end_reading()
        self._draft.end_reading()

    def elements(self, index: int) -> Elements | None:
        source, own = self._one(index)
        return source.elements(own)

    def why_gathered(self, index: int) -> str:
        source, own = self._one(index)
        return source.why_gathered(own)

    def prepare(self) -> None:
        self._base.prepare()
        self._draft.prepare()

    def release(self) -> None:
        self._base.release()
        self._draft.release()

    def _one(self, index: int) -> tuple[Source, int]:
        source, own, _, _ = next(self._parts(index, 1))
        return source, own

    def _parts(self, first: int, count: int) -> Iterator[tuple[Source, int, int, int]]:
        """Yield source, first tensor there and number of tensors of each part of a range, and where
        the part begins in the range."""
        in_base = max(0, min(first + count, len(self._base.metas)) - first)
        if in_base:
            yield self._base, first, in_base, 0
        for at in range(in_base, count):
            yield self._draft, self._indices[first + at - len(self._base.metas)], 1, at


def _chosen(
    metas: Sequence[TensorMeta], target: pb.DescribeTargetResponse
) -> Iterator[tuple[int, TensorMeta]]:
    """Yield the tensors that the pool takes, by their names in a base, each with its number."""
    wanted = {tensor.name for tensor in target.draft_tensors}
    if not wanted:
        raise UnsupportedError(
            "draft=: no replica of the pool takes a model that drafts tokens. Start one with "
            "vLLM's --speculative-config (its log says why it takes none), or push without draft="
        )
    for index, meta in enumerate(metas):
        names = (DRAFT_MODEL + meta.name, meta.name)
        name = next((name for name in names if name in wanted), None)
        if name is not None:
            yield index, replace(meta, name=name)
        elif not any(is_draft(name, target.draft_prefixes) for name in names):
            raise InvalidManifestError(
                f"{meta.name!r} of draft= is not a tensor of the model that drafts tokens in this "
                "pool"
            )
