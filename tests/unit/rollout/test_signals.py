"""SIGHUP ends no process of a replica: it has the replica read its files again."""

from __future__ import annotations

import signal
from typing import Any

import pytest

from rollout_side.config import AgentConfig, RolloutConfig
from rollout_side.service import main


async def test_what_a_replica_starts_ignores_a_hangup(monkeypatch: pytest.MonkeyPatch) -> None:
    """A signal that is ignored stays so in processes that are started; a handler does not."""
    found = []

    async def check_contact(_: Any) -> None:
        found.append(signal.getsignal(signal.SIGHUP))
        raise RuntimeError("enough")

    monkeypatch.setattr(main, "check_contact", check_contact)
    before = signal.getsignal(signal.SIGHUP)
    config = RolloutConfig(
        agent=AgentConfig(coordinator="127.0.0.1:1", replica_id="r"), vllm_args=()
    )
    try:
        with pytest.raises(RuntimeError, match="enough"):
            await main.serve(config)
    finally:
        signal.signal(signal.SIGHUP, before)
    assert found == [signal.SIG_IGN]
