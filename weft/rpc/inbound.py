"""Messages as they come in, on either side: parsed and bounded before anybody reads them.

What gRPC does with a parser that raises is not ours to choose (INTERNAL, a traceback in
the log), so these never raise: what cannot be taken comes out as a ``Refused``, and
whoever receives it answers, or raises, the typed error in it.
"""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any, Final

import grpc
from google.protobuf.message import DecodeError

from weft.contract.errors import InvalidRequestError, PeerUnavailableError, WeftError
from weft.contract.lru import Lru
from weft.rpc.bounds import check

#: Messages of so many bytes, of which so many of each call are remembered as taken: their
#: check costs as much as what is then made of them.
_LARGE: Final = 512
_MAX_TAKEN: Final = 4_096


@dataclass(frozen=True)
class Refused:
    """Stands for a message that cannot be taken."""

    error: WeftError


class InvalidResponseError(grpc.RpcError):
    """A server's answer that cannot be taken; ``error`` is the typed failure."""

    def __init__(self, error: WeftError) -> None:
        super().__init__(error.message)
        self.error = error


def parser(parse: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
    """A deserialiser that answers the message, or a ``Refused``; never raises.

    Args:
        parse: The generated one of the message (``FromString``).
    """
    taken: Lru[bytes, None] = Lru(_MAX_TAKEN)

    def parse_and_check(data: bytes) -> Any:
        try:
            message = parse(data)
        except (DecodeError, ValueError, RecursionError):
            what = f"{len(data)} bytes that are not the message this call takes"
            return Refused(InvalidRequestError(f"{what}: is the caller of another version?"))
        # A heartbeat says again and again what the one before it has said.
        name = hashlib.blake2b(data, digest_size=16).digest() if len(data) >= _LARGE else b""
        if name in taken:
            return message
        try:
            check(message)
        except WeftError as error:
            return Refused(error)
        if name and message.ByteSize() == len(data):  # else a text was cut
            taken.put(name, None)
        return message

    return parse_and_check


class Requests:
    """A stream of requests; raises the error of the first that cannot be taken."""

    def __init__(self, inner: AsyncIterator[Any]) -> None:
        self._inner = inner

    def __aiter__(self) -> AsyncIterator[Any]:
        return self

    async def __anext__(self) -> Any:
        request = await anext(self._inner)
        if isinstance(request, Refused):
            raise request.error
        return request


class CheckedChannel:
    """A channel whose stubs raise ``InvalidResponseError`` for answers that cannot be taken.

    For generated stubs of calls with one request: ``Stub(CheckedChannel(channel, ...))``.

    Args:
        channel: Stays the caller's to close.
        peer: Who answers, for people.
    """

    def __init__(self, channel: grpc.aio.Channel, peer: str) -> None:
        self._channel, self._peer = channel, peer

    def unary_unary(
        self, method: str, request_serializer: Any, response_deserializer: Any, **options: Any
    ) -> Any:
        """A unary method as ``grpc.aio.Channel`` makes one; it is called and awaited."""
        inner = self._channel.unary_unary(
            method, request_serializer, parser(response_deserializer), **options
        )

        async def call(request: Any, *, timeout: float) -> Any:
            return self._taken(await inner(request, timeout=timeout), method)

        return call

    def unary_stream(
        self, method: str, request_serializer: Any, response_deserializer: Any, **options: Any
    ) -> Any:
        """A stream as ``grpc.aio.Channel`` makes one; it is called and iterated."""
        inner = self._channel.unary_stream(
            method, request_serializer, parser(response_deserializer), **options
        )

        async def call(request: Any, *, timeout: float) -> AsyncIterator[Any]:
            async for response in inner(request, timeout=timeout):
                yield self._taken(response, method)

        return call

    def _taken(self, response: Any, method: str) -> Any:
        if isinstance(response, Refused):
            name = method.rpartition("/")[2]
            raise InvalidResponseError(
                PeerUnavailableError(
                    f"{self._peer} answered {name} with what cannot be: {response.error.message}",
                    reason="PEER_GONE",
                )
            )
        return response
