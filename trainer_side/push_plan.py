"""What the ranks of a trainer are to push, as one of them finds it: tensors, layout, who sends."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from trainer_side.pool.sender import bucket_capacity, packs_on_device
from trainer_side.push_request import PushRequest
from trainer_side.ranks.ranks import SENDER, Ranks
from trainer_side.sharded.plan import DEFAULT_MAX_SENDERS, ShardPlans
from trainer_side.sharded.push import ShardPush
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
    """One push, as a rank finds it: the same on every rank, but for named tensors."""

    target: pb.DescribeTargetResponse
    """What the pool serves; of its backends the one to use."""
    what: Content | NamedBase
    source: Source | RunSource | None
    """None of named tensors at ranks that do not send."""
    adapter: Adapter | None
    """None of a base."""
    manifest: Manifest | None
    """None where ``source`` is."""
    shards: ShardPush | None
    """What each rank is to send of what it holds; None where rank 0 sends all."""
    finite: bool
    """Whether NaN and infinities end the push."""
    remarks: tuple[str, ...] = ()
    """On what is gathered that a sharded trainer's ranks would send, and why."""

    @property
    def backend(self) -> str:
        """What is to carry the bytes."""
        return self.target.backends[0]

    @property
    def description(self) -> str:
        """Of what is read, for people."""
        return self.source.description if self.source else DESCRIPTION


class Planner:
    """Plans pushes, and keeps what the next one needs again.

    Args:
        ranks: Of the trainer.
        bucket_bytes: Payload of a bucket; None is what suits the backend.
        max_senders: Of more ranks that hold shards, some pass theirs to those that send; 1 is a
            gather at rank 0, of whole tensors.
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
        """What this rank would push to a pool; not collective, reads no values.

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
        """The manifest of a source's tensors, which is kept: the next push has the same."""
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
        """What the ranks hold, where each is to send it; and what is gathered in its place."""
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
    """Whether what is packed is looked at for NaN and infinities.

    Unless it was said: adapters that are packed on an accelerator, which reads one at the
    speed of its memory. On a CPU it costs about what the digest does (25 ms for 175 MB on
    one core; ``python -m benchmarks.finite``), so there it must be asked for.
    """
    return (is_adapter and packs_on_device(backend)) if wanted is None else wanted
