"""Content of one push, as the user handed it over: classified here, sent elsewhere.

One file: each kind is a model that is read in place, or what was kept of it, by the same rules.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Protocol

import torch

from trainer_side.params.choose import Kind, OpenedModel, open_model
from trainer_side.params.merged import MergedParams, check_mergeable, merge_settings
from trainer_side.params.names import (
    CheckpointMapping,
    adapter_tensor_name,
    base_name_in_peft,
)
from trainer_side.params.params import (
    ModelWatcher,
    Params,
    Settings,
    TensorWatcher,
    WholeParams,
    is_readable,
    model_changed,
    walk,
)
from trainer_side.params.quantised import has_quantised_layers
from trainer_side.params.snapshot import SnapshotMemory, gathered_names, snapshot
from trainer_side.pushes.rank_push import FollowedPush, RankPush, RankPushFactory
from trainer_side.ranks.ranks import SENDER, Ranks
from trainer_side.sources.adapter_source import (
    active_remarks,
    adapter_of_model,
    adapter_parameters,
    adapter_settings,
)
from trainer_side.sources.base_content import BaseContent
from trainer_side.sources.drafted_source import DraftedSource
from trainer_side.sources.file_source import (
    CheckpointSource,
    adapter_of_dir,
    adapter_states,
    base_of_dir,
    file_states,
)
from trainer_side.sources.module_source import ModuleSource
from trainer_side.sources.named_source import (
    Metadata,
    NamedSteps,
    OrderedSource,
    RunSource,
    collected_source,
)
from trainer_side.sources.origin import AdapterBase
from trainer_side.sources.source import Adapter, CastRule, Source, reading
from weft_rl.checkpoints.digest_cache import FileState
from weft_rl.containers import LruMapping
from weft_rl.contract.draft_layers import DRAFT_MODEL, is_draft
from weft_rl.contract.errors import InvalidRequestError, UnsupportedError
from weft_rl.contract.tensors import Reference, TensorMeta, base_fingerprint
from weft_rl.rpc.codec import dtype_from_proto
from weft_rl.v1 import publish_pb2 as pb

#: Sources of one base that are kept: for pools of other dtypes, as a draft.
_MAX_SOURCES = 4

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
        """Return the content frozen as it is now: copies of the weights, in ``memory``, and all
        else that a push reads of a model. Training may continue, and the model may change.
        Collective where the framework alone can gather.

        What the host has no room for is read later, and refused if it changed by then.

        Raises:
            ModelChangedError: It changed while it was copied.
        """

    def check_unchanged(self) -> None:
        """Look again at what was read in place; not collective.

        Raises:
            ModelChangedError: It changed since the push was asked for; names what did.
        """

    @property
    def remarks(self) -> tuple[str, ...]:
        """Remarks for the user that the push's success does not show."""

    @property
    def base(self) -> AdapterBase:
        """Model that is pushed as the base, or that an adapter was trained on."""


class PushContent(ABC):
    """Content that every rank of the trainer has a source of."""

    can_begin_again = True
    watcher: ModelWatcher | None = None
    """Watcher of what is read in place; None where nothing is."""

    def check_unchanged(self) -> None:
        if self.watcher is not None:
            self.watcher.check()

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
        with reading("the model"):
            source, adapter = self.source(target)
        push = packings.weights_push(source, target.backends[0])
        push.look_again = self.check_unchanged
        return push, adapter


@dataclass(frozen=True)
class BaseTensors:
    """Weights of a base by its own names, and their mapping to its checkpoint. Of the model itself
    nothing else is read to send them."""

    params: Params
    mapping: CheckpointMapping
    buffers: frozenset[str] = frozenset()
    """Names of the buffers among them; the pool's checkpoint may hold them."""
    are_read: bool = True
    """False at ranks that neither copied nor send any of them."""
    sources: LruMapping[object, ModuleSource] = field(
        init=False, repr=False, compare=False, default_factory=lambda: LruMapping(_MAX_SOURCES)
    )
    """Sources made of them, kept for later pushes."""

    def source(self, target: pb.DescribeTargetResponse, cast: bool) -> ModuleSource:
        """Return the source of what the pool's base consists of: parameters, and persistent buffers
        where its checkpoint holds them.

        Raises:
            WeftError: The weights cannot be pushed; says why.
        """
        rule, left_out = _base_rule(target, cast), self._left_out(target)
        key = rule.key, target.base_fingerprint, left_out, _draft_names(target)
        return self._source(key, lambda: self._expected(rule, target, left_out))

    def _source(self, key: object, make: Callable[[], ModuleSource]) -> ModuleSource:
        source = self.sources.get(key)
        if source is None:
            source = make()
            self.sources.put(key, source)
        if self.are_read:
            source.check_heads()
        return source

    def _expected(
        self, rule: CastRule, target: pb.DescribeTargetResponse, left_out: frozenset[str]
    ) -> ModuleSource:
        drafts, is_base = _draft_names(target), partial(_is_base, target)
        without = self.buffers | left_out
        source = ModuleSource(self.mapping, self.params, rule, without, drafts, is_base)
        if self.buffers and not is_base(source.metas):
            whole = ModuleSource(self.mapping, self.params, rule, left_out, drafts, is_base)
            if is_base(whole.metas):
                source = whole
        if left_out:
            source.description += f", without {len(left_out)} of layers for drafts"
        return source

    def _left_out(self, target: pb.DescribeTargetResponse) -> frozenset[str]:
        """Return the layers for drafts that no replica takes."""
        if not target.draft_prefixes:
            return frozenset()
        taken, prefixes = _draft_names(target), tuple(target.draft_prefixes)
        names = self.params.metas
        return frozenset(n for n in names if is_draft(n, prefixes) and n not in taken)

    def draft_source(self, target: pb.DescribeTargetResponse, cast: bool) -> Source:
        """Return the source of a model that drafts tokens, by its own names.

        Raises:
            WeftError: The weights cannot be pushed; says why.
        """
        rule, is_base = _draft_rule(target, cast), partial(_is_draft_model, target)
        return self._source(
            ("draft", rule.key),
            lambda: ModuleSource(self.mapping, self.params, rule, is_base=is_base),
        )

    @property
    def remarks(self) -> tuple[str, ...]:
        """Remarks on how they are held."""
        if "quantised" not in self.params.kind:
            return ()
        return ("the base is quantised here: its dequantised weights were pushed",)


@dataclass(frozen=True)
class ModelBase(PushContent):
    """Content with every weight of a model, which is read in place."""

    opened: OpenedModel
    cast: bool
    merged: str | None = None
    """Name of the adapter to merge into the weights; None for none."""
    notes: tuple[str, ...] = ()
    """Remarks on the model as it was when the push was asked for."""
    base: AdapterBase = field(default_factory=AdapterBase)
    """See ``Content.base``: a merged push makes no module a version of the base."""
    watcher: ModelWatcher | None = None
    """Watcher of the model as it was then."""
    known: BaseTensors | None = None
    """Result of ``weights`` as it was then; None if it is still to be found out."""

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
        is_peft = opened.is_adapted
        if is_peft and merged is None:
            raise InvalidRequestError(
                "this is a PEFT model: push_adapter sends its adapter, push_merged its base with "
                "the adapter merged in"
            )
        if not is_peft and merged is not None:
            raise InvalidRequestError("push_merged needs a PEFT model: push_base sends this one")
        found = cls(opened, cast, merged)
        if merged is None:
            watcher = ModelWatcher(opened.watcher("all"))
            return replace(
                found, base=AdapterBase.of(opened.module, watcher.states), watcher=watcher
            )
        check_mergeable(opened.module, merged)
        settings = merge_settings(opened.module, merged)
        found = replace(found, known=found.weights_by(settings))
        tensors = opened.watcher(
            f"merged with {merged}", lambda: _as_they_are(_inputs(found.weights().params))
        )
        read = partial(merge_settings, opened.module, merged)
        watcher = ModelWatcher(tensors, read, settings)
        return replace(found, notes=active_remarks(opened.module, merged), watcher=watcher)

    def weights(self) -> BaseTensors:
        """Return the weights to push, as the model has them now.

        Raises:
            WeftError: They cannot be pushed; says why.
        """
        if self.known is not None:
            return self.known
        merged = self.merged
        return self.weights_by({} if merged is None else merge_settings(self.opened.module, merged))

    def weights_by(self, settings: Settings) -> BaseTensors:
        """Return ``weights``, by the settings that ``merge_settings`` gave; kept for later pushes.

        Raises:
            WeftError: They cannot be pushed; says why.
        """
        key = self.merged, tuple(settings.items())
        found: BaseTensors | None = self.opened.sources.get(key)
        if found is None:
            found = self._weights(self.opened.params, CheckpointMapping.of(self.opened.base))
            self.opened.sources.put(key, found)
        return found

    def _weights(self, params: Params, mapping: CheckpointMapping) -> BaseTensors:
        module, buffers = self.opened.module, self.opened.buffers
        if params.is_collective and has_quantised_layers(module):
            raise UnsupportedError(
                "a base that is both quantised and sharded cannot be dequantised during a push: "
                "push the adapter (push_adapter), or shard an unquantised base"
            )
        if self.merged is not None:
            params = MergedParams(module, params, self.merged)
            buffers = frozenset(base_name_in_peft(name, self.merged) or "" for name in buffers)
        return BaseTensors(params, mapping, buffers)

    def source(self, target: pb.DescribeTargetResponse) -> tuple[Source, None]:
        return self.weights().source(target, self.cast), None

    def draft_source(self, target: pb.DescribeTargetResponse) -> Source:
        """See ``BaseTensors.draft_source``."""
        return self.weights().draft_source(target, self.cast)

    def kept(self, memory: SnapshotMemory) -> KeptBase:
        params, trained = self.opened.params, self._trained()
        names = _inputs(self.weights().params)
        rest = names - trained
        why = memory.whole.why_no_room(params.metas[name] for name in rest)
        copied = snapshot(params, trained & names if why else names, memory)
        weights = replace(
            self._weights(copied, CheckpointMapping.frozen(self.opened.base)),
            are_read=params.is_collective or memory.whole.ranks.rank == SENDER,
        )
        remarks = self.remarks
        if why:
            what = "weights" if self.merged is None else "frozen weights"
            remarks += (f"its {what} were read in place, not copied: {why}",)
        watcher = None
        if why:
            held = self.opened.held()
            watcher = ModelWatcher(TensorWatcher({name: held[name] for name in rest & held.keys()}))
        self.check_unchanged()
        return KeptBase(weights, self.cast, remarks, self.base, watcher)

    def _trained(self) -> set[str]:
        """Return the names of what is copied in any case: what is trained, and what only its
        framework could gather later."""
        found = gathered_names(self.opened.params)
        if self.merged is None:
            return found
        return found | {
            name
            for name, param in walk(self.opened.module).named.items()
            if param.requires_grad or adapter_tensor_name(name, self.merged) is not None
        }

    @property
    def remarks(self) -> tuple[str, ...]:
        return (*self.weights().remarks, *self.notes)


def _as_they_are(names: Iterable[str]) -> dict[str, str]:
    return {name: name for name in names}


def _inputs(params: Params) -> set[str]:
    """Return the names of the model's parameters that are read for its base."""
    return params.inputs if isinstance(params, MergedParams) else set(params.metas)


@dataclass(frozen=True)
class KeptBase(PushContent):
    """Content with every weight of a model as it was when the push was asked for."""

    weights: BaseTensors
    cast: bool
    remarks: tuple[str, ...]
    base: AdapterBase
    watcher: ModelWatcher | None
    """Watcher of what was not copied."""

    def source(self, target: pb.DescribeTargetResponse) -> tuple[Source, None]:
        return self.weights.source(target, self.cast), None

    def draft_source(self, target: pb.DescribeTargetResponse) -> Source:
        """See ``BaseTensors.draft_source``."""
        return self.weights.draft_source(target, self.cast)

    def kept(self, memory: SnapshotMemory) -> KeptBase:
        return self


def _is_base(target: pb.DescribeTargetResponse, metas: Sequence[TensorMeta]) -> bool:
    """Return whether these are all tensors of the pool's base; those for drafts do not count."""
    drafts = _draft_names(target)
    own = [meta for meta in metas if meta.name not in drafts]
    return base_fingerprint(target.architecture, own) == target.base_fingerprint


def _is_draft_model(target: pb.DescribeTargetResponse, metas: Sequence[TensorMeta]) -> bool:
    """Return whether these, by their own names, are all tensors of the model that drafts tokens."""
    wanted = _draft_names(target)
    own = {meta.name for meta in metas}
    return {DRAFT_MODEL + name if DRAFT_MODEL + name in wanted else name for name in own} == wanted


def _draft_names(target: pb.DescribeTargetResponse) -> frozenset[str]:
    """Return the names, in a base, of the tensors that the pool's replicas draft tokens with."""
    return frozenset(tensor.name for tensor in target.draft_tensors)


@dataclass(frozen=True)
class ModelAdapter(PushContent):
    """Content with a PEFT model's adapter, which is read in place."""

    opened: OpenedModel
    adapter_name: str
    cast: bool
    check_base: bool
    notes: tuple[str, ...] = ()
    """Remarks on the model as it was when the push was asked for."""
    base: AdapterBase = field(default_factory=AdapterBase)
    """See ``Content.base``."""
    watcher: ModelWatcher | None = None
    """Watcher of the adapter as it was then."""

    @classmethod
    def of(
        cls,
        model: torch.nn.Module,
        ranks: Ranks,
        cast: bool,
        adapter_name: str,
        check_base: bool,
        kind: Kind = "auto",
    ) -> ModelAdapter:
        """Open a model for a push of its adapter; see ``open_model``."""
        opened = open_model(model, ranks, kind)
        tensors = opened.watcher(
            f"adapter {adapter_name}", lambda: adapter_parameters(opened.params, adapter_name)
        )
        watcher = ModelWatcher(tensors, partial(adapter_settings, opened.module, adapter_name))
        notes = active_remarks(opened.module, adapter_name)
        base = _trained_base(opened) if ranks.rank == SENDER else AdapterBase()
        return cls(opened, adapter_name, cast, check_base, notes, base, watcher)

    def source(self, target: pb.DescribeTargetResponse) -> tuple[Source, Adapter]:
        adapter = self._adapter(self.opened, _adapter_rule(target, self.cast))
        return adapter.source, adapter

    def _adapter(self, opened: OpenedModel, rule: CastRule) -> Adapter:
        return adapter_of_model(opened, self.adapter_name, rule, check_base=self.check_base)

    def kept(self, memory: SnapshotMemory) -> KeptAdapter:
        names = adapter_parameters(self.opened.params, self.adapter_name)
        copied = replace(self.opened, params=snapshot(self.opened.params, names, memory))
        adapter = self._adapter(copied, CastRule())
        self.check_unchanged()
        return KeptAdapter(adapter, self.cast, self.remarks, self.base)

    @property
    def remarks(self) -> tuple[str, ...]:
        kind = self.opened.params.kind
        if "quantised" not in kind:
            return self.notes
        return (
            f"the adapter was trained on a base that is {kind.partition(' ')[2]}, and is served on "
            "the pool's own: answers differ from the trainer's by the error of that quantisation",
            *self.notes,
        )


@dataclass(frozen=True)
class KeptAdapter(PushContent):
    """Content with an adapter as it was when the push was asked for."""

    adapter: Adapter
    """Adapter by any rule for its dtypes."""
    cast: bool
    remarks: tuple[str, ...]
    base: AdapterBase

    def source(self, target: pb.DescribeTargetResponse) -> tuple[Source, Adapter]:
        source = self.adapter.source.cast_by(_adapter_rule(target, self.cast))
        return source, replace(self.adapter, source=source)

    def kept(self, memory: SnapshotMemory) -> KeptAdapter:
        return self


@dataclass(frozen=True)
class FileBase(PushContent):
    """Content of a checkpoint on disk, read when it is sent."""

    path: Path
    cast: bool
    remarks: tuple[str, ...] = ()
    files: Mapping[str, FileState | None] = field(default_factory=dict)
    """States of its files when the push was asked for."""

    @classmethod
    def of(cls, path: Path, cast: bool) -> FileBase:
        """Look at the files of a checkpoint."""
        return cls(path, cast, files=file_states(path))

    def source(self, target: pb.DescribeTargetResponse) -> tuple[Source, None]:
        rule, drafts = _base_rule(target, self.cast), _draft_names(target)
        return CheckpointSource(self.path, rule, drafts, partial(_is_base, target)), None

    def draft_source(self, target: pb.DescribeTargetResponse) -> Source:
        """Return the source of a model that drafts tokens, by its own names."""
        rule, is_draft_model = _draft_rule(target, self.cast), partial(_is_draft_model, target)
        return CheckpointSource(self.path, rule, rule.exceptions, is_draft_model)

    def kept(self, memory: SnapshotMemory) -> FileBase:
        """See ``Content.kept``: files are not copied, but looked at again."""
        return self

    def check_unchanged(self) -> None:
        now = file_states(self.path)
        if moved := [
            name for name in {**self.files, **now} if self.files.get(name) != now.get(name)
        ]:
            raise model_changed([f"file {name!r} of {self.path} was written" for name in moved])

    @property
    def base(self) -> AdapterBase:
        """See ``Content.base``: no module of this process."""
        return AdapterBase()


@dataclass(frozen=True)
class DraftedBase(PushContent):
    """Content with every weight of a base, and of the model that drafts tokens for it."""

    model: ModelBase | KeptBase | FileBase
    draft: ModelBase | KeptBase | FileBase

    def source(self, target: pb.DescribeTargetResponse) -> tuple[Source, None]:
        source, _ = self.model.source(target)
        return DraftedSource(source, self.draft.draft_source(target), target), None

    def kept(self, memory: SnapshotMemory) -> DraftedBase:
        return DraftedBase(self.model.kept(memory), self.draft.kept(memory))

    def check_unchanged(self) -> None:
        self.model.check_unchanged()
        self.draft.check_unchanged()

    @property
    def remarks(self) -> tuple[str, ...]:
        return (*self.model.remarks, *self.draft.remarks)

    @property
    def base(self) -> AdapterBase:
        return self.model.base


@dataclass(frozen=True)
class FileAdapter(PushContent):
    """Content of a directory that PEFT saved, read when it is sent."""

    path: Path
    cast: bool
    remarks: tuple[str, ...] = ()

    def source(self, target: pb.DescribeTargetResponse) -> tuple[Source, Adapter]:
        adapter = adapter_of_dir(self.path, _adapter_rule(target, self.cast))
        return adapter.source, adapter

    def kept(self, memory: SnapshotMemory) -> KeptAdapter:
        """See ``Content.kept``: an adapter's files are read now."""
        before, base = adapter_states(self.path), self.base
        adapter = adapter_of_dir(self.path, CastRule(), copy=memory.copy)
        if adapter_states(self.path) != before:
            raise model_changed([f"{self.path} was written"])
        return KeptAdapter(adapter, self.cast, self.remarks, base)

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
    watcher: ModelWatcher | None = None
    """Watcher of tensors that are known beforehand, since they came in a collection."""
    remarks: tuple[str, ...] = ()

    @property
    def can_begin_again(self) -> bool:
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
        push: RankPush
        collection = self.steps.collection
        if self.metadata is None and collection is not None:
            source = collected_source(collection, reference(), self.cast, self.draft)
            push = packings.weights_push(source, backend)
        elif self.metadata is None:
            arriving = RunSource(self.steps, reference(), self.cast, self.draft)
            push = packings.announced_push(arriving, backend)
        else:
            ordered = OrderedSource(self.steps, self.metadata, reference(), self.cast, self.draft)
            push = packings.ordered_push(ordered, backend)
        push.look_again = self.check_unchanged
        return push, None

    def check_unchanged(self) -> None:
        """See ``Content.check_unchanged``; of an iterator nothing is known beforehand."""
        if self.watcher is not None:
            self.watcher.check()

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


def watcher_of_named(given: object) -> ModelWatcher | None:
    """Return the watcher of named tensors that came in a dict, a list or a tuple; else None: what
    comes from an iterator is not known before it is read."""
    if isinstance(given, dict):
        found = given
    elif isinstance(given, list | tuple):
        pairs = [each for each in given if isinstance(each, tuple) and len(each) == 2]
        found = {name: tensor for name, tensor in pairs if isinstance(name, str)}
    else:
        return None
    tensors = {n: t for n, t in found.items() if isinstance(t, torch.Tensor) and is_readable(t)}
    return ModelWatcher(TensorWatcher(tensors))


def _trained_base(opened: OpenedModel) -> AdapterBase:
    """Return the base inside a PEFT model, as it is now."""
    watcher = opened.watcher("base", lambda: _base_names(opened))
    content = BaseContent(opened.base, watcher) if type(opened.params) is WholeParams else None
    return AdapterBase.of(opened.base, watcher.states(), content)


def _base_names(opened: OpenedModel) -> dict[str, str]:
    """Map the parameters and buffers of a model's own base to their names there."""
    found = {raw: base_name_in_peft(raw) for raw in opened.params.metas}
    return {raw: name for raw, name in found.items() if name is not None}


def base_content(
    model: Model,
    ranks: Ranks,
    cast: bool,
    merged: str | None = None,
    kind: Kind = "auto",
    draft: Model | None = None,
) -> Content:
    """Return the content of a call of ``push_base`` or ``push_merged``."""
    with reading("the model"):
        base = _base_of_model(model, ranks, cast, merged, kind)
        if draft is None:
            return base
        return DraftedBase(base, _base_of_model(draft, ranks, cast, None, "auto"))


def _base_of_model(
    model: Model, ranks: Ranks, cast: bool, merged: str | None, kind: Kind
) -> ModelBase | FileBase:
    if isinstance(model, str | Path):
        return FileBase.of(Path(model), cast)
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
    with reading("the model"):
        return ModelAdapter.of(model, ranks, cast, adapter_name, check_base, kind)


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
