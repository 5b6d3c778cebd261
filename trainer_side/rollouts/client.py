"""RolloutClient, the class that trainers import to have the pool generate."""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections.abc import Coroutine, Iterable, Sequence
from concurrent.futures import CancelledError, Future
from types import TracebackType
from typing import Any, Literal, TypeVar

from trainer_side.rollouts.requests import (
    CheckedPrompt,
    OnError,
    Prompt,
    PromptRequest,
    WantedVersions,
    check_sampling,
    checked_prompts,
    closed_error,
    wanted_of,
)
from trainer_side.rollouts.sample import SampleGroup
from trainer_side.rollouts.sampler import Sampler, SamplerConfig
from trainer_side.rollouts.stream import RolloutStream
from trainer_side.rollouts.window import Window
from weft_rl.contract.errors import InvalidRequestError, WeftError
from weft_rl.contract.names import BASE_POLICY, PolicyVersion
from weft_rl.contract.options import (
    DEFAULT_CONNECT_SECONDS,
    check_choice,
    check_count,
    check_seconds,
    shown_value,
)
from weft_rl.contract.sampling import Sampling
from weft_rl.rpc.channel import check_target
from weft_rl.rpc.security.credentials import Tls, credentials_of

DEFAULT_TIMEOUT_SECONDS = 1800.0
DEFAULT_STALL_SECONDS = 60.0
DEFAULT_MAX_REQUESTS = 256
#: Streams that one connection, and one caller at a replica, may have.
_MAX_REQUESTS = 1000

_STOP_SECONDS = 10.0

_T = TypeVar("_T")


class RolloutClient:
    """Client that samples from the pool's replicas.

    It finds replicas, spreads prompts over them, says which version made every token, and starts
    unfinished samples again on other replicas.

    Prompts go to the replica with the fewest outstanding tokens, each with all of its samples;
    while replicas have all the requests that they may have, prompts wait here, so that newer
    versions answer them. Replicas that join, drain and leave are followed through the
    coordinator; while it is away, the last list stands. A sample whose replica dies or stalls
    starts again from its prompt on another one: by the same exact version of an adapter, or it
    fails; of the base itself, which a replica holds one version of, by the same or a later one
    unless one version is asked for. Its former tokens are dropped, and whole samples of its group
    stay.

    Everything may be called from any number of threads and event loops; the work is done on a
    thread of the client's own. Not to be carried over a fork.

    Args:
        coordinator: HOST:PORT.
        logprobs_mode: Kind that log-probabilities must be of, in vLLM's words. A replica with
            another kind fails the call with ``UNSUPPORTED``.
        logprobs_truncated: True if log-probabilities must be of the distribution that top-k, top-p
            and min-p leave; None takes either.
        timeout_seconds: Longest time of a call, waiting for replicas included; of a stream, of
            each prompt from its admission on.
        connect_seconds: Longest wait for a coordinator that was never reached.
        stall_seconds: A replica that has requests and sends nothing for so long is taken to be
            stuck, and what it has starts again elsewhere. It must be longer than generation
            pauses for a push.
        max_requests_per_replica: Requests that one replica has of this client at a time, at most
            1000.
        tls: Certificates to trust and to show; by default what the environment names, as for
            ``Publisher``.
        token: The bearer token to show; by default what the environment names.

    Raises:
        InvalidRequestError: An argument that cannot be right; nothing was tried.
    """

    def __init__(
        self,
        coordinator: str,
        *,
        logprobs_mode: str = "processed_logprobs",
        logprobs_truncated: bool | None = None,
        timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS,
        connect_seconds: float = DEFAULT_CONNECT_SECONDS,
        stall_seconds: float = DEFAULT_STALL_SECONDS,
        max_requests_per_replica: int = DEFAULT_MAX_REQUESTS,
        tls: Tls | None = None,
        token: str | None = None,
    ) -> None:
        check_target(coordinator)
        check_seconds("timeout_seconds", timeout_seconds)
        check_seconds("connect_seconds", connect_seconds)
        check_seconds("stall_seconds", stall_seconds)
        check_choice("logprobs_truncated", logprobs_truncated, Literal[True, False, None])
        if not (isinstance(logprobs_mode, str) and logprobs_mode):
            raise InvalidRequestError(
                f"logprobs_mode={shown_value(logprobs_mode)}: give one of vLLM's words, as in "
                "'processed_logprobs'"
            )
        check_count("max_requests_per_replica", max_requests_per_replica, _MAX_REQUESTS)
        if max_requests_per_replica is None:
            raise InvalidRequestError(
                f"max_requests_per_replica=None: give a number, at most {_MAX_REQUESTS}"
            )
        self._timeout_seconds = timeout_seconds
        self._sampler = Sampler(
            SamplerConfig(
                coordinator=coordinator,
                credentials=credentials_of(tls, token),
                logprobs_mode=logprobs_mode,
                logprobs_truncated=logprobs_truncated,
                connect_seconds=connect_seconds,
                stall_seconds=stall_seconds,
                max_requests_per_replica=max_requests_per_replica,
            )
        )
        self._loop = _LoopThread("weft-rollouts")
        self._running = self._loop.submit(self._sampler.run())
        self._stop = weakref.finalize(self, self._loop.stop)

    def generate(
        self,
        prompts: Sequence[Prompt],
        *,
        model: str | PolicyVersion = BASE_POLICY,
        n: int = 1,
        sampling: Sampling | None = None,
        min_version: str | PolicyVersion | None = None,
        strict: bool | None = None,
        timeout_seconds: float | None = None,
        on_error: OnError = "raise",
    ) -> list[SampleGroup]:
        """Sample every prompt; block until every sample has ended.

        An interrupt ends the samples in the engines, too.

        Args:
            prompts: Texts, or sequences of token ids; with images as ``ImagePrompt``.
            model: Who answers, in the words of OpenAI's API. An adapter's name ("math"), or "base":
                the version that the name stands for when a replica takes the prompt. One version,
                "math@17" or a ``PolicyVersion``: that alone; of the base, which a replica holds one
                version of, the one that must be served when a replica takes the prompt.
            n: Samples of each prompt, at most 1024.
            sampling: Sampling options; by default the model's own distribution.
            min_version: This version ("math@17" or a ``PolicyVersion``) or a newer one answers;
                waited for. Not with one version as ``model``.
            strict: True if a sample fails with ``VERSION_CHANGED`` when the base changes before its
                end, instead of going on under the next one (``base_versions`` say so). By default
                where an exact version of the base is asked for.
            timeout_seconds: Longest time of this call; by default as for ``RolloutClient``.
            on_error: "raise" ends all with the first failure; "keep" returns the failed samples
                without tokens (after ``VERSION_CHANGED``, with those so far), and with ``error``.

        Returns:
            A group of ``n`` samples for each prompt, in their order. Its tensors are on the CPU and
            belong to the caller.

        Raises:
            InvalidRequestError: An argument cannot be right, or the engine refuses it.
            InvalidNameError: No model or version can have that name.
            NotFoundError: The version is gone, or nothing is called so.
            VersionChangedError: See ``strict``.
            UnsupportedError: The replica's log-probabilities are not what this client expects.
            PeerUnavailableError: ``COORDINATOR_UNREACHABLE``; or replicas failed over the prompt
                again and again.
            TransferTimeoutError: The deadline passed.
        """
        asked = self._asks(
            prompts, model, n, sampling, min_version, strict, timeout_seconds, on_error
        )
        future = self._submit(self._sample_all(asked, on_error))
        try:
            return future.result()
        except CancelledError:
            raise closed_error() from None
        finally:
            future.cancel()  # an interrupt, say

    async def agenerate(
        self,
        prompts: Sequence[Prompt],
        *,
        model: str | PolicyVersion = BASE_POLICY,
        n: int = 1,
        sampling: Sampling | None = None,
        min_version: str | PolicyVersion | None = None,
        strict: bool | None = None,
        timeout_seconds: float | None = None,
        on_error: OnError = "raise",
    ) -> list[SampleGroup]:
        """Sample as ``generate`` does, awaited on any event loop. Cancelling it ends the
        requests."""
        asked = self._asks(
            prompts, model, n, sampling, min_version, strict, timeout_seconds, on_error
        )
        try:
            return await asyncio.wrap_future(self._submit(self._sample_all(asked, on_error)))
        except asyncio.CancelledError:
            if self._stop.alive:
                raise
            raise closed_error() from None

    def stream(
        self,
        prompts: Iterable[Prompt],
        *,
        batch_size: int,
        max_staleness: int,
        model: str | PolicyVersion = BASE_POLICY,
        n: int = 1,
        sampling: Sampling | None = None,
        min_version: str | PolicyVersion | None = None,
        timeout_seconds: float | None = None,
        on_error: OnError = "raise",
    ) -> RolloutStream:
        """Sample ahead of training by at most ``max_staleness`` versions.

        A prompt is admitted only while the samples that are admitted and not reported as
        ``consumed`` are at most ``(max_staleness + 1) * batch_size``, itself included. Groups come
        as they are ready, but each in time: none is older than ``max_staleness`` versions when it
        is used, and none is discarded.

        Args:
            prompts: Prompts, drawn one by one as they are admitted, by the threads that iterate and
                report; may be endless.
            batch_size: Samples that a step of training consumes; a multiple of ``n``.
            max_staleness: 0 has generation wait for training.
            model, n, sampling, min_version, timeout_seconds, on_error: See ``generate``.

        Raises:
            InvalidRequestError: An argument cannot be right.
        """
        how = Sampling() if sampling is None else sampling
        check_sampling(how, n)
        check_choice("on_error", on_error, OnError)
        window = Window(batch_size, max_staleness, n)
        wanted = wanted_of(model, min_version)
        seconds = self._seconds(timeout_seconds)

        def sample(
            prompt: CheckedPrompt, wanted: WantedVersions, index: int
        ) -> Future[SampleGroup]:
            ask = PromptRequest(
                index=index,
                prompt=prompt.prompt,
                images=prompt.images,
                wanted=wanted,
                num_samples=n,
                sampling=how,
                strict=False,
                timeout_seconds=seconds,
            )
            return self._submit(self._sampler.sample(ask, keep=on_error == "keep"))

        return RolloutStream(prompts, window, wanted, seconds, sample)

    def close(self) -> None:
        """End all running samples, here and in the engines; idempotent."""
        self._stop()

    def __enter__(self) -> RolloutClient:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    # -- inside -------------------------------------------------------------------

    def _asks(
        self,
        prompts: Sequence[Prompt],
        model: str | PolicyVersion,
        n: int,
        sampling: Sampling | None,
        min_version: str | PolicyVersion | None,
        strict: bool | None,
        timeout_seconds: float | None,
        on_error: OnError,
    ) -> list[PromptRequest]:
        how = Sampling() if sampling is None else sampling
        check_sampling(how, n)
        check_choice("on_error", on_error, OnError)
        if strict is not None and not isinstance(strict, bool):
            raise InvalidRequestError(f"strict={strict!r:.80}: give True, False or None")
        wanted = wanted_of(model, min_version)
        return [
            PromptRequest(
                index=index,
                prompt=prompt,
                images=images,
                wanted=wanted,
                num_samples=n,
                sampling=how,
                strict=(wanted.is_base and wanted.exact is not None) if strict is None else strict,
                timeout_seconds=self._seconds(timeout_seconds),
            )
            for index, (prompt, images) in enumerate(checked_prompts(prompts))
        ]

    def _seconds(self, given: float | None) -> float:
        if given is None:
            return self._timeout_seconds
        check_seconds("timeout_seconds", given)
        return given

    def _submit(self, coroutine: Coroutine[Any, Any, _T]) -> Future[_T]:
        if not self._stop.alive:
            coroutine.close()
            raise closed_error()
        if self._running.done():
            coroutine.close()
            raise WeftError("this RolloutClient has failed") from self._running.exception()
        return self._loop.submit(coroutine)

    async def _sample_all(self, asks: list[PromptRequest], on_error: OnError) -> list[SampleGroup]:
        tasks = [
            asyncio.ensure_future(self._sampler.sample(ask, keep=on_error == "keep"))
            for ask in asks
        ]
        try:
            return await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


class _LoopThread:
    """Daemon thread that runs an event loop until ``stop``."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._loop.run_forever()
        finally:
            self._loop.close()

    def submit(self, coroutine: Coroutine[Any, Any, _T]) -> Future[_T]:
        """Run a coroutine on the loop; cancelling the future cancels it."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def stop(self) -> None:
        """Cancel everything that still runs on the loop and end the thread; idempotent."""
        if not self._thread.is_alive():
            return
        if threading.current_thread() is self._thread:  # its owner was collected there
            self._loop.stop()
            return
        asyncio.run_coroutine_threadsafe(_cancel_others(), self._loop).result(_STOP_SECONDS)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_STOP_SECONDS)


async def _cancel_others() -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
