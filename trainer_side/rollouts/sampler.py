"""Course of one prompt to its samples: to a replica, and to others where that one fails."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import grpc

from trainer_side.rollouts.dispatch import (
    BusyReplica,
    NextStep,
    PromptDispatcher,
    PromptRequirements,
    after,
)
from trainer_side.rollouts.requests import PromptRequest, WantedVersions
from trainer_side.rollouts.routes import Routes
from trainer_side.rollouts.sample import PartialSample, Sample, SampleGroup
from weft_rl.containers import LruMapping
from weft_rl.contract.errors import (
    PeerUnavailableError,
    StalledError,
    TransferTimeoutError,
    UnsupportedError,
    VersionChangedError,
    WeftError,
)
from weft_rl.contract.names import PolicyVersion
from weft_rl.rpc.channel import open_aio_channel
from weft_rl.rpc.codec import POLICY_VERSION
from weft_rl.rpc.security.credentials import Credentials
from weft_rl.rpc.status import error_from_rpc
from weft_rl.v1 import generate_pb2 as pb
from weft_rl.v1.generate_pb2_grpc import GenerateServiceStub

_log = logging.getLogger(__name__)

#: How often a prompt starts again where replicas fail while they answer it: it may be what
#: they fail over, and is not to end all of them.
_MAX_RESTARTS = 4
#: Before a version is asked for again that is still to come, whatever the routes tell.
_WAIT_SECONDS = 0.25
#: How long a prompt waits for a replica before it is said why, and what asking the coordinator
#: about that may take.
_SAY_SECONDS, _ASK_SECONDS = 5.0, 2.0
#: Remarks that are not logged twice.
_MAX_REMARKED = 256


@dataclass(frozen=True, kw_only=True)
class SamplerConfig:
    """Configuration of a ``Sampler``; see ``RolloutClient``."""

    coordinator: str
    credentials: Credentials
    logprobs_mode: str
    logprobs_truncated: bool | None
    connect_seconds: float
    stall_seconds: float
    max_requests_per_replica: int


@dataclass(eq=False)
class _PromptState:
    """Course of one prompt, as far as it has come."""

    ask: PromptRequest
    place: PromptRequirements
    number: int
    drafts: list[PartialSample]
    made_by: list[str]
    prompt_token_ids: list[int]
    num_restarts: int = 0
    has_begun: bool = False
    """True if the request that runs now was answered."""
    waits_since: float | None = None
    """Time at which it began to wait for a replica; None while it does not."""
    failure: WeftError | None = None
    """Error of the last failed request that did not end the prompt."""
    left_tokens: int = 0
    """Tokens of that request's cost that are still to come."""

    def too_late(self, why: str) -> TransferTimeoutError:
        """Return the error for a prompt whose time is over."""
        before = f"; before that: {self.failure.message}" if self.failure else ""
        return TransferTimeoutError(
            f"{self.place.wanted} did not answer a prompt in {self.ask.timeout_seconds:g} s: "
            f"{why}{before}"
        )

    @property
    def missing(self) -> list[int]:
        """Samples that the next request asks for."""
        return self.ask.next_samples([draft.is_whole for draft in self.drafts])


@dataclass(eq=False)
class _RunningRequest:
    """Request that runs at a replica."""

    target: BusyReplica
    call: Any
    is_stalled: bool = False


@dataclass
class Sampler:
    """Sampler that sends prompts to replicas; used on one event loop, while ``run`` runs."""

    config: SamplerConfig
    _stubs: dict[str, tuple[grpc.aio.Channel, Any]] = field(default_factory=dict)
    _running: set[_RunningRequest] = field(default_factory=set)
    _waiting: set[_PromptState] = field(default_factory=set)
    _said: str = ""
    """Reason why prompts wait, as it was logged last."""
    _remarked: LruMapping[str, bool] = field(default_factory=lambda: LruMapping(_MAX_REMARKED))
    """Remarks on samples that were logged."""
    _timer: asyncio.TimerHandle | None = None

    def __post_init__(self) -> None:
        config = self.config
        self._dispatch: PromptDispatcher[asyncio.Future[BusyReplica]] = PromptDispatcher(
            config.max_requests_per_replica
        )
        self._routes = Routes(
            config.coordinator, config.credentials, config.connect_seconds, self._set_routes
        )

    async def run(self) -> None:
        """Follow the routes and watch running requests until cancelled."""
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._routes.follow())
                tasks.create_task(self._watch())
                tasks.create_task(self._tell_waits())
        finally:
            if self._timer is not None:
                self._timer.cancel()
            for channel, _ in self._stubs.values():
                await channel.close()

    async def sample(self, ask: PromptRequest, *, keep: bool) -> SampleGroup:
        """Return all samples of one prompt.

        Args:
            keep: True if failed samples carry their error, instead of all being lost to it.

        Raises:
            WeftError: The samples cannot be had; not with ``keep``.
        """
        deadline = asyncio.get_running_loop().time() + ask.timeout_seconds
        course = _PromptState(
            ask=ask,
            place=PromptRequirements(ask.wanted),
            number=self._dispatch.number(),
            drafts=[PartialSample() for _ in range(ask.num_samples)],
            made_by=[""] * ask.num_samples,
            prompt_token_ids=ask.known_token_ids,
        )
        failure: WeftError | None = None
        try:
            await self._routes.known(deadline)
            while missing := course.missing:
                await self._step(course, missing, deadline)
        except WeftError as error:
            if not keep:
                raise
            failure = error
        samples = tuple(
            draft.sample(None if draft.is_whole else failure) for draft in course.drafts
        )
        return SampleGroup(
            index=ask.index,
            prompt_token_ids=course.prompt_token_ids,
            samples=samples,
            replica_ids=tuple(course.made_by),
            remarks=self._remarks(samples),
        )

    def _remarks(self, samples: Sequence[Sample]) -> tuple[str, ...]:
        """Return remarks on samples; log each the first time."""
        over = self._routes.over_another_base
        versions = {sample.adapter for sample in samples if sample.adapter is not None}
        found = [over[version] for version in versions if version in over]
        remarks = sorted(str(one) for one in found if any(map(one.made, samples)))
        for remark in remarks:
            if self._remarked.get(remark) is None:
                self._remarked.put(remark, True)
                _log.warning("%s: samples are of a policy that its trainer does not hold", remark)
        return tuple(remarks)

    async def _step(self, course: _PromptState, missing: list[int], deadline: float) -> None:
        """Ask one replica for the missing samples."""
        clock = asyncio.get_running_loop()
        target = await self._take(course, deadline)
        course.has_begun, course.left_tokens = False, course.ask.cost_tokens
        was_failing = target.num_failures > 0
        try:
            await self._attempt(course, missing, target, deadline)
            return
        except WeftError as error:
            failure = error
        finally:
            self._dispatch.release(target, course.left_tokens)
            self._pump()
        what = after(
            failure,
            strict=course.ask.strict,
            has_begun=course.has_begun,
            was_failing=was_failing,
        )
        if not (isinstance(failure, VersionChangedError) and what is NextStep.END):
            for index in missing:
                if not course.drafts[index].is_whole:
                    course.drafts[index] = PartialSample()
        if isinstance(failure, TransferTimeoutError):
            raise course.too_late(f"{target.replica_id} was at it") from failure
        course.failure = failure
        place, name = course.place, target.replica_id
        if what is NextStep.RESTART:
            course.num_restarts += 1
            if course.num_restarts > _MAX_RESTARTS:
                raise failure
        if what is NextStep.ASK_OTHERS:
            course.place = replace(place, refused=place.refused | {name})
            if not self._dispatch.may_ask(course.place):
                raise failure
        elif what is NextStep.WAIT:
            course.place = replace(place, is_ahead=True)
            await asyncio.sleep(min(_WAIT_SECONDS, max(0.0, deadline - clock.time())))
        elif what is NextStep.END:
            raise failure
        elif what is not NextStep.AGAIN:
            target.failed(clock.time())
            course.place = replace(place, avoid=place.avoid | {name})

    async def _attempt(
        self, course: _PromptState, missing: list[int], target: BusyReplica, deadline: float
    ) -> None:
        """Make one request; the drafts grow by what is streamed."""
        clock = asyncio.get_running_loop()
        request = course.ask.request(course.place.wanted, missing)
        try:
            call = self._stub(target.address).Generate(request, timeout=deadline - clock.time())
            with self._watched(target, call):
                async for response in call:
                    if response.HasField("admission"):
                        self._admit(course, response.admission)
                    num_tokens = 0
                    for chunk in response.chunks:
                        if chunk.index >= len(missing):
                            raise WeftError(f"{target.replica_id} sent more samples than asked for")
                        num_tokens += len(chunk.token_ids)
                        index = missing[chunk.index]
                        course.drafts[index].add(chunk)
                        course.made_by[index] = target.replica_id
                    target.progressed(clock.time(), num_tokens)
                    course.left_tokens = max(0, course.left_tokens - num_tokens)
        except grpc.RpcError as rpc_error:
            raise error_from_rpc(rpc_error) from rpc_error
        if not all(course.drafts[index].is_whole for index in missing):
            raise PeerUnavailableError(f"{target.replica_id} ended a sample before its end")

    def _admit(self, course: _PromptState, admission: pb.Admission) -> None:
        """Check the version that answers, and hold restarts of the prompt to it."""
        config, wanted = self.config, course.place.wanted
        if admission.logprobs_mode != config.logprobs_mode:
            raise UnsupportedError(
                f"the replica's log-probabilities are {admission.logprobs_mode!r}, and this "
                f"client's are {config.logprobs_mode!r}: start it with --logprobs-mode "
                f"{config.logprobs_mode}, or give RolloutClient(logprobs_mode=)"
            )
        truncated = config.logprobs_truncated
        if truncated is not None and truncated != admission.logprobs_truncated:
            raise UnsupportedError(
                "the replica's log-probabilities are of the distribution "
                f"{'after' if admission.logprobs_truncated else 'before'} top-k, top-p and min-p, "
                f"and RolloutClient(logprobs_truncated={truncated}) wants the other"
            )
        adapter = (
            POLICY_VERSION.decode(admission.adapter) if admission.HasField("adapter") else None
        )
        number = adapter.version if adapter else admission.base_version
        if wanted.at_least is not None and number < wanted.at_least:
            raise PeerUnavailableError(
                f"a replica answers by {PolicyVersion(wanted.policy, number)}, older than {wanted}",
                reason="VERSION_AHEAD",
            )
        course.has_begun = True
        course.prompt_token_ids = course.prompt_token_ids or list(admission.prompt_token_ids)
        if wanted.exact is None:
            # Of the base itself a replica holds one version: what starts again is of this one
            # or a later one, which its versions say.
            held = (None, number) if adapter is None else (number, None)
            course.place = replace(course.place, wanted=WantedVersions(wanted.policy, *held))

    # -- replicas -----------------------------------------------------------------

    async def _take(self, course: _PromptState, deadline: float) -> BusyReplica:
        """Wait for a replica and return it; the request is counted there until it is released."""
        clock = asyncio.get_running_loop()
        ready: asyncio.Future[BusyReplica] = clock.create_future()
        place = course.place
        self._dispatch.wait(place, course.number, course.ask.cost_tokens, ready)
        course.waits_since = clock.time()
        self._waiting.add(course)
        self._pump()
        try:
            async with asyncio.timeout_at(deadline):
                return await ready
        except BaseException as error:
            if ready.done() and not ready.cancelled():  # taken in the same moment
                self._dispatch.release(ready.result(), course.ask.cost_tokens)
            else:
                self._dispatch.forget(place, ready)
            self._pump()
            if isinstance(error, TimeoutError):
                raise course.too_late(await self._why_waiting(place)) from error
            raise
        finally:
            self._waiting.discard(course)

    def _pump(self) -> None:
        """Send prompts that can go now, and come back when a replica may be tried again."""
        clock = asyncio.get_running_loop()
        while (taken := self._dispatch.next(clock.time())) is not None:
            ready, target, cost_tokens = taken
            if ready.done():  # its caller has gone in this moment
                self._dispatch.release(target, cost_tokens)
            else:
                ready.set_result(target)
        if self._timer is not None:
            self._timer.cancel()
        again = self._dispatch.next_time(clock.time())
        self._timer = clock.call_at(again, self._pump) if again is not None else None

    def _set_routes(self, routes: Iterable[BusyReplica]) -> None:
        self._dispatch.update(routes, asyncio.get_running_loop().time())
        self._pump()
        addresses = {target.address for target in self._dispatch.targets.values()}
        used = {running.target.address for running in self._running}
        for address in self._stubs.keys() - addresses - used:
            channel, _ = self._stubs.pop(address)
            asyncio.ensure_future(channel.close())  # noqa: RUF006  # nothing is on it

    def _stub(self, address: str) -> Any:
        if address not in self._stubs:
            channel = open_aio_channel(address, self.config.credentials)
            self._stubs[address] = channel, GenerateServiceStub(channel)
        return self._stubs[address][1]

    # -- what runs ----------------------------------------------------------------

    @contextlib.contextmanager
    def _watched(self, target: BusyReplica, call: Any) -> Iterator[None]:
        """Cancel the request at the end of the ``with``, or once its replica is found to be
        stalled."""
        running = _RunningRequest(target, call)
        self._running.add(running)
        try:
            yield
        except asyncio.CancelledError:
            if not running.is_stalled:
                raise
            raise StalledError(
                f"{target.replica_id} sent nothing for {self.config.stall_seconds:g} s"
            ) from None
        finally:
            self._running.discard(running)
            call.cancel()

    async def _why_waiting(self, place: PromptRequirements) -> str:
        """Return what a prompt waits for, and why no replica serves it, as the coordinator
        knows."""
        why = self._dispatch.why_waiting(place.wanted)
        if self._dispatch.is_served(place):
            return why
        said = await self._routes.why_not_ready(_ASK_SECONDS)
        return f"{why} ({said})" if said else why

    async def _say_why(self, now: float) -> None:
        """Log why prompts wait that no replica serves, and again each time that the reason
        changes."""
        stuck = [
            course
            for course in self._waiting
            if course.waits_since is not None
            and now - course.waits_since >= _SAY_SECONDS
            and not self._dispatch.is_served(course.place)
        ]
        first = min(stuck, key=lambda course: course.number, default=None)
        if first is None:
            if self._said and not self._waiting:
                self._said = ""
                _log.info("no prompt waits any more")
            return
        why = f"{first.place.wanted} is not answered yet: {await self._why_waiting(first.place)}"
        if why != self._said:
            self._said = why
            _log.warning("%s; prompts wait for it", why)

    async def _tell_waits(self) -> None:
        clock = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(_SAY_SECONDS / 2)
            await self._say_why(clock.time())

    async def _watch(self) -> None:
        """Cancel requests at stalled replicas, so that their prompts start again."""
        clock = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(min(1.0, self.config.stall_seconds / 4))
            for running in [*self._running]:
                if running.target.is_stalled(clock.time(), self.config.stall_seconds):
                    running.is_stalled = True
                    running.call.cancel()
