"""Requests of single pushes: what users pass, checked before anything else happens, and planned."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
import torch.distributed as dist

from trainer_side.params.choose import Kind
from trainer_side.pushes.content import (
    Content,
    Model,
    NamedBase,
    adapter_content,
    base_content,
)
from trainer_side.pushes.rank_push import Packings, RankPush, packs_on_device
from trainer_side.ranks.ranks import SENDER, Ranks
from trainer_side.sources.adapter_source import Adapter
from trainer_side.sources.named_source import Metadata, NamedSteps, NamedTensors, check_named
from weft_rl.contract.arguments import check_choice, check_seconds
from weft_rl.contract.errors import InvalidRequestError
from weft_rl.contract.names import BASE_POLICY, MAX_VERSION, check_adapter_name
from weft_rl.contract.push_defaults import DEFAULT_ON_BASE_CHANGE, OnBaseChange, Require
from weft_rl.contract.tensors import Reference
from weft_rl.v1 import publish_pb2 as pb


@dataclass(frozen=True, kw_only=True)
class BaseOptions:
    """Options on an adapter's base; the same on every rank."""

    version: int | None = None
    on_change: OnBaseChange = DEFAULT_ON_BASE_CHANGE

    def __post_init__(self) -> None:
        check_choice("on_base_change", self.on_change, OnBaseChange)
        known = self.version
        if known is not None and (
            not isinstance(known, int) or isinstance(known, bool) or not 0 <= known <= MAX_VERSION
        ):
            raise InvalidRequestError(
                f"base_version={known!r:.80}: give the number N of the base@N that the adapter was "
                "trained on"
            )


@dataclass(frozen=True, kw_only=True)
class PushRequest:
    """Request of one push; the same on every rank."""

    policy: str
    content: Callable[[], Content]
    """Function that looks at the model; its failure is that of the push."""
    check_finite: bool | None
    """True if NaN and infinities end the push; None leaves it to ``checks_finite``."""
    require: Require
    timeout_seconds: float
    base: BaseOptions = field(default_factory=BaseOptions)
    """Caller's options on the base of an adapter."""

    def __post_init__(self) -> None:
        check_replicas(self.require)
        check_seconds("timeout_seconds", self.timeout_seconds)

    def with_options(
        self, check_finite: bool | None, require: Require | None, timeout_seconds: float | None
    ) -> PushRequest:
        """Return the request with other options; None leaves an option as it is.

        Raises:
            InvalidRequestError: One of them cannot be right.
        """
        return replace(
            self,
            check_finite=self.check_finite if check_finite is None else check_finite,
            require=self.require if require is None else require,
            timeout_seconds=self.timeout_seconds if timeout_seconds is None else timeout_seconds,
        )


@dataclass(frozen=True, kw_only=True)
class PushSettings:
    """Settings of a Publisher for all its pushes, which make the requests of single ones.

    Raises:
        InvalidRequestError: One of them cannot be right.
    """

    ranks: Ranks
    kind: Kind
    require: Require
    timeout_seconds: float
    check_finite: bool | None
    on_base_change: OnBaseChange

    def __post_init__(self) -> None:
        check_choice("kind", self.kind, Kind)
        check_choice("on_base_change", self.on_base_change, OnBaseChange)
        check_replicas(self.require)
        check_seconds("timeout_seconds", self.timeout_seconds)

    def adapter(
        self,
        model: Model,
        policy: str,
        adapter_name: str,
        cast: bool,
        check_base: bool,
        base_version: int | None,
        on_base_change: OnBaseChange | None,
    ) -> PushRequest:
        """Make the request to push an adapter; see ``Publisher.push_adapter``."""
        check_adapter_name(policy)
        base = BaseOptions(version=base_version, on_change=on_base_change or self.on_base_change)
        check_model(model, "push_adapter")
        return self._request(
            policy,
            lambda: adapter_content(model, self.ranks, cast, adapter_name, check_base, self.kind),
            base,
        )

    def model_or_named(
        self,
        model: Model | None,
        given: NamedTensors | None,
        metadata: Metadata | None,
        cast: bool,
    ) -> PushRequest:
        """Make the request to push a base, of a model or of named tensors; see
        ``Publisher.push_base``."""
        if model is not None:
            if given is not None or metadata is not None:
                raise InvalidRequestError("push_base takes a model or named_tensors=, not both")
            return self.base(model, cast)
        ranks = self.ranks
        if given is not None:
            check_named(given)
        elif ranks.size == 1:
            raise _nothing_given()

        def content() -> NamedBase:
            if given is None and ranks.rank == SENDER:
                raise _nothing_given()
            return NamedBase(NamedSteps(given, ranks), cast, metadata)

        return self._request(BASE_POLICY, content)

    def base(self, model: Model, cast: bool, merged: str | None = None) -> PushRequest:
        """Make the request to push a base, with the adapter ``merged`` in it if one is named. See
        ``Publisher.push_base``."""
        if merged is None:
            check_model(model, "push_base")
        else:
            check_model(model, "push_merged", directories=False)
        return self._request(
            BASE_POLICY, lambda: base_content(model, self.ranks, cast, merged, self.kind)
        )

    def _request(
        self,
        policy: str,
        content: Callable[[], Content],
        base: BaseOptions | None = None,
    ) -> PushRequest:
        return PushRequest(
            policy=policy,
            content=content,
            check_finite=self.check_finite,
            require=self.require,
            timeout_seconds=self.timeout_seconds,
            base=base or BaseOptions(),
        )


def _nothing_given() -> InvalidRequestError:
    return InvalidRequestError(
        "push_base: give a model, a directory, or named_tensors= (of several ranks, to the first)"
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
    packings: Packings,
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


def checks_finite(wanted: bool | None, backend: str, *, is_adapter: bool) -> bool:
    """Return whether packed tensors are checked for NaN and infinities.

    Unless ``wanted`` says, only adapters that are packed on an accelerator are, which reads one at
    the speed of its memory. On a CPU the check costs about what the digest does (25 ms for 175 MB
    on one core; ``python -m benchmarks.finite``), so there it must be asked for.
    """
    return (is_adapter and packs_on_device(backend)) if wanted is None else wanted


def check_data_host(host: object) -> str | None:
    """Return ``host`` if it may name an address of this machine.

    Raises:
        InvalidRequestError: It has a scheme or a port, or is no string.
    """
    if host is None:
        return None
    is_text = isinstance(host, str) and host.strip() == host != ""
    if not is_text or "/" in str(host) or str(host).count(":") == 1:
        raise InvalidRequestError(
            f"data_host={host!r}: give a name or address of this machine, without scheme or port"
        )
    return str(host)


def check_replicas(require: object) -> int:
    """Return the number of replicas that ``require`` asks for; 0 is all in contact.

    Raises:
        InvalidRequestError: Neither "all" nor a positive whole number.
    """
    if require == "all":
        return 0
    if isinstance(require, int) and not isinstance(require, bool) and require >= 1:
        return require
    raise InvalidRequestError(
        f"require={require!r}: use a number of replicas, at least 1, or 'all'"
    )


def check_callable(name: str, value: object) -> None:
    """Refuse a value that is neither None nor a function.

    Raises:
        InvalidRequestError: It is not.
    """
    if value is not None and not callable(value):
        raise InvalidRequestError(f"{name}={value!r}: give a function, or None")


def check_ranks(ranks: object) -> None:
    """Refuse a value that cannot say which processes push together.

    Raises:
        InvalidRequestError: Neither "all", "this" nor a process group.
    """
    if isinstance(ranks, str) and ranks in ("all", "this"):
        return
    if not (dist.is_available() and isinstance(ranks, dist.ProcessGroup)):
        raise InvalidRequestError(
            f"ranks={ranks!r}: use 'all', 'this' or a torch.distributed process group"
        )


def check_device(device: object) -> torch.device | None:
    """Return the accelerator to send from; None if none was named.

    Raises:
        InvalidRequestError: No CUDA device of this process.
    """
    if device is None:
        return None
    try:
        found: torch.device = torch.device(device)  # type: ignore[call-overload]
    except (RuntimeError, TypeError) as error:
        raise InvalidRequestError(f"device={device!r}: {error}".splitlines()[0]) from None
    if found.type != "cuda":
        raise InvalidRequestError(
            f"device={str(found)!r} is no CUDA device: to send from host memory, leave it out or "
            "say backend='gloo'"
        )
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if count == 0 or (found.index or 0) >= count:
        raise InvalidRequestError(
            f"device={str(found)!r}: this process has {count or 'no'} CUDA "
            f"device{'' if count == 1 else 's'}"
        )
    return found


def check_model(model: object, method: str, *, directories: bool = True) -> None:
    """Refuse a value that is not a model.

    Args:
        directories: Whether a path will do.

    Raises:
        InvalidRequestError: It is not; says what to give.
    """
    if isinstance(model, torch.nn.Module) or (directories and isinstance(model, str | Path)):
        return
    wanted = "a torch module" + (" or a directory" if directories else "")
    if isinstance(model, Mapping):
        raise InvalidRequestError(
            f"{method} takes {wanted}, not a state_dict: give the model that it was taken from"
            + (", or the directory that it was saved in" if directories else "")
        )
    raise InvalidRequestError(f"{method} takes {wanted}, not {type(model).__name__}")


def check_open(is_closed: bool) -> None:
    """Refuse a push of a Publisher that is closed.

    Raises:
        InvalidRequestError: ``PUBLISHER_CLOSED``.
    """
    if is_closed:
        raise InvalidRequestError(
            "this Publisher is closed: make another one, or push inside its `with` block",
            reason="PUBLISHER_CLOSED",
        )
