"""Requests of single pushes, made of what users pass and checked before anything else happens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from trainer_side.arguments import check_model, check_replicas
from trainer_side.params.choose import Kind
from trainer_side.ranks.ranks import SENDER, Ranks
from trainer_side.sources.content import Content, Model, adapter_content, base_content
from trainer_side.sources.named_source import NamedBase
from trainer_side.sources.named_tensors import Metadata, NamedSteps, NamedTensors, check_named
from weft_rl.contract.arguments import check_choice, check_seconds
from weft_rl.contract.errors import InvalidRequestError
from weft_rl.contract.names import BASE_POLICY, MAX_VERSION, check_adapter_name
from weft_rl.contract.push_defaults import DEFAULT_ON_BASE_CHANGE, OnBaseChange, Require


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
    content: Callable[[], Content | NamedBase]
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
        content: Callable[[], Content | NamedBase],
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
