"""Leases of a trainer, renewed in the background, and notices to the user's function."""

from __future__ import annotations

import contextlib
import logging
import secrets
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import grpc

from trainer_side.pool.rival import Rival, describe, this_process
from weft_rl.contract.errors import (
    LeaseFencedError,
    PeerUnavailableError,
    PolicyOwnedError,
    TransferTimeoutError,
    WeftError,
)
from weft_rl.rpc.codec import duration_from_proto
from weft_rl.rpc.status import error_from_rpc
from weft_rl.v1 import publish_pb2 as pb
from weft_rl.v1 import types_pb2
from weft_rl.v1.publish_pb2_grpc import PublishServiceStub

_log = logging.getLogger(__name__)

_CALL_SECONDS = 10.0
_RETRY_SECONDS = 0.25
# Renewed this many times in each time to live: two may be lost.
_RENEWALS = 3


@dataclass
class _Held:
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

    A background thread renews each lease three times in its time to live, and
    forgets one that was fenced: the next push acquires it anew, or is told who
    holds it.

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
        self._lock = threading.RLock()  # a signal handler may ask while its thread has it
        self._held: dict[str, _Held] = {}
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
            last_version, last_token = self._last.get(policy, (0, 0))
        request = pb.AcquirePolicyRequest(
            trainer_id=self._trainer_id,
            session_id=self.session_id,
            policy=policy,
            kind=kind,
            process=this_process(),
            last_version=last_version,
            last_fencing_token=last_token,
        )
        rival = Rival(takeover=self._takeover and not was_held)
        waiting = False
        while True:
            try:
                response = self._stub.AcquirePolicy(
                    request, timeout=max(0.1, deadline - time.monotonic()), wait_for_ready=True
                )
                break
            except grpc.RpcError as rpc_error:
                error = error_from_rpc(rpc_error)
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
                if time.monotonic() + _RETRY_SECONDS > deadline:
                    raise error from rpc_error
                if not waiting:
                    _log.warning("waiting for the lease of a former process: %s", error.message)
                    waiting = True
                if self._stop.wait(_RETRY_SECONDS):
                    raise error from rpc_error
        lease = response.lease
        with self._lock:
            last_version = max(last_version, response.last_version)
            self._last[policy] = last_version, max(last_token, lease.fencing_token)
            self._held[policy] = _Held(lease.fencing_token, duration_from_proto(lease.time_to_live))
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

    def forget(self, policy: str) -> None:
        """Drop the record of a lease that was fenced."""
        with self._lock:
            self._held.pop(policy, None)

    def close(self) -> None:
        """Release every lease, best effort; block at most some seconds."""
        self._stop.set()
        self._thread.join(_CALL_SECONDS)
        with self._lock:
            held, self._held = self._held, {}
        for policy, lease in held.items():
            request = pb.ReleasePolicyRequest(
                policy=policy, fencing_token=lease.token, session_id=self.session_id
            )
            try:
                self._stub.ReleasePolicy(request, timeout=2.0)
            except grpc.RpcError as error:
                _log.info("could not release %s: %s", policy, error_from_rpc(error))

    def _renew(self) -> None:
        while not self._stop.wait(self._interval()):
            with self._lock:
                held = dict(self._held)
            for policy, lease in held.items():
                request = pb.RenewLeaseRequest(
                    policy=policy, fencing_token=lease.token, session_id=self.session_id
                )
                try:
                    response = self._stub.RenewLease(request, timeout=lease.time_to_live_seconds)
                    self._note(policy, lease, response.publish_again_version)
                except grpc.RpcError as rpc_error:
                    error = error_from_rpc(rpc_error)
                    if isinstance(error, PeerUnavailableError | TransferTimeoutError):
                        _log.warning("could not renew %s yet: %s", policy, error)
                    else:
                        _log.warning("lost the lease of %s: %s", policy, error)
                        self.forget(policy)
                except Exception:  # noqa: BLE001 (no lease would be renewed any more)
                    _log.exception("renewing %s failed; it is tried again", policy)

    def _note(self, policy: str, held: _Held, lost_version: int) -> None:
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


class Notices:
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
