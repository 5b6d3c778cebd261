"""Single pushes: requests, checked before anything else happens, their plans, and their results."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch

from trainer_side.params.choose import Kind
from trainer_side.pushes.content import (
    Content,
    Model,
    NamedBase,
    adapter_content,
    base_content,
    watcher_of_named,
)
from trainer_side.pushes.rank_push import RankPush, RankPushFactory, packs_on_device
from trainer_side.ranks.ranks import SENDER, Ranks
from trainer_side.sources.named_source import Metadata, NamedSteps, NamedTensors, check_named
from trainer_side.sources.source import Adapter
from weft_rl.contract.errors import InvalidNameError, InvalidRequestError, WeftError
from weft_rl.contract.names import BASE_POLICY, PolicyVersion, check_adapter_name, plural
from weft_rl.contract.options import (
    DEFAULT_BASE,
    Require,
    check_choice,
    check_seconds,
    shown_value,
)
from weft_rl.contract.tensors import Reference
from weft_rl.v1 import publish_pb2 as pb


@dataclass(frozen=True, kw_only=True)
class PushOptions:
    """Rarely needed options of a push, given to a ``Publisher`` or to one push.

    Raises:
        InvalidRequestError: One of them cannot be right.
    """

    cast: bool = True
    """True if floats are cast to the dtype that the replicas serve; False refuses other dtypes."""
    check_finite: bool = False
    """True if NaN and infinities end the push with ``NotFiniteError``. Buckets are checked as they
    are packed, after the cast: on a CPU this costs about what the digest does. Adapters that are
    packed on an accelerator are checked in any case, where it costs next to nothing. A base is
    refused at begin by a pool where a replica loads it in place."""
    kind: Kind = "auto"
    """Kind that models are held as: detected ("auto"), or refused unless it is so: "whole" (plain,
    DDP, ZeRO-1 and 2), "fsdp1", "fsdp2" (HSDP), "zero3"."""

    def __post_init__(self) -> None:
        for name in ("cast", "check_finite"):
            check_choice(name, getattr(self, name), Literal[True, False])
        check_choice("kind", self.kind, Kind)


@dataclass(frozen=True, kw_only=True)
class RequestedBase:
    """Base that an adapter is for, as its push says."""

    version: int | None = None
    """Number N of the base@N that the adapter was trained on; None if it is to be found out."""
    is_required: bool = False
    """True if the push is refused where the pool serves a base of other content."""
    is_compared: bool = True
    """True if the pool's base is compared with the adapter's: names, shapes and content."""

    @classmethod
    def parse(cls, base: str | PolicyVersion) -> RequestedBase:
        """Parse the value of ``base=``; see ``Publisher.push_adapter``.

        Raises:
            InvalidRequestError: None of its values.
        """
        known = _BASES.get(base) if isinstance(base, str) else None
        if known is not None:
            return known
        text = str(base) if isinstance(base, str | PolicyVersion) else ""
        name = text.removeprefix(_ONLY)
        try:
            version = PolicyVersion.parse(name)
        except InvalidNameError:
            version = None
        if version is None or version.policy != BASE_POLICY:
            raise InvalidRequestError(
                f"base={shown_value(base)}: give 'auto', 'same', 'any', 'base@N' of the base that "
                "the adapter was trained on, or 'only base@N'"
            )
        return cls(version=version.version, is_required=name != text)


_ONLY = "only "
#: No pool has as many.
_MOST_REPLICAS = 2**20
_BASES = {
    DEFAULT_BASE: RequestedBase(),
    "same": RequestedBase(is_required=True),
    "any": RequestedBase(is_compared=False),
}


@dataclass(frozen=True, kw_only=True)
class PushRequest:
    """Request of one push; the same on every rank."""

    policy: str
    content: Callable[[], Content]
    """Function that looks at the model; its failure is that of the push."""
    check_finite: bool
    """True if NaN and infinities end the push wherever it is packed; see ``checks_finite``."""
    require: Require
    timeout_seconds: float
    base: RequestedBase = RequestedBase()
    kind: str = ""
    """Kind of what is pushed, as text."""
    how: str = ""
    """Options of the push, as text; empty at a rank that only follows rank 0."""
    beside: int = 0
    """Number of the call, if the push is carried out beside the training; else 0."""

    @property
    def arguments(self) -> dict[str, object]:
        """Arguments that every rank must ask for alike, by name."""
        found: dict[str, object] = {
            "call": "push",
            "policy": self.policy,
            "kind": self.kind,
            "asynchronous call": self.beside,
        }
        if self.how:
            found |= {"base": self.base, "require": self.require, "how": self.how}
        return found


@dataclass(frozen=True, kw_only=True)
class PushSettings:
    """Settings of pushes, which make the requests of single ones.

    Raises:
        InvalidRequestError: One of them cannot be right.
    """

    ranks: Ranks
    require: Require
    timeout_seconds: float
    options: PushOptions

    def __post_init__(self) -> None:
        if not isinstance(self.options, PushOptions):
            raise InvalidRequestError(
                f"options={shown_value(self.options)}: give trainer_side.PushOptions(...)"
            )
        check_replicas(self.require)
        check_seconds("timeout_seconds", self.timeout_seconds)

    def but(
        self,
        require: Require | None,
        timeout_seconds: float | None,
        options: PushOptions | None,
    ) -> PushSettings:
        """Return these settings but for those that are given."""
        given = {"require": require, "timeout_seconds": timeout_seconds, "options": options}
        changes: dict[str, Any] = {name: each for name, each in given.items() if each is not None}
        return replace(self, **changes) if changes else self

    def adapter(
        self, model: Model, policy: str, base: str | PolicyVersion, adapter_name: str
    ) -> PushRequest:
        """Make the request to push an adapter; see ``Publisher.push_adapter``."""
        check_adapter_name(policy)
        check_model(model, "push_adapter")
        _check_adapter(adapter_name)
        wanted, how = RequestedBase.parse(base), self.options

        @cache  # an attempt after the first one sends what the first one looked at
        def content() -> Content:
            return adapter_content(
                model, self.ranks, how.cast, adapter_name, wanted.is_compared, how.kind
            )

        said = f"adapter_name={adapter_name!r}"
        return self._request(policy, content, "adapter", said, wanted)

    def base(
        self, model: Model, *, merged: str | None = None, draft: Model | None = None
    ) -> PushRequest:
        """Make the request to push a base, with the adapter ``merged`` in it if one is named; see
        ``Publisher.push_base``, and ``merged``."""
        method = "push_base" if merged is None else "push_merged"
        check_model(model, method, directories=merged is None)
        if draft is not None:
            check_model(draft, f"{method}(draft=)")
        how = self.options

        @cache
        def content() -> Content:
            return base_content(model, self.ranks, how.cast, merged, how.kind, draft)

        kind = "base" if merged is None else "merged base"
        said = f"adapter_name={merged!r}, draft={draft is not None}"
        return self._request(BASE_POLICY, content, kind, said)

    def merged(
        self, model: torch.nn.Module, adapter_name: str, draft: Model | None = None
    ) -> PushRequest:
        """Make the request to push a base with an adapter merged in; see
        ``Publisher.push_merged``."""
        _check_adapter(adapter_name)
        return self.base(model, merged=adapter_name, draft=draft)

    def tensors(
        self,
        tensors: NamedTensors | None,
        metadata: Metadata | None,
        *,
        draft: bool = False,
    ) -> PushRequest:
        """Make the request to push a base of named tensors; see ``Publisher.push_tensors``."""
        ranks, how = self.ranks, self.options
        check_choice("draft", draft, Literal[True, False])
        if tensors is not None:
            check_named(tensors)
        elif ranks.size == 1:
            raise _no_tensors()

        def content() -> NamedBase:
            if tensors is None and ranks.rank == SENDER:
                raise _no_tensors()
            watcher = watcher_of_named(tensors) if ranks.rank == SENDER else None
            return NamedBase(NamedSteps(tensors, ranks), how.cast, metadata, draft, watcher)

        said = "" if tensors is None else f"draft={draft}"
        return self._request(BASE_POLICY, content, "named tensors", said)

    def _request(
        self,
        policy: str,
        content: Callable[[], Content],
        kind: str,
        said: str,
        base: RequestedBase = RequestedBase(),
    ) -> PushRequest:
        return PushRequest(
            policy=policy,
            kind=kind,
            how=said and f"{said}, {self.options}",
            content=content,
            check_finite=self.options.check_finite,
            require=self.require,
            timeout_seconds=self.timeout_seconds,
            base=base,
        )


def _no_tensors() -> InvalidRequestError:
    return InvalidRequestError(
        "push_tensors: give an iterator of (name, tensor) pairs, or a function that makes one (of "
        "several ranks, to the first)"
    )


@dataclass(frozen=True)
class PushPlan:
    """Plan of one push."""

    target: pb.DescribeTargetResponse
    """Description of what the pool serves; its first backend is the one to use."""
    what: Content
    push: RankPush
    """This rank's part."""
    adapter: Adapter | None
    """Adapter that is pushed; None for a base."""
    finite: bool
    """True if NaN and infinities end the push."""

    @property
    def backend(self) -> str:
        """Backend that is to carry the bytes."""
        return self.target.backends[0]

    @property
    def remarks(self) -> tuple[str, ...]:
        """Remarks on the model, and on how its ranks send it."""
        return (*self.what.remarks, *self.push.remarks)


def plan_push(
    request: PushRequest,
    target: pb.DescribeTargetResponse,
    packings: RankPushFactory,
    reference: Callable[[], Reference],
) -> PushPlan:
    """Plan what this rank would push to a pool; not collective, reads no values.

    Args:
        packings: Keeps what the next push needs again.
        reference: See ``Content.rank_push``.

    Raises:
        WeftError: It cannot be pushed: the model's layers, names or dtypes.
    """
    what = request.content()
    push, adapter = what.rank_push(target, packings, reference)
    backend = target.backends[0]
    finite = checks_finite(request.check_finite, backend, is_adapter=adapter is not None)
    return PushPlan(target, what, push, adapter, finite)


def checks_finite(wanted: bool, backend: str, *, is_adapter: bool) -> bool:
    """Return whether packed tensors are checked for NaN and infinities.

    Adapters that are packed on an accelerator always are: it reads one at the speed of its memory.
    On a CPU the check costs about what the digest does (25 ms for 175 MB on one core;
    ``python -m benchmarks.finite``), so there it must be asked for.
    """
    return wanted or (is_adapter and packs_on_device(backend))


def check_replicas(require: object) -> int:
    """Return the number of replicas that ``require`` asks for; 0 is all in contact.

    Raises:
        InvalidRequestError: Neither "all" nor a positive whole number that a pool could have.
    """
    if isinstance(require, str) and require == "all":
        return 0
    is_number = isinstance(require, int) and not isinstance(require, bool)
    if is_number and 1 <= require <= _MOST_REPLICAS:  # type: ignore[operator]
        return require  # type: ignore[return-value]
    raise InvalidRequestError(
        f"require={shown_value(require)}: use a number of replicas, at least 1 and at most "
        f"{_MOST_REPLICAS}, or 'all'"
    )


def _check_adapter(name: object) -> None:
    """Refuse a value that cannot name an adapter in a PEFT model."""
    if not isinstance(name, str):
        raise InvalidRequestError(
            f"adapter_name={shown_value(name)}: give the adapter's name in the PEFT model, a string"
        )


def check_model(model: object, method: str, *, directories: bool = True) -> None:
    """Refuse a value that is not a model.

    Args:
        directories: Whether a path will do.
    """
    if isinstance(model, torch.nn.Module) or (
        directories and isinstance(model, str | Path) and model != ""
    ):
        return
    wanted = "a torch module" + (" or a directory" if directories else "")
    if isinstance(model, Mapping):
        raise InvalidRequestError(
            f"{method} takes {wanted}, not a state_dict: give the model that it was taken from"
            + (", or the directory that it was saved in" if directories else "")
        )
    are_tensors = isinstance(model, Iterable) and not isinstance(model, str | bytes)
    hint = ": push_tensors takes named tensors" if are_tensors else ""
    raise InvalidRequestError(f"{method} takes {wanted}, not {type(model).__name__}{hint}")


# -- results ----------------------------------------------------------------------


@dataclass(frozen=True)
class CopyUsage:
    """Cost of the copy that an async push sends; see ``PushReport``."""

    num_bytes: int = 0
    seconds: float = 0.0
    memory_bytes: int = 0


#: Cost of a push that reads the model in place.
NOT_COPIED = CopyUsage()


@dataclass(frozen=True)
class DeltaUsage:
    """Cost and gain of a delta, or the reason against one; see ``Publisher(delta=)``."""

    is_delta: bool = False
    """True if only changed elements were sent."""
    changed_share: float = 0.0
    """Changed elements, of all ranks, as a share of all; 0 where they were not compared."""
    comparing_seconds: float = 0.0
    """Time in which this rank compared and coded what it sends."""
    memory_bytes: int = 0
    """Memory of the copy that this rank compares with, in the served dtype, and of what is kept
    with it to compare in."""
    whole_reason: str = ""
    """Reason why all elements were sent, to all replicas or, beside a delta, to some; empty for a
    delta, an adapter, and with "never"."""
    num_whole_replicas: int = 0
    """Replicas that were sent all elements beside a delta, since they could not take it."""


#: Usage of a push for which no delta was thought of.
NO_DELTA = DeltaUsage()


@dataclass(frozen=True, kw_only=True)
class PushReport:
    """Cost of a push as the coordinator measured it, with remarks on its outcome."""

    total_bytes: int
    """Payload of the version, in bytes; each replica received as much, or ``sent_bytes``."""
    num_replicas: int
    """Replicas that served the version when the push ended; ``remarks`` names the others."""
    seconds: float
    """Time from the call until every replica had switched, or had failed to."""
    forming_seconds: float
    """Time from the request to begin until every receiver was ready."""
    staging_seconds: float
    """Time from then until every receiver had verified the last bucket."""
    committing_seconds: float
    """Time from then until every replica served the version."""
    pause_seconds: float
    """Longest time that a replica paused generation."""
    source: str
    """Kind of trainer and of model that was read."""
    backend: str
    """Backend that carried the bytes: "one-sided", "nccl", "stream" or "gloo"."""
    backend_reason: str
    """Reason for this backend, and against those that the pool would have preferred."""
    copied_bytes: int = 0
    """Bytes that this rank copied to host memory before an async push returned; 0 for a push that
    blocks."""
    copying_seconds: float = 0.0
    """Time that the copy took, which the call blocked for."""
    copies_memory_bytes: int = 0
    """Host memory that this rank's publisher holds for copies, of this push and others; it is used
    again."""
    sent_bytes: int = 0
    """Payload bytes that each replica received: ``total_bytes``, or those of a delta, but for the
    replicas that were sent all elements beside it; 0 where the coordinator was restarted
    meanwhile."""
    delta: DeltaUsage = NO_DELTA
    """Cost and gain of a delta, if one was sent; or the reason why all elements were."""
    remarks: tuple[str, ...] = ()
    """Facts that success does not tell, each a sentence: replicas that did not switch and why, a
    quantised base, a base that is not the one that the adapter was trained on."""

    def __repr__(self) -> str:
        """Return the cost in short; the fields have all of it."""
        return f"PushReport({self._cost()})"

    def _cost(self) -> str:
        sent = f"{self.total_bytes:,} bytes"
        if self.delta.is_delta:
            sent = f"a delta of {self.sent_bytes:,} of {sent}"
            if self.delta.num_whole_replicas:
                sent += f" (whole to {self.delta.num_whole_replicas})"
        text = (
            f"{sent} to {plural(self.num_replicas, 'replica')} in "
            f"{self.seconds:.3f} s over {self.backend}"
        )
        return f"{text}, {plural(len(self.remarks), 'remark')}" if self.remarks else text


class PushResult(NamedTuple):
    """Version that a push made, and the push's report."""

    version: PolicyVersion
    """Version that the replicas serve, for example ``math@17``."""
    report: PushReport
    """Cost and remarks of the push."""

    def metrics(self, prefix: str = "weft/") -> dict[str, float]:
        """Return the push as flat numbers, for a logger of training: seconds by phase, bytes, the
        version's number, and whether it was a delta (1.0).

        Args:
            prefix: Beginning of each name.
        """
        report, delta = self.report, self.report.delta
        found = {
            "version": self.version.version,
            "num_replicas": report.num_replicas,
            "num_remarks": len(report.remarks),
            "total_bytes": report.total_bytes,
            "sent_bytes": report.sent_bytes,
            "seconds": report.seconds,
            "forming_seconds": report.forming_seconds,
            "staging_seconds": report.staging_seconds,
            "committing_seconds": report.committing_seconds,
            "pause_seconds": report.pause_seconds,
            "copying_seconds": report.copying_seconds,
            "is_delta": delta.is_delta,
            "changed_share": delta.changed_share,
            "comparing_seconds": delta.comparing_seconds,
        }
        return {prefix + name: float(value) for name, value in found.items()}

    def __str__(self) -> str:
        """Return the version alone: ``math@17``."""
        return str(self.version)

    def __repr__(self) -> str:
        """Return version and cost in short."""
        return f"PushResult({self.version}, {self.report._cost()})"


def report_of(
    transfer: pb.Transfer,
    plan: PushPlan,
    seconds: float,
    cost: CopyUsage,
    delta: DeltaUsage,
    failures: Iterable[WeftError],
    about_base: Iterable[str],
) -> PushReport:
    """Return the report of a push from its plan and its ended transfer.

    Args:
        cost: Cost of the copy that was sent.
        delta: Cost and gain of the delta that was sent, or the reason against one.
        failures: Errors that it was begun again for.
        about_base: Remarks on the base that an adapter is served over.
    """
    return PushReport(
        total_bytes=plan.push.num_bytes or transfer.total_bytes,
        num_replicas=len(transfer.serving_replica_ids),
        seconds=seconds,
        forming_seconds=transfer.forming.ToTimedelta().total_seconds(),
        staging_seconds=transfer.staging.ToTimedelta().total_seconds(),
        committing_seconds=transfer.committing.ToTimedelta().total_seconds(),
        pause_seconds=transfer.pause.ToTimedelta().total_seconds(),
        source=plan.push.description,
        backend=transfer.backend or plan.backend,
        backend_reason=transfer.backend_reason,
        copied_bytes=cost.num_bytes,
        copying_seconds=cost.seconds,
        copies_memory_bytes=cost.memory_bytes,
        delta=delta,
        sent_bytes=transfer.sent_bytes,
        remarks=(
            *(f"begun again, for {error}" for error in failures),
            *plan.remarks,
            *about_base,
            *missing_replicas(transfer),
        ),
    )


def missing_replicas(transfer: pb.Transfer) -> tuple[str, ...]:
    """Return a sentence for each replica that does not serve a committed push, with the reason."""
    if not transfer.replica_ids:
        count = len(transfer.serving_replica_ids)
        return (
            "the coordinator was restarted before it had told how the push ended: it is "
            f"committed, and {count} of the replicas in contact by then served it; the others "
            "catch up",
        )
    before = set(transfer.lost_replica_ids)
    return tuple(
        f"{refusal.replica_id} does not serve it: {_when(refusal.replica_id in before)}, "
        f"{refusal.message} [{refusal.reason}]"
        for refusal in transfer.refusals
    )


def _when(before_commit: bool) -> str:
    return "it was lost before the commit" if before_commit else "it did not switch at the commit"
