"""Sleep of the replicas on a trainer's GPUs, ordered by all its ranks in step."""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from types import TracebackType
from typing import Any, Protocol, TypeVar

import torch

from trainer_side.pool.coordinator_client import CoordinatorClient
from trainer_side.ranks.ranks import SENDER, Ranks, agreeing, is_told
from weft_rl.contract.errors import TransferTimeoutError, WeftError
from weft_rl.contract.names import BASE_POLICY
from weft_rl.contract.options import (
    SWITCH_SECONDS,
    SleepLevel,
    WhenRunning,
    check_choice,
    check_seconds,
)
from weft_rl.rpc.codec import duration_to_proto, when_running_to_proto
from weft_rl.transport.backends import gpu_uuid
from weft_rl.v1 import publish_pb2 as pb
from weft_rl.v1 import types_pb2

_log = logging.getLogger(__name__)
_T = TypeVar("_T")

# Longest wait for replicas that are woken after a failure: it is not to hide that one.
_WAKE_ALONE_SECONDS = 10.0
# Of one rank's list, as JSON: some sixty GPUs.
_LIST_BYTES = 2_560


class InStep(Protocol):
    """Function of a Publisher that runs work in step with the other ranks, between pushes."""

    def __call__(
        self, call: str, work: Callable[[Ranks, CoordinatorClient | None], _T], deadline: float
    ) -> _T:
        """Run ``work`` until ``deadline``, ``time.monotonic()``, and return its result. It gets the
        coordinator client at the sender, None at other ranks; ``call`` names it in errors."""


class RolloutSleep(AbstractContextManager[tuple[str, ...]]):
    """Sleep of the replicas on a trainer's GPUs, inside a ``with``; see
    ``Publisher.rollouts_asleep``.

    Args:
        in_step: Runs what all ranks do together.
        coordinator: Client at the sender; None at other ranks.
        tell: Tells the other ranks of an error for which this one does not come to the end.

    Raises:
        InvalidRequestError: A setting that cannot be right.
    """

    def __init__(
        self,
        level: SleepLevel,
        when_running: WhenRunning,
        timeout_seconds: float,
        *,
        in_step: InStep,
        coordinator: CoordinatorClient | None,
        tell: Callable[[BaseException], None] = lambda error: None,
    ) -> None:
        check_choice("level", level, SleepLevel)
        check_choice("when_running", when_running, WhenRunning)
        check_seconds("timeout_seconds", timeout_seconds)
        self._level, self._when_running = level, when_running
        self._timeout_seconds = timeout_seconds
        self._in_step, self._coordinator, self._tell = in_step, coordinator, tell
        self._pid = os.getpid()

    def __enter__(self) -> tuple[str, ...]:
        deadline = time.monotonic() + self._timeout_seconds + SWITCH_SECONDS
        return self._in_step("rollouts_asleep", partial(self._begin, deadline=deadline), deadline)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is not None:
            if not _is_known(error):
                self._tell(error)
            self._wake_alone()
            return
        deadline = time.monotonic() + SWITCH_SECONDS
        try:
            self._in_step("the end of rollouts_asleep", partial(wake, deadline=deadline), deadline)
        except TransferTimeoutError:  # they were told
            raise
        except BaseException:
            self._wake_alone()
            raise

    def _begin(
        self, ranks: Ranks, coordinator: CoordinatorClient | None, *, deadline: float
    ) -> tuple[str, ...]:
        try:
            return sleep(
                ranks,
                coordinator,
                level=self._level,
                when_running=self._when_running,
                timeout_seconds=self._timeout_seconds,
                deadline=deadline,
            )
        except BaseException as error:
            ranks.leave(error)  # before this rank waits for anything
            self._wake_alone()  # replicas that did fall asleep
            raise

    def _wake_alone(self) -> None:
        """Wake the replicas from the sender, after a failure: other ranks may not come to it."""
        if self._coordinator is None or os.getpid() != self._pid:  # a forked child's failure
            return
        try:
            _order_wake(self._coordinator, time.monotonic() + _WAKE_ALONE_SECONDS)
        except WeftError as error:
            _log.warning("replicas may sleep until the lease of the base ends: %s", error)


def _is_known(error: BaseException) -> bool:
    """Return whether an error that ends a ``with`` is, or came of, one that all ranks know."""
    seen: BaseException | None = error
    while seen is not None:
        if is_told(seen):
            return True
        seen = seen.__context__
    return False


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
    *,
    level: SleepLevel,
    when_running: WhenRunning,
    timeout_seconds: float,
    deadline: float,
) -> tuple[str, ...]:
    """Put replicas that share the ranks' GPUs to sleep; collective. Return their names.

    Args:
        timeout_seconds: Longest time for running requests to end.
        deadline: Deadline of the whole call, ``time.monotonic()``.

    Raises:
        WeftError: The same on every rank; see ``Publisher.rollouts_asleep``. But for
            ``SLEEP_DISABLED``, an error of one replica leaves the others asleep, or about to be:
            metadata ``asleep`` and the message name them.
    """
    ranks.open(deadline, {"call": "rollouts_asleep", "level": level, "when_running": when_running})
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
    ranks: Ranks, coordinator: CoordinatorClient | None, *, deadline: float
) -> tuple[str, ...]:
    """Wake replicas that this trainer put to sleep; collective. Return their names.

    Raises:
        TransferTimeoutError: Not in time; they are woken all the same.
        WeftError: The same on every rank; see ``Publisher.rollouts_asleep``.
    """
    ranks.open(deadline, {"call": "the end of rollouts_asleep"})

    def order() -> bytes:
        assert coordinator is not None
        return _order_wake(coordinator, deadline)

    return tuple(json.loads(ranks.share(order)))


def _order_wake(coordinator: CoordinatorClient, deadline: float) -> bytes:
    request = pb.WakeRolloutsRequest(session_id=coordinator.leases.session_id)
    return _ordered(coordinator, coordinator.stub.WakeRollouts, request, deadline)


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

    kind, waits_for = types_pb2.POLICY_KIND_BASE, "the replicas that share a GPU"
    names = coordinator.with_lease(BASE_POLICY, kind, call, deadline, waits_for)
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
