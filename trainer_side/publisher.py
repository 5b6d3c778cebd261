"""Publisher: what a trainer imports to push weights to the pool.

The composer of the trainer side: it introduces a source to the packer, the sender
and the control plane.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Literal, TypeVar

import grpc
import torch

from trainer_side.adapter_source import Adapter, adapter_of_model
from trainer_side.file_source import CheckpointSource, adapter_of_dir
from trainer_side.leases import Leases
from trainer_side.module_source import ModuleSource
from trainer_side.notices import Notices
from trainer_side.progress import ProgressReporter, reporter_for
from trainer_side.sender import Sender
from trainer_side.source import CastRule, Source, check_all_finite
from weft.contract.bucket_plan import DEFAULT_BUCKET_BYTES, plan_buckets
from weft.contract.errors import (
    InvalidRequestError,
    LeaseFencedError,
    NotReadyError,
    PeerUnavailableError,
    StaleEpochError,
    TransferTimeoutError,
    WeftError,
)
from weft.contract.manifest import Manifest
from weft.contract.names import BASE_POLICY, PolicyVersion, check_adapter_name, check_name
from weft.contract.tensors import TensorMeta
from weft.rpc.channel import open_channel
from weft.rpc.codec import dtype_from_proto, duration_to_proto, version_from_proto
from weft.rpc.manifest_codec import manifest_to_chunks
from weft.rpc.status import error_from_rpc
from weft.transport.group import BACKENDS
from weft.transport.host import local_address_towards
from weft.transport.membership import GroupTicket
from weft.v1 import publish_pb2 as pb
from weft.v1 import types_pb2
from weft.v1.publish_pb2_grpc import PublishServiceStub

_log = logging.getLogger(__name__)
_T = TypeVar("_T")

#: ``require``: every replica in contact when the push begins, or at least so many.
Require = Literal["all"] | int
# How often the outcome is asked again while the coordinator is away.
_RETRY_SECONDS = 0.5


@dataclass(frozen=True, kw_only=True)
class PushReport:
    """What a push cost, as the coordinator saw it."""

    version: PolicyVersion
    total_bytes: int
    num_replicas: int
    seconds: float
    """From the call until every replica served the version."""
    forming_seconds: float
    staging_seconds: float
    committing_seconds: float
    pause_seconds: float
    """Longest time a replica held its requests still."""


class Publisher:
    """Pushes versions of policies from one trainer process.

    Pushes of one publisher run one after the other; every method may be called
    from any thread. Leases are renewed in the background until ``close``.

    Args:
        coordinator: HOST:PORT.
        trainer_id: Stable name of this trainer; owns the policies it pushes.
        require: Which replicas must hold a version before it is committed: "all"
            that are in contact when the push begins, or at least so many.
        timeout_seconds: Longest time of a push, waiting for replicas included.
        bucket_bytes: Payload of a bucket; two are held in host memory.
        data_host: Address that the replicas reach this machine by; by default the
            one its routes choose towards the coordinator.
        progress: "auto" draws a bar on a terminal; None is silent; or a function
            of (policy, buckets verified, buckets in all).
        on_publish_again: Called with a policy's name when no replica holds the
            version that the pool should serve any more (all were restarted, say), and
            this publisher owns the policy: once each time that is asked, on a thread
            of its own, one call after the other. It may push, and until it returns
            ``close`` waits some seconds; an exception is logged. The weights must not
            change meanwhile: a trainer that cannot promise that looks at ``wanted``
            in its loop instead.
    """

    def __init__(
        self,
        coordinator: str,
        *,
        trainer_id: str,
        require: Require = "all",
        timeout_seconds: float = 600.0,
        bucket_bytes: int = DEFAULT_BUCKET_BYTES,
        data_host: str | None = None,
        progress: Literal["auto"] | Callable[[str, int, int], None] | None = "auto",
        on_publish_again: Callable[[str], None] | None = None,
    ) -> None:
        check_name(trainer_id, "trainer")
        self._target = coordinator
        self._require = _min_replicas(require)
        self._timeout_seconds = timeout_seconds
        self._bucket_bytes = bucket_bytes
        self._data_host = data_host
        self._reporter: ProgressReporter = reporter_for(progress)
        self._channel = open_channel(coordinator)
        self._stub = PublishServiceStub(self._channel)
        self._notices = Notices(on_publish_again) if on_publish_again else None
        self._leases = Leases(self._stub, trainer_id, self._notices.put if self._notices else None)
        self._pushing = threading.Lock()
        self._sender: Sender | None = None
        self._plans: dict[tuple[TensorMeta, ...], Manifest] = {}
        self._put: set[bytes] = set()
        #: What the last successful push cost.
        self.last_report: PushReport | None = None

    def push_adapter(
        self,
        model: torch.nn.Module | str | Path,
        policy: str,
        *,
        adapter_name: str = "default",
        cast: bool = True,
        check_finite: bool = False,
        check_base: bool = True,
        require: Require | None = None,
        timeout_seconds: float | None = None,
    ) -> PolicyVersion:
        """Push a LoRA adapter; returns once every replica serves it.

        Args:
            model: A PEFT model, read in place, or a directory that PEFT saved.
            policy: The adapter's name in the pool.
            adapter_name: Which adapter of the PEFT model.
            cast: Cast floats to the dtype that the replicas serve adapters in.
            check_finite: Read all tensors first and refuse NaN and infinities.
            check_base: Compare the base model's names and shapes with the pool's.
            require, timeout_seconds: As for ``Publisher``, for this push.

        Returns:
            The version, for example ``math@17``; requests may name it, or ``math``.

        Raises:
            InvalidAdapterError, BaseMismatchError, ...: Refused; nothing changed.
            PeerUnavailableError, TransferTimeoutError, ...: Failed; nothing changed.
        """
        check_adapter_name(policy)

        def make(target: pb.DescribeTargetResponse) -> tuple[Source, Adapter]:
            rule = CastRule(cast, dtype_from_proto(target.adapter_dtype))
            if isinstance(model, str | Path):
                adapter = adapter_of_dir(Path(model), rule)
            else:
                adapter = adapter_of_model(model, adapter_name, rule, check_base=check_base)
            return adapter.source, adapter

        return self._push(policy, make, check_finite, require, timeout_seconds)

    def push_base(
        self,
        model: torch.nn.Module | str | Path,
        *,
        cast: bool = True,
        check_finite: bool = False,
        require: Require | None = None,
        timeout_seconds: float | None = None,
    ) -> PolicyVersion:
        """Push every weight of the base model; returns once every replica serves it.

        Args:
            model: A plain torch or transformers model, read in place, or a
                directory (or file) of safetensors in checkpoint names.
            cast, check_finite, require, timeout_seconds: As for ``push_adapter``.

        Returns:
            The version, for example ``base@3``.

        Raises:
            InvalidManifestError: Not exactly the served model's tensors.
            WeftError: As for ``push_adapter``.
        """
        if not isinstance(model, str | Path) and hasattr(model, "peft_config"):
            raise InvalidRequestError(
                "this is a PEFT model: push_adapter sends its adapter; to send a merged model, "
                "merge a copy first (model.merge_and_unload())"
            )

        def make(target: pb.DescribeTargetResponse) -> tuple[Source, None]:
            exceptions = {
                name: dtype_from_proto(dtype)
                for name, dtype in target.base_dtype_exceptions.items()
            }
            rule = CastRule(cast, dtype_from_proto(target.base_dtype), exceptions)
            if isinstance(model, str | Path):
                return CheckpointSource(Path(model), rule), None
            return ModuleSource(model, rule), None

        return self._push(BASE_POLICY, make, check_finite, require, timeout_seconds)

    @property
    def wanted(self) -> frozenset[str]:
        """Policies owned here that no replica can serve until they are pushed again.

        Learnt with the leases, within a third of their time to live; a push of the
        policy takes it out. Does not block.
        """
        return self._leases.wanted

    def close(self) -> None:
        """Release the leases and leave the side group; blocks at most some seconds,
        and for a push that is under way."""
        if self._notices is not None:
            self._notices.close()
        with self._pushing:
            if self._sender is not None:
                self._sender.close()
                self._sender = None
        self._leases.close()
        self._channel.close()

    def __enter__(self) -> Publisher:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    # -- one push ------------------------------------------------------------

    def _push(
        self,
        policy: str,
        make: Callable[[pb.DescribeTargetResponse], tuple[Source, Adapter | None]],
        check_finite: bool,
        require: Require | None,
        timeout_seconds: float | None,
    ) -> PolicyVersion:
        began = time.monotonic()
        deadline = began + (timeout_seconds or self._timeout_seconds)
        min_replicas = self._require if require is None else _min_replicas(require)
        with self._pushing:
            target = self._call(
                lambda left: self._stub.DescribeTarget(
                    pb.DescribeTargetRequest(), timeout=left, wait_for_ready=True
                ),
                deadline,
            )
            source, adapter = make(target)
            if check_finite:
                check_all_finite(source)
            manifest = self._plan(source.metas)
            begun = self._begin(policy, manifest, adapter, target, min_replicas, deadline)
            version = version_from_proto(begun.version)
            _log.info(
                "pushing %s: %s, %d bytes to %s, epoch %d",
                version,
                source.description,
                manifest.total_bytes,
                ", ".join(begun.replica_ids),
                begun.group.epoch,
            )
            transfer = self._carry_out(begun, version, source, manifest, deadline)
            self._leases.published(policy)
        seconds = time.monotonic() - began
        self.last_report = PushReport(
            version=version,
            total_bytes=manifest.total_bytes,
            num_replicas=len(transfer.replica_ids),
            seconds=seconds,
            forming_seconds=transfer.forming.ToTimedelta().total_seconds(),
            staging_seconds=transfer.staging.ToTimedelta().total_seconds(),
            committing_seconds=transfer.committing.ToTimedelta().total_seconds(),
            pause_seconds=transfer.pause.ToTimedelta().total_seconds(),
        )
        _log.info("pushed %s in %.3f s", version, seconds)
        return version

    def _plan(self, metas: tuple[TensorMeta, ...]) -> Manifest:
        """The bucket plan of these tensors, kept: the next push has the same."""
        manifest = self._plans.get(metas)
        if manifest is None:
            manifest = plan_buckets(metas, self._bucket_bytes)
            if len(self._plans) >= 32:
                self._plans.clear()
            self._plans[metas] = manifest
        return manifest

    def _begin(
        self,
        policy: str,
        manifest: Manifest,
        adapter: Adapter | None,
        target: pb.DescribeTargetResponse,
        min_replicas: int,
        deadline: float,
    ) -> pb.BeginTransferResponse:
        """Begin, after acquiring the lease and making the manifest known as needed."""
        kind = types_pb2.POLICY_KIND_BASE if adapter is None else types_pb2.POLICY_KIND_ADAPTER
        spec = None
        if adapter is not None:
            spec = types_pb2.AdapterSpec(
                config_json=adapter.config_json,
                base_fingerprint=adapter.base_fingerprint,
                trained_on_base_version=target.base_version,
            )
        request = pb.BeginTransferRequest(
            request_id=secrets.token_hex(16),
            policy=policy,
            layout_digest=manifest.layout_digest,
            adapter=spec,
            require=pb.Requirement(min_replicas=min_replicas),
            backend=BACKENDS[0],
        )
        fenced = False
        while True:
            request.fencing_token = self._leases.token(policy, kind, deadline)
            if manifest.layout_digest not in self._put:
                self._put_manifest(manifest, deadline)
            if self._sender is not None and self._sender.usable:
                request.group_id = self._sender.ticket.group_id
            request.timeout.CopyFrom(duration_to_proto(deadline - time.monotonic()))
            try:
                return self._call(
                    lambda left: self._stub.BeginTransfer(
                        request, timeout=left, wait_for_ready=True
                    ),
                    deadline,
                )
            except LeaseFencedError:
                # Expired while we were away (a long step under a debugger, a restart
                # of the coordinator): acquire anew once, or learn who holds it.
                self._leases.forget(policy)
                if fenced:
                    raise
                fenced = True
            except NotReadyError as error:
                if error.reason != "MANIFEST_UNKNOWN" or manifest.layout_digest not in self._put:
                    raise
                self._put.discard(manifest.layout_digest)  # the coordinator restarted

    def _put_manifest(self, manifest: Manifest, deadline: float) -> None:
        def chunks() -> Iterator[pb.PutManifestRequest]:
            return (pb.PutManifestRequest(chunk=chunk) for chunk in manifest_to_chunks(manifest))

        self._call(lambda left: self._stub.PutManifest(chunks(), timeout=left), deadline)
        self._put.add(manifest.layout_digest)

    def _carry_out(
        self,
        begun: pb.BeginTransferResponse,
        version: PolicyVersion,
        source: Source,
        manifest: Manifest,
        deadline: float,
    ) -> pb.Transfer:
        """Send, then learn the outcome; the group is kept if all went well."""
        if not begun.HasField("group"):  # a retried call of a push that has ended
            return self._outcome(begun.transfer_id, deadline, None)
        sender = None
        try:
            # When the group is gone, only the coordinator knows why, or whether the
            # version was committed all the same.
            with contextlib.suppress(StaleEpochError, PeerUnavailableError):
                sender = self._sender_for(begun.group)
                self._send(sender, begun, version, source, manifest, deadline)
            return self._outcome(begun.transfer_id, deadline, sender)
        except BaseException as error:
            self._give_up(begun, error)
            raise

    def _send(
        self,
        sender: Sender,
        begun: pb.BeginTransferResponse,
        version: PolicyVersion,
        source: Source,
        manifest: Manifest,
        deadline: float,
    ) -> None:
        with self._reporter.push(str(version), manifest.total_bytes) as progress:
            sender.send(
                source,
                manifest,
                transfer_id=begun.transfer_id,
                nonce=begun.nonce,
                deadline=deadline,
                progress=progress,
            )

    def _sender_for(self, group: pb.GroupPlan) -> Sender:
        if self._sender is not None:
            if self._sender.usable and self._sender.ticket.group_id == group.group_id:
                return self._sender
            self._sender.close()
            self._sender = None
        host = self._data_host or local_address_towards(self._target)
        ticket = GroupTicket(
            group_id=group.group_id,
            token=group.token,
            epoch=group.epoch,
            rank=group.rank,
            size=group.size,
            backend=group.backend,
            host=host,
        )
        self._sender = Sender(self._target, ticket)
        return self._sender

    def _outcome(self, transfer_id: str, deadline: float, sender: Sender | None) -> pb.Transfer:
        """Wait for the commit, the sender standing by; outlives the coordinator."""
        request = pb.AwaitTransferRequest(transfer_id=transfer_id)

        def ask(left: float) -> pb.AwaitTransferResponse:
            call = self._stub.AwaitTransfer.future(request, timeout=left)
            if sender is not None and sender.usable:
                sender.stand_by(call)
            return call.result()

        while True:
            try:
                return self._call(ask, deadline).transfer
            except PeerUnavailableError as error:
                if error.reason != "COORDINATOR_AWAY" or time.monotonic() > deadline:
                    raise
                time.sleep(_RETRY_SECONDS)

    def _give_up(self, begun: pb.BeginTransferResponse, error: BaseException) -> None:
        """Tell the coordinator, best effort, and leave the group."""
        request = pb.AbortTransferRequest(
            transfer_id=begun.transfer_id,
            fencing_token=self._leases.held_token(begun.version.policy),
            message=f"the trainer gave up: {error!r}"[:500],
        )
        if not isinstance(error, WeftError) or isinstance(error, TransferTimeoutError):
            try:
                self._stub.AbortTransfer(request, timeout=2.0)
            except grpc.RpcError as rpc_error:
                _log.info("could not abort %s: %s", begun.transfer_id, error_from_rpc(rpc_error))
        if self._sender is not None:
            self._sender.close()
            self._sender = None

    def _call(self, call: Callable[[float], _T], deadline: float) -> _T:
        """One RPC with the time that is left; its failure as a typed error."""
        left = deadline - time.monotonic()
        if left <= 0:
            raise TransferTimeoutError("the push's deadline passed")
        try:
            return call(left)
        except grpc.RpcError as error:
            raise error_from_rpc(error) from error


def _min_replicas(require: Require) -> int:
    if require == "all":
        return 0
    if isinstance(require, int) and not isinstance(require, bool) and require >= 1:
        return require
    raise InvalidRequestError(f"require={require!r}: use 'all' or a number of replicas, at least 1")
