"""One push, in step on every rank of a trainer: describe, plan, begin, send, outcome."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from trainer_side.arguments import check_replicas
from trainer_side.pool.client import PoolClient
from trainer_side.pool.sender import bucket_capacity, packs_on_device
from trainer_side.pool.shards.peer import Peer
from trainer_side.pool.shards.plan import DEFAULT_MAX_SENDERS, ShardPlan, ShardPlans
from trainer_side.pool.shards.push import ShardPush
from trainer_side.push_request import PushRequest
from trainer_side.ranks import SENDER, Ranks, agreeing
from trainer_side.sources.adapter_source import Adapter
from trainer_side.sources.content import Content
from trainer_side.sources.lockstep import LedSource, follow
from trainer_side.sources.named_source import DESCRIPTION, NamedBase, RunSource
from trainer_side.sources.origin import Origin, Origins
from trainer_side.sources.shard_source import shard_source
from trainer_side.sources.source import Source
from weft import tracing
from weft.containers.lru import Lru
from weft.contract.errors import (
    BaseMismatchError,
    PeerUnavailableError,
    TransferAbortedError,
)
from weft.contract.layout.manifest import Manifest, plan_buckets
from weft.contract.layout.tensors import TensorMeta
from weft.contract.names import PolicyVersion
from weft.rpc.codec import version_from_proto
from weft.tracing import Span
from weft.v1 import publish_pb2 as pb

_T = TypeVar("_T")
_log = logging.getLogger(__name__)

_MAX_MANIFESTS = 32


@dataclass(frozen=True, kw_only=True)
class PushReport:
    """What a push cost, as the coordinator saw it."""

    version: PolicyVersion
    total_bytes: int
    num_replicas: int
    """Replicas that served the version when the push ended; ``remarks`` names the others."""
    seconds: float
    """Time from the call until every replica had switched, or had failed to."""
    forming_seconds: float
    staging_seconds: float
    committing_seconds: float
    pause_seconds: float
    """Longest time that a replica paused generation for."""
    source: str
    """What was read: the kind of trainer and of model that was found."""
    backend: str
    """What carried the bytes: "one-sided", "nccl" or "gloo"."""
    backend_reason: str
    """Why that one, and why not those that the pool would have preferred."""
    remarks: tuple[str, ...] = ()
    """What the success does not tell: a replica that did not switch and why, a trainer's base
    that is quantised, ..."""


class Pushing:
    """Carries pushes out, one at a time; thread-safe.

    Args:
        ranks: Of the trainer; closed with it.
        client: At the sender, closed with it; None elsewhere.
        bucket_bytes: Payload of a bucket; None is what suits the backend.
        peer: This rank as a further sender; closed with it.
        max_senders: Of more ranks that hold shards, some pass theirs to those that send; 1 is a
            gather at rank 0, of whole tensors.
    """

    def __init__(
        self,
        ranks: Ranks,
        client: PoolClient | None,
        bucket_bytes: int | None,
        peer: Peer,
        max_senders: int = DEFAULT_MAX_SENDERS,
    ) -> None:
        self._lock = threading.Lock()
        self._ranks, self._sender_client = ranks, client
        self._bucket_bytes = bucket_bytes
        self._origins = Origins()
        self._peer, self._max_senders = peer, max_senders
        self._plans = ShardPlans(max_senders)
        #: What the last push that succeeded cost.
        self.last_report: PushReport | None = None
        self._said: dict[str, tuple[str, ...]] = {}
        self._manifests: Lru[tuple[int, tuple[TensorMeta, ...]], Manifest] = Lru(_MAX_MANIFESTS)

    def push(
        self,
        request: PushRequest,
        *,
        began: float,
        is_replaced: Callable[[], bool] = lambda: False,
        parent: str = "",
    ) -> PolicyVersion:
        """Push; collective, blocks until every replica has switched or failed to.

        Args:
            request: What is pushed; the failure to look at it is that of every rank.
            began: When it was asked for, ``time.monotonic()``; the deadline counts from now.
            is_replaced: Asked at the sender once the push's turn has come.
            parent: The traceparent of whose part it is, if that is not this thread's.

        Raises:
            TransferAbortedError: ``REPLACED``.
            WeftError: The same on every rank; nothing changed.
        """
        with self._lock, self._traced("weft.push", parent=parent, policy=request.policy) as span:
            self.last_report = self._push(request, began, is_replaced, span)
            return self.last_report.version

    def between_pushes(self, work: Callable[[Ranks, PoolClient | None], _T]) -> _T:
        """Something else that the ranks do in step, once no push is under way."""
        with self._lock:
            return work(self._ranks, self._sender_client)

    def close(self) -> None:
        """Wait for the push under way, leave the other ranks and the pool."""
        with self._lock:
            self._ranks.abandon()
            self._peer.close()
            self._origins.close()
            if self._sender_client is not None:
                self._sender_client.close()

    def _traced(
        self, name: str, *, parent: str = "", **values: tracing.Value
    ) -> contextlib.AbstractContextManager[Span]:
        """A span at the sender: a push is one trace, however many ranks it has."""
        tracer = tracing.NO_TRACER if self._sender_client is None else tracing.of_process()
        return tracer.span(name, parent=parent, **values)

    def _push(
        self, request: PushRequest, began: float, is_replaced: Callable[[], bool], span: Span
    ) -> PushReport:
        deadline = time.monotonic() + request.timeout_seconds
        ranks = self._ranks
        ranks.open(deadline)
        without: list[str] = []

        def describe() -> bytes:
            if not without and is_replaced():
                return b""
            return self._client.describe(deadline, without).SerializeToString()

        while True:
            described = ranks.share(describe, all_wait=True)
            if not described:
                raise TransferAbortedError(
                    f"a later push of {request.policy!r} replaced this one before it began; "
                    "nothing was sent",
                    reason="REPLACED",
                )
            target = pb.DescribeTargetResponse.FromString(described)
            with self._traced("weft.push.plan"), agreeing(ranks) as agreement:
                what, source, adapter, manifest = self._plan(request, target, deadline)
                shards = self._shards(source, manifest)
                if not isinstance(what, NamedBase) and manifest is not None:
                    # Named tensors are laid out by rank 0 alone.
                    agreement.same = manifest.layout_digest
                if shards is not None:
                    agreement.same += shards.plan.digest
                    is_peer = ranks.rank != SENDER and shards.sender is not None
                    agreement.flags = int(is_peer and not self._peer.can_use(target))
            if not agreement.told:
                break
            without.append(target.backends[0])
        if shards is not None:
            try:
                shards.source.gather()
            except BaseException:
                ranks.abandon()  # others may wait for us inside it
                raise
        description = source.description if source else DESCRIPTION
        span.set(
            kind="base" if adapter is None else "adapter",
            bytes=manifest.total_bytes if manifest else 0,
            backend=target.backends[0],
        )
        finite = checks_finite(request.check_finite, adapter, target.backends[0])
        carries_runs = isinstance(source, RunSource)

        def begin() -> bytes:
            assert manifest is not None
            plan = shards.plan if shards else None
            return self._begin(
                request, what, manifest, adapter, target, finite, carries_runs, plan, deadline
            )

        shared = ranks.share(begin, all_wait=True)
        origin, answer = Origin.decode(shared)
        begun = pb.BeginTransferResponse.FromString(answer)
        version = version_from_proto(begun.version)
        span.set(version=version.version, transfer_id=begun.transfer_id)
        _log.debug(
            "pushing %s: %s, %d bytes to %s, epoch %d",
            version,
            description,
            manifest.total_bytes if manifest else 0,
            ", ".join(begun.replica_ids),
            begun.group.epoch,
        )
        if shards is not None and manifest is not None:
            transfer = self._send_shards(begun, shards, manifest, finite, deadline)
        else:
            transfer = self._carry_out(begun, what, source, manifest, finite, deadline)
        about_base: tuple[str, ...] = ()
        if adapter is None:
            self._origins.pushed(what.base, version.version)
        elif request.base.on_change != "ignore" and transfer.HasField("served_over_base_version"):
            about_base = origin.remarks(transfer.served_over_base_version)
        backend = transfer.backend or target.backends[0]
        span.set(replicas=len(transfer.serving_replica_ids), backend=backend)
        gathered = shards.source.remarks if shards else ()
        remarks = (*what.remarks, *gathered, *about_base, *missing_replicas(transfer))
        self._warn(version, remarks, about_base)
        report = PushReport(
            version=version,
            total_bytes=manifest.total_bytes if manifest else transfer.total_bytes,
            num_replicas=len(transfer.serving_replica_ids),
            seconds=time.monotonic() - began,
            forming_seconds=transfer.forming.ToTimedelta().total_seconds(),
            staging_seconds=transfer.staging.ToTimedelta().total_seconds(),
            committing_seconds=transfer.committing.ToTimedelta().total_seconds(),
            pause_seconds=transfer.pause.ToTimedelta().total_seconds(),
            source=description,
            backend=backend,
            backend_reason=transfer.backend_reason,
            remarks=remarks,
        )
        _log.info(
            "pushed %s in %.3f s: %d bytes to %d replicas, epoch %d",
            version,
            report.seconds,
            report.total_bytes,
            report.num_replicas,
            begun.group.epoch,
        )
        return report

    def _warn(
        self, version: PolicyVersion, remarks: tuple[str, ...], about_base: tuple[str, ...]
    ) -> None:
        """Log remarks; what is the same for each push of a policy only when it changes."""
        known, self._said[version.policy] = self._said.get(version.policy), about_base
        for remark in remarks:
            if remark not in about_base or known != about_base:
                _log.warning("%s: %s", version, remark)

    @property
    def _client(self) -> PoolClient:
        assert self._sender_client is not None
        return self._sender_client

    def _begin(
        self,
        request: PushRequest,
        what: Content | NamedBase,
        manifest: Manifest,
        adapter: Adapter | None,
        target: pb.DescribeTargetResponse,
        finite: bool,
        carries_runs: bool,
        shards: ShardPlan | None,
        deadline: float,
    ) -> bytes:
        origin = Origin(None)
        if adapter is not None:
            digest = target.base_checkpoint_digest
            must_know = request.base.on_change == "refuse"
            origin = self._origins.of(
                what.base, request.base.version, digest, deadline, must_know=must_know
            )
            if origin.version is None and must_know:
                raise BaseMismatchError(
                    f"on_base_change='refuse' needs to know which base {request.policy!r} was "
                    f"trained on: {origin.why}"
                )
        begun = self._client.begin(
            request.policy,
            manifest,
            adapter,
            deadline,
            min_replicas=check_replicas(request.require),
            check_finite=finite,
            trained_on=origin.version,
            refuse_other_base=adapter is not None and request.base.on_change == "refuse",
            carries_runs=carries_runs,
            shards=shards,
        )
        return origin.encode(begun.SerializeToString())

    def _plan(
        self, request: PushRequest, target: pb.DescribeTargetResponse, deadline: float
    ) -> tuple[Content | NamedBase, Source | RunSource | None, Adapter | None, Manifest | None]:
        """What is pushed, and how it is laid out: named tensors at the sender alone."""
        source: Source | RunSource | None = None
        adapter: Adapter | None = None
        what = request.content()
        if not isinstance(what, NamedBase):
            source, adapter = what.source(target)
        elif self._ranks.rank == SENDER:
            source = what.over(self._client.reference(target, deadline))
        manifest = self._manifest(target.backends[0], source) if source else None
        return what, source, adapter, manifest

    def _manifest(self, backend: str, source: Source | RunSource) -> Manifest:
        """The manifest of a source's tensors, which is kept: the next push has the same."""
        capacity, metas = bucket_capacity(backend, self._bucket_bytes), source.metas
        manifest = self._manifests.get((capacity, metas))
        if manifest is None:
            manifest = plan_buckets(metas, capacity)
            self._manifests.put((capacity, metas), manifest)
        return manifest

    def _shards(
        self, source: Source | RunSource | None, manifest: Manifest | None
    ) -> ShardPush | None:
        """What the ranks hold, where each is to send it; the same on every rank."""
        ranks = self._ranks
        if ranks.size == 1 or manifest is None or isinstance(source, RunSource | None):
            return None
        shards = shard_source(source, ranks) if self._max_senders > 1 else None
        plan = self._plans.plan(manifest, shards.held) if shards else None
        return None if shards is None or plan is None else ShardPush(shards, plan, ranks)

    def _send_shards(
        self,
        begun: pb.BeginTransferResponse,
        push: ShardPush,
        manifest: Manifest,
        finite: bool,
        deadline: float,
    ) -> pb.Transfer:
        """Send what this rank holds, beside the others; the outcome everywhere."""
        ranks, number = self._ranks, push.sender
        is_under_way = begun.HasField("group")
        is_peer = is_under_way and ranks.rank != SENDER and number is not None
        try:
            with agreeing(ranks):
                if is_peer and number is not None:
                    self._peer.join(begun, number)
        except BaseException as error:
            if ranks.rank == SENDER:
                self._client.give_up(begun, error)
            else:  # a member that sends nothing would be waited for, where others agreed
                self._peer.close()
            raise

        def send() -> bytes:
            try:
                transfer = self._client.carry_out(begun, push, manifest, finite, deadline)
                return transfer.SerializeToString()
            finally:
                push.add_up()

        with contextlib.ExitStack() as beside:
            beside.callback(push.source.release)  # last, once this rank's thread has ended
            if is_peer:
                beside.enter_context(self._peer.sending(begun, push, manifest, finite, deadline))
            elif ranks.rank != SENDER:
                push.add_up()
            push.hand_over()
            return pb.Transfer.FromString(ranks.share(send))

    def _carry_out(
        self,
        begun: pb.BeginTransferResponse,
        what: Content | NamedBase,
        source: Source | RunSource | None,
        manifest: Manifest | None,
        finite: bool,
        deadline: float,
    ) -> pb.Transfer:
        """Send at the sender, help elsewhere; the outcome everywhere."""
        ranks = self._ranks
        ended: list[pb.Transfer] = []

        def send() -> bytes:
            assert source is not None
            assert manifest is not None
            led: Source | RunSource = source
            if not isinstance(source, RunSource) and source.is_collective:
                led = LedSource(source, ranks)
            ended.append(self._client.carry_out(begun, led, manifest, finite, deadline))
            return ended[0].SerializeToString()

        if ranks.rank != SENDER and begun.HasField("group"):
            if isinstance(what, NamedBase):
                what.steps.follow()
            elif source is not None and manifest is not None:
                assert not isinstance(source, RunSource)
                if source.is_collective:
                    follow(source, ranks, manifest)
        try:
            return pb.Transfer.FromString(ranks.share(send))
        except PeerUnavailableError as error:
            if not ended:
                raise
            _log.warning("the push is served, but not all ranks could be told: %s", error)
            return ended[0]


def checks_finite(wanted: bool | None, adapter: Adapter | None, backend: str) -> bool:
    """Whether what is packed is looked at for NaN and infinities.

    Unless it was said: adapters that are packed on an accelerator, which reads one at the
    speed of its memory. On a CPU it costs about what the digest does (25 ms for 175 MB on
    one core; ``python -m benchmarks.finite``), so there it must be asked for.
    """
    return (adapter is not None and packs_on_device(backend)) if wanted is None else wanted


def missing_replicas(transfer: pb.Transfer) -> tuple[str, ...]:
    """Who does not serve a push that was committed, and why, a sentence each."""
    if not transfer.replica_ids:
        count = len(transfer.serving_replica_ids)
        return (
            "the coordinator was restarted before it had told how the push ended: it is "
            f"committed, and {count} of the replicas in contact by then served it; the others "
            "catch up",
        )
    before = set(transfer.lost_replica_ids)
    return tuple(
        f"{refusal.replica_id} does not serve it: {_when(refusal.replica_id in before)}, "
        f"{refusal.message} [{refusal.reason}]"
        for refusal in transfer.refusals
    )


def _when(before_commit: bool) -> str:
    return "it was lost before the commit" if before_commit else "it did not switch at the commit"
