"""A replica that brings what it holds to another: the source of a clone."""

from __future__ import annotations

import dataclasses
from collections.abc import Generator
from typing import TYPE_CHECKING, Any

from tests.sim.clock import Future, any_of
from tests.sim.data import layout_of
from tests.sim.sender import Epoch, Sending
from tests.sim.store import Copy
from weft_rl.contract.errors import NotFoundError, TransferTimeoutError, WeftError
from weft_rl.coordinator.decisions.state import effects

if TYPE_CHECKING:
    from tests.sim.replica import SimReplica

#: After its last bucket a clone's source waits so long for its group to end.
_END_SECONDS = 30.0


class CloneSource:
    """The clones that one process of a replica sends."""

    def __init__(self, replica: SimReplica) -> None:
        self._replica = replica
        self._begun: set[str] = set()

    def send(self, order: effects.CallSend, answer: Future) -> None:
        """Take the order; a repeated one begins nothing."""
        copy = self._replica.store.held(order.version)
        if copy is None:
            answer.set(error=NotFoundError(f"no copy of {order.version} is held here"))
            return
        answer.set(True)
        if order.group.group_id not in self._begun:
            self._begun.add(order.group.group_id)
            self._replica.worker.spawn(self._clone(order, copy))

    def _clone(self, order: effects.CallSend, copy: Copy) -> Generator[Any, Any, None]:
        world, clock = self._replica.world, self._replica.clock
        deadline = clock.now + order.timeout_seconds
        yield world.network.delay()
        digest = copy.digest
        if world.random.random() < world.corruption / 3:  # digested anew as it is sent
            digest = dataclasses.replace(digest, value=b"rotten!!")
        sending = Sending(order.transfer_id, layout_of(copy.version.policy), digest, deadline)
        epoch = Epoch(world, self._replica, order.group)
        try:
            yield from epoch.send_buckets(sending)
            end = clock.now + _END_SECONDS
            late = TransferTimeoutError("the group does not end")
            while epoch.broken is None:
                yield any_of(clock, end - clock.now, epoch.changed(), late=late)
        except WeftError as error:
            epoch.give_up(order.transfer_id, error)
        epoch.close(WeftError("the clone has ended"))
