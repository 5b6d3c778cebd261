"""Leases of a trainer, renewed in the background, and notices to the user's function."""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import grpc

from weft_rl.contract.errors import (
    LeaseFencedError,
    PeerUnavailableError,
    PolicyOwnedError,
    TransferTimeoutError,
    WeftError,
)
from weft_rl.contract.names import check_counted
from weft_rl.rpc.codec import duration_from_proto, timestamp_to_proto
from weft_rl.rpc.status import error_from_rpc
from weft_rl.v1 import publish_pb2 as pb
from weft_rl.v1 import types_pb2
from weft_rl.v1.publish_pb2_grpc import PublishServiceStub

# Start times are computed from the clock of the boot, which adjustments move a little.
_SAME_START_SECONDS = 2.0
_PROC = Path("/proc")


def this_process() -> pb.TrainerProcess:
    """Describe the calling process to other processes of its trainer."""
    pid = os.getpid()
    return pb.TrainerProcess(
        host=socket.gethostname()[:128],
        host_key=host_key(),
        pid=pid,
        start_time=timestamp_to_proto(_start_time(pid) or 0.0),
    )


def has_ended(holder: Mapping[str, str]) -> bool:
    """Return whether a process is known to be gone; false where that cannot be known.

    Args:
        holder: ``host_key``, ``pid`` and ``start_time``, the metadata of POLICY_OWNED.
    """
    pid = int(holder.get("pid") or 0)
    if not pid or not host_key() or holder.get("host_key") != host_key():
        return False
    started = _start_time(pid)
    return started is None or abs(started - float(holder["start_time"])) > _SAME_START_SECONDS


def is_this_process(holder: Mapping[str, str]) -> bool:
    """Return whether the holder of a lease is the calling process itself."""
    return holder.get("host_key") == host_key() != "" and holder.get("pid") == str(os.getpid())


@cache
def host_key() -> str:
    """Return a key of this boot of the machine and its namespace of process ids.

    Containers that share a host's name do not share their processes. Empty where /proc is not
    there.
    """
    try:
        boot = (_PROC / "sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}:{os.stat(_PROC / 'self/ns/pid').st_ino}"
    except OSError:
        return ""


def _start_time(pid: int) -> float | None:
    """Return the start time of a process, in seconds since 1970; None if it has ended."""
    try:
        stat = (_PROC / str(pid) / "stat").read_text()
        boot = next(
            float(line.split()[1])
            for line in (_PROC / "stat").read_text().splitlines()
            if line.startswith("btime ")
        )
    except (OSError, StopIteration):
        return None
    # The command's name may hold anything; what follows its last ")" has fixed columns
    # (proc_pid_stat(5): 3 is the state, 22 the start in clock ticks since the boot).
    columns = stat.rpartition(")")[2].split()
    if columns[0] in "ZX":
        return None
    return boot + int(columns[19]) / os.sysconf("SC_CLK_TCK")


@dataclass
class RivalHolder:
    """Knowledge of a lease's holder from successive refusals of one acquisition.

    A restarted trainer must wait for the lease of its former process, which nobody released. Two
    trainers that were started with one name by mistake must be told at once. They are told apart
    by whether the holder shows a sign of life after the other one asked, or is known to have ended
    on this machine.

    Args:
        takeover: True if the holder is to be displaced even if it lives.
    """

    takeover: bool
    _first: tuple[int, int] | None = None

    def displaced_token(self, holder: Mapping[str, str]) -> int:
        """Return the token of the lease to take over now; 0 to wait.

        Args:
            holder: Metadata of the last refusal (POLICY_OWNED).
        """
        token = int(holder.get("fencing_token") or 0)
        return token if self.takeover or has_ended(holder) else 0

    def is_alive(self, holder: Mapping[str, str]) -> bool:
        """Return whether the lease was renewed, or taken by another process, since the first
        refusal. A coordinator that was restarted counts renewals from 0."""
        token, renewals = (int(holder.get(key) or 0) for key in ("fencing_token", "num_renewals"))
        first = self._first
        if first is None or (token == first[0] and renewals < first[1]):
            self._first = token, renewals
            return False
        return (token, renewals) != first


def describe(trainer_id: str, policy: str, holder: Mapping[str, str], text: str) -> str:
    """Return why a push is refused whose policy is held by a living process of this trainer.

    Args:
        text: The refusal's own message, which names the process.
    """
    own = is_this_process(holder)
    who = "another Publisher of this very process" if own else "another process"
    return (
        f"{who} runs as trainer {trainer_id!r} and renews its lease of {policy!r}: {text}. Give "
        "each trainer an id of its own, end the other one, or take its policies over with "
        "Publisher(takeover=True)"
    )


_log = logging.getLogger(__name__)
_CALL_SECONDS = 10.0
# For the release of all leases together.
_RELEASE_SECONDS = 2.0
_RETRY_SECONDS = 0.25
# Renewed this many times in each time to live: two may be lost.
_RENEWALS = 3


@dataclass
class _HeldLease:
    kind: types_pb2.PolicyKind.ValueType
    token: int
    time_to_live_seconds: float
    lost_version: int = 0
    """Version that no replica holds any more, as the coordinator said last; 0 is none."""
    answered_version: int = 0
    """Version that a push has replaced since; an answer on its way may still name it."""

    @property
    def wanted_version(self) -> int:
        return 0 if self.lost_version == self.answered_version else self.lost_version


class Leases:
    """Leases of the policies that one publisher owns; thread-safe.

    A background thread renews each lease three times in its time to live. One that was fenced
    though nobody else holds it (it ran out while this process was stopped, or the coordinator
    lost its catalog) is acquired anew at once. One that somebody took over is forgotten: the next
    push acquires it, or is told who holds it.

    Args:
        takeover: True if the first lease of each policy is taken from a living process of this
            trainer. If it were every lease, the two would displace each other for ever.
        on_wanted: Called on the background thread with a policy that is to be
            published again, once each time that is asked; must return at once.
    """

    def __init__(
        self,
        stub: PublishServiceStub,
        trainer_id: str,
        on_wanted: Callable[[str], None] | None = None,
        *,
        takeover: bool = False,
    ) -> None:
        self._stub = stub
        self._takeover = takeover
        self._on_wanted = on_wanted
        self._trainer_id = trainer_id
        #: Random: what tells this publisher from others with its trainer_id.
        self.session_id = secrets.token_hex(8)
        # Pool that the coordinator told: one of another pool refuses this publisher.
        self._pool_id = ""
        self._lock = threading.RLock()  # a signal handler may ask while its thread has it
        self._held: dict[str, _HeldLease] = {}
        #: Policies that were ever held: none of them is taken over by force again.
        self._known: set[str] = set()
        # By policy, the newest version and the largest token that were told: a coordinator
        # that has lost its catalog learns from them how far it was.
        self._last: dict[str, tuple[int, int]] = {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._renew, name="weft-leases", daemon=True)
        self._thread.start()

    def token(self, policy: str, kind: types_pb2.PolicyKind.ValueType, deadline: float) -> int:
        """Return the fencing token of ``policy``'s lease, acquiring it if need be.

        Blocks while the lease is held by a former process of this very trainer, which may
        be dead: until it expires, at most until ``deadline`` (``time.monotonic()``). One
        that is known to have ended is displaced at once.

        Raises:
            PolicyOwnedError: Another trainer holds it, or another process of this one
                that lives: it has renewed the lease meanwhile.
            LeaseFencedError: Another process of this trainer took it over from this one.
            WeftError: See AcquirePolicy.
        """
        with self._lock:
            if policy in self._held:
                return self._held[policy].token
            was_held = policy in self._known
        request = self._acquire_request(policy, kind)
        rival = RivalHolder(takeover=self._takeover and not was_held)
        waiting = False
        while True:
            try:
                response = self._stub.AcquirePolicy(
                    request, timeout=max(0.1, deadline - time.monotonic()), wait_for_ready=True
                )
                break
            except grpc.RpcError as rpc_error:
                error = error_from_rpc(rpc_error)
                if error.reason == "POOL_RECOVERING" and self._may_retry(deadline):
                    continue
                if not (
                    isinstance(error, PolicyOwnedError)
                    and error.metadata.get("holder") == self._trainer_id
                ):
                    raise error from rpc_error
                displaced = rival.displaced_token(error.metadata)
                if displaced and displaced != request.displaced_token:
                    _log.warning("taking the lease over: %s", error.message)
                    request.displaced_token = displaced
                    continue
                if was_held or rival.is_alive(error.metadata):
                    raise self._refused(policy, error, was_held) from rpc_error
                if not waiting:
                    _log.warning("waiting for the lease of a former process: %s", error.message)
                    waiting = True
                if not self._may_retry(deadline):
                    raise error from rpc_error
        return self._note_acquired(policy, kind, response)

    def _may_retry(self, deadline: float) -> bool:
        """Wait a moment; return False if there is no time left, or this object was closed."""
        return time.monotonic() + _RETRY_SECONDS <= deadline and not self._stop.wait(_RETRY_SECONDS)

    def _acquire_request(
        self, policy: str, kind: types_pb2.PolicyKind.ValueType
    ) -> pb.AcquirePolicyRequest:
        with self._lock:
            last_version, last_token = self._last.get(policy, (0, 0))
        return pb.AcquirePolicyRequest(
            trainer_id=self._trainer_id,
            session_id=self.session_id,
            policy=policy,
            kind=kind,
            process=this_process(),
            last_version=last_version,
            last_fencing_token=last_token,
            pool_id=self._pool_id,
        )

    def _note_acquired(
        self,
        policy: str,
        kind: types_pb2.PolicyKind.ValueType,
        response: pb.AcquirePolicyResponse,
    ) -> int:
        """Note an acquired lease; return its token."""
        lease = response.lease
        check_counted("fencing token", lease.fencing_token)
        check_counted(f"version {policy}@", response.last_version)
        with self._lock:
            self._pool_id = response.pool_id or self._pool_id
            last_version, last_token = self._last.get(policy, (0, 0))
            last_version = max(last_version, response.last_version)
            self._last[policy] = last_version, max(last_token, lease.fencing_token)
            held = _HeldLease(kind, lease.fencing_token, duration_from_proto(lease.time_to_live))
            if (former := self._held.get(policy)) is not None:  # the same need is told once
                held.lost_version = former.lost_version
                held.answered_version = former.answered_version
            self._held[policy] = held
            self._known.add(policy)
        return lease.fencing_token

    def _refused(self, policy: str, error: PolicyOwnedError, was_held: bool) -> WeftError:
        """Return the error of a push whose policy another process of this trainer holds."""
        if was_held:
            return LeaseFencedError(
                f"this trainer's lease of {policy!r} was taken over: {error.message}",
                metadata=error.metadata,
            )
        text = describe(self._trainer_id, policy, error.metadata, error.message)
        return PolicyOwnedError(text, metadata=error.metadata)

    @property
    def wanted(self) -> frozenset[str]:
        """Policies that are to be published again; does not block."""
        with self._lock:
            return frozenset(name for name, held in self._held.items() if held.wanted_version)

    def assigned(self, policy: str, version: int) -> None:
        """Note the version that was assigned to a push."""
        with self._lock:
            last_version, last_token = self._last.get(policy, (0, 0))
            self._last[policy] = max(last_version, version), last_token

    def published(self, policy: str) -> None:
        """Note that a version was pushed, which fulfils a request to publish again."""
        with self._lock:
            if (held := self._held.get(policy)) is not None:
                held.answered_version = held.lost_version

    def held_token(self, policy: str) -> int:
        """Return the token held for ``policy``, 0 if none; does not block."""
        with self._lock:
            held = self._held.get(policy)
            return held.token if held else 0

    def forget(self, policy: str, token: int = 0) -> None:
        """Drop the record of a lease that was fenced; 0 stands for whichever token is held."""
        with self._lock:
            if (held := self._held.get(policy)) is not None and token in (0, held.token):
                del self._held[policy]

    def close(self) -> None:
        """Release every lease, best effort; block at most some seconds.

        What a coordinator that is away is not told ends with the lease, once it is back.
        """
        self._stop.set()
        self._thread.join(_CALL_SECONDS)
        with self._lock:
            held, self._held = self._held, {}
        give_up_at = time.monotonic() + _RELEASE_SECONDS
        for policy, lease in held.items():
            request = pb.ReleasePolicyRequest(
                policy=policy, fencing_token=lease.token, session_id=self.session_id
            )
            try:
                left = max(0.1, give_up_at - time.monotonic())
                self._stub.ReleasePolicy(request, timeout=left)
            except grpc.RpcError as error:
                _log.info("could not release %s: %s", policy, error_from_rpc(error))
                if time.monotonic() >= give_up_at:
                    break

    def _renew(self) -> None:
        while not self._stop.wait(self._interval()):
            with self._lock:
                held = dict(self._held)
            for policy, lease in held.items():
                request = pb.RenewLeaseRequest(
                    policy=policy,
                    fencing_token=lease.token,
                    session_id=self.session_id,
                    pool_id=self._pool_id,
                )
                try:
                    response = self._stub.RenewLease(request, timeout=lease.time_to_live_seconds)
                    lease.time_to_live_seconds = duration_from_proto(response.lease.time_to_live)
                    with self._lock:
                        self._pool_id = response.pool_id or self._pool_id
                    self._note(policy, lease, response.publish_again_version)
                except grpc.RpcError as rpc_error:
                    self._renewal_failed(policy, lease, error_from_rpc(rpc_error))
                except Exception:  # noqa: BLE001 (no lease would be renewed any more)
                    _log.exception("renewing %s failed; it is tried again", policy)

    def _renewal_failed(self, policy: str, lease: _HeldLease, error: WeftError) -> None:
        """Keep a lease that could not be renewed, or acquire it anew where nobody else holds it;
        else forget it."""
        is_free = isinstance(error, LeaseFencedError) and not error.metadata.get("holder")
        if is_free and not self._stop.is_set():
            _log.warning("acquiring %s anew: %s", policy, error)
            request = self._acquire_request(policy, lease.kind)
            try:
                response = self._stub.AcquirePolicy(request, timeout=lease.time_to_live_seconds)
            except grpc.RpcError as rpc_error:
                error = error_from_rpc(rpc_error)
            else:
                self._note_acquired(policy, lease.kind, response)
                self._note(policy, self._held[policy], response.publish_again_version)
                return
        is_elsewhere = error.reason == "POOL_MISMATCH"  # its own pool's may be back in a moment
        if is_elsewhere or isinstance(error, PeerUnavailableError | TransferTimeoutError):
            _log.warning("could not renew %s yet: %s", policy, error)
        else:
            _log.warning("lost the lease of %s: %s", policy, error)
            self.forget(policy, lease.token)

    def _note(self, policy: str, held: _HeldLease, lost_version: int) -> None:
        with self._lock:
            before = held.wanted_version
            held.lost_version = lost_version
            if not lost_version:
                held.answered_version = 0
            is_new = held.wanted_version not in (0, before)
        if is_new:
            _log.warning(
                "no replica holds %s@%d any more: publish %s again", policy, lost_version, policy
            )
            if self._on_wanted is not None:
                self._on_wanted(policy)

    def _interval(self) -> float:
        with self._lock:
            lives = [lease.time_to_live_seconds for lease in self._held.values()]
        return min(lives, default=3.0) / _RENEWALS


_log = logging.getLogger(__name__)
_MAX_WAITING = 1000
_STOP_SECONDS = 5.0


class NoticeQueue:
    """Notices that hand names to a function that may take long, from threads that may not.

    Args:
        function: Called with each name; what it raises is logged.
    """

    def __init__(self, function: Callable[[str], None]) -> None:
        self._function = function
        self._thread: threading.Thread | None = None
        self._free_places = threading.Semaphore(_MAX_WAITING)
        self._executor = ThreadPoolExecutor(1, "weft-notices", self._note_thread)

    def put(self, name: str) -> None:
        """Have the function called with ``name`` soon; return at once."""
        if not self._free_places.acquire(blocking=False):
            _log.warning("the notice of %s is dropped: %d wait", name, _MAX_WAITING)
            return
        with contextlib.suppress(RuntimeError):  # closed meanwhile
            self._executor.submit(self._call, name)

    def close(self) -> None:
        """Drop the names that wait. Blocks at most some seconds for a call under way; not at all
        from within that call."""
        self._executor.shutdown(wait=False, cancel_futures=True)
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(_STOP_SECONDS)

    def _note_thread(self) -> None:
        self._thread = threading.current_thread()

    def _call(self, name: str) -> None:
        self._free_places.release()
        try:
            self._function(name)
        except Exception:  # noqa: BLE001 (the user's code)
            _log.exception("on_publish_again failed for %s", name)
