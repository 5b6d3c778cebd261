"""Orders to answer a probe that workers do not take: never two on their way."""

from __future__ import annotations

import asyncio
import contextlib

from rollout_side.agent.serving import OrderQueue, ProbeOrders
from rollout_side.engine import JoinOrder
from weft_rl.contract.group import GroupTicket


class HungEngine:
    """Takes an order when it is let."""

    def __init__(self) -> None:
        self.orders: list[str] = []
        self.go_on = asyncio.Event()

    async def join_group(self, order: JoinOrder) -> None:
        self.orders.append(order.ticket.group_id)
        await self.go_on.wait()


def _order(group_id: str) -> JoinOrder:
    ticket = GroupTicket(
        coordinator="127.0.0.1:1",
        host="",
        group_id=group_id,
        token="",
        epoch=1,
        rank=1,
        size=2,
        backend="",
    )
    return JoinOrder(ticket=ticket, trainer_id="probe:r0", is_probe=True)


async def _given_up(orders: ProbeOrders, group_id: str) -> None:
    """The coordinator's call reaches its deadline."""
    call = asyncio.create_task(orders.start(_order(group_id)))
    for _ in range(5):
        await asyncio.sleep(0)
    call.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await call


def test_workers_are_told_of_a_probe_once_however_often_it_is_repeated() -> None:
    async def run() -> None:
        engine = HungEngine()
        orders = ProbeOrders(engine)  # type: ignore[arg-type]
        for _ in range(3):
            await _given_up(orders, "p1")
        await _given_up(orders, "p2")
        assert engine.orders == ["p1"], "the next one waits for it"
        engine.go_on.set()
        await orders.start(_order("p2"))
        await orders.start(_order("p2"))
        assert engine.orders == ["p1", "p2"]

    asyncio.run(run())


def test_the_running_order_is_known_until_it_has_ended() -> None:
    async def run() -> None:
        orders, go_on = OrderQueue(), asyncio.Event()
        order = asyncio.create_task(orders.run(go_on.wait(), "switching to math@1"))
        after = asyncio.create_task(orders.run(go_on.wait(), "switching to math@2"))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert orders.running is not None
        assert orders.running.what == "switching to math@1"
        go_on.set()
        await asyncio.gather(order, after)
        assert orders.running is None
        assert not orders.is_busy

    asyncio.run(run())
