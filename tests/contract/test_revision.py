"""Who speaks another revision of the protocol is refused, and told which side is older."""

from __future__ import annotations

import pytest

from tests.contract.calls import fails
from tests.contract.conftest import Pool
from tests.doubles.rank import FakeRank
from weft_rl.contract.errors import WeftError
from weft_rl.rpc.bounds import PROTOCOL_REVISION
from weft_rl.v1 import registry_pb2, rendezvous_pb2

OTHERS = pytest.mark.parametrize(
    ("given", "older", "said"),
    [
        (0, "caller", "protocol revision 0"),
        (PROTOCOL_REVISION + 1, "coordinator", f"protocol revision {PROTOCOL_REVISION + 1}"),
    ],
)
_REFUSAL = ("FAILED_PRECONDITION", "REVISION_MISMATCH")


def _check(error: WeftError, given: int, older: str, said: str) -> None:
    assert error.metadata == {
        "caller_revision": str(given),
        "coordinator_revision": str(PROTOCOL_REVISION),
        "older": older,
    }
    assert f"speaks {said}, the coordinator protocol revision {PROTOCOL_REVISION}" in error.message
    assert error.message.endswith("which is older")


@OTHERS
async def test_a_replica(pool: Pool, given: int, older: str, said: str) -> None:
    replica = await pool.replica()
    again = registry_pb2.RegisterRequest(
        replica_id="r1", incarnation="i", address="127.0.0.1:1", protocol_revision=given
    )
    _check(await fails(replica.registry.Register(again), *_REFUSAL), given, older, said)
    assert [r.replica_id for r in (await pool.seen()).replicas] == ["r0"]


@OTHERS
async def test_a_trainer(pool: Pool, given: int, older: str, said: str) -> None:
    await pool.replica()
    trainer = await pool.trainer()
    begin = trainer.stub.BeginTransfer(trainer.begin_request(protocol_revision=given))
    _check(await fails(begin, *_REFUSAL), given, older, said)
    assert (await trainer.push()).version.version == 1  # none was burnt


@OTHERS
async def test_a_rank(pool: Pool, given: int, older: str, said: str) -> None:
    replica = await pool.replica()
    replica.attends = False
    trainer = await pool.trainer()
    begun = await trainer.begin()
    rank = FakeRank(pool.target, begun.group, 0)
    await rank.say(
        hello=rendezvous_pb2.Hello(
            credential=rank.credential, protocol_revision=given, num_buckets_in_flight=2
        )
    )
    _check(await fails(rank.hear(), *_REFUSAL), given, older, said)
    await rank.close()
