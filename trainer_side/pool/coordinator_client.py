"""Coordinator as the sender of a trainer calls it.

Calls have the time that is left, are made again after the coordinator was away, and use the lease
that they need.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import TypeVar

import grpc

from trainer_side.pool.contact import Contact
from trainer_side.pool.leases import Leases
from weft_rl.contract.errors import LeaseFencedError, TransferTimeoutError
from weft_rl.contract.layout.manifest import Manifest
from weft_rl.contract.tensors import Reference
from weft_rl.rpc.manifest_codec import manifest_to_chunks, reference_from_chunks
from weft_rl.rpc.security.credentials import Credentials
from weft_rl.rpc.status import error_from_rpc
from weft_rl.rpc.threaded_channel import open_threaded_channel
from weft_rl.v1 import publish_pb2 as pb
from weft_rl.v1 import types_pb2
from weft_rl.v1.publish_pb2_grpc import PublishServiceStub

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
    ) -> None:
        self.target, self.credentials = coordinator, credentials
        self.trainer_id = trainer_id
        self._channel = open_threaded_channel(coordinator, credentials, self._give_up_late)
        #: Calls that ``call`` and ``with_lease`` make.
        self.stub = PublishServiceStub(self._channel)
        self._contact = Contact(
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
            self._contact.wait(deadline)

    def call(self, call: Callable[[float], _T], deadline: float) -> _T:
        """Make one RPC with the time that is left; its failure is a typed error.

        It is made again once a coordinator that was away is back (all RPCs are idempotent).

        Args:
            call: Function that makes the RPC, within so many seconds.
            deadline: ``time.monotonic()`` at which to give up.
        """
        while True:
            left = deadline - time.monotonic()
            if left <= 0:
                raise TransferTimeoutError("the push's deadline passed")
            try:
                return call(left)
            except grpc.RpcError as rpc_error:
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
    ) -> _T:
        """Make an RPC under a policy's lease, which is acquired as needed; see ``call``.

        Args:
            call: Function that makes the RPC with the lease's token, within so many seconds.
        """
        self.reach(deadline)
        fenced = False
        while True:
            token = self.leases.token(policy, kind, deadline)
            try:
                return self.call(partial(call, token), deadline)
            except LeaseFencedError as error:
                # Expired while we were away (a long step under a debugger, a restart
                # of the coordinator): acquire anew once, or learn who holds it.
                self.leases.forget(policy)
                if fenced or error.metadata.get("holder"):  # somebody took it over
                    raise
                fenced = True

    def describe(self, deadline: float) -> pb.DescribeTargetResponse:
        """Return what the pool serves; block until a replica has described it."""
        request = pb.DescribeTargetRequest()
        return self.call(lambda left: self.stub.DescribeTarget(request, timeout=left), deadline)

    def reference(self, target: pb.DescribeTargetResponse, deadline: float) -> Reference:
        """Return every tensor of the base that the pool serves; asked for once. A coordinator that
        is too old to say is an UnsupportedError."""
        served = target.base_fingerprint, target.base_dtype, dict(target.base_dtype_exceptions)
        if self._reference is None or self._reference[0] != served:
            request = pb.GetReferenceRequest(fingerprint=target.base_fingerprint)
            read = partial(self.stub.GetReference, request)
            found = self.call(
                lambda left: reference_from_chunks(p.chunk for p in read(timeout=left)), deadline
            )
            self._reference = served, found
        return self._reference[1]

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
