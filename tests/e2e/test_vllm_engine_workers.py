"""No worker method raises, and none leaves an answer that the next call would get."""

from __future__ import annotations

import os
import signal
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from rollout_side.vllm_engine.server.worker_calls import Deadlines
from tests.e2e.conftest import TinyModels
from tests.e2e.engine_process import EngineProcess
from tests.e2e.staging_receiver import StageOrder
from tests.waits import until
from weft_rl.contract.errors import TransferTimeoutError
from weft_rl.contract.names import PolicyVersion

_FAULTS: list[tuple[str, tuple[Any, ...], str]] = [
    ("weft_open", (b"",), "called before"),
    ("weft_keep_draft", (1,), "TypeError"),
    ("weft_begin_trial", (), "TypeError"),
    ("weft_end_trial", (), "weft_begin_trial was not called"),
    ("weft_join", (b"garbage",), "garbled JoinOrder"),
    ("weft_handle", ("t-unknown",), "nothing is staged"),
    ("weft_adopt", (b"garbage", b""), "garbled"),
    ("weft_load_adapter", ("t-unknown", "{}", b"", 1), "nothing is staged"),
    ("weft_drop_adapter", ("x",), "TypeError"),
    ("weft_apply_base", ("t-unknown", b""), "nothing is staged"),
    ("weft_learn_copies", (b"name",), "garbled TensorDigests"),
    ("weft_load_in_place", ("t-unknown", "base@1"), "was not prepared here"),
    ("weft_loaded", ("t-unknown", b""), "is not loaded in place here"),
    ("weft_keep_base", (), "TypeError"),
    ("weft_bound_undo", (), "TypeError"),
    ("weft_take_back", (), "TypeError"),
    ("weft_pin_bases", (1,), "TypeError"),
    ("weft_held", ("base", 99), "no copy of base@99"),
    ("weft_digest", (), "TypeError"),
    ("weft_digested", (1,), "TypeError"),
    ("weft_send", (b"garbage",), "garbled SendOrder"),
    ("weft_spill", (b"",), "garbled SpillOrder"),
    ("weft_restore", (), "TypeError"),
    ("weft_restored", (), "TypeError"),
    ("weft_discard", (), "TypeError"),
    ("weft_sleep", (), "TypeError"),
    ("weft_wake", (), "TypeError"),
    ("weft_awake", (1,), "TypeError"),
    ("weft_close", (1,), "TypeError"),
]


@pytest.mark.parametrize(("method", "args", "text"), _FAULTS, ids=[f[0] for f in _FAULTS])
def test_a_failing_method_answers_and_the_next_call_is_right(
    engine_tp2: EngineProcess, method: str, args: tuple[Any, ...], text: str
) -> None:
    answers = engine_tp2.rpc(method, *args)
    assert [answer["rank"] for answer in answers] == [0, 1]
    failed = [answer for answer in answers if not answer["ok"]]
    assert failed, answers
    assert text in failed[0]["error_message"]
    held = engine_tp2.rpc("weft_pin_bases", [])
    assert [a["ok"] for a in held] == [True, True]
    assert [a["rank"] for a in held] == [0, 1]


def test_one_rank_fails_and_the_other_drops_what_it_took(
    engine_tp2: EngineProcess, qwen2_tied: TinyModels
) -> None:
    """The file of the order is missing: rank 0 fails in join, rank 1 has no receiver."""
    order = StageOrder(transfer_id="t", version="lost@1", file="/nonexistent").join_order()
    with pytest.raises(Exception, match="rank 0 of 2"):
        engine_tp2.call("join_group", order)
    engine_tp2.push_adapter("found@1", qwen2_tied.adapters[0])
    assert engine_tp2.complete("found", [5, 6, 7]).model == "found@1"


@pytest.mark.filterwarnings("ignore")  # vLLM's and torch's own, at import
def test_every_method_is_guarded() -> None:
    from rollout_side.vllm_engine.worker.extension import WeftWorker

    methods = [name for name in vars(WeftWorker) if not name.startswith("__")]
    assert {name for name, _, _ in _FAULTS} == set(methods)
    assert all(name.startswith("weft_") for name in methods)
    assert all(hasattr(getattr(WeftWorker, name), "__wrapped__") for name in methods)


def test_workers_that_were_stopped_go_on_where_they_were(
    engine_tp2: EngineProcess, qwen2_tied: TinyModels
) -> None:
    """For longer than a call may take, a request and a push under way."""
    engine, pids = engine_tp2, engine_tp2.facts["worker_pids"]
    engine.push_base("base@70", qwen2_tied.base)
    answer = engine.complete("tiny", [5, 6, 7], 200)
    engine.call("_workers.__setattr__", "_deadlines", Deadlines(call_seconds=0.5))
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(engine.complete, "tiny", [5, 6, 7], 200)
        try:
            until(lambda: running.done() or engine.call("num_requests"))
            for pid in pids:
                os.kill(pid, signal.SIGSTOP)
            for late in (("pin_bases", [70]), ("apply_retained", PolicyVersion("base", 70))):
                with pytest.raises(TransferTimeoutError, match="did not finish"):
                    engine.call(*late)
            assert engine.call("memory").retained_bases[0] == 70  # nobody is asked
        finally:
            for pid in pids:
                os.kill(pid, signal.SIGCONT)
            engine.call("_workers.__setattr__", "_deadlines", Deadlines())
        assert running.result(timeout=60) == answer
    assert engine.call("dirty_reason") == ""
    assert engine.rpc("weft_pin_bases", [])[1]["ok"]
    engine.push_base("base@71", qwen2_tied.base)
    assert engine.complete("tiny", [5, 6, 7], 200) == answer
