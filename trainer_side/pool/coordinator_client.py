"""Coordinator as the sender of a trainer calls it.

Calls have the time that is left, are made again after the coordinator was away, and use the lease
that they need.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, TypeVar

import grpc

from trainer_side.pool.leases import Leases
from weft_rl.contract.errors import (
    InvalidRequestError,
    LeaseFencedError,
    PeerUnavailableError,
    TransferTimeoutError,
)
from weft_rl.contract.group import SITE_VARIABLE
from weft_rl.contract.manifest import Manifest
from weft_rl.contract.tensors import Reference
from weft_rl.rpc.channel import (
    check_own_address,
    local_address_towards,
    open_threaded_channel,
    split_target,
)
from weft_rl.rpc.codec import dtype_from_proto, dtype_to_proto
from weft_rl.rpc.handshake import why_refused
from weft_rl.rpc.manifest_codec import manifest_to_chunks, reference_from_chunks
from weft_rl.rpc.security.credentials import Credentials
from weft_rl.rpc.status import error_from_rpc, is_unanswered
from weft_rl.v1 import publish_pb2 as pb
from weft_rl.v1 import types_pb2
from weft_rl.v1.publish_pb2_grpc import PublishServiceStub

#: Between two lines of the log while nobody answers.
LOG_SECONDS = 10.0
# What one try at a plain connection, made to learn why, may take.
_PROBE_SECONDS = 2.0
# And one at a TLS handshake, with a server that has taken the connection.
_HANDSHAKE_SECONDS = 0.3
# A connection to a port that is closed fails within a moment; one that is open needs a
# moment more than that.
_POLL_SECONDS = 0.5
_NO_ANSWER = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)


class CoordinatorConnection:
    """Connection of a trainer to its coordinator.

    One that was never reached for ``connect_seconds`` is an error: most often its address
    is wrong. One that was reached before is waited for as long as a push may take: it is
    being restarted.

    Args:
        channel: Channel to the coordinator; closed by its owner.
        target: HOST:PORT of the coordinator.
        connect_seconds: Longest wait for the first connection.
        credentials: Credentials that the channel shows; by default this process's.
        probe: Function that says why ``target`` cannot be connected to; empty if it can.
    """

    def __init__(
        self,
        channel: grpc.Channel,
        target: str,
        connect_seconds: float,
        probe: Callable[[str], str] | None = None,
        credentials: Credentials | None = None,
    ) -> None:
        self._target = target
        # Of the health service, whose empty request asks for the server as a whole.
        self._check: Any = channel.unary_unary("/grpc.health.v1.Health/Check")
        self._connect_seconds = connect_seconds
        self._probe = probe or (lambda target: why_unreachable(target, credentials))
        #: Whether there was a connection at some time.
        self.was_reached = False

    def wait(self, deadline: float) -> None:
        """Block until there is a connection, at most until ``deadline`` (``time.monotonic()``).

        The log says why it waits, at once and every 10 s.

        Raises:
            PeerUnavailableError: ``COORDINATOR_UNREACHABLE``: never reached in its time.
                ``COORDINATOR_AWAY``: reached before, and not again until ``deadline``.
        """
        began = time.monotonic()
        end = deadline if self.was_reached else min(deadline, began + self._connect_seconds)
        logged_at, why = float("-inf"), ""
        while not self._answers(min(_POLL_SECONDS, end - time.monotonic())):
            now = time.monotonic()
            if now >= end:
                raise self._failure(why or self._learn_why(0.5), now - began)
            if now - logged_at >= LOG_SECONDS:
                logged_at, why = now, self._learn_why(end - now)
                _log.warning(
                    "the coordinator at %s cannot be reached: %s; trying for another %.0f s",
                    self._target,
                    why,
                    max(0.0, end - time.monotonic()),
                )
        if logged_at > 0:
            _log.warning(
                "reached the coordinator at %s after %.1f s",
                self._target,
                time.monotonic() - began,
            )
        self.was_reached = True

    def _answers(self, seconds: float) -> bool:
        """Return whether a gRPC server answers within a time, whatever its answer.

        This makes a call, and does not ask for the channel's connectivity: that may belong to a
        connection that is gone. It is also watched by a thread of grpcio's that fails when the
        channel is closed.
        """
        try:
            self._check(b"", timeout=max(0.05, seconds), wait_for_ready=True)
        except grpc.RpcError as error:
            return error.code() not in _NO_ANSWER
        return True

    def _learn_why(self, seconds: float) -> str:
        """Return the probe's answer; looking a host's name up may take longer than ``seconds``."""
        found: list[str] = []
        thread = threading.Thread(
            target=lambda: found.append(self._probe(self._target)),
            name="weft-probe",
            daemon=True,
        )
        thread.start()
        thread.join(max(0.1, min(seconds, 2 * _PROBE_SECONDS)))
        if not found:
            return "its host's name could not be looked up yet"
        return found[0] or "something listens there, but does not answer as a coordinator does"

    def _failure(self, why: str, seconds: float) -> PeerUnavailableError:
        if self.was_reached:
            return PeerUnavailableError(
                f"the coordinator at {self._target} is away: {why}; the push's time is up",
                reason="COORDINATOR_AWAY",
            )
        return PeerUnavailableError(
            f"the coordinator at {self._target} was never reached in {seconds:.1f} s: {why}. "
            "Check that `weft coordinator` runs, that its --listen is reachable from this "
            "machine (not 127.0.0.1 if it is another one), and host, port and firewall; a job "
            "that starts together with it waits longer: connect_seconds=300",
            reason="COORDINATOR_UNREACHABLE",
            metadata={"target": self._target},
        )


def why_unreachable(target: str, credentials: Credentials | None = None) -> str:
    """Return why a connection to HOST:PORT cannot be made; empty if it can.

    Tried by TCP and with these credentials. Blocks some seconds at most, not counting the look-up
    of the name.
    """
    host, port = split_target(target)
    try:
        socket.create_connection((host, port), timeout=_PROBE_SECONDS).close()
    except socket.gaierror as error:
        return f"the host {host!r} is not known ({error.strerror})"
    except TimeoutError:
        return f"no answer in {_PROBE_SECONDS:.0f} s (another network, or a firewall?)"
    except OSError as error:
        return error.strerror.lower() if error.strerror else str(error)
    known = Credentials.from_environment() if credentials is None else credentials
    return why_refused(target, known, _HANDSHAKE_SECONDS)


def own_site() -> str:
    """Return the label of the place where this process runs, by its environment."""
    return os.environ.get(SITE_VARIABLE, "")


def data_address(data_host: str | None, target: str) -> str:
    """Return the address of this machine that replicas are to connect to.

    Args:
        data_host: Address as the user gave it; None takes the route towards the coordinator.
        target: The coordinator's HOST:PORT.

    Raises:
        InvalidRequestError: ``data_host`` is not known here, or no address of this machine.
        PeerUnavailableError: ``COORDINATOR_UNREACHABLE``: no route to the coordinator.
    """
    if data_host is None:
        try:
            return local_address_towards(target)
        except OSError as error:
            raise PeerUnavailableError(
                f"this machine has no route to the coordinator at {target}: "
                f"{error.strerror or error}; say data_host=, the address that the replicas "
                "reach this machine by",
                reason="COORDINATOR_UNREACHABLE",
            ) from error
    try:
        check_own_address(data_host)
    except OSError as error:
        unknown = isinstance(error, socket.gaierror)
        what = "is not known here" if unknown else "is no address of this machine"
        raise InvalidRequestError(
            f"data_host={data_host!r} {what} ({error.strerror}): give the name or address that "
            "the replicas reach this machine by, or leave it out"
        ) from error
    return data_host


_log = logging.getLogger(__name__)
_T = TypeVar("_T")
# How often a coordinator that is away is looked for again.
_RETRY_SECONDS = 0.5
_ABORT_SECONDS = 2.0


class CoordinatorClient:
    """Connection of a trainer to its coordinator, and the leases that it holds there.

    Used by one thread at a time; leases are renewed on a thread of their own.

    Args:
        coordinator: HOST:PORT.
        trainer_id: Owner of the policies that are pushed.
        connect_seconds: Longest wait for a coordinator that was never reached.
        takeover: True if leases are taken from a living process of this trainer.
        on_wanted: Function called with a policy that is to be published again, on the leases'
            thread; must return at once.
        credentials: Credentials to show; by default those that the environment names.
        on_wait: Function called with what is waited for, before each wait.
    """

    def __init__(
        self,
        coordinator: str,
        trainer_id: str,
        *,
        connect_seconds: float,
        takeover: bool = False,
        on_wanted: Callable[[str], None] | None = None,
        credentials: Credentials | None = None,
        on_wait: Callable[[str], None] = lambda what: None,
    ) -> None:
        self._on_wait = on_wait
        self.target, self.credentials = coordinator, credentials
        self.trainer_id = trainer_id
        self._channel = open_threaded_channel(coordinator, credentials, self._give_up_late)
        #: Calls that ``call`` and ``with_lease`` make.
        self.stub = PublishServiceStub(self._channel)
        self._contact = CoordinatorConnection(
            self._channel, coordinator, connect_seconds, credentials=credentials
        )
        self.leases = Leases(self.stub, trainer_id, on_wanted, takeover=takeover)
        self._known_manifests: set[bytes] = set()
        self._reference: tuple[object, Reference] | None = None

    def reach(self, deadline: float) -> None:
        """Wait for a coordinator that was never reached, for ``connect_seconds``.

        Raises:
            PeerUnavailableError: ``COORDINATOR_UNREACHABLE``.
        """
        if not self._contact.was_reached:
            self._on_wait(f"the coordinator at {self.target}")
            self._contact.wait(deadline)

    def call(
        self,
        call: Callable[[float], _T],
        deadline: float,
        waits_for: str = "the coordinator to answer",
    ) -> _T:
        """Make one RPC with the time that is left; its failure is a typed error.

        It is made again once a coordinator that was away is back (all RPCs are idempotent).

        Args:
            call: Function that makes the RPC, within so many seconds.
            deadline: ``time.monotonic()`` at which to give up.
            waits_for: What the RPC waits for, as the error says that ends it at its deadline.
        """
        self._on_wait(waits_for)
        late = f"the deadline passed while waiting for {waits_for}"
        while True:
            left = deadline - time.monotonic()
            if left <= 0:
                raise TransferTimeoutError(late)
            try:
                return call(left)
            except grpc.RpcError as rpc_error:
                if is_unanswered(rpc_error):
                    raise TransferTimeoutError(late) from rpc_error
                error = error_from_rpc(rpc_error)
                if error.reason != "COORDINATOR_AWAY":
                    raise error from rpc_error
            time.sleep(_RETRY_SECONDS)
            self._contact.wait(deadline)

    def with_lease(
        self,
        policy: str,
        kind: types_pb2.PolicyKind.ValueType,
        call: Callable[[int, float], _T],
        deadline: float,
        waits_for: str,
    ) -> _T:
        """Make an RPC under a policy's lease, which is acquired as needed; see ``call``.

        Args:
            call: Function that makes the RPC with the lease's token, within so many seconds.
        """
        self.reach(deadline)
        fenced = False
        while True:
            self._on_wait(f"the lease of {policy}")
            token = self.leases.token(policy, kind, deadline)
            try:
                return self.call(partial(call, token), deadline, waits_for)
            except LeaseFencedError as error:
                # Expired while we were away (a long step under a debugger, a coordinator
                # that lost its catalog): acquire it anew once, or learn who holds it. The
                # renewal may have done so beside: the holder is this trainer then.
                self.leases.forget(policy, token)
                is_taken = error.metadata.get("holder", self.trainer_id) != self.trainer_id
                if fenced or is_taken:
                    raise
                fenced = True

    def describe(self, deadline: float) -> pb.DescribeTargetResponse:
        """Return what the pool serves; block until a replica has described it."""
        request = pb.DescribeTargetRequest()
        return self.call(
            lambda left: self.stub.DescribeTarget(request, timeout=left),
            deadline,
            "a replica that has described its base model",
        )

    def reference(self, target: pb.DescribeTargetResponse, deadline: float) -> Reference:
        """Return every tensor of the base that the pool serves; asked for once."""
        drafts = [(tensor.name, tensor.dtype) for tensor in target.draft_tensors]
        told = target.base_dtype_exceptions
        exceptions = target.base_dtype_exceptions_digest or dict(told)
        served = (
            target.base_fingerprint,
            target.base_dtype,
            exceptions,
            drafts,
            target.reference_name,
        )
        if self._reference is None or self._reference[0] != served:
            found, name = self.call(
                partial(self._read_reference, target.base_fingerprint), deadline
            )
            # A replica that registered meanwhile may have changed it: this push takes it once.
            self._reference = None if name != target.reference_name else (served, found)
            return found
        return self._reference[1]

    def _read_reference(self, fingerprint: str, left: float) -> tuple[Reference, str]:
        """Ask for a reference; return it with the name that the coordinator has for it."""
        names = {""}

        def chunks() -> Iterator[types_pb2.ReferenceChunk]:
            request = pb.GetReferenceRequest(fingerprint=fingerprint)
            for part in self.stub.GetReference(request, timeout=left):
                names.add(part.reference_name)
                yield part.chunk

        return reference_from_chunks(chunks()), max(names)

    def add_dtypes(self, target: pb.DescribeTargetResponse, deadline: float) -> None:
        """Add ``base_dtype_exceptions`` that were too many for the answer; asked for once."""
        if target.base_dtype_exceptions_digest:
            reference = self.reference(target, deadline)
            found = reference.dtype_exceptions(dtype_from_proto(target.base_dtype))
            for name, dtype in found.items():
                target.base_dtype_exceptions[name] = dtype_to_proto(dtype)

    def put_manifest(self, manifest: Manifest, deadline: float) -> None:
        """Make a layout known to the coordinator, unless it is."""
        if manifest.layout_digest in self._known_manifests:
            return

        def chunks() -> Iterator[pb.PutManifestRequest]:
            return (pb.PutManifestRequest(chunk=chunk) for chunk in manifest_to_chunks(manifest))

        self.call(lambda left: self.stub.PutManifest(chunks(), timeout=left), deadline)
        self._known_manifests.add(manifest.layout_digest)

    def forget_manifest(self, manifest: Manifest) -> bool:
        """Note that a layout is no longer known; return whether it was put before."""
        was_known = manifest.layout_digest in self._known_manifests
        self._known_manifests.discard(manifest.layout_digest)
        return was_known

    def abort(
        self, begun: pb.BeginTransferResponse | pb.BeginTransferRequest, error: BaseException
    ) -> None:
        """Tell the coordinator that this trainer gives a transfer up, best effort.

        Args:
            begun: Transfer that was begun; the request for it where no answer has come.
        """
        if isinstance(begun, pb.BeginTransferResponse):
            policy, named = begun.version.policy, {"transfer_id": begun.transfer_id}
        else:
            policy, named = begun.policy, {"request_id": begun.request_id}
        request = pb.AbortTransferRequest(
            policy=policy,
            fencing_token=self.leases.held_token(policy),
            message=f"the trainer gave up: {error!r}"[:500],
            **named,
        )
        try:
            self.stub.AbortTransfer(request, timeout=_ABORT_SECONDS)
        except grpc.RpcError as rpc_error:
            _log.info("could not abort the push of %s: %s", policy, error_from_rpc(rpc_error))

    def _give_up_late(self, answer: object) -> None:
        """Abort a transfer whose push was interrupted while it was begun."""
        if isinstance(answer, pb.BeginTransferResponse):
            self.abort(answer, KeyboardInterrupt())

    def close(self) -> None:
        """Release the leases and the connection; block at most some seconds."""
        self.leases.close()
        self._channel.close()
