"""Publisher: what a trainer imports to push weights to the pool.

The composer of the trainer side: it introduces a source to the packer, the sender
and the control plane.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Literal

import torch

from trainer_side.adapter_source import Adapter, adapter_of_model
from trainer_side.delivery import Delivery
from trainer_side.file_source import CheckpointSource, adapter_of_dir
from trainer_side.module_source import ModuleSource
from trainer_side.params.choose import open_model
from trainer_side.progress import reporter_for
from trainer_side.ranks import SENDER, Together, agreeing, ranks_of
from trainer_side.source import CastRule, Source, check_all_finite
from trainer_side.together import LedSource, follow
from weft.contract.bucket_plan import DEFAULT_BUCKET_BYTES, plan_buckets
from weft.contract.errors import InvalidManifestError, InvalidRequestError
from weft.contract.manifest import Manifest
from weft.contract.names import BASE_POLICY, PolicyVersion, check_adapter_name, check_name
from weft.contract.tensors import TensorMeta
from weft.rpc.codec import dtype_from_proto, version_from_proto
from weft.v1 import publish_pb2 as pb

_log = logging.getLogger(__name__)

#: ``require``: every replica in contact when the push begins, or at least so many.
Require = Literal["all"] | int


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
    """Pushes versions of policies from one trainer, of one process or of many.

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
        ranks: Which processes push together. "all" of ``torch.distributed`` (one, if it
            is not initialised) or those of a group: each makes a Publisher, and each
            calls every push, in the same order; rank 0 of them is the sender, and the
            only one that reaches the coordinator. "this" process only: for a trainer
            whose weights are whole here, pushed by one of its ranks.
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
        ranks: Together = "all",
    ) -> None:
        check_name(trainer_id, "trainer")
        self._require = _min_replicas(require)
        self._timeout_seconds = timeout_seconds
        self._bucket_bytes = bucket_bytes
        self._ranks = ranks_of(ranks)
        self._speaker: Delivery | None = None
        if self._ranks.rank == SENDER:
            self._speaker = Delivery(coordinator, trainer_id, data_host, reporter_for(progress))
        self._pushing = threading.Lock()
        self._plans: dict[tuple[TensorMeta, ...], Manifest] = {}
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
                opened = open_model(model, self._ranks)
                adapter = adapter_of_model(opened, adapter_name, rule, check_base=check_base)
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
            opened = open_model(model, self._ranks)
            return ModuleSource(opened.module, opened.params, rule), None

        return self._push(BASE_POLICY, make, check_finite, require, timeout_seconds)

    def close(self) -> None:
        """Release the leases and leave the side group; blocks at most some seconds."""
        with self._pushing:
            self._ranks.abandon()
            if self._speaker is not None:
                self._speaker.close()

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
        ranks = self._ranks
        with self._pushing:
            ranks.open(deadline)
            target = pb.DescribeTargetResponse.FromString(
                ranks.share(lambda: self._delivery.describe(deadline).SerializeToString())
            )
            with agreeing(ranks):
                source, adapter = make(target)
                if check_finite:
                    check_all_finite(source)
                manifest = self._plan(source.metas)
            self._check_same(manifest)

            def begin() -> bytes:
                begun = self._delivery.begin(
                    policy, manifest, adapter, target, min_replicas, deadline
                )
                return begun.SerializeToString()

            begun = pb.BeginTransferResponse.FromString(ranks.share(begin))
            version = version_from_proto(begun.version)
            _log.info(
                "pushing %s: %s, %d bytes to %s, epoch %d",
                version,
                source.description,
                manifest.total_bytes,
                ", ".join(begun.replica_ids),
                begun.group.epoch,
            )
            transfer = self._carry_out(begun, source, manifest, deadline)
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

    def _check_same(self, manifest: Manifest) -> None:
        """The ranks of a trainer must have the same model in mind."""
        theirs = self._ranks.share(lambda: manifest.layout_digest)
        with agreeing(self._ranks):
            if theirs != manifest.layout_digest:
                raise InvalidManifestError(
                    f"rank {self._ranks.rank} of this trainer would push other names or shapes "
                    "than its rank 0: every rank must push the same model"
                )

    def _carry_out(
        self, begun: pb.BeginTransferResponse, source: Source, manifest: Manifest, deadline: float
    ) -> pb.Transfer:
        """Send at the sender, help elsewhere; the outcome everywhere."""
        ranks = self._ranks
        led = LedSource(source, ranks) if source.is_collective and ranks.size > 1 else source

        def send() -> bytes:
            return self._delivery.carry_out(begun, led, manifest, deadline).SerializeToString()

        if ranks.rank != SENDER and source.is_collective and begun.HasField("group"):
            follow(source, ranks, manifest)
        return pb.Transfer.FromString(ranks.share(send))

    @property
    def _delivery(self) -> Delivery:
        assert self._speaker is not None
        return self._speaker

    def _plan(self, metas: tuple[TensorMeta, ...]) -> Manifest:
        """The bucket plan of these tensors, kept: the next push has the same."""
        manifest = self._plans.get(metas)
        if manifest is None:
            manifest = plan_buckets(metas, self._bucket_bytes)
            if len(self._plans) >= 32:
                self._plans.clear()
            self._plans[metas] = manifest
        return manifest


def _min_replicas(require: Require) -> int:
    if require == "all":
        return 0
    if isinstance(require, int) and not isinstance(require, bool) and require >= 1:
        return require
    raise InvalidRequestError(f"require={require!r}: use 'all' or a number of replicas, at least 1")
