"""Channels to Weft's servers, and the addresses that they go to.

Channels follow their credentials: a call that begins after the files have changed goes over a
new connection. Calls under way keep their connection, which closes with the last of them.
"""

from __future__ import annotations

import asyncio
import fcntl
import json
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, Final

import grpc

from weft_rl.contract.errors import InvalidRequestError
from weft_rl.contract.options import shown_value
from weft_rl.interrupts import OwnThread, on_own_thread
from weft_rl.rpc.security.credentials import NO_CREDENTIALS, Credentials
from weft_rl.rpc.status import InvalidResponseError

#: How often the files are looked at, at most.
_LOOK_SECONDS: Final = 1.0


class _Connection:
    """One channel, its number of calls under way, and stamps of the files it was made with."""

    def __init__(self, channel: Any, stamps: object) -> None:
        self.channel, self.stamps = channel, stamps
        self.num_calls = 0
        self.methods: dict[tuple[str, str], Any] = {}


class _RenewedChannel:
    """Channel for Weft's stubs, blocking or of asyncio; callbacks come on any thread."""

    def __init__(self, target: str, credentials: Credentials, connect: Callable[[], Any]) -> None:
        self._target, self._credentials, self._connect = target, credentials, connect
        self._lock = threading.Lock()
        self._looked_at = time.monotonic()
        self._current = _Connection(connect(), credentials.stamps())
        #: Connections of former certificates that have calls under way.
        self._stale: list[_Connection] = []

    def unary_unary(self, method: str, *args: Any, **options: Any) -> _Method:
        return _Method(self, ("unary_unary", method), args, options)

    def unary_stream(self, method: str, *args: Any, **options: Any) -> _Method:
        return _Method(self, ("unary_stream", method), args, options)

    def stream_unary(self, method: str, *args: Any, **options: Any) -> _Method:
        return _Method(self, ("stream_unary", method), args, options)

    def stream_stream(self, method: str, *args: Any, **options: Any) -> _Method:
        return _Method(self, ("stream_stream", method), args, options)

    def metadata(self, given: Any) -> tuple[tuple[str, Any], ...]:
        """Return a call's metadata and the token; a bad token fails like the call itself."""
        try:
            return (*(given or ()), *self._credentials.metadata(self._target))
        except InvalidRequestError as error:
            raise InvalidResponseError(error) from error

    def take(self) -> _Connection:
        """Return the connection for a call that begins now, to be released at its end."""
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
        if stale is not None:
            self._close(stale.channel)
        return connection

    def release(self, connection: _Connection) -> None:
        """Count the end of a call; the last one closes a connection of former certificates."""
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


class _Method:
    """One method of a channel that is renewed."""

    def __init__(
        self, channel: _RenewedChannel, key: tuple[str, str], args: Any, options: Any
    ) -> None:
        self._channel, self._key, self._args, self._options = channel, key, args, options

    def __call__(
        self, request: Any = None, timeout: float | None = None, metadata: Any = None, **how: Any
    ) -> Any:
        return self._begin(lambda method: method, request, timeout, metadata, how)

    def future(self, request: Any, timeout: float | None = None, metadata: Any = None) -> Any:
        """Begin the call; the caller waits for it, or cancels it."""
        return self._begin(lambda method: method.future, request, timeout, metadata, {})

    def _begin(
        self, way: Callable[[Any], Any], request: Any, timeout: Any, metadata: Any, how: Any
    ) -> Any:
        carried = self._channel.metadata(metadata)
        connection = self._channel.take()
        try:
            method = connection.methods.get(self._key)
            if method is None:
                kind, name = self._key
                method = getattr(connection.channel, kind)(name, *self._args, **self._options)
                connection.methods[self._key] = method
            answer = way(method)(request, timeout=timeout, metadata=carried, **how)
        except BaseException:
            self._channel.release(connection)
            raise
        if hasattr(answer, "add_done_callback"):
            answer.add_done_callback(lambda _: self._channel.release(connection))
        else:  # a blocking call: it has ended
            self._channel.release(connection)
        return answer


class RenewedChannel(_RenewedChannel):
    """Blocking channel that follows its credentials."""

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


class RenewedAioChannel(_RenewedChannel):
    """Asyncio channel that follows its credentials; used on one event loop."""

    def _close(self, channel: Any) -> None:
        task = asyncio.get_running_loop().create_task(channel.close())
        _closing.add(task)
        task.add_done_callback(_closing.discard)

    async def close(self, grace: float | None = None) -> None:
        """Close the channel, at most ``grace`` seconds after now."""
        await asyncio.gather(*(channel.close(grace) for channel in self._take_all()))

    async def __aenter__(self) -> RenewedAioChannel:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


#: Closing tasks: an event loop alone does not keep them.
_closing: Final[set[asyncio.Task[None]]] = set()


# -- channels, and the addresses that they go to ---------------------------------

#: Largest message either way, but for prompts; whatever may be larger is sent in chunks.
MAX_MESSAGE_BYTES: Final = 4 * 2**20
#: Largest request that a replica takes: a prompt with its images.
MAX_PROMPT_BYTES: Final = 32 * 2**20
#: A silent connection is probed this often, and given up ``KEEPALIVE_TIMEOUT_MS``
#: later. Servers allow twice that rate (see ``weft_rl.rpc.server``).
KEEPALIVE_TIME_MS: Final = 10_000
KEEPALIVE_TIMEOUT_MS: Final = 5_000
# Of Linux: the address of an interface.
_SIOCGIFADDR: Final = 0x8915

# Unary calls that may be sent twice. CallStore is not among them (add, append);
# typed failures are never retried (see weft_rl.rpc.status).
_RETRIED: Final = {
    "weft.v1.InspectService": None,
    "weft.v1.PublishService": (
        "DescribeTarget", "AcquirePolicy", "RenewLease", "ReleasePolicy",
        "BeginTransfer", "AwaitTransfer", "AbortTransfer",
    ),
    "weft.v1.RegistryService": ("CheckReplica", "Register", "Heartbeat", "Leave"),
    "weft.v1.ReplicaService": None,
}  # fmt: skip
_RETRY_POLICY: Final = {
    "maxAttempts": 4,
    "initialBackoff": "0.1s",
    "maxBackoff": "1s",
    "backoffMultiplier": 2,
    "retryableStatusCodes": ["UNAVAILABLE"],
}


def _service_config() -> str:
    names: list[dict[str, str]] = []
    for service, methods in _RETRIED.items():
        if methods is None:
            names.append({"service": service})
        else:
            names += [{"service": service, "method": method} for method in methods]
    return json.dumps({"methodConfig": [{"name": names, "retryPolicy": _RETRY_POLICY}]})


CHANNEL_OPTIONS: Final[list[tuple[str, int | str]]] = [
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_PROMPT_BYTES),
    ("grpc.keepalive_time_ms", KEEPALIVE_TIME_MS),
    ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_MS),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    # A restarted coordinator is found again within two seconds. Under "min" gRPC has the longest
    # time of one attempt: a busy machine may take more than a second to answer.
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.min_reconnect_backoff_ms", 5_000),
    ("grpc.max_reconnect_backoff_ms", 2_000),
    # The control plane is next door: an http_proxy meant for the internet is
    # not on the way to it.
    ("grpc.enable_http_proxy", 0),
    ("grpc.enable_retries", 1),
    ("grpc.service_config", _service_config()),
]


def open_channel(target: str, credentials: Credentials | None = None) -> grpc.Channel:
    """Open a blocking channel to ``HOST:PORT``; connects at the first call.

    The caller closes it. Not to be carried over a fork.

    Args:
        credentials: Credentials to show; this process's (``Credentials.from_environment``) by
            default.

    Raises:
        InvalidRequestError: A file of them cannot be used.
    """
    channel: grpc.Channel = _open(grpc, RenewedChannel, target, credentials)
    return channel


def open_aio_channel(target: str, credentials: Credentials | None = None) -> grpc.aio.Channel:
    """Open an asyncio channel to ``HOST:PORT``; call it on the running loop.

    The caller closes it. Arguments and errors are those of ``open_channel``.
    """
    channel: grpc.aio.Channel = _open(grpc.aio, RenewedAioChannel, target, credentials)
    return channel


def _open(
    library: Any, renewed: Callable[..., Any], target: str, credentials: Credentials | None
) -> Any:
    shown = Credentials.from_environment() if credentials is None else credentials

    def connect() -> Any:
        if shown.has_tls:
            return library.secure_channel(target, shown.channel_credentials(), CHANNEL_OPTIONS)
        return library.insecure_channel(target, CHANNEL_OPTIONS)

    return connect() if shown == NO_CREDENTIALS else renewed(target, shown, connect)


def split_target(target: str) -> tuple[str, int]:
    """Split ``HOST:PORT`` or ``[V6]:PORT`` into host and port.

    Raises:
        ValueError: Not of that form.
    """
    host, colon, port = target.rpartition(":")
    if not colon or not port.isdigit() or not host:
        raise ValueError(f"{target!r} is not HOST:PORT")
    return host.strip("[]"), int(port)


def check_listen(listen: str) -> None:
    """Refuse an address to listen on that is not HOST:PORT; port 0 is any.

    Raises:
        InvalidRequestError: It is not.
    """
    host, colon, port = listen.rpartition(":")
    if not colon or not host or not port.isdigit() or int(port) > 65535:
        raise InvalidRequestError(f"listen is {listen!r}; it must be HOST:PORT")


def is_host(host: str) -> bool:
    """Return whether text may be the name or address of a machine; it is not looked up."""
    try:
        host.encode("idna")  # as a look-up does
    except UnicodeError:
        return False
    return host.isprintable() and not any(map(str.isspace, host))


def check_target(target: object, name: str = "coordinator") -> str:
    """Return ``target`` if it is HOST:PORT, as a user has written it under ``name``.

    Raises:
        InvalidRequestError: It has a scheme, lacks its port, or is no string.
    """
    what = f"{name}={shown_value(target)}"
    if not isinstance(target, str):
        raise InvalidRequestError(f"{what}: give HOST:PORT as a string")
    if "//" in target or target.startswith("unix:"):
        raise InvalidRequestError(f"{what}: give HOST:PORT without a scheme, as in weft:50051")
    try:
        host, port = split_target(target)
    except ValueError:
        raise InvalidRequestError(
            f"{what} names no port: give HOST:PORT, as in {target.strip(':') or 'weft'}:50051"
        ) from None
    if not 0 < port < 65536 or not is_host(host):
        raise InvalidRequestError(f"{what}: give a host, and a port from 1 to 65535")
    return target


def address_of_interface(name: str) -> str:
    """Return a network interface's first IPv4 address.

    Raises:
        OSError: There is no such interface, or it has none.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        answer = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
    return socket.inet_ntoa(answer[20:24])  # after its name follows a sockaddr_in


def local_address_towards(target: str) -> str:
    """Return the address that this machine's routes give packets to ``HOST:PORT``.

    Nothing is sent: a datagram socket is connected, which only chooses a route.
    """
    host, port = split_target(target)
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(address)
        return str(probe.getsockname()[0])


def check_own_address(host: str) -> None:
    """Refuse a name or address at which no socket of this machine can listen.

    Raises:
        OSError: It is not known here (``socket.gaierror``), or no interface has it.
    """
    family, _, _, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
    with socket.socket(family, socket.SOCK_STREAM) as tried:
        tried.bind(address)


# -- calls that no interrupt stops midway (see ``weft_rl.interrupts``) -----------


class _ThreadedChannel:
    """Blocking channel for a trainer's stubs; streamed answers come whole."""

    def __init__(self, channel: grpc.Channel, late: Callable[[Any], object]) -> None:
        self._channel, self._late = channel, late

    def unary_unary(self, *args: Any, **options: Any) -> _ThreadedMethod:
        return _ThreadedMethod(self._channel.unary_unary(*args, **options), self._late)

    def stream_unary(self, *args: Any, **options: Any) -> _ThreadedMethod:
        return _ThreadedMethod(self._channel.stream_unary(*args, **options), self._late)

    def unary_stream(self, *args: Any, **options: Any) -> Callable[..., Iterator[Any]]:
        method = self._channel.unary_stream(*args, **options)
        return lambda *given, **how: iter(on_own_thread(lambda: [*method(*given, **how)]))

    def close(self) -> None:
        """Close the channel; calls under way are cancelled."""
        on_own_thread(self._channel.close)


class _ThreadedMethod:
    def __init__(self, method: Callable[..., Any], late: Callable[[Any], object]) -> None:
        self._method, self._late = method, late

    def __call__(self, *given: Any, **how: Any) -> Any:
        return on_own_thread(lambda: self._method(*given, **how), self._late)

    def future(self, *given: Any, **how: Any) -> OwnThread[Any]:
        """Begin the call; ``result`` of the returned object waits for it."""
        return OwnThread(lambda: self._method(*given, **how), self._late).start()


def open_threaded_channel(
    target: str, credentials: Credentials | None, late: Callable[[Any], object]
) -> grpc.Channel:
    """Open a blocking channel to ``HOST:PORT`` whose calls are made on threads of their own.

    Args:
        credentials: See ``open_channel``.
        late: Called with each answer that comes after its caller was interrupted, there.
    """
    channel: Any = _ThreadedChannel(open_channel(target, credentials), late)
    return channel  # type: ignore[no-any-return]
