"""Mapping of typed errors to gRPC statuses and back.

A failure travels as a status with one ``google.rpc.ErrorInfo`` (domain
``weft``); the other side rebuilds the type from its reason.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from typing import Final

import grpc
from google.protobuf.message import DecodeError
from google.rpc import code_pb2, error_details_pb2, status_pb2  # type: ignore[import-untyped]
from grpc_status import rpc_status  # type: ignore[import-untyped]

from weft_rl.contract.errors import (
    CapacityError,
    PeerUnavailableError,
    TransferTimeoutError,
    WeftError,
    error_from_reason,
)

#: ``ErrorInfo.domain`` of every failure that Weft reports.
DOMAIN: Final = "weft"
#: When a caller that met a bound, or asked for what is not here now, should try again.
RETRY_AFTER_SECONDS: Final = 1
_RETRIED: Final = frozenset({"RESOURCE_EXHAUSTED", "UNAVAILABLE"})
# Statuses travel as HTTP/2 trailers, of which 8 KiB are accepted in all, and the
# message is in there twice.
_MAX_MESSAGE_CHARS: Final = 1500
_MAX_METADATA_CHARS: Final = 200
_MAX_METADATA_ENTRIES: Final = 8
_CONNECT_FAILURE: Final = re.compile(
    r"ipv[46]:(?P<address>\S+): Failed to connect to remote host: (?P<cause>.+)"
)
_DETAILS_KEY: Final = "grpc-status-details-bin"
# Tells gRPC's own retries to leave a typed failure alone: only a broken
# connection is worth a blind second try.
_NO_BLIND_RETRY: Final = ("grpc-retry-pushback-ms", "-1")


class InvalidResponseError(grpc.RpcError):
    """Failure of a call on this side: an answer that cannot be taken, or no credentials to show.

    ``error`` is the typed failure.
    """

    def __init__(self, error: WeftError) -> None:
        super().__init__(error.message)
        self.error = error


def status_from_error(error: WeftError) -> status_pb2.Status:
    """Return the ``google.rpc.Status`` that carries ``error``; overlong text is cut."""
    status = status_pb2.Status(
        code=code_pb2.Code.Value(error.status), message=_cut(error.message, _MAX_MESSAGE_CHARS)
    )
    entries = list(error.metadata.items())[:_MAX_METADATA_ENTRIES]
    info = error_details_pb2.ErrorInfo(
        reason=error.reason,
        domain=DOMAIN,
        metadata={key: _cut(value, _MAX_METADATA_CHARS) for key, value in entries},
    )
    status.details.add().Pack(info)
    if error.status in _RETRIED:
        retry = error_details_pb2.RetryInfo()
        retry.retry_delay.seconds = RETRY_AFTER_SECONDS
        status.details.add().Pack(retry)
    return status


def _cut(text: str, limit: int) -> str:
    text = text.encode(errors="replace").decode()  # a lone surrogate (of JSON, say) cannot travel
    return text if len(text) <= limit else text[: limit - 3] + "..."


async def abort_with_error(
    context: grpc.aio.ServicerContext[object, object], error: WeftError
) -> None:
    """End a call with ``error``; never returns (``context.abort`` raises).

    Raises:
        CancelledError: The caller has gone meanwhile.
    """
    status = rpc_status.to_status(status_from_error(error))
    trailers = (*status.trailing_metadata, _NO_BLIND_RETRY)
    try:
        await context.abort(status.code, status.details, trailers)
    except grpc.aio.InternalError as gone:  # gRPC's core takes no status for a call that is over
        raise asyncio.CancelledError from gone


def error_from_rpc(error: grpc.RpcError) -> WeftError:
    """Return the typed error behind a failed call, sync or aio.

    A failure without Weft's details came from the connection or from another server. It is
    ``COORDINATOR_AWAY`` when nobody answered, and ``DEADLINE`` when the caller's own deadline
    passed. It is ``STAGING_FULL`` (a ``CapacityError``) when a bound of gRPC was met.
    """
    if isinstance(error, InvalidResponseError):
        return error.error
    info = _error_info(error)
    if info is not None:
        return error_from_reason(info.reason, _details(error), dict(info.metadata))
    code = error.code() if isinstance(error, grpc.Call | grpc.aio.AioRpcError) else None
    text = _details(error) or str(error)
    if code is grpc.StatusCode.UNAVAILABLE:
        return PeerUnavailableError(f"no answer: {_cause(text)}", reason="COORDINATOR_AWAY")
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return TransferTimeoutError(f"the call's deadline passed: {text}")
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED:
        return CapacityError(text)
    return WeftError(f"{code.name if code else 'UNKNOWN'}: {text}")


def is_unanswered(error: grpc.RpcError) -> bool:
    """Return whether a call ended by its caller's deadline, before the server said anything."""
    late = grpc.StatusCode.DEADLINE_EXCEEDED
    return isinstance(error, grpc.Call) and error.code() is late and _error_info(error) is None


def _cause(text: str) -> str:
    """Return the cause in gRPC's text, such as ``127.0.0.1:1: Connection refused``."""
    found = _CONNECT_FAILURE.search(text)
    return f"{found['address']}: {found['cause']}" if found else text


def _details(error: grpc.RpcError) -> str:
    if isinstance(error, grpc.Call | grpc.aio.AioRpcError):
        return error.details() or ""
    return ""


def _error_info(error: grpc.RpcError) -> error_details_pb2.ErrorInfo | None:
    if not isinstance(error, grpc.Call | grpc.aio.AioRpcError):
        return None
    for key, value in error.trailing_metadata() or ():
        if key != _DETAILS_KEY:
            continue
        with contextlib.suppress(DecodeError):  # of another server than ours
            for detail in status_pb2.Status.FromString(value).details:
                info = error_details_pb2.ErrorInfo()
                if detail.Unpack(info) and info.domain == DOMAIN:
                    return info
    return None
