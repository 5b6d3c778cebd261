"""Plan of a push as one rank finds it: tensors, layout and senders."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from trainer_side.pool.sender import bucket_capacity, packs_on_device
from trainer_side.push_request import PushRequest
from trainer_side.ranks.ranks import SENDER, Ranks
from trainer_side.sharding.plan import DEFAULT_MAX_SENDERS, ShardPlans
from trainer_side.sharding.push import ShardPush
from trainer_side.sources.adapter_source import Adapter
from trainer_side.sources.content import Content
from trainer_side.sources.named_source import DESCRIPTION, NamedBase, RunSource
from trainer_side.sources.shard_source import ShardSource, shard_source
from trainer_side.sources.source import Source
from weft_rl.containers.lru import Lru
from weft_rl.contract.layout.manifest import Manifest, plan_buckets
from weft_rl.contract.tensors import Reference, TensorMeta
from weft_rl.v1 import publish_pb2 as pb

_MAX_MANIFESTS = 32


@dataclass(frozen=True)
class PushPlan:
    """Plan of one push; the same on every rank, except for named tensors."""

    target: pb.DescribeTargetResponse
    """Description of what the pool serves; its first backend is the one to use."""
    what: Content | NamedBase
    source: Source | RunSource | None
    """Source of the tensors; None for named tensors at ranks that do not send."""
    adapter: Adapter | None
    """Adapter that is pushed; None for a base."""
    manifest: Manifest | None
    """Layout of the tensors; None where ``source`` is None."""
    shards: ShardPush | None
    """Shares that the ranks send of what they hold; None where rank 0 sends all."""
    finite: bool
    """True if NaN and infinities end the push."""
    remarks: tuple[str, ...] = ()
    """Tensors that are gathered though ranks of a sharded trainer could send them, and the
    reasons."""

    @property
    def backend(self) -> str:
        """Backend that is to carry the bytes."""
        return self.target.backends[0]

    @property
    def description(self) -> str:
        """Description of what is read, for messages."""
        return self.source.description if self.source else DESCRIPTION


class Planner:
    """Planner of pushes, which keeps what the next push needs again.

    Args:
        ranks: Ranks of the trainer.
        bucket_bytes: Payload of a bucket; None is what suits the backend.
        max_senders: Most ranks that send. If more hold shards, the others pass theirs to those that
            send; with 1, rank 0 gathers whole tensors.
    """

    def __init__(
        self, ranks: Ranks, bucket_bytes: int | None, max_senders: int = DEFAULT_MAX_SENDERS
    ) -> None:
        self._ranks, self._bucket_bytes = ranks, bucket_bytes
        self._max_senders = max_senders
        self._shard_plans = ShardPlans(max_senders)
        self._manifests: Lru[tuple[int, tuple[TensorMeta, ...]], Manifest] = Lru(_MAX_MANIFESTS)
        self._last: tuple[int, tuple[TensorMeta, ...], Manifest] | None = None

    def plan(
        self,
        request: PushRequest,
        target: pb.DescribeTargetResponse,
        reference: Callable[[], Reference],
    ) -> PushPlan:
        """Plan what this rank would push to a pool; not collective, reads no values.

        Args:
            reference: The pool's own list of tensors; called for named tensors, at the sender
                alone, which lays them out.

        Raises:
            WeftError: It cannot be pushed: the model's layers, names or dtypes.
        """
        source: Source | RunSource | None = None
        adapter: Adapter | None = None
        what = request.content()
        if not isinstance(what, NamedBase):
            source, adapter = what.source(target)
        elif self._ranks.rank == SENDER:
            source = what.over(reference())
        backend = target.backends[0]
        manifest = self._manifest(backend, source) if source else None
        shards, remarks = self._shards(source, manifest)
        finite = checks_finite(request.check_finite, backend, is_adapter=adapter is not None)
        return PushPlan(target, what, source, adapter, manifest, shards, finite, remarks)

    def _manifest(self, backend: str, source: Source | RunSource) -> Manifest:
        """Return the manifest of a source's tensors, kept for the next push of the same tensors."""
        capacity, metas = bucket_capacity(backend, self._bucket_bytes), source.metas
        last = self._last
        if last is not None and last[0] == capacity and last[1] is metas:
            return last[2]  # without a look at thousands of tensors
        manifest = self._manifests.get((capacity, metas))
        if manifest is None:
            manifest = plan_buckets(metas, capacity)
            self._manifests.put((capacity, metas), manifest)
        self._last = capacity, metas, manifest
        return manifest

    def _shards(
        self, source: Source | RunSource | None, manifest: Manifest | None
    ) -> tuple[ShardPush | None, tuple[str, ...]]:
        """Return the push of the ranks' shards, if they send them, and remarks on what is
        gathered."""
        ranks = self._ranks
        sends_alone = ranks.size == 1 or self._max_senders == 1
        if sends_alone or manifest is None or isinstance(source, RunSource | None):
            return None, ()
        shards = shard_source(source, ranks)
        if not isinstance(shards, ShardSource):
            return None, () if shards is None else shards.remarks
        plan = self._shard_plans.plan(manifest, shards.held)
        if isinstance(plan, str):
            return None, (f"rank 0 gathered all: {plan}",)
        return ShardPush(shards, plan, ranks), shards.remarks


def checks_finite(wanted: bool | None, backend: str, *, is_adapter: bool) -> bool:
    """Return whether packed tensors are checked for NaN and infinities.

    Unless ``wanted`` says, only adapters that are packed on an accelerator are, which reads one at
    the speed of its memory. On a CPU the check costs about what the digest does (25 ms for 175 MB
    on one core; ``python -m benchmarks.finite``), so there it must be asked for.

    Unless it was said: adapters that are packed on an accelerator, which reads one at the
    speed of its memory. On a CPU it costs about what the digest does (25 ms for 175 MB on
    one core; ``python -m benchmarks.finite``), so there it must be asked for.
    """
    return (is_adapter and packs_on_device(backend)) if wanted is None else wanted
