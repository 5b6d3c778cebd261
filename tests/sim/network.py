"""A network that delays, loses, repeats and cuts: calls, and ordered streams."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any, Protocol

from tests.sim.clock import Clock, Future, Process, away
from weft_rl.contract.errors import TransferTimeoutError, WeftError
from weft_rl.coordinator.decisions.state.effects import CallSwitch


class Server(Protocol):
    """What answers calls under a name."""

    def serve(self, method: str, args: dict[str, Any], timeout: float) -> tuple[Future, Any]:
        """Begin to answer; returns the answer and what to do if the caller goes."""
        ...


class Network:
    """Everything between processes. Rates are probabilities a message.

    A lost request or answer is an error to its caller after the call's deadline; a
    repeated one is carried out twice, as gRPC's own retries do.
    """

    def __init__(self, clock: Clock, random: Random) -> None:
        self.clock = clock
        self.random = random
        self.processes: dict[str, Process] = {}
        self.cuts: set[frozenset[str]] = set()
        self.loss = self.repeat = 0.0
        self.slow = 0.0
        self.max_delay = 0.02
        self.streams: list[Stream] = []

    def delay(self) -> float:
        """How long a message takes."""
        if self.slow and self.random.random() < self.slow:
            return self.random.uniform(0.1, 3.0)
        return self.random.uniform(0.0005, self.max_delay)

    def connected(self, a: str, b: str) -> bool:
        """Whether messages pass between two names."""
        return not self.cuts or frozenset((a, b)) not in self.cuts

    def cut(self, a: str, b: str) -> None:
        """Let nothing pass; streams break, each side learning it on its own."""
        self.cuts.add(frozenset((a, b)))
        for stream in list(self.streams):
            if {stream.client.name, stream.server.name} == {a, b}:
                stream.break_off(slow=True)

    def heal(self) -> None:
        """Let everything pass again."""
        self.cuts.clear()

    def call(self, source: Process, to: str, method: str, timeout: float, **args: Any) -> Future:
        """A unary call; done within ``timeout`` while ``source`` lives."""
        answer, cancels = Future(), list[Callable[[], object]]()

        def end(value: Any = None, error: WeftError | None = None) -> None:
            self.clock.cancel(timer)
            source.at_crash.pop(answer, None)
            answer.set(value, error)

        def give_up() -> None:
            end(error=TransferTimeoutError(f"the deadline of {method} to {to} passed"))
            for cancel in cancels:
                cancel()

        def caller_died() -> None:
            self.clock.cancel(timer)
            for cancel in cancels:
                self.clock.after(self.delay(), cancel)

        def deliver() -> None:
            target = self.processes.get(to)
            if not self.connected(source.name, to):
                if self.random.random() < 0.5:
                    self.clock.after(self.delay(), end, None, away(to))
                return
            if target is None or not target.alive:
                self.clock.after(self.delay(), end, None, away(to))
                return
            if not source.alive or self.clock.now >= deadline:
                return
            if target.frozen_until > self.clock.now:
                self.clock.after(target.frozen_until - self.clock.now, deliver)
                return
            key = object()
            target.at_crash[key] = lambda: self.clock.after(self.delay(), end, None, away(to))
            future, cancel = target.serve(method, args, deadline - self.clock.now)  # type: ignore[attr-defined]
            if cancel is not None:
                cancels.append(cancel)

            def answered(done: Future) -> None:
                target.at_crash.pop(key, None)
                if self.random.random() >= self.loss and self.connected(source.name, to):
                    self.clock.after(self.delay(), end, done.value, done.error)

            future.then(answered)

        def repeat() -> None:
            # To flip a name is no transfer, which a replica would know again, and to register
            # is to be told what is wanted; but gRPC repeats a call only until it has its
            # answer.
            heard = method == "register" or isinstance(args.get("order"), CallSwitch)
            if not (answer.done and heard):
                deliver()

        deadline = self.clock.now + max(0.0, timeout)
        timer = self.clock.after(max(0.0, timeout), give_up)
        source.at_crash[answer] = caller_died
        if self.random.random() >= self.loss:
            self.clock.after(self.delay(), deliver)
            if self.repeat and self.random.random() < self.repeat:
                self.clock.after(self.delay() + self.random.random() * 2, repeat)
        return answer


class Stream:
    """An ordered stream between a rank and the coordinator; may break at any time."""

    def __init__(
        self,
        network: Network,
        client: Process,
        server: Process,
        on_message: Callable[[tuple[Any, ...]], object],
        on_closed: Callable[[WeftError], object],
    ) -> None:
        self.network = network
        self.client, self.server = client, server
        self._on_message, self._on_closed = on_message, on_closed
        self.server_message: Callable[[tuple[Any, ...]], object] = lambda message: None
        self.server_closed: Callable[[str], object] = lambda why: None
        self.broken = False
        self._client_told = self._server_told = False
        self._last_up = self._last_down = 0.0
        network.streams.append(self)
        client.at_crash[self] = self.break_off
        server.at_crash[self] = self.break_off

    def up(self, message: tuple[Any, ...]) -> None:
        """From the rank."""
        self._last_up = self._send(self._last_up, self._arrive_up, message)

    def down(self, message: tuple[Any, ...]) -> None:
        """To the rank."""
        self._last_down = self._send(self._last_down, self._arrive_down, message)

    def _send(self, last: float, arrive: Callable[..., object], message: tuple[Any, ...]) -> float:
        clock = self.network.clock
        when = max(last, clock.now + self.network.delay())
        if not self.broken:
            clock.after(when - clock.now, arrive, message)
        return when

    def _arrive_up(self, message: tuple[Any, ...]) -> None:
        if not self.broken and self.server.alive:
            self.server_message(message)

    def _arrive_down(self, message: tuple[Any, ...]) -> None:
        if not self.broken and self.client.alive:
            self._on_message(message)

    def break_off(self, *, slow: bool = False) -> None:
        """Lose it; both sides learn it, sooner or later."""
        if self.broken:
            return
        self._forget()
        for tell in (self._tell_client, self._tell_server):
            seconds = self.network.random.uniform(0.1, 3.0) if slow else self.network.delay()
            self.network.clock.after(seconds, tell, away("the other end"))

    def leave(self) -> None:
        """The rank closes it."""
        if not self.broken:
            self._forget()
            self._client_told = True
            self.network.clock.after(self.network.delay(), self._tell_server, away(""))

    def end(self, error: WeftError) -> None:
        """The coordinator closes it, after what it sent before."""
        self._server_told = True
        when = max(self._last_down, self.network.clock.now + self.network.delay())
        self.network.clock.after(when - self.network.clock.now, self._ended, error)

    def _ended(self, error: WeftError) -> None:
        if not self.broken:
            self._forget()
            self._tell_client(error)

    def _forget(self) -> None:
        self.broken = True
        self.client.at_crash.pop(self, None)
        self.server.at_crash.pop(self, None)
        self.network.streams.remove(self)

    def _tell_client(self, error: WeftError) -> None:
        if self.client.alive and not self._client_told:
            self._client_told = True
            self._on_closed(error)

    def _tell_server(self, error: WeftError) -> None:
        if self.server.alive and not self._server_told:
            self._server_told = True
            self.server_closed("its stream broke")
