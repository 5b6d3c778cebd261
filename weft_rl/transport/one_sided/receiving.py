"""A receiver's end: a thread that copies each bucket out of the sender's memory."""

from __future__ import annotations

import contextlib
import logging
import os
import selectors
import threading
from collections import Counter, deque
from functools import partial

import torch

from weft_rl.transport.one_sided.device_memory import DeviceMapping
from weft_rl.transport.one_sided.directory import connect
from weft_rl.transport.one_sided.errors import OneSidedError
from weft_rl.transport.one_sided.memory_file import Mapping
from weft_rl.transport.one_sided.messages import (
    Channel,
    Export,
    ExportDevice,
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
from weft_rl.transport.wire.options import WHOLE, BucketOptions

_log = logging.getLogger(__name__)

#: Memory files of one sender that a receiver maps: it has a few buffers, and replaces some.
MAX_MAPPED = 64
# Buckets that were said to be ready and are not received yet: a sender keeps 8 at most.
_MAX_READY = 64
_SENDER = 0
_CONNECT_SECONDS = 10.0
_WELCOME_SECONDS = 30.0
# What is lent is read by kernels of a GPU, which end.
_RETURN_SECONDS = 60.0
# Channels of groups that are over whose memory is mapped here still: they close when it is not,
# or with the process. Referenced, because they close with their last reference, too.
_KEPT: set[Channel] = set()


class Receiving:
    """One-sided ``backends.Backend`` of one receiver: of any rank but the sender's."""

    #: A thread of its own connects.
    is_formed = True

    def __init__(self, store: Store, rank: int, device: torch.device) -> None:
        self._place, self._rank, self._device = Place(store), rank, device
        self._lock = threading.Lock()  # guards what follows
        self._posted: deque[OneSidedWork] = deque()
        self._error = ""
        #: While its first answer is awaited. Later it is closed by the thread alone, once all
        #: is unmapped: by that the sender knows that it may free its memory.
        self._channel: Channel | None = None
        #: How often each buffer of the sender's is lent at the moment.
        self._lent: Counter[int] = Counter()
        self._returned = threading.Condition()  # guards it, and what is mapped once it has left
        self._has_left = False
        #: Held while a piece is copied.
        self._copying = threading.Lock()
        self._mapped: dict[int, Mapping | DeviceMapping] = {}
        self._ready: deque[Ready] = deque()
        self._wakeup = Wakeup()
        self._thread = threading.Thread(target=self._run, name="weft-one-sided", daemon=True)
        self._thread.start()

    def broadcast(
        self, buffer: torch.Tensor, timeout_seconds: float, options: BucketOptions = WHOLE
    ) -> OneSidedWork:
        """See ``Backend``."""
        work = OneSidedWork(buffer, options)
        with self._lock:
            if self._error:
                raise OneSidedError(self._error)
            self._posted.append(work)
        self._wakeup.set()
        return work

    def abort(self) -> None:
        """See ``Backend``: nothing is copied after the current piece."""
        self._end("this rank left the group")

    def settle(self, timeout_seconds: float) -> bool:
        """See ``Backend``."""
        if not self._copying.acquire(timeout=timeout_seconds):
            return False
        self._copying.release()
        return bool(self._error)

    def _end(self, error: str) -> None:
        with self._lock:
            self._error = self._error or error
            channel = self._channel
        if channel is not None:
            channel.shut()
        self._wakeup.set()

    def _check(self) -> None:
        if self._error:
            raise OneSidedError(self._error)

    # -- on its thread -------------------------------------------------------------

    def _run(self) -> None:
        channel: Channel | None = None
        try:
            channel = self._connect()
            self._follow(channel)
        except OneSidedError as error:
            self._end(str(error))
        except Exception as error:  # noqa: BLE001 (the edge of a thread)
            # Also what the store raises when the group is over.
            self._end(f"the group's sender was not reached: {error!r}")
        with self._lock:
            works, self._channel = [*self._posted], None
            self._posted.clear()
        for work in works:
            work.end(self._error)
        self._wakeup.close()
        if channel is not None:
            self._leave(channel)

    def _connect(self) -> Channel:
        self._place.announce(self._rank)
        digest, name = self._place.find(_SENDER)
        channel = Channel(connect(name, _CONNECT_SECONDS))
        try:
            # Before anything can end it: a sender knows who has left by this, also if that was
            # before it came here, and waits for nobody.
            channel.send(Hello(self._rank, self._place.secret))
            with self._lock:
                self._channel = channel
            self._check()
            welcome, fd = channel.receive(_WELCOME_SECONDS)
            if fd is not None:
                os.close(fd)
            if not isinstance(welcome, Welcome):
                raise OneSidedError(f"the sender began with {type(welcome).__name__}")
            check_secret(welcome.secret, digest, _SENDER)
            with self._lock:
                self._channel = None
            self._check()
        except BaseException:
            channel.close()
            raise
        return channel

    def _follow(self, channel: Channel) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(channel, selectors.EVENT_READ)
            selector.register(self._wakeup, selectors.EVENT_READ)
            while True:
                events = selector.select()
                self._wakeup.clear()
                self._check()
                if any(key.fileobj is channel for key, _ in events):
                    self._hear(channel, *channel.receive())
                while self._ready and self._posted:
                    self._take(channel, self._ready.popleft())

    def _leave(self, channel: Channel) -> None:
        """Tell the sender at once that this rank is gone, and by the channel's end that it may free
        its memory."""
        with contextlib.suppress(OneSidedError):
            channel.send(Left())
        with self._returned:
            self._returned.wait_for(lambda: not self._lent.total(), _RETURN_SECONDS)
            self._has_left = True
            self._unmap(channel)

    def _unmap(self, channel: Channel) -> None:
        """Unmap the sender's memory, and close the channel once nothing is mapped any more. Called
        with ``_returned`` held: by the thread, or by whoever gives back lent memory after it."""
        _KEPT.discard(channel)
        if self._lent.total():
            _log.error("a sender's memory stays mapped: it is still read")
            _KEPT.add(channel)
            return
        for export_id, mapped in [*self._mapped.items()]:
            try:
                mapped.close()
            except OneSidedError as error:
                _log.error("a sender's memory stays mapped: %s", error)
                _KEPT.add(channel)
            else:
                del self._mapped[export_id]
        if not self._mapped:
            channel.close()

    def _map(self, export: Export | ExportDevice, fd: int | None) -> Mapping | DeviceMapping:
        if isinstance(export, ExportDevice):
            return DeviceMapping(export, self._device)
        assert fd is not None
        return Mapping(fd, export.num_bytes)

    def _hear(self, channel: Channel, message: Message, fd: int | None) -> None:
        try:
            if isinstance(message, Export | ExportDevice):
                if len(self._mapped) >= MAX_MAPPED:
                    raise OneSidedError(f"the sender hands over more than {MAX_MAPPED} buffers")
                if message.export_id in self._mapped:
                    raise OneSidedError(f"the sender hands over buffer {message.export_id} again")
                self._mapped[message.export_id] = self._map(message, fd)
            elif isinstance(message, Withdraw):
                if self._lent[message.export_id]:
                    raise OneSidedError(f"the sender frees buffer {message.export_id}, being read")
                if (mapped := self._mapped.get(message.export_id)) is not None:
                    mapped.close()
                    del self._mapped[message.export_id]
                channel.send(Withdrawn(message.export_id))
            elif isinstance(message, Ready) and len(self._ready) < _MAX_READY:
                self._ready.append(message)
            else:
                raise OneSidedError(f"the sender said {type(message).__name__} out of turn")
        finally:
            if fd is not None:
                with contextlib.suppress(OSError):
                    os.close(fd)

    def _take(self, channel: Channel, ready: Ready) -> None:
        """Copy a bucket to the buffer that was posted for it."""
        work = self._posted[0]
        mapped = self._mapped.get(ready.export_id)
        if mapped is None:
            raise OneSidedError(f"the sender never handed over buffer {ready.export_id}")
        if work.buffer.numel() != ready.num_bytes:
            raise OneSidedError(
                f"the sender sends {ready.num_bytes:,} bytes where {work.buffer.numel():,} are "
                "expected"
            )
        wanted = work.options.tail_bytes
        num_bytes = ready.num_bytes - (wanted if ready.tail else 0)
        # Only what lies where the buffer does is read there as the buffer would be.
        lends = work.borrows and work.buffer.is_cuda == isinstance(mapped, DeviceMapping)
        lent = mapped.lent(ready.first_byte, num_bytes) if lends else None
        work.tail = _tail(ready, wanted, mapped)
        work.tell_kept = partial(channel.send, Kept(ready.sequence))
        if lent is not None:
            self._lend(channel, ready, work, lent)
            return
        with self._copying:
            # One lock for the whole bucket: ``_check`` ends it after a piece.
            mapped.copy(ready.first_byte, work.buffer[:num_bytes], self._check, work.after)
        if channel.is_ended:  # it may have changed the bytes meanwhile
            raise OneSidedError("the sender left while its memory was read")
        channel.send(Taken(ready.sequence))
        with self._lock:
            self._posted.popleft()
        work.end()

    def _lend(
        self, channel: Channel, ready: Ready, work: OneSidedWork, content: torch.Tensor
    ) -> None:
        """Let a bucket be read where it lies, until it is given back."""
        with self._returned:
            self._lent[ready.export_id] += 1
        if not work.lend(content, partial(self._take_back, channel, ready)):
            self._forget_lent(channel, ready)
        with self._lock:
            self._posted.popleft()
        work.end()

    def _take_back(self, channel: Channel, ready: Ready) -> None:
        """Tell the sender that a lent bucket is no longer read; on any thread. The channel is open
        for as long as anything is lent."""
        try:
            if channel.is_ended:  # as of a copy
                raise OneSidedError("the sender left while its memory was read")
            channel.send(Taken(ready.sequence))
        finally:
            self._forget_lent(channel, ready)

    def _forget_lent(self, channel: Channel, ready: Ready) -> None:
        with self._returned:
            self._lent[ready.export_id] -= 1
            self._returned.notify_all()
            if self._has_left and not self._lent.total():
                self._unmap(channel)


def _tail(ready: Ready, wanted: int, mapped: Mapping | DeviceMapping) -> bytes | None:
    """Return the last bytes of a bucket that are wanted, or those of them that were sent; None
    where none are.

    Raises:
        OneSidedError: More came along.
    """
    if not ready.tail:
        return mapped.read(ready.first_byte + ready.num_bytes - wanted, wanted) if wanted else None
    if len(ready.tail) > wanted:
        raise OneSidedError(
            f"the sender says {len(ready.tail):,} bytes beside a bucket, where {wanted:,} are "
            "expected at most"
        )
    return ready.tail
