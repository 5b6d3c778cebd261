"""The coordinator's side groups: a model of ``weft_rl.coordinator.runtime.live_groups``."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from tests.sim.network import Stream
from weft_rl.contract.errors import (
    NotAllowedError,
    RequestConflictError,
    StaleEpochError,
    WeftError,
)
from weft_rl.contract.group import LinkUsage
from weft_rl.contract.manifest import SendPlan
from weft_rl.coordinator.decisions.state import effects, events
from weft_rl.coordinator.decisions.state.transfer import Activity, Group, RankReport
from weft_rl.coordinator.runtime.live_groups import Watermark

if TYPE_CHECKING:
    from tests.sim.world import World


class _LiveGroup:
    def __init__(self, group: Group) -> None:
        self.group = group
        self.links: dict[int, Stream] = {}
        self.plan: SendPlan | None = None
        self.watermark: Watermark | None = None
        self.reports: dict[int, RankReport] = {}
        self.num_told: dict[int, int] = {}
        #: The receiver whose link is slow, if one's is; its buckets come no later for that.
        self.slow: int | None = None

    def hops(self) -> dict[tuple[int, int], LinkUsage]:
        """Return what the members measure in a chain; nothing before somebody's link is slow."""
        chain = (0, *self.group.receivers)
        if self.slow is None:
            return {}
        return {
            (source, target): LinkUsage(
                _BYTES, _BYTES / (1 if self.slow in (source, target) else 100)
            )
            if target != self.slow
            else LinkUsage(_BYTES, _BYTES, num_waiting=_BYTES)
            for source, target in pairwise(chain)
        }


_BYTES = 2**16


class LiveGroups:
    """All live groups; ``post`` takes the events of their streams."""

    def __init__(self, post: Callable[[events.Event], None], world: World) -> None:
        self._post, self._world = post, world
        self.live: dict[str, _LiveGroup] = {}

    def attend(self, stream: Stream, group_id: str, token: str, rank: int) -> None:
        """A rank's stream says hello."""
        live = self.live.get(group_id)
        if live is None:
            stream.end(StaleEpochError(f"group {group_id} was dropped"))
        elif token != live.group.token_of(rank):
            stream.end(NotAllowedError("wrong token"))
        elif rank in live.links:
            stream.end(RequestConflictError(f"rank {rank} attends already"))
        else:
            assert rank < live.group.size
            live.links[rank] = stream
            stream.server_message = lambda message: self._receive(group_id, rank, message)
            stream.server_closed = lambda why: self._leave(stream, group_id, rank, why)
            self._post(events.RankAttends(group_id, rank))

    def _leave(self, stream: Stream, group_id: str, rank: int, why: str) -> None:
        live = self.live.get(group_id)
        if live is not None and live.links.get(rank) is stream:
            del live.links[rank]
            self._post(events.RankGone(group_id, rank, why))

    def _receive(self, group_id: str, rank: int, message: tuple[Any, ...]) -> None:
        kind, transfer_id, *rest = message
        live = self.live.get(group_id)
        mark = live.watermark if live else None
        if kind == "prepared":
            self._post(events.RankPrepared(group_id, transfer_id, rank, *rest))
        elif kind == "load_due":
            self._post(events.RankLoadDue(group_id, transfer_id, rank))
        elif kind == "progress" and live is not None:
            live.reports[rank] = RankReport(transfer_id, Activity.WAITING, *rest)
        elif kind == "failed":
            self._post(events.RankFailed(group_id, transfer_id, rank, *rest))
        elif live is not None and mark is not None and mark.transfer_id == transfer_id:
            if kind == "verified":
                for sender in mark.report(rank, *rest):
                    self._release(live, sender, transfer_id, mark.num_verified)
            elif kind == "staged":
                assert rank in live.group.senders or mark.is_through(rank)
                self._post(events.RankStaged(group_id, transfer_id, rank, *rest))

    def take_progress(self) -> list[events.RanksHeard]:
        """What ranks have said since this was asked last, by group."""
        told = []
        for name, live in self.live.items():
            reports, live.reports = live.reports, {}
            mark, transfer_id, new = live.watermark, "", dict[int, int]()
            if mark is not None:
                transfer_id = mark.transfer_id
                new = {r: n for r, n in mark.num_reported.items() if live.num_told.get(r) != n}
                live.num_told.update(new)
            hops = self._measure(live, transfer_id)
            if reports or new or hops:
                told.append(events.RanksHeard(name, reports, transfer_id, new, hops))
        return told

    def _measure(self, live: _LiveGroup, transfer_id: str) -> dict[tuple[int, int], LinkUsage]:
        links = self._world.links
        if links is None or not transfer_id:
            return {}
        if live.slow is None and links.random() < 0.2:
            live.slow = links.choice([*live.group.receivers])
        if live.slow is not None:
            slow = live.group.trainer_id, live.group.member_name(live.slow)
            self._world.slow_links.add(slow)
        return live.hops()

    def carry_out(self, effect: effects.Effect) -> None:
        """What the driver has decided."""
        match effect:
            case effects.OpenGroup(group=group):
                self.live[group.group_id] = _LiveGroup(group)
            case effects.DropGroup(group_id=group_id, why=why):
                live = self.live.pop(group_id, None)
                for link in live.links.values() if live else ():
                    link.end(StaleEpochError(f"the group was dropped: {why}"))
            case effects.SendPrepare(group_id=group_id, transfer=transfer, time_left=left):
                live = self.live.get(group_id)
                if live is not None:
                    live.plan = transfer.send_plan
                for rank in live.group.receivers if live is not None else ():
                    if rank in live.links:
                        live.links[rank].down(("prepare", transfer.transfer_id, transfer, left))
            case effects.SendStart(group_id=group_id, transfer_id=transfer_id):
                first = effect.first_bucket
                live = self.live.get(group_id)
                if live is not None:
                    live.watermark = Watermark(
                        transfer_id,
                        effect.num_receivers,
                        effect.num_buckets,
                        first,
                        live.group.num_senders,
                        live.plan,
                    )
                    live.num_told = {}
                self._send(group_id, ("start", transfer_id, first))
                for sender in live.group.senders if first and live is not None else ():
                    self._release(live, sender, transfer_id, first)
            case effects.SendReform(group_id=group_id, transfer_id=transfer_id):
                live = self.live.get(group_id)
                for rank in live.group.senders if live is not None else ():
                    if rank in live.links:
                        live.links[rank].down(("reform", transfer_id, effect.renewed))
            case effects.SendAbort(group_id=group_id, transfer_id=transfer_id, failure=failure):
                error: WeftError = failure.error()
                self._send(group_id, ("abort", transfer_id, error))

    def _send(self, group_id: str, message: tuple[Any, ...]) -> None:
        live = self.live.get(group_id)
        for link in live.links.values() if live else ():
            link.down(message)

    def _release(self, live: _LiveGroup, rank: int, transfer_id: str, num_buckets: int) -> None:
        if rank in live.links:
            live.links[rank].down(("released", transfer_id, num_buckets))
