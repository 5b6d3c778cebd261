"""The edge of every servicer: raised errors become statuses, bugs are logged."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, cast

import grpc

from weft.contract.errors import UnsupportedError, WeftError
from weft.rpc.inbound import Refused, Requests, parser
from weft.rpc.status import abort_with_error

_log = logging.getLogger(__name__)
_PREFIX = "/weft.v1."


class ErrorInterceptor(grpc.aio.ServerInterceptor):
    """Answers a raised ``WeftError`` with its status, anything else with INTERNAL, and
    requests that cannot be parsed, or are out of bounds, before a handler sees them.

    Applies to Weft's own services, for all four kinds of RPC; their handlers are
    coroutines or, when they stream answers, async generators.
    """

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """Wrap the method's handler."""
        handler = await continuation(handler_call_details)
        method = handler_call_details.method
        if handler is None or not method.startswith(_PREFIX):
            return handler
        if handler.response_streaming:
            make = (
                grpc.stream_stream_rpc_method_handler
                if handler.request_streaming
                else grpc.unary_stream_rpc_method_handler
            )
            inner = handler.stream_stream or handler.unary_stream
            guarded: Any = _guard_stream(_checking(inner, handler), method)
        else:
            make = (
                grpc.stream_unary_rpc_method_handler
                if handler.request_streaming
                else grpc.unary_unary_rpc_method_handler
            )
            inner = handler.stream_unary or handler.unary_unary
            guarded = _guard_unary(_checking(inner, handler), method)
        return make(guarded, parser(handler.request_deserializer), handler.response_serializer)


def _checking(inner: Callable[[Any, Any], Any], handler: Any) -> Callable[[Any, Any], Any]:
    """The handler's method, for requests as ``parser`` gives them."""

    def call_with_stream(requests: Any, context: Any) -> Any:
        return inner(Requests(requests), context)

    def call(request: Any, context: Any) -> Any:
        if isinstance(request, Refused):
            raise request.error
        return inner(request, context)

    return call_with_stream if handler.request_streaming else call


def _guard_unary(
    inner: Callable[[Any, Any], Awaitable[Any]], method: str
) -> Callable[[Any, Any], Awaitable[Any]]:
    async def guarded(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
        try:
            return await inner(request, context)
        except (asyncio.CancelledError, grpc.aio.AbortError):
            raise
        except Exception as error:  # noqa: BLE001 (the edge of the process)
            await abort_with_error(context, _typed(error, method))

    return guarded


def _guard_stream(
    inner: Callable[[Any, Any], AsyncIterator[Any]], method: str
) -> Callable[[Any, Any], AsyncIterator[Any]]:
    async def guarded(
        request: Any, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[Any]:
        try:
            async for response in inner(request, context):
                yield response
        except (asyncio.CancelledError, grpc.aio.AbortError):
            raise
        except Exception as error:  # noqa: BLE001 (the edge of the process)
            await abort_with_error(context, _typed(error, method))

    return guarded


def _typed(error: Exception, method: str) -> WeftError:
    if isinstance(error, WeftError):
        # What fails in a way that has a name is the caller's to hear; only what nobody
        # expected, below, is an error of this process.
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
