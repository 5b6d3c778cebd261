"""Digests of tensors, asked of the coordinator: the same on every replica and of every push of
the same tensors, however they came."""

from __future__ import annotations

import pytest
import torch

from tests.doubles.engine import EngineDouble
from tests.doubles.pool import Pool
from tests.integration.models import Model, lora, peft_of, until, weights
from tests.integration.replicas import digests, is_ready, replica
from trainer_side import Publisher
from weft_rl.contract.checkpoint import StoredTensor
from weft_rl.rpc.channel import open_channel
from weft_rl.transport.digests.wsum64 import content_digest, tensor_digest
from weft_rl.v1 import inspect_pb2 as pb
from weft_rl.v1.inspect_pb2_grpc import InspectServiceStub


def expected(tensors: dict[str, torch.Tensor]) -> dict[str, StoredTensor]:
    return {
        name: StoredTensor(
            name, "F32", tuple(t.shape), tensor_digest(t.contiguous().view(-1).view(torch.uint8))
        )
        for name, t in tensors.items()
    }


def test_they_do_not_depend_on_how_a_version_came(pool: Pool) -> None:
    pool.add_replica("replica-0", EngineDouble(weights(Model()), base_copies=9))
    base = weights(Model(5))
    for number, bucket_bytes in enumerate((512, 2**20), 1):
        trainer_id = f"trainer-{number}"
        with Publisher(
            pool.target, trainer_id=trainer_id, timeout_seconds=20, bucket_bytes=bucket_bytes
        ) as publisher:
            publisher.push_base(Model(5))
            publisher.push_tensors(reversed(base.items()))
    for number in range(1, 5):
        assert digests(pool, "replica-0", f"base@{number}") == expected(base)
    with open_channel(pool.target) as channel:
        listed = InspectServiceStub(channel).ListVersions(pb.ListVersionsRequest(policy="base"))
    content = content_digest([tensor.digest for tensor in expected(base).values()])
    pushed = {v.version.version: v.content_digest.value for v in listed.versions}
    assert {number: pushed[number] for number in range(1, 5)} == dict.fromkeys(range(1, 5), content)


def test_a_clone_has_those_of_the_push(pool: Pool, publisher: Publisher) -> None:
    pool.add_replica("replica-0", EngineDouble(weights(Model()), base_copies=1))
    base, adapter = Model(5), peft_of(Model(), 1)
    publisher.push_base(base)
    publisher.push_adapter(adapter, "math")
    pool.add_replica("replica-1", EngineDouble(weights(Model()), base_copies=1))
    until(lambda: is_ready(pool, "replica-1"))
    for name in ("replica-0", "replica-1"):
        assert digests(pool, name, "base@1") == expected(weights(base))
        assert digests(pool, name, "math@1") == expected(lora(adapter))


@pytest.mark.parametrize("is_readable", [True, False])
def test_a_base_that_was_loaded_in_place_is_read_back_where_it_can_be(
    pool: Pool, publisher: Publisher, is_readable: bool
) -> None:
    engine = EngineDouble(weights(Model()), in_place=True, is_readable=is_readable)
    pool.add_replica("replica-0", engine)
    publisher.push_base(Model(5))
    assert replica(pool, "replica-0").version_vector.base == 1
    if is_readable:
        assert digests(pool, "replica-0", "base@1") == expected(weights(Model(5)))
        return
    with pytest.raises(Exception, match="no copy of base@1 is held here"):
        digests(pool, "replica-0", "base@1")
