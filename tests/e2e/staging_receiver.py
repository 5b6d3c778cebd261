"""A receiver without a network, for tests: it stages tensors from files.

``join`` carries the order as JSON in its ticket's ``group_id`` and obeys at once. It
runs in vLLM's worker, so this module imports nothing that a worker has not.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import itertools
import json
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from rollout_side.engine import JoinOrder
from rollout_side.memory.handoff import HandoffQueue, SharedBucket
from rollout_side.memory.segment import HostSegment
from rollout_side.memory.store import WorkerStore
from rollout_side.memory.versions import StagedVersion, bucket_starts
from rollout_side.vllm_engine.compat import bridges
from tests.e2e.arriving_file import FromFile
from weft_rl.contract.errors import WeftError
from weft_rl.contract.group import GroupTicket
from weft_rl.contract.manifest import plan_buckets
from weft_rl.contract.names import PolicyVersion
from weft_rl.contract.tensors import DataType, TensorMeta
from weft_rl.tracing import Tracer

FACTORY = f"{__name__}:StagingReceiver"


@dataclasses.dataclass(frozen=True, kw_only=True)
class StageOrder:
    """What to stage; or ``scribble``, to overwrite all memory that is free for reuse or
    retained;
    or ``break_load_after`` so many tensors, once; or what is to arrive: a file whose buckets
    are given to an engine that loads ``in_place``."""

    transfer_id: str = ""
    version: str = ""
    file: str = ""
    drop: tuple[str, ...] = ()
    """Tensors to leave out."""
    scribble: bool = False
    break_load_after: int = 0
    in_place: bool = False
    num_buckets: int = 10**6
    """How many of them come; the rest never do."""

    def join_order(self) -> JoinOrder:
        """As an argument of ``Engine.join_group``."""
        ticket = GroupTicket(
            coordinator="",
            host="127.0.0.1",
            group_id=json.dumps(dataclasses.asdict(self)),
            token="",
            epoch=1,
            rank=1,
            size=2,
            backend="gloo",
        )
        return JoinOrder(ticket=ticket, trainer_id="test")


def content_digest(file: Path) -> bytes:
    """What the receiver reports for a file."""
    return hashlib.sha256(str(file).encode()).digest()


class StagingReceiver:
    """See the module; a ``ReceiverLike``."""

    def __init__(self, store: WorkerStore, tracer: Tracer) -> None:
        self._store = store

    def join(self, order: JoinOrder) -> None:
        """Obey what the ticket's ``group_id`` says."""
        self._obey(StageOrder(**json.loads(order.ticket.group_id)))

    def _obey(self, order: StageOrder) -> None:
        if order.scribble:
            store = self._store
            bases = (store.held(PolicyVersion("base", v)) for v in store.retained_bases())
            for segment in (*store._segments, *(base.segment for base in bases)):
                segment.data.fill_(0x7F)
            return
        if order.break_load_after:
            break_next_load(order.break_load_after)
            return
        if order.in_place:
            self._arrive(order)
            return
        tensors = {n: t for n, t in load_file(order.file).items() if n not in order.drop}
        self._stage(order, tensors)

    def close(self) -> None:
        """What is put from here ends with the handoff that it is put to."""

    def _arrive(self, order: StageOrder) -> None:
        """Put a file's buckets through memory of one, in a thread as the receiver's; other
        ranks map it."""
        arriving = FromFile(PolicyVersion.parse(order.version), Path(order.file))
        deadline = time.monotonic() + 60
        handoff = HandoffQueue(
            order.transfer_id,
            arriving.version,
            arriving.manifest,
            deadline,
            self._store.num_ranks,
        )
        self._store.put_handoff(handoff)
        shared = SharedBucket(
            [HostSegment.allocate(max(b.wire_bytes for b in arriving.manifest.buckets))], 0
        )
        memory = shared.buffers[0].data

        def put() -> None:
            with contextlib.suppress(WeftError):  # it was discarded
                for index, wire in itertools.islice(arriving.buckets(), order.num_buckets):
                    there = memory[: wire.numel()].copy_(wire)
                    handoff.put(index, there, arriving.bucket_digests[index], shared)
                    handoff.wait_loaded(index, lambda: None)

        threading.Thread(target=put, name="arriving", daemon=True).start()

    def _stage(self, order: StageOrder, tensors: dict[str, Any]) -> None:
        version = PolicyVersion.parse(order.version)
        manifest = plan_buckets(
            [
                TensorMeta(n, DataType[str(t.dtype).removeprefix("torch.").upper()], tuple(t.shape))
                for n, t in tensors.items()
            ],
            capacity_bytes=2**16,
        )
        segment = self._store.reserve(
            order.transfer_id, manifest.wire_bytes, adapter=version.policy != "base"
        )
        starts = bucket_starts(manifest)
        for slot in manifest.tensors:
            begin = starts[slot.bucket] + slot.offset_bytes
            raw = tensors[slot.meta.name].contiguous().view(-1).view(torch.uint8)
            segment.data[begin : begin + slot.meta.num_bytes].copy_(raw)
        self._store.put_staged(
            StagedVersion(
                order.transfer_id, version, manifest, segment, content_digest(Path(order.file))
            )
        )


def break_next_load(after: int) -> None:
    """Make this worker's next base load fail once ``after`` tensors were taken."""
    native = bridges.without_lora

    @contextlib.contextmanager
    def without_lora(model: Any) -> Iterator[None]:
        bridges.without_lora, load = native, model.load_weights
        model.load_weights = lambda weights: load(_breaking(weights, after))
        try:
            with native(model):
                yield
        finally:
            del model.load_weights

    bridges.without_lora = without_lora


def _breaking(weights: Iterable[Any], after: int) -> Iterator[Any]:
    for index, named in enumerate(weights):
        if index == after:
            raise OSError("the disk of the test is broken")
        yield named
