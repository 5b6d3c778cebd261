"""Side groups that a worker receives in; nothing here knows vLLM."""

from __future__ import annotations

import threading

from rollout_side.engine import JoinOrder
from rollout_side.memory.store import WorkerStore
from rollout_side.receive.group_receiver import GroupReceiver
from rollout_side.receive.probe import Probe
from weft_rl.contract.group import GroupTicket
from weft_rl.tracing import NO_TRACER, Tracer


class Receiver:
    """All side groups of one worker process, one per trainer.

    Args:
        store: Store that verified versions are put in.
        tracer: Tracer for the spans of what is received; its owner closes it.
    """

    def __init__(self, store: WorkerStore, tracer: Tracer = NO_TRACER) -> None:
        self._store, self._tracer = store, tracer
        self._lock = threading.Lock()
        self._groups: dict[str, GroupReceiver] = {}
        self._probe: Probe | None = None

    def join(self, order: JoinOrder) -> None:
        """Join a group in place of the trainer's former one.

        Returns at once; success and failure are told on the group's stream. A probe takes
        the place of a former one instead.
        """
        with self._lock:
            ticket, trainer_id = order.ticket, order.trainer_id
            if order.is_probe:
                if _leave_for(ticket, self._probe):
                    self._probe = Probe(ticket, self._store.threads)
                return
            former = self._groups.get(trainer_id)
            if _leave_for(ticket, former):
                self._groups[trainer_id] = GroupReceiver(
                    ticket, trainer_id, self._store, former, self._tracer
                )

    def close(self) -> None:
        """Leave all groups; does not wait for their threads."""
        with self._lock:
            if self._probe is not None:
                self._probe.leave()
            for group in self._groups.values():
                group.leave()
            self._groups.clear()


def _leave_for(ticket: GroupTicket, former: GroupReceiver | Probe | None) -> bool:
    """Leave a former group for a new one; return False if the new one is older, or the same."""
    if former is not None:
        if former.ticket.group_id == ticket.group_id or former.ticket.epoch > ticket.epoch:
            return False
        former.leave()
    return True
