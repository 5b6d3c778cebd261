"""What is emptied at a switch, over vLLM's double."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from rollout_side.vllm_engine.compat.requests import KEEP_REQUESTS
from rollout_side.vllm_engine.replica import VllmReplica
from rollout_side.vllm_engine.server import request_gate
from rollout_side.vllm_engine.server.requests_at_switch import EngineCaches
from tests.doubles.vllm import BASE, FakeEngine, make_replica
from weft_rl.contract.capabilities import RunningRequests
from weft_rl.contract.errors import LoadFailedError, TransferTimeoutError
from weft_rl.contract.names import STARTED_WITH

REMOTE = RuntimeError("Failed to reset KV cache even when all the running requests are preempted")


async def _in_place(replica: VllmReplica) -> None:
    await replica.load_in_place("t", BASE, 60.0)
    await replica.apply_base("t", BASE, b"")


WAYS = {
    "staged": lambda replica: replica.apply_base("t", BASE, b""),
    "in place": _in_place,
    "from the files": lambda replica: replica.apply_retained(STARTED_WITH),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("choice", ["recompute", "keep", "abort"])
async def test_every_switch_forgets_what_an_encoder_has_seen(
    choice: RunningRequests, way: str
) -> None:
    engine = FakeEngine(sees=True)
    replica = make_replica(engine, in_place=True, running_requests=choice)
    await WAYS[way](replica)
    forgotten = [KEEP_REQUESTS if choice == "keep" else "reset", "reset encoder"]
    begin = engine.calls.index(forgotten[0])
    assert engine.calls[begin : begin + 2] == forgotten
    assert engine.calls.index("pause") < begin < engine.calls.index("resume")


@pytest.mark.parametrize(
    "field",
    [{"is_multimodal_model": True}, {"is_encoder_decoder": True}, {"runner_type": "pooling"}],
)
def test_what_has_an_encoder(field: dict[str, object]) -> None:
    engine = FakeEngine()
    assert not EngineCaches(engine).has_encoder
    engine.model_config = SimpleNamespace(**{**vars(engine.model_config), **field})
    assert EngineCaches(engine).has_encoder


async def test_an_encoder_that_cannot_be_reset_is_not_asked_again() -> None:
    engine = FakeEngine(sees=True)
    engine.failures["reset encoder"] = RuntimeError("no")
    replica = make_replica(engine)
    with pytest.raises(LoadFailedError, match="forgetting"):
        await replica.apply_base("t", BASE, b"")
    assert replica.dirty_reason
    assert replica.tracker.refuse_reason
    assert "resume" not in engine.calls


@pytest.mark.parametrize("choice", ["recompute", "abort"])
async def test_blocks_outside_are_forgotten_and_none_arrives_behind_the_load(
    choice: RunningRequests,
) -> None:
    engine = FakeEngine(connector=True)
    # A request waits for blocks; a connector lets go of some only later.
    engine.resets = [REMOTE, False, None]
    replica = make_replica(engine, running_requests=choice)
    await replica.apply_base("t", BASE, b"")
    tried = ["pause", "reset all", "resume"]
    assert engine.calls == [
        *tried, *tried, *tried, "pause", "reset all",
        "weft_apply_base", "base@3", "reset all", "weft_keep_base", "resume",
    ]  # fmt: skip


async def test_blocks_are_awaited_before_a_load_in_place_too() -> None:
    engine = FakeEngine(connector=True)
    engine.resets = [False]
    replica = make_replica(engine, in_place=True)
    await replica.load_in_place("t", BASE, 60.0)
    assert engine.calls[-3:] == ["pause", "reset all", "weft_load_arriving"]


async def test_blocks_that_never_arrive_end_the_push_and_nothing_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(request_gate, "_ARRIVING_SECONDS", 0.0)
    engine = FakeEngine(connector=True)
    engine.reset_works = False
    replica = make_replica(engine)
    with pytest.raises(TransferTimeoutError, match="connector"):
        await replica.apply_base("t", BASE, b"")
    assert not replica.dirty_reason
    assert engine.calls[-1] == "resume"
    assert "weft_apply_base" not in engine.calls


async def test_blocks_outside_that_stay_behind_a_load_are_never_used() -> None:
    engine = FakeEngine(connector=True)
    engine.resets = [True, False]
    replica = make_replica(engine)
    with pytest.raises(LoadFailedError, match="old blocks"):
        await replica.apply_base("t", BASE, b"")
    assert replica.dirty_reason
    await replica.apply_base("t", BASE, b"")  # which pauses, and awaits nothing
    assert not replica.dirty_reason


async def test_an_engine_that_dies_as_it_is_emptied_is_not_asked_again() -> None:
    engine = FakeEngine(connector=True)
    engine.resets = [RuntimeError("dead")]
    engine.errored = True
    with pytest.raises(LoadFailedError, match="dead"):
        await make_replica(engine).apply_base("t", BASE, b"")
    assert engine.calls == ["pause", "reset all"]


@pytest.mark.parametrize("connector", [False, True])
async def test_blocks_outside_are_found_by_their_base(connector: bool) -> None:
    engine = FakeEngine(connector=connector)
    replica = make_replica(engine)
    request = SimpleNamespace(cache_salt=None, external_req_id="r")
    for _ in range(2):
        await engine.add_request_async(request)
        request.cache_salt = None
        await replica.apply_base("t", BASE, b"")
    assert engine.salts == (["base@0 0 ", "base@3 1 "] if connector else [None, None])
