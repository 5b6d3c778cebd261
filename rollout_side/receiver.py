"""The Weft thread of a worker: joins side groups, receives, verifies, stages.

It runs beside the engine's thread in the worker's process and touches no engine
state: its results lie in the ``WorkerStore`` until a commit takes them. Nothing
here knows vLLM.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from dataclasses import dataclass

from rollout_side.engine import GroupSpec
from rollout_side.segment import Segment
from rollout_side.staged import StagedVersion, WorkerStore, bucket_starts, is_adapter
from weft.contract.errors import TransferAbortedError, WeftError, error_from_reason
from weft.contract.manifest import TRAILER_BYTES, Manifest, check_trailer
from weft.contract.names import PolicyVersion
from weft.transport.digest import content_digest, payload_digest
from weft.transport.group import Operation
from weft.transport.manifests import ManifestCache
from weft.transport.membership import GroupTicket, Membership
from weft.v1 import rendezvous_pb2 as pb
from weft.v1 import types_pb2

_log = logging.getLogger(__name__)

# Receives posted ahead: one fills while the one before is digested.
_RECEIVES_AHEAD = 2
# Directions wait here while a transfer is received; one trainer's transfers are
# serial, so there are never more than a few.
_MAX_DIRECTIONS = 100


class Receiver:
    """All side groups of one worker process, one a trainer.

    Args:
        store: Where verified versions are put.
    """

    def __init__(self, store: WorkerStore) -> None:
        self._store = store
        self._lock = threading.Lock()
        self._groups: dict[str, _Group] = {}

    def join(self, spec: GroupSpec) -> None:
        """Join ``spec``'s group in place of the trainer's former one.

        Returns at once; success and failure are told on the group's stream.
        """
        with self._lock:
            old = self._groups.get(spec.trainer_id)
            if old is not None:
                if old.spec.group_id == spec.group_id or old.spec.epoch > spec.epoch:
                    return
                old.leave()
            self._groups[spec.trainer_id] = _Group(spec, self._store)

    def close(self) -> None:
        """Leave all groups; does not wait for their threads."""
        with self._lock:
            for group in self._groups.values():
                group.leave()
            self._groups.clear()


@dataclass(frozen=True)
class _Transfer:
    """A transfer that was prepared: where its bytes go."""

    transfer_id: str
    version: PolicyVersion
    manifest: Manifest
    nonce: int
    deadline: float
    segment: Segment


class _Group:
    """One membership and the thread that receives for it."""

    def __init__(self, spec: GroupSpec, store: WorkerStore) -> None:
        self.spec = spec
        self._store = store
        self._manifests = ManifestCache()
        self._directions: queue.Queue[pb.AttendResponse | None] = queue.Queue(_MAX_DIRECTIONS)
        self._membership: Membership | None = None
        self._prepared: _Transfer | None = None
        self._thread = threading.Thread(
            target=self._run, name=f"weft-receive-{spec.trainer_id}", daemon=True
        )
        self._thread.start()

    def leave(self) -> None:
        """End the thread soon; a receive under way is abandoned."""
        if (membership := self._membership) is not None:
            membership.group.abort(TransferAbortedError("the replica left the side group"))
        self._directions.put(None)

    # -- on the stream's thread --------------------------------------------

    def _on_message(self, response: pb.AttendResponse) -> None:
        if response.HasField("abort"):
            abort = response.abort
            error = error_from_reason(abort.reason, abort.message)
            if self._membership is not None:
                self._membership.group.abort(error)
        self._directions.put_nowait(response)

    def _on_closed(self, error: WeftError) -> None:
        _log.info(
            "group %s of trainer %s ended: %s", self.spec.group_id, self.spec.trainer_id, error
        )
        self._directions.put(None)

    # -- on the group's own thread -----------------------------------------

    def _run(self) -> None:
        spec = self.spec
        ticket = GroupTicket(
            group_id=spec.group_id,
            token=spec.token,
            epoch=spec.epoch,
            rank=spec.rank,
            size=spec.size,
            backend=spec.backend,
            host=spec.host,
        )
        try:
            self._membership = Membership(
                spec.coordinator, ticket, on_message=self._on_message, on_closed=self._on_closed
            )
        except Exception:  # noqa: BLE001 (the edge of a thread)
            # The coordinator sees that this rank never attends and gives up in time.
            _log.exception("could not join group %s", spec.group_id)
            return
        try:
            while (direction := self._directions.get()) is not None:
                self._follow(self._membership, direction)
        finally:
            self._drop_prepared(reusable=False)
            self._membership.leave()

    def _follow(self, membership: Membership, direction: pb.AttendResponse) -> None:
        """Carry out one direction; failures are reported, never raised."""
        kind = direction.WhichOneof("message")
        transfer_id = getattr(direction, kind).transfer_id if kind in _TRANSFER_KINDS else ""
        try:
            if kind == "prepare":
                self._prepare(membership, direction.prepare)
            elif kind == "start":
                self._receive(membership, transfer_id)
            elif kind == "abort":
                self._drop_prepared(reusable=True)
                self._store.discard(transfer_id)
        except Exception as error:  # noqa: BLE001 (the edge of a thread)
            typed = error if isinstance(error, WeftError) else WeftError(repr(error))
            if not isinstance(error, WeftError):
                _log.exception("transfer %s failed", transfer_id)
            _log.info("transfer %s failed here: %s", transfer_id, typed)
            self._drop_prepared(reusable=False)
            failed = pb.RankFailed(
                transfer_id=transfer_id, reason=typed.reason, message=typed.message
            )
            membership.attendance.send(pb.AttendRequest(failed=failed))

    def _prepare(self, membership: Membership, prepare: pb.Prepare) -> None:
        timeout_seconds = prepare.timeout.ToTimedelta().total_seconds()
        deadline = time.monotonic() + timeout_seconds
        self._drop_prepared(reusable=True)
        manifest = self._manifests.get(
            prepare.layout_digest, membership.stub, membership.credential, timeout_seconds
        )
        version = PolicyVersion(prepare.version.policy, prepare.version.version)
        segment = self._store.reserve(
            prepare.transfer_id, manifest.wire_bytes, adapter=is_adapter(version)
        )
        self._prepared = _Transfer(
            prepare.transfer_id, version, manifest, prepare.nonce, deadline, segment
        )
        prepared = pb.Prepared(transfer_id=prepare.transfer_id)
        membership.attendance.send(pb.AttendRequest(prepared=prepared))

    def _receive(self, membership: Membership, transfer_id: str) -> None:
        transfer = self._prepared
        if transfer is None or transfer.transfer_id != transfer_id:
            raise WeftError(f"transfer {transfer_id} was started but never prepared")
        began = time.monotonic()
        digests = self._receive_buckets(membership, transfer)
        self._prepared = None
        digest = content_digest(digests)
        self._store.put_staged(
            StagedVersion(
                transfer_id, transfer.version, transfer.manifest, transfer.segment, digest
            )
        )
        content = types_pb2.ContentDigest(
            algorithm=types_pb2.DigestAlgorithm.ValueType(transfer.manifest.digest_algorithm),
            value=digest,
            size_bytes=transfer.manifest.total_bytes,
        )
        staged = pb.Staged(transfer_id=transfer_id, content_digest=content)
        membership.attendance.send(pb.AttendRequest(staged=staged))
        _log.info(
            "staged %s: %d bytes in %.3f s, epoch %d",
            transfer.version,
            transfer.manifest.total_bytes,
            time.monotonic() - began,
            self.spec.epoch,
        )

    def _receive_buckets(self, membership: Membership, transfer: _Transfer) -> list[int]:
        """Receive straight into the segment, verify in order, report each bucket."""
        manifest, data = transfer.manifest, transfer.segment.data
        starts = bucket_starts(manifest)
        posted: list[Operation] = []
        digests: list[int] = []
        for index, bucket in enumerate(manifest.buckets):
            while len(posted) < min(index + _RECEIVES_AHEAD, len(manifest.buckets)):
                at = starts[len(posted)]
                wire = data[at : at + manifest.buckets[len(posted)].wire_bytes]
                seconds = max(1.0, transfer.deadline - time.monotonic())
                posted.append(membership.group.broadcast(wire, seconds))
            posted[index].wait(transfer.deadline)
            payload = data[starts[index] : starts[index] + bucket.payload_bytes]
            trailer_at = starts[index] + bucket.payload_bytes
            digest = payload_digest(payload, manifest.digest_algorithm)
            check_trailer(
                data[trailer_at : trailer_at + TRAILER_BYTES].numpy().data,
                digest=digest,
                nonce=transfer.nonce,
                bucket=index,
                payload_bytes=bucket.payload_bytes,
            )
            digests.append(digest)
            verified = pb.BucketVerified(transfer_id=transfer.transfer_id, bucket=index)
            membership.attendance.send(pb.AttendRequest(bucket_verified=verified))
        return digests

    def _drop_prepared(self, *, reusable: bool) -> None:
        """Give memory back; not for reuse if a receive may still write to it."""
        transfer, self._prepared = self._prepared, None
        if transfer is not None:
            self._store.release(transfer.transfer_id, transfer.segment if reusable else None)


_TRANSFER_KINDS = frozenset({"prepare", "start", "abort"})
