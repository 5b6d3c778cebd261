"""Source of every weight of a model, in checkpoint names."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import groupby, pairwise

import torch

from trainer_side.params.elements import Elements, HeldElements
from trainer_side.params.merged_elements import MergedElements
from trainer_side.params.names import CheckpointMapping, Conversion, Revert
from trainer_side.params.params import Params, WholeElements, copy_into, whole_tensors
from trainer_side.sources.source import CastRule, Source, make_metas, torch_dtypes
from trainer_side.sources.tied_heads import IsBase, are_equal, copied_heads, no_copy


class ModuleSource(Source):
    """Parameters of a model, tied ones once, and those of its buffers that belong to the base.

    Args:
        mapping: The module itself, without wrappers, which knows its checkpoint names; or its
            mapping to them.
        params: Its parameters and buffers; they must not change while a push reads them.
        cast: Rule for the dtype that each of them travels in.
        without: Names among ``params`` to leave out.
        drafts: Checkpoint names of tensors for drafts, which come last: a replica that loads in
            place would hold them until the model is complete.
        is_base: Function that tells whether these are all tensors of the pool's base; None where
            that is not known. See ``copied_heads``.

    Parameters that transformers holds in another form are converted one group at a
    time: extra memory at the sender is that of the largest such group.

    Raises:
        InvalidManifestError: See ``Params.check``.
    """

    def __init__(
        self,
        mapping: torch.nn.Module | CheckpointMapping,
        params: Params,
        cast: CastRule,
        without: Collection[str] = (),
        drafts: Collection[str] = (),
        is_base: IsBase | None = None,
    ) -> None:
        self._params = params
        if isinstance(mapping, torch.nn.Module):
            mapping = CheckpointMapping.of(mapping)
        self._revert = mapping.revert
        own = {name: meta for name, meta in params.metas.items() if name not in without}
        params.check(own)
        groups, outputs = mapping.conversions(own)
        self._groups = sorted(
            groups, key=lambda group: any(name in drafts for name in group.targets)
        )
        self.description = f"{params.kind} {mapping.kind}, {len(own)} parameters"
        self.is_collective = params.is_collective
        metas = make_metas(
            [(name, outputs[name]) for group in self._groups for name in group.targets], cast
        )
        heads = copied_heads(metas, is_base)
        # What the pool has under the embedding's name alone; not sent.
        self._heads = [g for g in self._groups if g.is_identity and g.targets[0] in heads]
        self._groups = [g for g in self._groups if g not in self._heads]
        sent = {name for group in self._groups for name in group.targets}
        self.metas = tuple(meta for meta in metas if meta.name in sent)
        self._dtypes = torch_dtypes(self.metas)
        self._index = [
            (group, position) for group in self._groups for position in range(len(group.targets))
        ]
        self._cut: tuple[Conversion, list[Elements | None]] | None = None
        self._converted: tuple[Conversion, list[torch.Tensor] | None] | None = None

    def check_heads(self) -> None:
        """Refuse an output layer that is left out and does not equal the embedding now. Reads both,
        where they lie; not collective.

        Raises:
            InvalidManifestError: Names it.
        """
        for head in self._heads:
            of = [
                group
                for group in self._groups
                if group.is_identity
                and self._params.metas[group.sources[0]].shape
                == self._params.metas[head.sources[0]].shape
            ]
            if not any(self._are_equal(head.sources[0], group.sources[0]) for group in of):
                raise no_copy(head.targets[0], [group.targets[0] for group in of])

    def _are_equal(self, name: str, other: str) -> bool:
        """Return whether two parameters are equal, as far as this rank holds them."""
        if not self.is_collective:
            return are_equal(self._params.whole(name), self._params.whole(other))
        one, two = self._params.elements(name), self._params.elements(other)
        if not (isinstance(one, HeldElements) and isinstance(two, HeldElements)):
            return False
        own = [run for run in one.runs if run.rank == one.rank]
        return one.runs == two.runs and all(
            torch.equal(one.held(number), two.held(number)) for number in range(len(own))
        )

    def elements(self, index: int) -> Elements | None:
        """See ``Source.elements``; return elements for a whole parameter, or a contiguous part of
        one. An example of the latter is one of stacked experts."""
        group, position = self._index[index]
        if group.is_identity:
            return self._params.elements(group.sources[0])
        if self._cut is None or self._cut[0] is not group:
            self._cut = (group, self._cut_group(group))
        return self._cut[1][position]

    def _cut_group(self, group: Conversion) -> list[Elements | None]:
        """Return each target's elements of a group where they lie; None for those to be
        gathered."""
        found: list[Elements | None] = [None] * len(group.targets)
        places: dict[str, list[tuple[int, int, int]]] = {}
        for position, block in enumerate(group.blocks):
            if block is not None:
                places.setdefault(block.source, []).append((block.begin, block.end, position))
        for name, blocks in places.items():
            blocks.sort()
            whole = self._params.elements(name)
            is_apart = all(a[1] <= b[0] for a, b in pairwise(blocks))
            if isinstance(whole, WholeElements | HeldElements | MergedElements) and is_apart:
                parts = whole.cut([(begin, end) for begin, end, _ in blocks])
                for (_, _, position), part in zip(blocks, parts, strict=True):
                    found[position] = part
        return found

    def why_gathered(self, index: int) -> str:
        group, position = self._index[index]
        for name in group.sources:
            if self._params.elements(name) is None:
                return self._params.why_gathered(name)
        if position >= len(group.blocks) or group.blocks[position] is None:
            return "the checkpoint's form of it is computed"
        return "the checkpoint cuts it otherwise than into whole rows"

    def prepare(self) -> None:
        self._params.prepare()

    def release(self) -> None:
        self._params.release()

    def read(self, first: int, count: int, views: Sequence[torch.Tensor] | None) -> None:
        run: list[int] = []
        indices = range(first, first + count)
        for group, of_group in groupby(indices, lambda index: self._index[index][0]):
            if group.is_identity:
                run += of_group
                continue
            converted = self._convert(group, wanted=views is not None)
            if views is not None and converted is not None:
                own = list(of_group)
                copy_into(
                    [views[index - first] for index in own],
                    [converted[self._index[index][1]] for index in own],
                )
        if run:
            self._params.fetch(
                [self._index[index][0].sources[0] for index in run],
                [self._dtypes[index] for index in run],
                None if views is None else [views[index - first] for index in run],
            )
        if first + count == len(self._index):
            self.end_reading()

    def end_reading(self) -> None:
        """See ``Source.end_reading``; free converted tensors, since the source outlives the
        push."""
        self._converted = None

    def _convert(self, group: Conversion, *, wanted: bool) -> list[torch.Tensor] | None:
        """Return the group's checkpoint tensors; None at ranks that only give what they hold."""
        if self._converted is None or self._converted[0] is not group:
            self._converted = None  # free the former before making the next
            tensors = whole_tensors(self._params, group.sources, wanted=wanted)
            outs = None if tensors is None else convert(group, tensors, self._revert)
            self._converted = (group, outs)
        return self._converted[1]


def convert(
    group: Conversion, params: Mapping[str, torch.Tensor], revert: Revert | None
) -> list[torch.Tensor]:
    """Return the checkpoint tensors of one group, in the order of its targets."""
    tensors = {name: params[name] for name in group.sources}
    out = tensors if revert is None else revert(tensors)
    return [out[name] for name in group.targets]
