"""Calls on threads of their own: what they answer, and what becomes of one that is interrupted."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.waits import until
from weft_rl.rpc import channel as channels
from weft_rl.rpc.channel import open_threaded_channel


class _Channel:
    """Answers a call with the thread that it came on, once it may."""

    def __init__(self) -> None:
        self.may_answer = threading.Event()
        self.may_answer.set()
        self.is_closed = False

    def unary_unary(self, name: str) -> Callable[..., int]:
        return self._answer

    def unary_stream(self, name: str) -> Callable[..., Iterator[int]]:
        return lambda request, timeout: iter([self._answer(request, timeout)] * 2)

    def _answer(self, request: bytes, timeout: float) -> int:
        assert request == b"request"
        assert self.may_answer.wait(timeout)
        return threading.get_ident()

    def close(self) -> None:
        self.is_closed = True


@pytest.fixture
def under(monkeypatch: pytest.MonkeyPatch) -> _Channel:
    """What the channel under test calls."""
    channel = _Channel()
    monkeypatch.setattr(channels, "open_channel", lambda target, credentials: channel)
    return channel


def test_every_call_is_made_on_another_thread(under: _Channel) -> None:
    late: list[object] = []
    channel: Any = open_threaded_channel("127.0.0.1:1", None, late.append)
    here = threading.get_ident()
    method = channel.unary_unary("/weft/Method")
    assert method(b"request", timeout=5.0) != here
    assert method.future(b"request", timeout=5.0).result() != here
    (first, second) = channel.unary_stream("/weft/Method")(b"request", timeout=5.0)
    assert first == second != here
    channel.close()
    assert under.is_closed
    assert not late


def test_the_answer_to_an_interrupted_call_is_handed_over_when_it_comes(under: _Channel) -> None:
    late: list[object] = []
    channel: Any = open_threaded_channel("127.0.0.1:1", None, late.append)
    under.may_answer.clear()
    me = threading.get_ident()
    timer = threading.Timer(0.1, signal.pthread_kill, (me, signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        channel.unary_unary("/weft/Method")(b"request", timeout=5.0)
    timer.join()
    assert not late
    under.may_answer.set()
    until(lambda: late)
    # Its channel answers as before.
    assert channel.unary_unary("/weft/Method")(b"request", timeout=5.0)
