"""Sleep of the replicas on a trainer's GPUs: in step on every rank of it."""

from __future__ import annotations

import json
import time
from typing import Literal

import torch

from trainer_side.pool.client import PoolClient
from trainer_side.ranks import SENDER, Ranks, agreeing
from weft.rpc.codec import duration_to_proto
from weft.transport.backends import gpu_uuid
from weft.v1 import publish_pb2 as pb
from weft.v1 import registry_pb2

#: What becomes of requests that run when a replica falls asleep.
WhenRunning = Literal["finish", "abort"]
_WHEN_RUNNING = {
    "finish": registry_pb2.WHEN_RUNNING_FINISH,
    "abort": registry_pb2.WHEN_RUNNING_ABORT,
}
#: vLLM's levels: 1 moves the weights to host memory, 2 discards them.
SleepLevel = Literal[1, 2]
#: What an engine may take to fall asleep once its requests have ended, and to wake.
SWITCH_SECONDS = 180.0
# Of one rank's list, as JSON: some sixty GPUs.
_LIST_BYTES = 2_560


def used_gpus() -> list[str]:
    """UUIDs of the GPUs that this process uses: its current device, and where torch has
    memory for it."""
    if not torch.cuda.is_available():
        return []
    current = torch.cuda.current_device()
    return [
        gpu_uuid(torch.device("cuda", index))
        for index in range(torch.cuda.device_count())
        if index == current or torch.cuda.memory_reserved(index)
    ]


def sleep(
    ranks: Ranks,
    client: PoolClient | None,
    level: SleepLevel,
    when_running: WhenRunning,
    timeout_seconds: float,
) -> tuple[str, ...]:
    """Put them to sleep; collective. Returns which.

    Raises:
        WeftError: The same on every rank; see ``Publisher.sleep_rollouts``.
    """
    deadline = time.monotonic() + timeout_seconds + SWITCH_SECONDS
    ranks.open(deadline)
    uuids = _gathered(ranks)

    def order() -> bytes:
        assert client is not None
        answer = client.with_base_lease(
            lambda stub, token, session_id, left: stub.SleepRollouts(
                pb.SleepRolloutsRequest(
                    fencing_token=token,
                    session_id=session_id,
                    gpu_uuids=uuids,
                    when_running=_WHEN_RUNNING[when_running],
                    timeout=duration_to_proto(timeout_seconds),
                    level=level,
                ),
                timeout=left,
            ),
            deadline,
        )
        return json.dumps(list(answer.replica_ids)).encode()

    return tuple(json.loads(ranks.share(order)))


def wake(ranks: Ranks, client: PoolClient | None, timeout_seconds: float) -> tuple[str, ...]:
    """Wake them; collective. Returns which.

    Raises:
        WeftError: The same on every rank; see ``Publisher.wake_rollouts``.
    """
    deadline = time.monotonic() + timeout_seconds
    ranks.open(deadline)

    def order() -> bytes:
        assert client is not None
        answer = client.with_base_lease(
            lambda stub, token, session_id, left: stub.WakeRollouts(
                pb.WakeRolloutsRequest(fencing_token=token, session_id=session_id), timeout=left
            ),
            deadline,
        )
        return json.dumps(list(answer.replica_ids)).encode()

    return tuple(json.loads(ranks.share(order)))


def _gathered(ranks: Ranks) -> list[str]:
    """At the sender, the GPUs of all ranks, sorted."""
    with agreeing(ranks):
        mine = json.dumps(used_gpus()).encode().ljust(_LIST_BYTES)
        buffer = torch.frombuffer(bytearray(mine), dtype=torch.uint8)
    if ranks.rank != SENDER:
        ranks.collect(buffer, {})
        return []
    theirs = {r: torch.zeros(_LIST_BYTES, dtype=torch.uint8) for r in range(1, ranks.size)}
    ranks.collect(None, theirs)
    lists = (json.loads(bytes(one.numpy())) for one in (buffer, *theirs.values()))
    return sorted({uuid for one in lists for uuid in one})
