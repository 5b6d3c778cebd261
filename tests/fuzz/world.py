"""What generated requests are sent to: a coordinator, a replica, and a push that is held.

The push is of an adapter: its group has formed but for the sender, so that ids, tokens
and digests are alive and every stage of a push can be spoken of.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import random
from collections.abc import Mapping, Sequence
from typing import Any

import grpc
from google.protobuf.duration_pb2 import Duration

from rollout_side.agent.agent import Agent
from tests.doubles.engine import EngineDouble
from tests.doubles.halves import in_halves
from tests.doubles.pool import Pool
from tests.waits import eventually
from weft_rl.contract.manifest import plan_buckets
from weft_rl.contract.tensors import DataType, TensorMeta
from weft_rl.coordinator.decisions.state.pool import PoolState
from weft_rl.rpc.bounds import PROTOCOL_REVISION
from weft_rl.rpc.channel import open_aio_channel
from weft_rl.rpc.codec import send_plan_to_proto
from weft_rl.rpc.manifest_codec import manifest_to_chunks
from weft_rl.v1 import (
    admin_pb2,
    admin_pb2_grpc,
    publish_pb2,
    publish_pb2_grpc,
    registry_pb2,
    registry_pb2_grpc,
    rendezvous_pb2,
    types_pb2,
)

REPLICA = "replica-0"
_CALL_SECONDS = 5.0
_RANK, _HIDDEN = 4, 32
_METAS = tuple(
    TensorMeta(f"base_model.model.layers.{i}.q_proj.lora_{side}.weight", DataType.FLOAT32, shape)
    for i in range(3)
    for side, shape in (("A", (_RANK, _HIDDEN)), ("B", (_HIDDEN, _RANK)))
)
_CONFIG = {"peft_type": "LORA", "r": _RANK, "lora_alpha": 8, "target_modules": ["q_proj"]}


class World:
    """One pool; all methods run on its event loop.

    Args:
        pool: With one replica, ``REPLICA``, which has ``engine``.
        chance: Where choices come from.
    """

    def __init__(self, pool: Pool, engine: EngineDouble, chance: random.Random) -> None:
        self.pool, self.engine, self.chance = pool, engine, chance
        self.policy = "held"
        self.manifest = plan_buckets(_METAS)
        self.token = 0
        self.transfer_id = ""
        self._group = publish_pb2.GroupPlan()
        self._numbers = itertools.count(1)
        self.channel = open_aio_channel(pool.target)
        self._publish = publish_pb2_grpc.PublishServiceStub(self.channel)
        self._registry = registry_pb2_grpc.RegistryServiceStub(self.channel)
        self._admin = admin_pb2_grpc.AdminServiceStub(self.channel)
        self.replica_channel = open_aio_channel(self.agent.address)

    @property
    def agent(self) -> Agent:
        """The replica's."""
        return self.pool.agents[REPLICA]

    @property
    def state(self) -> PoolState:
        """The coordinator's."""
        coordinator: Any = self.pool.coordinator
        return coordinator.driver.state  # type: ignore[no-any-return]

    @property
    def generation(self) -> int:
        """The coordinator's."""
        return self.state.generation

    def count(self) -> int:
        """A number that was not given before."""
        return next(self._numbers)

    def adapter(self) -> types_pb2.AdapterSpec:
        """What the held push is of."""
        return types_pb2.AdapterSpec(config_json=json.dumps(_CONFIG))

    def credential(self, rank: int) -> rendezvous_pb2.GroupCredential:
        """Of a rank of the held push's group."""
        group = self.state.groups.get(self._group.group_id)
        token = group.token_of(rank) if group else self._group.token
        return rendezvous_pb2.GroupCredential(group_id=self._group.group_id, token=token)

    def acquire_request(self) -> publish_pb2.AcquirePolicyRequest:
        """For the held policy; answers its lease again."""
        return publish_pb2.AcquirePolicyRequest(
            trainer_id="fuzz",
            session_id="s1",
            policy=self.policy,
            kind=types_pb2.POLICY_KIND_ADAPTER,
        )

    def begin_request(self, request_id: str) -> publish_pb2.BeginTransferRequest:
        """For a push of the held policy."""
        return publish_pb2.BeginTransferRequest(
            request_id=request_id,
            policy=self.policy,
            fencing_token=self.token,
            layout_digest=self.manifest.layout_digest,
            adapter=self.adapter(),
            require=publish_pb2.Requirement(min_replicas=1),
            timeout=Duration(seconds=30),
            backend="gloo",
            protocol_revision=PROTOCOL_REVISION,
            send_plan=self.send_plan() if self.chance.random() < 0.3 else None,
        )

    def send_plan(self) -> types_pb2.SendPlan:
        """One that fits."""
        return send_plan_to_proto(in_halves(self.manifest))

    async def refresh(self) -> None:
        """Put back what requests have ended: the replica's service, the lease, the push."""
        for tries_left in (2, 1, 0):
            try:
                await self._refresh()
                return
            except grpc.aio.AioRpcError:  # what it relied on has just ended, too
                if not tries_left:
                    raise

    async def _refresh(self) -> None:
        await self._tidy()
        held = self.state.transfers.get(self.transfer_id)
        if held is not None and held.uncommitted:
            request = publish_pb2.RenewLeaseRequest(policy=self.policy, fencing_token=self.token)
            await self._publish.RenewLease(request, timeout=_CALL_SECONDS)
            return
        owner = self.state.policies.get(self.policy)
        if (
            owner is not None
            and owner.lease is not None
            and (
                owner.lease.trainer_id,
                owner.lease.session_id,
            )
            != ("fuzz", "s1")
        ):
            self.policy = f"held-{self.count()}"  # a request has taken the other
        answer = await self._publish.AcquirePolicy(self.acquire_request(), timeout=_CALL_SECONDS)
        self.token = answer.lease.fencing_token
        chunks = manifest_to_chunks(self.manifest)
        requests = iter([publish_pb2.PutManifestRequest(chunk=chunk) for chunk in chunks])
        await self._publish.PutManifest(requests, timeout=_CALL_SECONDS)
        request_id = f"held-{self.count()}"
        begun = await self._publish.BeginTransfer(self.begin_request(request_id), timeout=20)
        self.transfer_id, self._group = begun.transfer_id, begun.group

    async def _tidy(self) -> None:
        """Leave nothing behind that keeps a usual push from what it needs."""
        for replica_id in list(self.state.out_of_service):
            request = admin_pb2.UncordonRequest(replica_id=replica_id)
            await self._admin.Uncordon(request, timeout=_CALL_SECONDS)
        for replica in list(self.state.replicas.values()):
            if replica.replica_id != REPLICA:
                leave = registry_pb2.LeaveRequest(
                    replica_id=replica.replica_id, incarnation=replica.incarnation
                )
                await self._registry.Leave(leave, timeout=_CALL_SECONDS)
        ours = self.state.replicas.get(REPLICA)
        if self.agent._drain.is_draining or (ours is not None and ours.drain is not None):
            await self.pool.leave(REPLICA)
            await self.pool.join(REPLICA, self.engine)
            await self.replica_channel.close()
            self.replica_channel = open_aio_channel(self.agent.address)
            await eventually(lambda: self.agent.serving.vector.base == self.state.vector.base)
        pushes = [t for t in self.state.transfers.values() if t.transfer_id != self.transfer_id]
        for transfer in pushes:  # those that requests have begun, or have waiting
            token = transfer.purpose.fencing_token
            abort = publish_pb2.AbortTransferRequest(
                transfer_id=transfer.transfer_id, policy=transfer.policy, fencing_token=token or 0
            )
            if transfer.uncommitted and token is not None:
                await self._publish.AbortTransfer(abort, timeout=_CALL_SECONDS)

    def known(self) -> Mapping[str, Sequence[Any]]:
        """Values that are alive, or were a moment ago, by the name of a field."""
        digest = types_pb2.ContentDigest(
            algorithm=types_pb2.DIGEST_ALGORITHM_WSUM64,
            value=b"\1" * 8,
            size_bytes=self.manifest.total_bytes,
        )
        versions = [types_pb2.PolicyVersion(policy=p, version=1) for p in ("base", self.policy)]
        groups = list(self.state.groups.values())
        return {
            "policy": ["base", self.policy, "code"],
            "trainer_id": ["fuzz", "other"],
            "replica_id": [REPLICA, "stranger"],
            "incarnation": [self.agent.config.incarnation, "i1"],
            "transfer_id": [self.transfer_id, *self.state.history],
            "group_id": [group.group_id for group in groups],
            "token": [group.token_of(rank) for group in groups for rank in (0, 1)],
            "fencing_token": [self.token, 1],
            "coordinator_generation": [self.generation],
            "layout_digest": [self.manifest.layout_digest],
            "content_digest": [digest],
            "credential": [self.credential(0), self.credential(1)],
            "version": [*versions, 1, 2],
            "adapter": [self.adapter()],
            "keys": ["a", "n"],
            "key": ["a", "n"],
        }

    def replica_now(self) -> Any:
        """What a refused order must leave as it was."""
        serving, engine = self.agent.serving, self.engine
        return (
            serving.vector,
            serving.dirty_reason,
            dict(engine.aliases),
            engine.store.retained_bases(),
            sorted(group for group in engine.receiver.groups if group != "fuzz"),
            sorted(engine.cloner._sending),
        )

    def is_repair(self, before: Any, now: Any) -> bool:
        """Whether the coordinator itself brought the pool's base back, and nothing else changed."""
        (was, *others), (vector, *rest) = before, now
        served = self.state.vector.base
        is_back = was.base != served == vector.base and was.adapters == vector.adapters
        return is_back and others == rest

    async def close(self) -> None:
        """Hang up; the pool is the caller's."""
        await asyncio.gather(self.channel.close(), self.replica_channel.close())
