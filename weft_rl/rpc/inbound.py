"""Edge of a process, on either side: messages are checked, errors become statuses.

Messages are parsed and bounded before anybody reads them; bugs are logged.

When a parser raises, gRPC answers INTERNAL, with a traceback in the log. So the parsers here
never raise: a message that cannot be taken comes out as a ``RefusedMessage``. Its receiver
answers, or raises, the typed error in it.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Final, cast

import grpc
from google.protobuf.message import DecodeError

from weft_rl.containers import LruMapping
from weft_rl.contract.errors import (
    CapacityError,
    InvalidRequestError,
    PeerUnavailableError,
    UnsupportedError,
    WeftError,
)
from weft_rl.rpc.bounds import check
from weft_rl.rpc.security.access import is_open
from weft_rl.rpc.security.guard import STREAM_LOOK_SECONDS, Guard
from weft_rl.rpc.status import InvalidResponseError, abort_with_error

#: Messages of at least so many bytes are remembered once they have passed their check, the newest
#: ``_MAX_TAKEN`` of each call: to check one again would cost as much as to carry it out.
_LARGE: Final = 512
_MAX_TAKEN: Final = 4_096
#: How long a stream's reader may take nothing that is sent to it, and its status.
SEND_SECONDS: Final = 60.0
_END_SECONDS: Final = 1.0


@dataclass(frozen=True)
class RefusedMessage:
    """Stand-in for a message that cannot be taken."""

    error: WeftError


def parser(parse: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
    """Return a deserialiser that gives the message, or a ``RefusedMessage``, and never raises.

    Args:
        parse: Generated deserialiser of the message (``FromString``).
    """
    taken: LruMapping[bytes, None] = LruMapping(_MAX_TAKEN)

    def parse_and_check(data: bytes) -> Any:
        try:
            message = parse(data)
        except (DecodeError, ValueError, RecursionError):
            what = f"{len(data)} bytes that are not the message this call takes"
            return RefusedMessage(InvalidRequestError(f"{what}: is the caller of another version?"))
        # A heartbeat says again and again what the one before it has said.
        name = hashlib.blake2b(data, digest_size=16).digest() if len(data) >= _LARGE else b""
        if name in taken:
            return message
        try:
            check(message)
        except WeftError as error:
            return RefusedMessage(error)
        if name and message.ByteSize() == len(data):  # else a text was cut
            taken.put(name, None)
        return message

    return parse_and_check


class Requests:
    """Stream of requests; raises the error of the first that cannot be taken."""

    def __init__(self, inner: AsyncIterator[Any]) -> None:
        self._inner = inner

    def __aiter__(self) -> AsyncIterator[Any]:
        return self

    async def __anext__(self) -> Any:
        request = await anext(self._inner)
        if isinstance(request, RefusedMessage):
            raise request.error
        return request


class CheckedChannel:
    """Channel whose stubs raise ``InvalidResponseError`` for answers that cannot be taken.

    For generated stubs of calls with one request: ``Stub(CheckedChannel(channel, ...))``.

    Args:
        channel: Stays the caller's to close.
        peer: Name of the server, for error messages.
    """

    def __init__(self, channel: grpc.aio.Channel, peer: str) -> None:
        self._channel, self._peer = channel, peer

    def unary_unary(
        self, method: str, request_serializer: Any, response_deserializer: Any, **options: Any
    ) -> Any:
        """Return a unary method like ``grpc.aio.Channel``'s, to be called and awaited."""
        inner = self._channel.unary_unary(
            method, request_serializer, parser(response_deserializer), **options
        )

        async def call(request: Any, *, timeout: float, metadata: Any = None) -> Any:
            return self._taken(await inner(request, timeout=timeout, metadata=metadata), method)

        return call

    def unary_stream(
        self, method: str, request_serializer: Any, response_deserializer: Any, **options: Any
    ) -> Any:
        """Return a streaming method like ``grpc.aio.Channel``'s, to be called and iterated."""
        inner = self._channel.unary_stream(
            method, request_serializer, parser(response_deserializer), **options
        )

        async def call(request: Any, *, timeout: float) -> AsyncIterator[Any]:
            async for response in inner(request, timeout=timeout):
                yield self._taken(response, method)

        return call

    def _taken(self, response: Any, method: str) -> Any:
        if isinstance(response, RefusedMessage):
            name = method.rpartition("/")[2]
            raise InvalidResponseError(
                PeerUnavailableError(
                    f"{self._peer} answered {name} with an invalid message: "
                    f"{response.error.message}",
                    reason="PEER_GONE",
                )
            )
        return response


_log = logging.getLogger(__name__)
_PREFIX = "/weft.v1."


class EdgeInterceptor(grpc.aio.ServerInterceptor):
    """Interceptor that answers raised errors with statuses, and refuses calls and requests.

    A ``WeftError`` is answered with its status, anything else with INTERNAL. Callers that may not
    call are refused before a handler sees them. So are requests that cannot be parsed, or are out
    of bounds.

    Applies to Weft's own services, for all four kinds of RPC; their handlers are coroutines or,
    when they stream answers, async generators. Where callers are asked who they are, reflection is
    guarded like these services; health alone is open to everybody.

    Args:
        on_refused: Called with the reason of each call that is answered with an error.
    """

    def __init__(self, guard: Guard, on_refused: Callable[[str], None] | None = None) -> None:
        self._guard = guard
        self._on_refused = on_refused or (lambda _: None)
        #: By method, its handler and the wrapped one, which remembers messages that it has checked.
        self._wrapped: dict[str, tuple[Any, Any]] = {}

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """Return the method's handler, wrapped; it is asked for with each call."""
        handler = await continuation(handler_call_details)
        method = handler_call_details.method
        if handler is None:
            return None
        known, wrapped = self._wrapped.get(method, (None, None))
        if known is not handler:
            wrapped = self._wrap(handler, method)
            self._wrapped[method] = handler, wrapped
        return wrapped

    def _wrap(self, handler: Any, method: str) -> Any:
        is_ours = method.startswith(_PREFIX)
        # Channelz, which cannot be guarded so, is served where nobody is asked.
        if not is_ours and (is_open(method.lstrip("/")) or not self._guard.asks):
            return handler
        unary, stream = handler.unary_unary, handler.unary_stream
        if handler.request_streaming:
            unary, stream = handler.stream_unary, handler.stream_stream
        inner = stream if handler.response_streaming else unary
        parse = handler.request_deserializer
        if is_ours:
            inner, parse = _checking(inner, handler), parser(parse)
        if handler.response_streaming:
            make = (
                grpc.stream_stream_rpc_method_handler
                if handler.request_streaming
                else grpc.unary_stream_rpc_method_handler
            )
            guarded: Any = _guard_stream(inner, method, self._guard, self._on_refused)
        else:
            make = (
                grpc.stream_unary_rpc_method_handler
                if handler.request_streaming
                else grpc.unary_unary_rpc_method_handler
            )
            guarded = _guard_unary(inner, method, self._guard, self._on_refused)
        return make(guarded, parse, handler.response_serializer)


def _checking(inner: Callable[[Any, Any], Any], handler: Any) -> Callable[[Any, Any], Any]:
    """Return the handler's method, for requests as ``parser`` gives them."""

    def call_with_stream(requests: Any, context: Any) -> Any:
        return inner(Requests(requests), context)

    def call(request: Any, context: Any) -> Any:
        if isinstance(request, RefusedMessage):
            raise request.error
        return inner(request, context)

    return call_with_stream if handler.request_streaming else call


def _guard_unary(
    inner: Callable[[Any, Any], Awaitable[Any]],
    method: str,
    guard: Guard,
    on_refused: Callable[[str], None],
) -> Callable[[Any, Any], Awaitable[Any]]:
    async def guarded(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
        try:
            with guard.call(context, method[1:], request, is_stream=False):
                return await inner(request, context)
        except (asyncio.CancelledError, grpc.aio.AbortError):
            raise
        except Exception as error:  # noqa: BLE001 (the edge of the process)
            typed = _typed(error, method)
            on_refused(typed.reason)
            await abort_with_error(context, typed)

    return guarded


def _guard_stream(
    inner: Callable[[Any, Any], AsyncIterator[Any]],
    method: str,
    guard: Guard,
    on_refused: Callable[[str], None],
) -> Callable[[Any, Any], Awaitable[None]]:
    async def guarded(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        def check_again() -> None:
            if guard.asks:
                guard.check_again(context, method[1:])

        try:
            with guard.call(context, method[1:], request, is_stream=True):
                responses = inner(request, context)
                if guard.asks:
                    responses = _while_allowed(responses, check_again)
                async for response in responses:
                    await _send(context, response, check_again)
        except (asyncio.CancelledError, grpc.aio.AbortError):
            raise
        except Exception as error:  # noqa: BLE001 (the edge of the process)
            typed = _typed(error, method)
            on_refused(typed.reason)
            await _end(context, typed)

    return guarded


async def _send(
    context: grpc.aio.ServicerContext[Any, Any], response: Any, check_again: Callable[[], None]
) -> None:
    """Send one response of a stream; call ``check_again`` while its reader takes none."""
    sending = asyncio.ensure_future(context.write(response))
    clock = asyncio.get_running_loop().time
    until = clock() + SEND_SECONDS
    try:
        while not sending.done():
            look_seconds = min(STREAM_LOOK_SECONDS, until - clock())
            done, _ = await asyncio.wait({sending}, timeout=max(0.0, look_seconds))
            if not done:
                check_again()
                if clock() >= until:
                    raise CapacityError(
                        f"the reader took nothing for {SEND_SECONDS:.0f} s", reason="TOO_SLOW"
                    )
        if sending.exception() is not None:
            raise asyncio.CancelledError from sending.exception()
    finally:
        sending.cancel()


async def _end(context: grpc.aio.ServicerContext[Any, Any], error: WeftError) -> None:
    """End a stream with ``error``; a reader that takes nothing is not awaited."""
    try:
        async with asyncio.timeout(_END_SECONDS):
            await abort_with_error(context, error)
    except TimeoutError:
        raise asyncio.CancelledError from error


async def _while_allowed(
    responses: AsyncIterator[Any], check_again: Callable[[], None]
) -> AsyncIterator[Any]:
    """Yield the responses, until ``check_again`` raises; it is called periodically."""
    clock = asyncio.get_running_loop().time
    look_at = clock() + STREAM_LOOK_SECONDS
    following: asyncio.Future[Any] | None = None
    try:
        while True:
            following = asyncio.ensure_future(anext(responses))
            while True:
                done, _ = await asyncio.wait({following}, timeout=max(0.0, look_at - clock()))
                if clock() >= look_at:
                    check_again()
                    look_at = clock() + STREAM_LOOK_SECONDS
                if done:
                    break
            try:
                response = following.result()
            except StopAsyncIteration:
                return
            yield response
    finally:
        if following is not None:
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)


def _typed(error: Exception, method: str) -> WeftError:
    if isinstance(error, WeftError):
        # A typed failure is for the caller. Only an unexpected one, below, is an error of this
        # process.
        level = logging.WARNING if error.status == "INTERNAL" else logging.DEBUG
        _log.log(level, "%s refused: %s", method, error)
        return error
    if isinstance(error, NotImplementedError):
        return UnsupportedError(f"{method} is not implemented by this server")
    _log.exception("%s failed unexpectedly", method, exc_info=error)
    return WeftError(f"{method} failed unexpectedly; the server's log has the traceback")


def on_call_end(
    context: grpc.aio.ServicerContext[Any, Any], callback: Callable[[], object]
) -> None:
    """Call ``callback`` once as soon as a call has ended, in whatever way.

    A stream's generator is only closed when it is next resumed or collected; this
    is at once.
    """
    context.add_done_callback(cast("Any", lambda _: callback()))
