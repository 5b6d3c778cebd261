"""The sender's end: telling where the bytes lie, and hearing when each receiver has its copy."""

from __future__ import annotations

import contextlib
import logging
import os
import selectors
import threading
import time
import weakref
from dataclasses import dataclass, field

import torch

from weft_rl.ipc.arrivals import Arrivals
from weft_rl.transport.one_sided.device_memory import DeviceBlock, DeviceView, view_of
from weft_rl.transport.one_sided.directory import listen, unlink
from weft_rl.transport.one_sided.errors import OneSidedError
from weft_rl.transport.one_sided.memory_file import MemoryFile, file_of
from weft_rl.transport.one_sided.messages import (
    MAX_TAIL_BYTES,
    Channel,
    Hello,
    Kept,
    Left,
    Message,
    Ready,
    Taken,
    Welcome,
    Withdraw,
    Withdrawn,
)
from weft_rl.transport.one_sided.works import OneSidedWork, Place, Store, Wakeup, check_secret
from weft_rl.transport.wire.options import WHOLE, BucketOptions, write_tail

_log = logging.getLogger(__name__)

# Connections of this user's processes that have said nothing (yet).
_MAX_SILENT = 64
_SENDER = 0
# After an accept that failed; the receivers that have come are heard as much later.
_RETRY_SECONDS = 0.05


class SentWork(OneSidedWork):
    """A broadcast, and the receivers that have still to copy it."""

    def __init__(
        self, buffer: torch.Tensor, sequence: int, missing: set[int], options: BucketOptions
    ) -> None:
        super().__init__(buffer, options)
        self.memory: MemoryFile | DeviceView
        self.memory, self.first_byte = view_of(buffer) or file_of(buffer)
        self.sequence, self.missing = sequence, missing
        #: Receivers that have not said yet that they keep it.
        self.unkept = set(missing)


@dataclass
class _Member:
    """A receiver that has said who it is, and the memory files that it knows."""

    rank: int
    channel: Channel
    known: dict[int, weakref.ref[MemoryFile | DeviceView]] = field(default_factory=dict)
    mapped: dict[int, DeviceBlock] = field(default_factory=dict)
    """Blocks that must not be freed before it says that it has unmapped them."""

    def tell(self, message: Message, fd: int | None = None) -> None:
        """Send a message to the receiver.

        Raises:
            OneSidedError: The receiver is gone; names it.
        """
        try:
            self.channel.send(message, fd)
        except OneSidedError as error:
            raise OneSidedError(f"rank {self.rank} is gone: {error}") from error

    def say(self, work: SentWork) -> None:
        """Let the receiver copy a bucket; raises as ``tell``."""
        for known_id, used in [*self.known.items()]:
            if used() is None:
                del self.known[known_id]
                self.tell(Withdraw(known_id))
        memory = work.memory
        if memory.export_id not in self.known:
            self.tell(*memory.offer())
            self.known[memory.export_id] = weakref.ref(memory)
            if isinstance(memory, DeviceView):
                self.mapped[memory.export_id] = memory.block
        size = work.buffer.numel()
        self.tell(Ready(work.sequence, memory.export_id, work.first_byte, size, work.options.tail))

    def wait_unmapped(self) -> None:
        """Block until the receiver maps nothing on a GPU any more, however long that takes: it says
        so, or closes its socket, as the end of its process does. CUDA calls the results of freeing
        earlier undefined."""
        with contextlib.suppress(OneSidedError):
            while self.mapped:
                message, fd = self.channel.receive()
                if fd is not None:
                    os.close(fd)
                if isinstance(message, Withdrawn):
                    self.mapped.pop(message.export_id, None)


class Sending:
    """One-sided ``backends.Backend`` of the sender: of rank 0."""

    #: Receivers come to a thread of its own.
    is_formed = True

    def __init__(self, store: Store, size: int) -> None:
        self._place, self._ranks = Place(store), frozenset(range(1, size))
        self._lock = threading.Lock()  # guards what follows
        self._works: dict[int, SentWork] = {}
        #: Those that some receiver has not said yet that it keeps.
        self._unkept: dict[int, SentWork] = {}
        self._members: dict[int, _Member] = {}
        self._error = ""
        self._num_sent = 0
        self._digests: dict[int, str] = {}
        self._wakeup = Wakeup()
        self._listener, self._name = listen()
        self._thread = threading.Thread(target=self._run, name="weft-one-sided", daemon=True)
        try:
            self._arrivals = Arrivals(self._listener, _MAX_SILENT)
            self._thread.start()
        except BaseException as error:  # interrupted: nobody else could end it
            self.abort()
            if not self._thread.is_alive():
                unlink(self._name)
                self._listener.close()
            if isinstance(error, OSError):
                raise OneSidedError(f"no receiver can connect: {error}") from error
            raise

    def broadcast(
        self, buffer: torch.Tensor, timeout_seconds: float, options: BucketOptions = WHOLE
    ) -> OneSidedWork:
        """See ``Backend``.

        Args:
            buffer: Result of ``backends.allocate``.
        """
        if len(options.tail) > MAX_TAIL_BYTES:
            write_tail(buffer, options)
            options = WHOLE
        if buffer.is_cuda and not options.tail:
            torch.cuda.current_stream(buffer.device).synchronize()
        with self._lock:
            if self._error:
                raise OneSidedError(self._error)
            work = SentWork(buffer, self._num_sent, set(self._ranks), options)
            self._num_sent += 1
            self._works[work.sequence] = work
            if options.on_kept is not None:
                self._unkept[work.sequence] = work
            members = [*self._members.values()]
            try:
                for member in members:
                    member.say(work)
            except OneSidedError as error:
                self._fail(str(error))
        return work

    def abort(self) -> None:
        """See ``Backend``. A receiver that is still copying finds the socket closed afterwards, and
        discards its copy."""
        with self._lock:
            self._fail("this rank left the group")

    def settle(self, timeout_seconds: float) -> bool:
        """See ``Backend``: nothing here writes."""
        return bool(self._error)

    def _fail(self, error: str) -> None:
        """End all broadcasts with an error; called with the lock held."""
        self._error = self._error or error
        for member in self._members.values():
            member.channel.end()
        for work in self._works.values():
            work.end(self._error)
        self._works.clear()
        self._unkept.clear()
        self._wakeup.set()

    # -- on its thread -------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._place.announce(_SENDER, self._name)
            for rank in self._ranks:
                self._digests[rank], _ = self._place.find(rank)
            self._serve()
        except Exception as error:  # noqa: BLE001 (the edge of a thread)
            # Also what the store raises when the group is over.
            text = f"the group's receivers were not met: {error!r}"
            with self._lock:
                self._fail(str(error) if isinstance(error, OneSidedError) else text)
        finally:
            unlink(self._name)
            self._arrivals.close()
            self._listener.close()
            with self._lock:
                members = [*self._members.values()]
                self._members.clear()
            self._wakeup.close()
            for member in members:
                member.wait_unmapped()
                member.channel.close()

    def _serve(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._arrivals, selectors.EVENT_READ)
            selector.register(self._wakeup, selectors.EVENT_READ)
            while True:
                events = selector.select()
                self._wakeup.clear()
                if self._error:
                    raise OneSidedError(self._error)
                for key, _ in events:
                    if key.fileobj is self._arrivals:
                        self._accept(selector)
                    elif isinstance(key.fileobj, Channel):
                        self._hear(key.data)

    def _accept(self, selector: selectors.BaseSelector) -> None:
        try:
            arrived = self._arrivals.take()
        except OSError as error:  # no descriptor is free, say
            _log.warning("no receiver can connect: %s", error)
            time.sleep(_RETRY_SECONDS)
            return
        try:
            while arrived:
                try:
                    channel = Channel(arrived.pop(0))
                except OneSidedError as error:
                    _log.warning("refused on a group's socket: %s", error)
                    continue
                self._introduce(channel, selector)
        finally:  # where one of them has ended the group
            for connected in arrived:
                connected.close()

    def _introduce(self, channel: Channel, selector: selectors.BaseSelector) -> None:
        """Admit a receiver that says who it is; close the connection of anybody else."""
        try:
            member = self._recognise(channel)
        except OneSidedError as error:
            _log.debug("refused on a group's socket: %s", error)
            channel.close()
            return
        selector.register(channel, selectors.EVENT_READ, member)
        with self._lock:
            self._members[member.rank] = member
            member.tell(Welcome(self._place.secret))
            for work in self._works.values():
                member.say(work)

    def _recognise(self, channel: Channel) -> _Member:
        hello, fd = channel.receive()
        if fd is not None:
            os.close(fd)
        if not isinstance(hello, Hello):
            raise OneSidedError(f"it began with {type(hello).__name__}")
        if hello.rank not in self._digests or hello.rank in self._members:
            raise OneSidedError(f"no rank {hello.rank} is awaited")
        check_secret(hello.secret, self._digests[hello.rank], hello.rank)
        return _Member(hello.rank, channel)

    def _hear(self, member: _Member) -> None:
        try:
            message, fd = member.channel.receive()
        except OneSidedError as error:
            raise OneSidedError(f"rank {member.rank} is gone: {error}") from error
        if fd is not None:
            os.close(fd)
        if isinstance(message, Left):
            raise OneSidedError(f"rank {member.rank} is gone: it has left the group")
        if isinstance(message, Kept):
            self._note_kept(member.rank, message.sequence)
            return
        with self._lock:
            if isinstance(message, Withdrawn):
                member.mapped.pop(message.export_id, None)
                return
            work = self._works.get(message.sequence) if isinstance(message, Taken) else None
            if work is None or member.rank not in work.missing:
                raise OneSidedError(f"rank {member.rank} has taken what it was not given")
            work.missing.remove(member.rank)
            if not work.missing:
                del self._works[work.sequence]
                work.end()

    def _note_kept(self, rank: int, sequence: int) -> None:
        with self._lock:
            work = self._unkept.get(sequence)
            if work is None:
                return  # whoever sent it did not ask
            if rank in work.missing or rank not in work.unkept:
                raise OneSidedError(f"rank {rank} keeps what it has not taken")
            work.unkept.remove(rank)
            if work.unkept:
                return
            del self._unkept[sequence]
            work.is_kept = True
        if work.options.on_kept is not None:
            work.options.on_kept()
