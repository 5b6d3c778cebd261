"""The members of a one-sided group: a sender, which tells where bytes lie, and receivers, each of
which has a thread that copies them out of the sender's memory.

The sender hears when each receiver has its copy. One file: the two ends are one protocol, and each
message of one is read beside what the other does with it.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import logging
import os
import selectors
import socket
import threading
import time
import weakref
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import torch
from torch._C._distributed_c10d import Store

from weft_rl.interrupts import Flag, SelectorWaker
from weft_rl.ipc.connection import PeerError
from weft_rl.ipc.listener import NewConnections
from weft_rl.transport.one_sided.directory import connect, listen, unlink
from weft_rl.transport.one_sided.memory import (
    DeviceBlock,
    DeviceMapping,
    DeviceView,
    FileMapping,
    MemoryFile,
    export_of,
    map_export,
    record_event,
    synchronize,
)
from weft_rl.transport.one_sided.messages import (
    MAX_TAIL_BYTES,
    SECRET_BYTES,
    Export,
    ExportDevice,
    Hello,
    Kept,
    Left,
    MemberConnection,
    Message,
    OneSidedError,
    Ready,
    Taken,
    Welcome,
    Withdraw,
    Withdrawn,
)
from weft_rl.transport.wire.buckets import WHOLE, ArrivedBucket, BucketOptions, write_tail

_log = logging.getLogger(__name__)

_PREFIX = "one-sided"
_SENDER = 0
#: Memory files of one sender that a receiver maps: it has a few buffers, and replaces some.
MAX_MAPPED = 64
# Buckets that were said to be ready and are not received yet: a sender keeps 8 at most.
_MAX_READY = 64
_CONNECT_SECONDS = 10.0
_WELCOME_SECONDS = 30.0
# What is lent is read by kernels of a GPU, which end.
_RETURN_SECONDS = 60.0
# Connections of groups that are over whose memory is mapped here still: they close when it is not,
# or with the process. Referenced, because they close with their last reference, too.
KEPT: set[MemberConnection] = set()
# Connections of this user's processes that have said nothing (yet).
_MAX_SILENT = 64
# After an accept that failed; the receivers that have come are heard as much later.
_RETRY_SECONDS = 0.05


class OneSidedWork:
    """A broadcast; see ``backends.Work``.

    Args:
        buffer: Bytes to send, or memory to receive them in.
        options: ``borrows``: whether a receiver's thread may ``lend`` it the bytes instead.
    """

    def __init__(self, buffer: torch.Tensor, options: BucketOptions) -> None:
        self.buffer, self.options, self.borrows = buffer, options, options.borrows
        self.tail: bytes | None = None
        self._lock = threading.Lock()  # guards what is lent
        self._lent: torch.Tensor | None = None
        self._return: Callable[[], None] | None = None
        #: How a receiver tells the sender that it keeps the bucket.
        self.tell_kept: Callable[[], None] | None = None
        #: Whether every receiver has said so, at the sender.
        self.is_kept = False
        #: What the buffer must not be written before; None on a CPU.
        self.after = record_event(buffer.device)
        self._woken = Flag()
        self._error = ""
        self.done = False

    def end(self, error: str = "") -> None:
        """Mark the broadcast as ended: nothing here touches the buffer any more. Only the first
        call counts.

        Args:
            error: Reason why it failed. A text: an exception would hold frames, and they buffers.
        """
        if not self.done:
            self._error, self.done = error, True
            self.wake()

    def lend(self, content: torch.Tensor, give_back: Callable[[], None]) -> bool:
        """Offer the sender's memory to be read there, in place of a copy; before ``end``.

        Args:
            content: The bytes.
            give_back: Called once nobody reads them any more, by whichever thread.

        Returns:
            True if that will be; False if nobody reads what comes any more.
        """
        with self._lock:
            if not self.borrows:
                return False
            self._lent, self._return = content, give_back
            return True

    @property
    def arrived(self) -> ArrivedBucket:
        return ArrivedBucket(self._lent, self.tail)

    def give_back(self) -> None:
        with self._lock:
            self.borrows, self._lent = False, None
            give_back, self._return = self._return, None
        if give_back is not None:
            give_back()

    def receive_again(self, buffer: torch.Tensor, deadline: float) -> bool:
        return False  # it was read in the sender's memory

    def keep(self) -> bool:
        """See ``Work``; a sender that is gone is found out elsewhere."""
        if self.tell_kept is not None:
            with contextlib.suppress(PeerError):
                self.tell_kept()
        return self.tell_kept is not None

    def wait_until(self, deadline: float) -> bool:
        return self._woken.wait(deadline - time.monotonic())

    def finish(self) -> None:
        if self._error:
            raise OneSidedError(self._error)

    def wake(self) -> None:
        self._woken.set()


class MemberIdentity:
    """Identity of a member: a secret whose digest the group's store has. By it a socket tells the
    store's rank from any other process of the same user."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.secret = os.urandom(SECRET_BYTES)

    def announce(self, rank: int, socket_name: str = "") -> None:
        """Publish the secret's digest in the group's store, and the name of the socket where the
        sender listens."""
        digest = hashlib.sha256(self.secret).hexdigest()
        self._store.set(f"{_PREFIX}/{rank}", f"{digest} {socket_name}")

    def find(self, rank: int) -> tuple[str, str]:
        """Return a member's digest and the name of its socket; blocks until it has announced
        them."""
        digest, _, name = self._store.get(f"{_PREFIX}/{rank}").decode().partition(" ")
        return digest, name


def check_secret(connection: MemberConnection, secret: bytes, digest: str, rank: int) -> None:
    """Refuse a peer that is not the group's member of that rank."""
    if not hmac.compare_digest(hashlib.sha256(secret).hexdigest(), digest):
        raise OneSidedError(
            f"{connection.peer} says that it is rank {rank}, and is not the group's"
        )


# -- a receiver ------------------------------------------------------------


class OneSidedReceiver:
    """One-sided ``backends.Backend`` of one receiver: of any rank but the sender's."""

    #: A thread of its own connects.
    is_formed = True

    def __init__(self, store: Store, rank: int, device: torch.device) -> None:
        self._place, self._rank, self._device = MemberIdentity(store), rank, device
        self._lock = threading.Lock()  # guards what follows
        self._posted: deque[OneSidedWork] = deque()
        self.error = ""
        #: While its first answer is awaited. Later it is closed by the thread alone, once all
        #: is unmapped: by that the sender knows that it may free its memory.
        self._connection: MemberConnection | None = None
        #: How often each buffer of the sender's is lent at the moment.
        self._lent: Counter[int] = Counter()
        self._returned = threading.Condition()  # guards it, and what is mapped once it has left
        self._has_left = False
        #: Held while a piece is copied.
        self._copying = threading.Lock()
        self._mapped: dict[int, FileMapping | DeviceMapping] = {}
        self._ready: deque[Ready] = deque()
        self._wakeup = SelectorWaker()
        self.thread = threading.Thread(target=self._run, name="weft-one-sided", daemon=True)
        self.thread.start()

    def broadcast(
        self, buffer: torch.Tensor, timeout_seconds: float, options: BucketOptions = WHOLE
    ) -> OneSidedWork:
        work = OneSidedWork(buffer, options)
        with self._lock:
            if self.error:
                raise OneSidedError(self.error)
            self._posted.append(work)
        self._wakeup.set()
        return work

    def abort(self) -> None:
        """See ``Backend``: nothing is copied after the current piece."""
        self._end("this rank left the group")

    def settle(self, timeout_seconds: float) -> bool:
        if not self._copying.acquire(timeout=timeout_seconds):
            return False
        self._copying.release()
        return bool(self.error)

    def _end(self, error: str) -> None:
        with self._lock:
            self.error = self.error or error
            connection = self._connection
        if connection is not None:
            connection.shut()
        self._wakeup.set()

    def _check(self) -> None:
        if self.error:
            raise OneSidedError(self.error)

    # -- on its thread -------------------------------------------------------------

    def _run(self) -> None:
        connection: MemberConnection | None = None
        try:
            connection = self._connect()
            self._follow(connection)
        except PeerError as error:
            self._end(str(error))
        except Exception as error:  # noqa: BLE001 (the edge of a thread)
            # Also what the store raises when the group is over.
            self._end(f"the group's sender was not reached: {error!r}")
        with self._lock:
            works, self._connection = [*self._posted], None
            self._posted.clear()
        for work in works:
            work.end(self.error)
        self._wakeup.close()
        if connection is not None:
            self._leave(connection)

    def _connect(self) -> MemberConnection:
        self._place.announce(self._rank)
        digest, name = self._place.find(_SENDER)
        connection = MemberConnection(connect(name, _CONNECT_SECONDS))
        try:
            # Before anything can end it: a sender knows who has left by this, also if that was
            # before it came here, and waits for nobody.
            connection.send(Hello(self._rank, self._place.secret))
            with self._lock:
                self._connection = connection
            self._check()
            welcome = connection.receive_message(_WELCOME_SECONDS)
            if not isinstance(welcome, Welcome):
                raise OneSidedError(f"the sender began with {type(welcome).__name__}")
            check_secret(connection, welcome.secret, digest, _SENDER)
            with self._lock:
                self._connection = None
            self._check()
        except BaseException:
            connection.close()
            raise
        return connection

    def _follow(self, connection: MemberConnection) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(connection, selectors.EVENT_READ)
            selector.register(self._wakeup, selectors.EVENT_READ)
            while True:
                events = selector.select()
                self._wakeup.clear()
                self._check()
                if any(key.fileobj is connection for key, _ in events):
                    self._hear(connection, *connection.receive())
                while self._ready and self._posted:
                    self._take(connection, self._ready.popleft())

    def _leave(self, connection: MemberConnection) -> None:
        """Tell the sender at once that this rank is gone, and by the connection's end that it may
        free its memory."""
        with contextlib.suppress(PeerError):
            connection.send(Left())
        with self._returned:
            self._returned.wait_for(lambda: not self._lent.total(), _RETURN_SECONDS)
            self._has_left = True
            self._unmap(connection)

    def _unmap(self, connection: MemberConnection) -> None:
        """Unmap the sender's memory, and close the connection once nothing is mapped any more.
        Called with ``_returned`` held: by the thread, or by whoever gives back lent memory after
        it."""
        KEPT.discard(connection)
        if self._lent.total():
            _log.error("a sender's memory stays mapped: it is still read")
            KEPT.add(connection)
            return
        for export_id, mapped in [*self._mapped.items()]:
            try:
                mapped.close()
            except PeerError as error:
                _log.error("a sender's memory stays mapped: %s", error)
                KEPT.add(connection)
            else:
                del self._mapped[export_id]
        if not self._mapped:
            connection.close()

    def _hear(self, connection: MemberConnection, message: Message, fd: int | None) -> None:
        try:
            if isinstance(message, Export | ExportDevice):
                if len(self._mapped) >= MAX_MAPPED:
                    raise OneSidedError(f"the sender hands over more than {MAX_MAPPED} buffers")
                if message.export_id in self._mapped:
                    raise OneSidedError(f"the sender hands over buffer {message.export_id} again")
                self._mapped[message.export_id] = map_export(message, fd, self._device)
            elif isinstance(message, Withdraw):
                if self._lent[message.export_id]:
                    raise OneSidedError(f"the sender frees buffer {message.export_id}, being read")
                if (mapped := self._mapped.get(message.export_id)) is not None:
                    mapped.close()
                    del self._mapped[message.export_id]
                connection.send(Withdrawn(message.export_id))
            elif isinstance(message, Ready) and len(self._ready) < _MAX_READY:
                self._ready.append(message)
            else:
                raise OneSidedError(f"the sender said {type(message).__name__} out of turn")
        finally:
            if fd is not None:
                with contextlib.suppress(OSError):
                    os.close(fd)

    def _take(self, connection: MemberConnection, ready: Ready) -> None:
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
        work.tell_kept = partial(connection.send, Kept(ready.sequence))
        if work.options.is_dropped:
            self._taken(connection, ready, work)
            return
        wanted = work.options.tail_bytes
        num_bytes = ready.num_bytes - (wanted if ready.tail else 0)
        # Only what lies where the buffer does is read there as the buffer would be.
        lends = work.borrows and work.buffer.is_cuda == isinstance(mapped, DeviceMapping)
        lent = mapped.lent(ready.first_byte, num_bytes) if lends else None
        work.tail = _tail(ready, wanted, mapped)
        if lent is not None:
            self._lend(connection, ready, work, lent)
            return
        with self._copying:
            # One lock for the whole bucket: ``_check`` ends it after a piece.
            mapped.copy(ready.first_byte, work.buffer[:num_bytes], self._check, work.after)
        if connection.is_ended:  # it may have changed the bytes meanwhile
            raise OneSidedError("the sender left while its memory was read")
        self._taken(connection, ready, work)

    def _taken(self, connection: MemberConnection, ready: Ready, work: OneSidedWork) -> None:
        """Tell the sender that a bucket is no longer read, and end the receive."""
        connection.send(Taken(ready.sequence))
        with self._lock:
            self._posted.popleft()
        work.end()

    def _lend(
        self, connection: MemberConnection, ready: Ready, work: OneSidedWork, content: torch.Tensor
    ) -> None:
        """Let a bucket be read where it lies, until it is given back."""
        with self._returned:
            self._lent[ready.export_id] += 1
        if not work.lend(content, partial(self._take_back, connection, ready)):
            self._forget_lent(connection, ready)
        with self._lock:
            self._posted.popleft()
        work.end()

    def _take_back(self, connection: MemberConnection, ready: Ready) -> None:
        """Tell the sender that a lent bucket is no longer read; on any thread. The connection is
        open for as long as anything is lent."""
        try:
            if connection.is_ended:  # as of a copy
                raise OneSidedError("the sender left while its memory was read")
            connection.send(Taken(ready.sequence))
        finally:
            self._forget_lent(connection, ready)

    def _forget_lent(self, connection: MemberConnection, ready: Ready) -> None:
        with self._returned:
            self._lent[ready.export_id] -= 1
            self._returned.notify_all()
            if self._has_left and not self._lent.total():
                self._unmap(connection)


def _tail(ready: Ready, wanted: int, mapped: FileMapping | DeviceMapping) -> bytes | None:
    """Return the last bytes of a bucket that are wanted, or those of them that were sent; None
    where none are."""
    if not ready.tail:
        return mapped.read(ready.first_byte + ready.num_bytes - wanted, wanted) if wanted else None
    if len(ready.tail) > wanted:
        raise OneSidedError(
            f"the sender says {len(ready.tail):,} bytes beside a bucket, where {wanted:,} are "
            "expected at most"
        )
    return ready.tail


# -- the sender ------------------------------------------------------------


class SentWork(OneSidedWork):
    """A broadcast, and the receivers that have still to copy it."""

    def __init__(
        self, buffer: torch.Tensor, sequence: int, missing: set[int], options: BucketOptions
    ) -> None:
        super().__init__(buffer, options)
        self.memory: MemoryFile | DeviceView
        self.memory, self.first_byte = export_of(buffer)
        self.sequence, self.missing = sequence, missing
        #: Receivers that have not said yet that they keep it.
        self.unkept = set(missing)


@dataclass
class _Member:
    """A receiver that has said who it is, and the memory files that it knows."""

    rank: int
    connection: MemberConnection
    known: dict[int, weakref.ref[MemoryFile | DeviceView]] = field(default_factory=dict)
    mapped: dict[int, DeviceBlock] = field(default_factory=dict)
    """Blocks that must not be freed before it says that it has unmapped them."""

    def tell(self, message: Message, fd: int | None = None) -> None:
        """Send a message to the receiver.

        Raises:
            OneSidedError: The receiver is gone; names it.
        """
        try:
            self.connection.send(message, fd)
        except PeerError as error:
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
        with contextlib.suppress(PeerError):
            while self.mapped:
                message = self.connection.receive_message()
                if isinstance(message, Withdrawn):
                    self.mapped.pop(message.export_id, None)


class OneSidedSender:
    """One-sided ``backends.Backend`` of the sender: of rank 0."""

    #: Receivers come to a thread of its own.
    is_formed = True

    def __init__(self, store: Store, size: int) -> None:
        self._place, self._ranks = MemberIdentity(store), frozenset(range(1, size))
        self._lock = threading.Lock()  # guards what follows
        self._works: dict[int, SentWork] = {}
        #: Those that some receiver has not said yet that it keeps.
        self._unkept: dict[int, SentWork] = {}
        self._members: dict[int, _Member] = {}
        self.error = ""
        self._num_sent = 0
        self._digests: dict[int, str] = {}
        self._wakeup = SelectorWaker()
        self._listener, self._name = listen()
        self.thread = threading.Thread(target=self._run, name="weft-one-sided", daemon=True)
        try:
            self._arrivals = NewConnections(self._listener, _MAX_SILENT)
            self.thread.start()
        except BaseException as error:  # interrupted: nobody else could end it
            self.abort()
            if not self.thread.is_alive():
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
        if not options.tail:
            synchronize(buffer.device)
        with self._lock:
            if self.error:
                raise OneSidedError(self.error)
            work = SentWork(buffer, self._num_sent, set(self._ranks), options)
            self._num_sent += 1
            self._works[work.sequence] = work
            if options.on_kept is not None:
                self._unkept[work.sequence] = work
            members = [*self._members.values()]
            try:
                for member in members:
                    member.say(work)
            except PeerError as error:
                self._fail(str(error))
        return work

    def abort(self) -> None:
        """See ``Backend``. A receiver that is still copying finds the socket closed afterwards, and
        discards its copy."""
        with self._lock:
            self._fail("this rank left the group")

    def settle(self, timeout_seconds: float) -> bool:
        """See ``Backend``: nothing here writes."""
        return bool(self.error)

    def _fail(self, error: str) -> None:
        """End all broadcasts with an error; called with the lock held."""
        self.error = self.error or error
        for member in self._members.values():
            member.connection.end()
        for work in self._works.values():
            work.end(self.error)
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
                self._fail(str(error) if isinstance(error, PeerError) else text)
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
                member.connection.close()

    def _serve(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._arrivals, selectors.EVENT_READ)
            selector.register(self._wakeup, selectors.EVENT_READ)
            while True:
                events = selector.select()
                self._wakeup.clear()
                if self.error:
                    raise OneSidedError(self.error)
                for key, _ in events:
                    if key.fileobj is self._arrivals:
                        self._accept(selector)
                    elif isinstance(key.fileobj, MemberConnection):
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
                self._introduce(arrived.pop(0), selector)
        finally:  # where one of them has ended the group
            for connected in arrived:
                connected.close()

    def _introduce(self, connected: socket.socket, selector: selectors.BaseSelector) -> None:
        """Admit a receiver that says who it is; close the connection of anybody else."""
        try:
            connection = MemberConnection(connected)
        except PeerError as error:  # another user's, who should find no way to this socket
            _log.warning("refused on a group's socket: %s", error)
            return
        try:
            member = self._recognise(connection)
        except PeerError as error:
            _log.debug("refused on a group's socket: %s", error)
            connection.close()
            return
        selector.register(member.connection, selectors.EVENT_READ, member)
        with self._lock:
            self._members[member.rank] = member
            member.tell(Welcome(self._place.secret))
            for work in self._works.values():
                member.say(work)

    def _recognise(self, connection: MemberConnection) -> _Member:
        hello = connection.receive_message()
        if not isinstance(hello, Hello):
            raise OneSidedError(f"{connection.peer} began with {type(hello).__name__}")
        if hello.rank not in self._digests or hello.rank in self._members:
            raise OneSidedError(
                f"{connection.peer} says that it is rank {hello.rank}, which is not awaited"
            )
        check_secret(connection, hello.secret, self._digests[hello.rank], hello.rank)
        return _Member(hello.rank, connection)

    def _hear(self, member: _Member) -> None:
        try:
            message = member.connection.receive_message()
        except PeerError as error:
            raise OneSidedError(f"rank {member.rank} is gone: {error}") from error
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
