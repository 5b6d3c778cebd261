"""Replicas of several ranks."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.unit.rollout.memory.ranks.members import Replica
from weft_rl.contract.errors import (
    TransferAbortedError,
)


@pytest.fixture
def replica() -> Iterator[Replica]:
    made = Replica()
    yield made
    made.queue.fail(TransferAbortedError("the test has ended"))
    made.server.close()
