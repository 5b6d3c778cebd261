"""Content of one push, as the user handed it over: classified here, sent elsewhere."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch

from trainer_side.params.choose import Kind, OpenedModel, open_model
from trainer_side.params.merged import MergedParams, merge_settings
from trainer_side.params.names import adapter_tensor_name, base_name_in_peft, unwrapped_name
from trainer_side.params.params import Params
from trainer_side.params.quantised import DequantisedParams, has_quantised_layers
from trainer_side.params.snapshot import SnapshotMemory, gathered_names, snapshot
from trainer_side.pushes.rank_push import FollowedPush, RankPush, RankPushFactory
from trainer_side.ranks.ranks import SENDER, Ranks
from trainer_side.sources.adapter_source import (
    Adapter,
    active_remarks,
    adapter_of_model,
    adapter_parameters,
)
from trainer_side.sources.drafted_source import DraftedSource
from trainer_side.sources.file_source import CheckpointSource, adapter_of_dir, base_of_dir
from trainer_side.sources.module_source import ModuleSource
from trainer_side.sources.named_source import Metadata, NamedSteps, OrderedSource, RunSource
from trainer_side.sources.origin import AdapterBase
from trainer_side.sources.source import CastRule, Source
from weft_rl.contract.draft_layers import DRAFT_MODEL, is_draft
from weft_rl.contract.errors import InvalidRequestError, UnsupportedError
from weft_rl.contract.tensors import Reference, base_fingerprint
from weft_rl.rpc.codec import dtype_from_proto
from weft_rl.v1 import publish_pb2 as pb

#: What ``push_base`` and ``push_adapter`` take.
Model = torch.nn.Module | str | Path


class Content(Protocol):
    """Weights of one push."""

    @property
    def can_begin_again(self) -> bool:
        """True if another push of the same content would read all of it."""

    def rank_push(
        self,
        target: pb.DescribeTargetResponse,
        packings: RankPushFactory,
        reference: Callable[[], Reference],
    ) -> tuple[RankPush, Adapter | None]:
        """Return this rank's push of it, and the adapter's description if it is one; not
        collective.

        Args:
            target: Description of what the pool serves; its first backend is the one to use.
            reference: The pool's own list of tensors; called for named tensors, at rank 0 alone,
                which lays them out.

        Raises:
            WeftError: The weights cannot be pushed; says why.
        """

    def kept(self, memory: SnapshotMemory) -> Content:
        """Return the content with copies of the weights as they are now, in ``memory``. Training
        may continue afterwards. Collective where the framework alone can gather."""

    @property
    def remarks(self) -> tuple[str, ...]:
        """Remarks for the user that the push's success does not show."""

    @property
    def base(self) -> AdapterBase:
        """Model that is pushed as the base, or that an adapter was trained on."""


class PushContent(ABC):
    """Content that every rank of the trainer has a source of."""

    can_begin_again = True

    @abstractmethod
    def source(self, target: pb.DescribeTargetResponse) -> tuple[Source, Adapter | None]:
        """Return the source for a pool, and the adapter's description if it is one; not collective.

        Raises:
            WeftError: The weights cannot be pushed; says why.
        """

    def rank_push(
        self,
        target: pb.DescribeTargetResponse,
        packings: RankPushFactory,
        reference: Callable[[], Reference],
    ) -> tuple[RankPush, Adapter | None]:
        """See ``Content.rank_push``."""
        source, adapter = self.source(target)
        return packings.weights_push(source, target.backends[0]), adapter


@dataclass(frozen=True)
class ModelBase(PushContent):
    """Content with every weight of a model."""

    opened: OpenedModel
    cast: bool
    merged: str | None = None
    """Name of the adapter to merge into the weights; None for none."""
    notes: tuple[str, ...] = ()
    """Remarks on the model as it was when the push was asked for."""

    @classmethod
    def of(
        cls,
        model: torch.nn.Module,
        ranks: Ranks,
        cast: bool,
        merged: str | None,
        kind: Kind = "auto",
    ) -> ModelBase:
        """Open a model for a push of its base; see ``open_model``.

        Raises:
            InvalidRequestError: A PEFT model without ``merged``, or ``merged`` for another model.
        """
        opened = open_model(model, ranks, kind)
        is_peft = hasattr(opened.module, "peft_config")
        if is_peft and merged is None:
            raise InvalidRequestError(
                "this is a PEFT model: push_adapter sends its adapter, push_merged its base with "
                "the adapter merged in"
            )
        if not is_peft and merged is not None:
            raise InvalidRequestError("push_merged needs a PEFT model: push_base sends this one")
        notes = active_remarks(opened.module, merged) if merged is not None else ()
        return cls(opened, cast, merged, notes)

    def source(self, target: pb.DescribeTargetResponse) -> tuple[Source, None]:
        """See ``PushContent.source``."""
        module: Any = self.opened.module
        params = self.opened.params
        if params.is_collective and has_quantised_layers(module):
            raise UnsupportedError(
                "a base that is both quantised and sharded cannot be dequantised during a push: "
                "push the adapter (push_adapter), or shard an unquantised base"
            )
        rule = _base_rule(target, self.cast)
        settings = None if self.merged is None else merge_settings(module, self.merged)
        served = target.base_fingerprint if self.opened.buffers else ""
        drafts = _draft_names(target)
        key = self.merged, settings, rule.key, served, self._left_out(target), drafts
        source: ModuleSource | None = self.opened.sources.get(key)
        if source is None:
            if self.merged is not None:
                params = MergedParams(module, params, self.merged)
                module = module.get_base_model()
            source = self._expected(module, params, rule, target)
            self.opened.sources.put(key, source)
        return source, None

    def _expected(
        self,
        module: torch.nn.Module,
        params: Params,
        rule: CastRule,
        target: pb.DescribeTargetResponse,
    ) -> ModuleSource:
        """Return the source of what the pool's base consists of: parameters, and persistent buffers
        where its checkpoint holds them."""
        buffers = self.opened.buffers
        if self.merged is not None:
            buffers = frozenset(base_name_in_peft(name, self.merged) or "" for name in buffers)
        left_out, drafts = self._left_out(target), _draft_names(target)
        source = ModuleSource(module, params, rule, buffers | left_out, drafts)
        if buffers and not _is_base(source, target):
            whole = ModuleSource(module, params, rule, left_out, drafts)
            if _is_base(whole, target):
                source = whole
        if left_out:
            source.description += f", without {len(left_out)} of layers for drafts"
        return source

    def _left_out(self, target: pb.DescribeTargetResponse) -> frozenset[str]:
        """Return the layers for drafts that no replica takes."""
        if not target.draft_prefixes:
            return frozenset()
        taken, prefixes = _draft_names(target), tuple(target.draft_prefixes)
        names = self.opened.params.metas
        return frozenset(n for n in names if is_draft(n, prefixes) and n not in taken)

    def draft_source(self, target: pb.DescribeTargetResponse) -> Source:
        """Return the source of a model that drafts tokens, by its own names.

        Raises:
            WeftError: The weights cannot be pushed; says why.
        """
        rule = _draft_rule(target, self.cast)
        source: ModuleSource | None = self.opened.sources.get(("draft", rule.key))
        if source is None:
            source = ModuleSource(self.opened.module, self.opened.params, rule)
            self.opened.sources.put(("draft", rule.key), source)
        return source

    def kept(self, memory: SnapshotMemory) -> ModelBase:
        """See ``Content.kept``; of a PEFT model, copy only what is trained and what could not be
        read later. Its base is not copied otherwise."""
        names = set(self.opened.params.metas)
        if self.merged is not None:
            names = {
                unwrapped_name(name)
                for name, param in self.opened.module.named_parameters()
                if param.requires_grad or adapter_tensor_name(name, self.merged) is not None
            }
            names |= {
                name
                for name in gathered_names(self.opened.params)
                if base_name_in_peft(name) is not None
                or base_name_in_peft(name, self.merged) is not None
            }
            names |= self.opened.buffers
        params = snapshot(self.opened.params, names, memory)
        return replace(self, opened=replace(self.opened, params=params))

    @property
    def remarks(self) -> tuple[str, ...]:
        """See ``Content.remarks``."""
        if isinstance(self.opened.params, DequantisedParams):
            text = "the base is quantised here: its dequantised weights were pushed"
            return (text, *self.notes)
        return self.notes

    @property
    def base(self) -> AdapterBase:
        """See ``Content.base``."""
        return _base_of(self.opened)


def _is_base(source: Source, target: pb.DescribeTargetResponse) -> bool:
    drafts = _draft_names(target)
    metas = [meta for meta in source.metas if meta.name not in drafts]
    return base_fingerprint(target.architecture, metas) == target.base_fingerprint


def _draft_names(target: pb.DescribeTargetResponse) -> frozenset[str]:
    """Return the names, in a base, of the tensors that the pool's replicas draft tokens with."""
    return frozenset(tensor.name for tensor in target.draft_tensors)


@dataclass(frozen=True)
class ModelAdapter(PushContent):
    """Content with a PEFT model's adapter."""

    opened: OpenedModel
    adapter_name: str
    cast: bool
    check_base: bool
    notes: tuple[str, ...] = ()
    """Remarks on the model as it was when the push was asked for."""

    def source(self, target: pb.DescribeTargetResponse) -> tuple[Source, Adapter]:
        """See ``PushContent.source``."""
        adapter = adapter_of_model(
            self.opened, self.adapter_name, _adapter_rule(target, self.cast),
            check_base=self.check_base,
        )  # fmt: skip
        return adapter.source, adapter

    def kept(self, memory: SnapshotMemory) -> ModelAdapter:
        """See ``Content.kept``."""
        names = adapter_parameters(self.opened.params, self.adapter_name)
        params = snapshot(self.opened.params, names, memory)
        return replace(self, opened=replace(self.opened, params=params))

    @property
    def remarks(self) -> tuple[str, ...]:
        """See ``Content.remarks``."""
        kind = self.opened.params.kind
        if "quantised" not in kind:
            return self.notes
        return (
            f"the adapter was trained on a base that is {kind.partition(' ')[2]}, and is served on "
            "the pool's own: answers differ from the trainer's by the error of that quantisation",
            *self.notes,
        )

    @property
    def base(self) -> AdapterBase:
        """See ``Content.base``."""
        return _base_of(self.opened)


@dataclass(frozen=True)
class FileBase(PushContent):
    """Content of a checkpoint on disk, read when it is sent."""

    path: Path
    cast: bool
    remarks: tuple[str, ...] = ()

    def source(self, target: pb.DescribeTargetResponse) -> tuple[Source, None]:
        """See ``PushContent.source``."""
        rule = _base_rule(target, self.cast)
        return CheckpointSource(self.path, rule, _draft_names(target)), None

    def draft_source(self, target: pb.DescribeTargetResponse) -> Source:
        """Return the source of a model that drafts tokens, by its own names."""
        rule = _draft_rule(target, self.cast)
        return CheckpointSource(self.path, rule, rule.exceptions)

    def kept(self, memory: SnapshotMemory) -> FileBase:
        """See ``Content.kept``: files are not copied."""
        return self

    @property
    def base(self) -> AdapterBase:
        """See ``Content.base``: no module of this process."""
        return AdapterBase()


@dataclass(frozen=True)
class DraftedBase(PushContent):
    """Content with every weight of a base, and of the model that drafts tokens for it."""

    model: ModelBase | FileBase
    draft: ModelBase | FileBase

    def source(self, target: pb.DescribeTargetResponse) -> tuple[Source, None]:
        """See ``PushContent.source``."""
        source, _ = self.model.source(target)
        return DraftedSource(source, self.draft.draft_source(target), target), None

    def kept(self, memory: SnapshotMemory) -> DraftedBase:
        """See ``Content.kept``."""
        return DraftedBase(self.model.kept(memory), self.draft.kept(memory))

    @property
    def remarks(self) -> tuple[str, ...]:
        """See ``Content.remarks``."""
        return (*self.model.remarks, *self.draft.remarks)

    @property
    def base(self) -> AdapterBase:
        """See ``Content.base``."""
        return self.model.base


@dataclass(frozen=True)
class FileAdapter(PushContent):
    """Content of a directory that PEFT saved, read when it is sent."""

    path: Path
    cast: bool
    remarks: tuple[str, ...] = ()

    def source(self, target: pb.DescribeTargetResponse) -> tuple[Source, Adapter]:
        """See ``PushContent.source``."""
        adapter = adapter_of_dir(self.path, _adapter_rule(target, self.cast))
        return adapter.source, adapter

    def kept(self, memory: SnapshotMemory) -> FileAdapter:
        """See ``Content.kept``: files are not copied."""
        return self

    @property
    def base(self) -> AdapterBase:
        """See ``Content.base``: return the base that PEFT recorded when it saved."""
        return base_of_dir(self.path)


@dataclass(frozen=True)
class NamedBase:
    """Content with every weight of the base, as named tensors.

    Args:
        steps: This rank's iteration over them.
        cast: Cast floats to the reference's dtypes.
        metadata: Names in order, with shapes and dtypes; None if not known beforehand.
        draft: True if the tensors of the model that drafts tokens are among them.
    """

    steps: NamedSteps
    cast: bool
    metadata: Metadata | None
    draft: bool = False
    remarks: tuple[str, ...] = ()

    @property
    def can_begin_again(self) -> bool:
        """See ``Content.can_begin_again``."""
        return self.steps.can_begin_again

    def rank_push(
        self,
        target: pb.DescribeTargetResponse,
        packings: RankPushFactory,
        reference: Callable[[], Reference],
    ) -> tuple[RankPush, None]:
        """See ``Content.rank_push``.

        Raises:
            InvalidManifestError: ``metadata`` does not match the reference.
        """
        if packings.ranks.rank != SENDER:
            return FollowedPush(self.steps), None
        backend = target.backends[0]
        if self.metadata is None:
            arriving = RunSource(self.steps, reference(), self.cast, self.draft)
            return packings.announced_push(arriving, backend), None
        ordered = OrderedSource(self.steps, self.metadata, reference(), self.cast, self.draft)
        return packings.ordered_push(ordered, backend), None

    def kept(self, memory: SnapshotMemory) -> NamedBase:
        """See ``Content.kept``.

        Raises:
            UnsupportedError: Named tensors exist only while they are pushed.
        """
        raise UnsupportedError("named tensors cannot be copied for a later push: use push_tensors")

    @property
    def base(self) -> AdapterBase:
        """See ``Content.base``: no module of this process."""
        return AdapterBase()


def _base_of(opened: OpenedModel) -> AdapterBase:
    module: Any = opened.module
    is_peft = hasattr(module, "peft_config") and hasattr(module, "get_base_model")
    return AdapterBase.of(module.get_base_model() if is_peft else module)


def base_content(
    model: Model,
    ranks: Ranks,
    cast: bool,
    merged: str | None = None,
    kind: Kind = "auto",
    draft: Model | None = None,
) -> Content:
    """Return the content of a call of ``push_base`` or ``push_merged``."""
    base = _base_of_model(model, ranks, cast, merged, kind)
    if draft is None:
        return base
    return DraftedBase(base, _base_of_model(draft, ranks, cast, None, "auto"))


def _base_of_model(
    model: Model, ranks: Ranks, cast: bool, merged: str | None, kind: Kind
) -> ModelBase | FileBase:
    if isinstance(model, str | Path):
        return FileBase(Path(model), cast)
    return ModelBase.of(model, ranks, cast, merged, kind)


def adapter_content(
    model: Model,
    ranks: Ranks,
    cast: bool,
    adapter_name: str,
    check_base: bool,
    kind: Kind = "auto",
) -> Content:
    """Return the content of a call of ``push_adapter``."""
    if isinstance(model, str | Path):
        return FileAdapter(Path(model), cast)
    opened = open_model(model, ranks, kind)
    notes = active_remarks(opened.module, adapter_name)
    return ModelAdapter(opened, adapter_name, cast, check_base, notes)


def _base_rule(target: pb.DescribeTargetResponse, cast: bool) -> CastRule:
    exceptions = {
        name: dtype_from_proto(dtype) for name, dtype in target.base_dtype_exceptions.items()
    }
    exceptions |= {
        tensor.name: dtype_from_proto(tensor.dtype)
        for tensor in target.draft_tensors
        if tensor.dtype != target.base_dtype
    }
    return CastRule(cast, dtype_from_proto(target.base_dtype), exceptions)


def _draft_rule(target: pb.DescribeTargetResponse, cast: bool) -> CastRule:
    """Return the rule for the model that drafts tokens, by its own names."""
    dtypes = {
        tensor.name.removeprefix(DRAFT_MODEL): dtype_from_proto(tensor.dtype)
        for tensor in target.draft_tensors
    }
    return CastRule(cast, dtype_from_proto(target.base_dtype), dtypes)


def _adapter_rule(target: pb.DescribeTargetResponse, cast: bool) -> CastRule:
    return CastRule(cast, dtype_from_proto(target.adapter_dtype))
