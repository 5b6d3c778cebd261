"""Channel whose calls are not stopped midway by an interrupt (see ``weft_rl.interrupts``)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import grpc

from weft_rl.interrupts import OwnThread, on_own_thread
from weft_rl.rpc.channel import open_channel
from weft_rl.rpc.security.credentials import Credentials


class _Channel:
    """Blocking channel, as far as a trainer's stubs use one.

    Answers that are streams are short, and come whole.
    """

    def __init__(self, channel: grpc.Channel, late: Callable[[Any], object]) -> None:
        self._channel, self._late = channel, late

    def unary_unary(self, *args: Any, **options: Any) -> _Method:
        return _Method(self._channel.unary_unary(*args, **options), self._late)

    def stream_unary(self, *args: Any, **options: Any) -> _Method:
        return _Method(self._channel.stream_unary(*args, **options), self._late)

    def unary_stream(self, *args: Any, **options: Any) -> Callable[..., Iterator[Any]]:
        method = self._channel.unary_stream(*args, **options)
        return lambda *given, **how: iter(on_own_thread(lambda: [*method(*given, **how)]))

    def close(self) -> None:
        """Close the channel; calls under way are cancelled."""
        on_own_thread(self._channel.close)


class _Method:
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
    channel: Any = _Channel(open_channel(target, credentials), late)
    return channel  # type: ignore[no-any-return]
