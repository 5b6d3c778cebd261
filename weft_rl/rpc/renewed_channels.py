"""Channels that follow their credentials.

A call that begins after the files have changed goes over a new connection. Calls under way
keep their connection, which closes with the last of them.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from typing import Any, Final

import grpc

from weft_rl.contract.errors import InvalidRequestError
from weft_rl.rpc.security.credentials import Credentials
from weft_rl.rpc.status import InvalidResponseError

#: How often the files are looked at, at most.
_LOOK_SECONDS: Final = 1.0
_KINDS: Final = ("unary_unary", "unary_stream", "stream_unary", "stream_stream")


class _Connection:
    """One channel, its number of calls under way, and stamps of the files it was made with."""

    def __init__(self, channel: Any, stamps: object) -> None:
        self.channel, self.stamps = channel, stamps
        self.num_calls = 0
        self.methods: dict[tuple[str, str], Any] = {}


class _RenewedChannel:
    """Shared part of both kinds of channel; a lock guards it, as callbacks come on any thread."""

    def __init__(self, target: str, credentials: Credentials, connect: Callable[[], Any]) -> None:
        self._target, self._credentials, self._connect = target, credentials, connect
        self._lock = threading.Lock()
        self._looked_at = time.monotonic()
        self._current = _Connection(connect(), credentials.stamps())
        #: Those of former certificates that have calls under way.
        self._stale: list[_Connection] = []

    def _method(self, kind: str, method: str, *args: Any, **options: Any) -> Any:
        raise NotImplementedError

    def _take(self, kind: str, method: str, args: Any, options: Any) -> tuple[_Connection, Any]:
        """Return the connection for a call that begins now, and the method on it."""
        stale = None
        with self._lock:
            connection = self._current
            now = time.monotonic()
            if now - self._looked_at >= _LOOK_SECONDS:
                self._looked_at = now
                stamps = self._credentials.stamps()
                if stamps != connection.stamps:
                    self._current = _Connection(self._connect(), stamps)
                    if connection.num_calls:
                        self._stale.append(connection)
                    else:
                        stale = connection
                    connection = self._current
            connection.num_calls += 1
            key = (kind, method)
            if key not in connection.methods:
                connection.methods[key] = getattr(connection.channel, kind)(
                    method, *args, **options
                )
            call = connection.methods[key]
        if stale is not None:
            self._close(stale.channel)
        return connection, call

    def _release(self, connection: _Connection) -> None:
        with self._lock:
            connection.num_calls -= 1
            is_last = not connection.num_calls and connection in self._stale
            if is_last:
                self._stale.remove(connection)
        if is_last:
            self._close(connection.channel)

    def _take_all(self) -> list[Any]:
        """Return every channel that is open, to be closed by the caller."""
        with self._lock:
            stale, self._stale = self._stale, []
            return [connection.channel for connection in (*stale, self._current)]

    def _close(self, channel: Any) -> None:
        raise NotImplementedError

    def metadata(self, given: Any) -> tuple[tuple[str, Any], ...]:
        """Return the metadata of a call: what its caller gives, and the token.

        Raises:
            InvalidResponseError: The token cannot be sent. It is raised as by a failed call,
                for callers that handle whatever becomes of a call.
        """
        try:
            return (*(given or ()), *self._credentials.metadata(self._target))
        except InvalidRequestError as error:
            raise InvalidResponseError(error) from error

    def unary_unary(self, method: str, *args: Any, **options: Any) -> Any:
        """See ``grpc.Channel``."""
        return self._method("unary_unary", method, *args, **options)

    def unary_stream(self, method: str, *args: Any, **options: Any) -> Any:
        """See ``grpc.Channel``."""
        return self._method("unary_stream", method, *args, **options)

    def stream_unary(self, method: str, *args: Any, **options: Any) -> Any:
        """See ``grpc.Channel``."""
        return self._method("stream_unary", method, *args, **options)

    def stream_stream(self, method: str, *args: Any, **options: Any) -> Any:
        """See ``grpc.Channel``."""
        return self._method("stream_stream", method, *args, **options)


class RenewedChannel(_RenewedChannel):
    """Blocking channel, as far as Weft's stubs use one: calls, futures, ``close``."""

    def _method(self, kind: str, method: str, *args: Any, **options: Any) -> Any:
        return _Method(self, kind, method, args, options)

    def _close(self, channel: Any) -> None:
        channel.close()

    def close(self) -> None:
        """Close the channel; calls under way are cancelled."""
        for channel in self._take_all():
            channel.close()

    def __enter__(self) -> RenewedChannel:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Method:
    """One method of a blocking channel."""

    def __init__(
        self, channel: RenewedChannel, kind: str, method: str, args: Any, options: Any
    ) -> None:
        self._channel, self._kind, self._name = channel, kind, method
        self._args, self._options = args, options

    def __call__(
        self, request: Any, timeout: float | None = None, metadata: Any = None, **options: Any
    ) -> Any:
        carried = self._channel.metadata(metadata)
        connection, call = self._begin()
        if self._kind.endswith("_stream"):
            return self._watched(connection, lambda: call(request, timeout, carried, **options))
        try:
            return call(request, timeout, carried, **options)
        finally:
            self._channel._release(connection)

    def future(self, request: Any, timeout: float | None = None, metadata: Any = None) -> Any:
        """Begin the call; the caller waits for it, or cancels it."""
        carried = self._channel.metadata(metadata)
        connection, call = self._begin()
        return self._watched(connection, lambda: call.future(request, timeout, carried))

    def _begin(self) -> tuple[_Connection, Any]:
        return self._channel._take(self._kind, self._name, self._args, self._options)

    def _watched(self, connection: _Connection, begin: Callable[[], Any]) -> Any:
        release = self._channel._release
        try:
            rpc = begin()
        except BaseException:
            release(connection)
            raise
        rpc.add_done_callback(lambda _: release(connection))
        return rpc


class RenewedAioChannel(_RenewedChannel):
    """Asyncio channel, as far as Weft's stubs use one; used on one event loop."""

    def __init__(self, target: str, credentials: Credentials, connect: Callable[[], Any]) -> None:
        super().__init__(target, credentials, connect)
        self._closing: set[asyncio.Task[None]] = set()

    def _method(self, kind: str, method: str, *args: Any, **options: Any) -> Any:
        def begin(
            request: Any = None, *, timeout: float | None = None, metadata: Any = None
        ) -> Any:
            carried = self.metadata(metadata)
            connection, call = self._take(kind, method, args, options)
            try:
                rpc = call(request, timeout=timeout, metadata=carried)
            except BaseException:
                self._release(connection)
                raise
            rpc.add_done_callback(lambda _: self._release(connection))
            return rpc

        return begin

    def _close(self, channel: Any) -> None:
        task = asyncio.get_running_loop().create_task(channel.close())
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    async def close(self, grace: float | None = None) -> None:
        """Close the channel, at most ``grace`` seconds after now."""
        await asyncio.gather(*(channel.close(grace) for channel in self._take_all()))


def renewed_channel(target: str, credentials: Credentials, options: Any) -> grpc.Channel:
    """Open a blocking channel to ``target`` with ``credentials``."""
    channel: Any = RenewedChannel(
        target,
        credentials,
        lambda: (
            grpc.secure_channel(target, credentials.channel_credentials(), options)
            if credentials.has_tls
            else grpc.insecure_channel(target, options)
        ),
    )
    return channel  # type: ignore[no-any-return]


def renewed_aio_channel(target: str, credentials: Credentials, options: Any) -> grpc.aio.Channel:
    """Open an asyncio channel to ``target`` with ``credentials``."""
    channel: Any = RenewedAioChannel(
        target,
        credentials,
        lambda: (
            grpc.aio.secure_channel(target, credentials.channel_credentials(), options)
            if credentials.has_tls
            else grpc.aio.insecure_channel(target, options)
        ),
    )
    return channel  # type: ignore[no-any-return]
