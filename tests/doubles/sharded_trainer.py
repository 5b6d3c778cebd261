"""A trainer of several ranks, each of which sends what it holds: real stubs, real side group.

Its ranks are threads. What they exchange over their own link is a dictionary here.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence

import grpc
import torch

from trainer_side.sources.source import CastRule, make_metas
from weft_rl.contract.backends import GLOO
from weft_rl.contract.errors import WeftError
from weft_rl.contract.manifest import (
    Manifest,
    Run,
    SendPlan,
    WireBucket,
    make_send_plan,
    plan_buckets,
)
from weft_rl.rpc.bounds import PROTOCOL_REVISION
from weft_rl.rpc.channel import open_channel
from weft_rl.rpc.codec import TICKET, duration_to_proto, send_plan_to_proto
from weft_rl.rpc.manifest_codec import manifest_to_chunks
from weft_rl.rpc.status import error_from_rpc
from weft_rl.transport.backends import allocate
from weft_rl.transport.digests.wsum64 import part_digests
from weft_rl.transport.group import CPU
from weft_rl.transport.sender import MembersLostError, SenderProgress, SendingRank
from weft_rl.transport.wire.buckets import SealedBucket, run_parts, seal_bucket, tensor_sums
from weft_rl.v1 import publish_pb2 as pb
from weft_rl.v1 import types_pb2
from weft_rl.v1.publish_pb2_grpc import PublishServiceStub

#: Tensors of a rank, as runs: by sender.
Shards = Sequence[Sequence[Run]]


def layout_of(weights: Mapping[str, torch.Tensor], bucket_bytes: int) -> Manifest:
    return plan_buckets(make_metas(weights, CastRule(enabled=False)), bucket_bytes)


def shards_of(manifest: Manifest, num_senders: int) -> list[list[Run]]:
    """Rows of the first tensor, columns of other matrices, and every vector whole at one rank."""
    shards: list[list[Run]] = [[] for _ in range(num_senders)]
    for index, slot in enumerate(manifest.tensors):
        shape = slot.meta.shape
        if len(shape) < 2:
            shards[index % num_senders].append(Run(index, 0, slot.meta.shape[0]))
            continue
        rows, columns = shape
        if index == 0 or num_senders == 1:
            cuts = [rows * i // num_senders * columns for i in range(num_senders)]
            ends = [*cuts[1:], rows * columns]
            runs = [Run(index, a, b - a) for a, b in zip(cuts, ends, strict=True)]
        else:
            cuts = [columns * i // num_senders // 2 * 2 for i in range(num_senders)]
            ends = [*cuts[1:], columns]
            runs = [Run(index, a, b - a, columns, rows) for a, b in zip(cuts, ends, strict=True)]
        for shard, run in zip(shards, runs, strict=True):
            shard.append(run)
    return shards


def plan_of(manifest: Manifest, shards: Shards) -> tuple[SendPlan, list[list[Run]]]:
    """The send plan, and the runs of each of its wire buckets."""
    wires: list[WireBucket] = []
    carried: list[list[Run]] = []
    for bucket in range(len(manifest.buckets)):
        for sender, shard in enumerate(shards):
            runs = [run for run in shard if manifest.tensors[run.tensor].bucket == bucket]
            if runs:
                sizes = [
                    run.payload_bytes(manifest.tensors[run.tensor].meta.dtype.itemsize_bytes)
                    for run in runs
                ]
                wires.append(WireBucket(sender, bucket, sum(sizes), len(runs)))
                carried.append(runs)
    return make_send_plan(len(shards), wires), carried


class _Link:
    """Adds up what the ranks' runs add to the digests of tensors."""

    def __init__(self, manifest: Manifest, num_ranks: int) -> None:
        self._manifest, self._num_ranks = manifest, num_ranks
        self._given: dict[int, tuple[list[Run], list[int]]] = {}
        self._lock = threading.Lock()

    def give(self, rank: int, runs: list[Run], digests: list[int]) -> bool:
        """Add a rank's part; whether all are there."""
        with self._lock:
            self._given[rank] = runs, digests
            return len(self._given) == self._num_ranks

    def sum(self) -> list[int]:
        given = list(self._given.values())
        all_runs = [run for of, _ in given for run in of]
        return tensor_sums(self._manifest, all_runs, [d for _, of in given for d in of])


class ShardBuckets:
    """One rank's wire buckets; see ``Buckets``. ``made`` says which were, in order."""

    num_buffers = 2

    def __init__(self, push: ShardedPush, rank: int, backend: str) -> None:
        self._backend = backend
        self.manifest, self._push, self._rank = push.manifest, push, rank
        self.plan, self.sender = push.plan, rank
        self._indices = push.plan.sent_by(rank)
        need = max(push.plan.wire_bytes(index) for index in self._indices)
        self._buffers = [allocate(backend, need, CPU) for _ in range(2)]
        self._runs: list[Run] = []
        self._digests: list[int] = []
        self.made: list[int] = []

    def make(self, index: int, on_progress: Callable[[], None]) -> SealedBucket:
        push, wire_index = self._push, self._indices[index]
        push.before(self._rank, index)
        self.made.append(index)
        runs, wire = push.carried[wire_index], self.wire(index)
        wire.zero_()
        parts = run_parts(self.manifest, runs)
        for run, part in zip(runs, parts, strict=True):
            flat = push.tensors[run.tensor].view(-1)
            rows = flat[run.first : run.end].as_strided(
                (run.repeats, run.count), (run.stride or run.count, 1)
            )
            size = flat.element_size()
            first = part.at + (0 if run.repeats > 1 else run.first * size - run.begin_bytes(size))
            packed = rows.contiguous().view(torch.uint8).view(-1)
            wire[first : first + packed.numel()] = packed
        payload_bytes = push.plan.buckets[wire_index].payload_bytes
        digests = part_digests(wire[:payload_bytes], parts)
        self._runs += runs
        self._digests += digests
        return seal_bucket(payload_bytes, push.nonce, wire_index, digests, runs)

    def are_summed(self) -> bool:
        return self._push.link.give(self._rank, self._runs, self._digests)

    def digests(self, made: list[int]) -> list[int]:
        return self._push.link.sum()

    def wire(self, index: int) -> torch.Tensor:
        size = self._push.plan.wire_bytes(self._indices[index])
        return self._buffers[index % 2][:size]

    def move(self) -> None:
        """To other memory: an abandoned operation may still read this."""
        old = self._buffers
        self._buffers = [allocate(self._backend, len(buffer), CPU) for buffer in old]
        for buffer, before in zip(self._buffers, old, strict=True):
            buffer.copy_(before)


class ShardedPush:
    """What all ranks know of one push; ``before(rank, nth)`` is called as a rank makes one."""

    def __init__(
        self,
        manifest: Manifest,
        tensors: Sequence[torch.Tensor],
        num_senders: int,
        before: Callable[[int, int], None],
    ) -> None:
        self.manifest, self.tensors, self.before = manifest, tensors, before
        self.plan, self.carried = plan_of(manifest, shards_of(manifest, num_senders))
        self.link = _Link(manifest, num_senders)
        self.nonce = 0


class ShardedTrainer:
    """A trainer of the base whose ranks send what they hold."""

    def __init__(
        self, target: str, num_senders: int = 2, bucket_bytes: int = 4096, backend: str = GLOO
    ) -> None:
        self._target, self._num_senders, self._bucket_bytes = target, num_senders, bucket_bytes
        self._backend = backend
        self._channel = open_channel(target)
        self.stub = PublishServiceStub(self._channel)
        self.ranks: dict[int, SendingRank] = {}
        self._token = self.stub.AcquirePolicy(
            pb.AcquirePolicyRequest(
                trainer_id="sharded",
                session_id="s1",
                policy="base",
                kind=types_pb2.POLICY_KIND_BASE,
            )
        ).lease.fencing_token
        self.buckets: dict[int, ShardBuckets] = {}
        self.errors: dict[int, tuple[float, WeftError]] = {}

    def push(
        self,
        weights: Mapping[str, torch.Tensor],
        *,
        min_replicas: int = 0,
        timeout_seconds: float = 20.0,
        before: Callable[[int, int], None] = lambda rank, nth: None,
    ) -> pb.Transfer:
        """Push; ``errors`` has what each rank failed with, and when.

        Raises:
            WeftError: What AwaitTransfer says.
        """
        push, begun = self._begin(weights, min_replicas, timeout_seconds, before)
        push.nonce = begun.nonce
        self._join(begun.group)
        self.errors.clear()
        deadline = time.monotonic() + timeout_seconds
        threads = [
            threading.Thread(target=self._send, args=(rank, push, begun.transfer_id, deadline))
            for rank in range(self._num_senders)
        ]
        for thread in threads:
            thread.start()
        try:
            request = pb.AwaitTransferRequest(transfer_id=begun.transfer_id)
            return self.stub.AwaitTransfer(request, timeout=timeout_seconds + 5).transfer
        except grpc.RpcError as error:
            raise error_from_rpc(error) from error
        finally:
            for thread in threads:
                thread.join(30)

    def begin(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Ask for a push, which nobody sends."""
        self._begin(weights, 0, 5.0, lambda rank, nth: None)

    def _begin(
        self,
        weights: Mapping[str, torch.Tensor],
        min_replicas: int,
        timeout_seconds: float,
        before: Callable[[int, int], None],
    ) -> tuple[ShardedPush, pb.BeginTransferResponse]:
        manifest = layout_of(weights, self._bucket_bytes)
        push = ShardedPush(manifest, list(weights.values()), self._num_senders, before)
        chunks = (pb.PutManifestRequest(chunk=chunk) for chunk in manifest_to_chunks(manifest))
        self.stub.PutManifest(chunks)
        request = pb.BeginTransferRequest(
            request_id=secrets.token_hex(8),
            policy="base",
            fencing_token=self._token,
            layout_digest=manifest.layout_digest,
            require=pb.Requirement(min_replicas=min_replicas),
            timeout=duration_to_proto(timeout_seconds),
            backend=self._backend,
            trial_names=self.stub.DescribeTarget(pb.DescribeTargetRequest()).trial_names,
            group_id=self.ranks[0].ticket.group_id if self.ranks else "",
            protocol_revision=PROTOCOL_REVISION,
            send_plan=send_plan_to_proto(push.plan),
        )
        return push, self.stub.BeginTransfer(request, timeout=timeout_seconds + 5)

    def _join(self, group: pb.GroupPlan) -> None:
        if self.ranks and self.ranks[0].ticket.group_id == group.group_id:
            return
        self.leave()
        for rank, token in enumerate([group.token, *group.further_tokens]):
            own = pb.GroupPlan()
            own.CopyFrom(group)
            own.rank, own.token = rank, token
            ticket = TICKET.decode(own, coordinator=self._target, host="127.0.0.1")
            self.ranks[rank] = SendingRank(ticket, CPU)

    def _send(self, rank: int, push: ShardedPush, transfer_id: str, deadline: float) -> None:
        buckets = self.buckets[rank] = ShardBuckets(push, rank, self._backend)
        sending = SenderProgress(transfer_id, buckets, deadline)
        while True:
            member = self.ranks[rank]
            try:
                member.send(sending)
                return
            except (MembersLostError, WeftError) as error:
                if member.successor is None:
                    member.give_up(transfer_id, error)
                    self._note(rank, error)
                    return
            except Exception as error:  # the rank "dies"
                member.leave()
                self._note(rank, error)
                return
            released = member.num_released(transfer_id)
            sending.num_released = max(sending.num_released, released)
            if not member.leave():
                buckets.move()
            self.ranks[rank] = SendingRank(member.successor, CPU)

    def _note(self, rank: int, error: Exception) -> None:
        typed = error if isinstance(error, WeftError) else WeftError(repr(error))
        self.errors[rank] = time.monotonic(), typed

    def leave(self) -> None:
        """Leave the group."""
        for rank in self.ranks.values():
            rank.leave()
        self.ranks.clear()

    def close(self) -> None:
        """End it."""
        self.leave()
        self._channel.close()
