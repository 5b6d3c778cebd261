"""A slow reader of routes gets the newest list, and no other."""

from __future__ import annotations

import asyncio

import pytest

from weft.contract.errors import PeerUnavailableError
from weft.coordinator.feed import RouteFeed


async def test_lists_that_nobody_took_are_not_told() -> None:
    feed = RouteFeed()
    assert await feed.newer(-1) == 0
    waiting = asyncio.create_task(feed.newer(0))
    await asyncio.sleep(0)
    for _ in range(1000):
        feed.change()
    assert await waiting == await feed.newer(0) == 1000


async def test_the_end_is_told_to_those_who_wait() -> None:
    feed = RouteFeed()
    waiting, held = asyncio.create_task(feed.newer(0)), asyncio.create_task(feed.hold(60))
    await asyncio.sleep(0)
    feed.close()
    await asyncio.wait_for(held, 5)
    with pytest.raises(PeerUnavailableError):
        await waiting
