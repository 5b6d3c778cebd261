"""Sleep of the replicas on a trainer's GPUs, ordered by all its ranks in step."""

from __future__ import annotations

import json
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from trainer_side.pool.coordinator_client import CoordinatorClient
from trainer_side.ranks.ranks import SENDER, Ranks, agreeing
from weft_rl.contract.arguments import check_choice, check_seconds
from weft_rl.contract.names import BASE_POLICY
from weft_rl.contract.sleep import (
    DEFAULT_REQUESTS_SECONDS,
    SWITCH_SECONDS,
    SleepLevel,
    WhenRunning,
)
from weft_rl.rpc.codec import duration_to_proto, when_running_to_proto
from weft_rl.transport.backends import gpu_uuid
from weft_rl.v1 import publish_pb2 as pb
from weft_rl.v1 import types_pb2

_T = TypeVar("_T")

# Of one rank's list, as JSON: some sixty GPUs.
_LIST_BYTES = 2_560


class RolloutSleep(ABC):
    """Methods of a ``Publisher`` that put replicas on its GPUs to sleep and wake them."""

    @abstractmethod
    def _between_pushes(
        self, call: str, work: Callable[[Ranks, CoordinatorClient | None], _T], deadline: float
    ) -> _T:
        """Run ``work`` in step with the other ranks, once no push is under way. It gets the
        coordinator client at the sender, None at other ranks."""

    def sleep_rollouts(
        self,
        *,
        level: SleepLevel = 1,
        when_running: WhenRunning = "finish",
        timeout_seconds: float = DEFAULT_REQUESTS_SECONDS,
    ) -> tuple[str, ...]:
        """Have the replicas that share a GPU with this trainer give its memory back.

        At once nothing is routed to them; once their requests have ended they sleep, and the KV
        cache is gone. A push wakes the weights of those that it reaches, ``wake_rollouts`` the KV
        cache. The sleep is a part of this publisher's lease of the base, which is acquired: when
        that ends, they wake by themselves. Every rank calls it, as with a push; it waits for pushes
        under way.

        Args:
            level: vLLM's sleep level: 1 moves the weights to host memory, 2 discards them, which
                takes none where a push of the base brings others before ``wake_rollouts``. Without
                one a replica wakes with a copy of its own, or from its checkpoint's files; else it
                is routed to once it was brought one.
            when_running: Running requests "finish", or "abort" with what they have.
            timeout_seconds: Longest time for those to end; to fall asleep, an engine may take three
                minutes more.

        Returns:
            The replicas that sleep; none where none shares a GPU.

        Raises:
            NotReadyError: ``SLEEP_DISABLED``: one was started without ``--enable-sleep``;
                nothing changed. Or ``TRANSFER_UNDER_WAY``: one loads a base in place.
            TransferTimeoutError: Requests did not end; that replica takes requests again.
            RequestConflictError: One was woken meanwhile, by an operator.
            WeftError: See ``push_adapter``.

            But for ``SLEEP_DISABLED``, an error of one replica leaves the others asleep, or
            about to be: metadata ``asleep`` and the message name them. Call it again, or
            ``wake_rollouts``; else they sleep until the lease ends.
        """
        check_choice("when_running", when_running, WhenRunning)
        check_choice("level", level, SleepLevel)
        check_seconds("timeout_seconds", timeout_seconds)
        return self._between_pushes(
            "sleep_rollouts",
            lambda ranks, coordinator: sleep(
                ranks, coordinator, level, when_running, timeout_seconds
            ),
            time.monotonic() + timeout_seconds + SWITCH_SECONDS,
        )

    def wake_rollouts(self, *, timeout_seconds: float = SWITCH_SECONDS) -> tuple[str, ...]:
        """Wake the replicas that ``sleep_rollouts`` put to sleep, weights and KV cache.

        Returns once they take requests. A replica that missed versions meanwhile is routed to once
        it has them. Every rank calls it.

        Returns:
            The replicas that were woken; none where none slept.

        Raises:
            TransferTimeoutError: Not in time; they are woken all the same.
            WeftError: See ``push_adapter``.
        """
        check_seconds("timeout_seconds", timeout_seconds)
        return self._between_pushes(
            "wake_rollouts",
            lambda ranks, coordinator: wake(ranks, coordinator, timeout_seconds),
            time.monotonic() + timeout_seconds,
        )


def used_gpus() -> list[str]:
    """Return UUIDs of the GPUs that this process uses. These are its current device and every
    device where torch holds memory for it."""
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
    coordinator: CoordinatorClient | None,
    level: SleepLevel,
    when_running: WhenRunning,
    timeout_seconds: float,
) -> tuple[str, ...]:
    """Put replicas that share the ranks' GPUs to sleep; collective. Return their names.

    Raises:
        WeftError: The same on every rank; see ``Publisher.sleep_rollouts``.
    """
    deadline = time.monotonic() + timeout_seconds + SWITCH_SECONDS
    ranks.open(deadline)
    uuids = _gathered(ranks)

    def order() -> bytes:
        assert coordinator is not None
        request = pb.SleepRolloutsRequest(
            session_id=coordinator.leases.session_id,
            gpu_uuids=uuids,
            when_running=when_running_to_proto(when_running == "abort"),
            timeout=duration_to_proto(timeout_seconds),
            level=level,
        )
        return _ordered(coordinator, coordinator.stub.SleepRollouts, request, deadline)

    return tuple(json.loads(ranks.share(order)))


def wake(
    ranks: Ranks, coordinator: CoordinatorClient | None, timeout_seconds: float
) -> tuple[str, ...]:
    """Wake replicas that this trainer put to sleep; collective. Return their names.

    Raises:
        WeftError: The same on every rank; see ``Publisher.wake_rollouts``.
    """
    deadline = time.monotonic() + timeout_seconds
    ranks.open(deadline)

    def order() -> bytes:
        assert coordinator is not None
        request = pb.WakeRolloutsRequest(session_id=coordinator.leases.session_id)
        return _ordered(coordinator, coordinator.stub.WakeRollouts, request, deadline)

    return tuple(json.loads(ranks.share(order)))


def _ordered(
    coordinator: CoordinatorClient,
    method: Callable[..., Any],
    request: pb.SleepRolloutsRequest | pb.WakeRolloutsRequest,
    deadline: float,
) -> bytes:
    """Call ``method`` under the base's lease; return the names of the ordered replicas, as JSON."""

    def call(token: int, left: float) -> list[str]:
        request.fencing_token = token
        return list(method(request, timeout=left).replica_ids)

    names = coordinator.with_lease(BASE_POLICY, types_pb2.POLICY_KIND_BASE, call, deadline)
    return json.dumps(names).encode()


def _gathered(ranks: Ranks) -> list[str]:
    """Return the sorted GPU UUIDs of all ranks at the sender, nothing elsewhere; collective."""
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
