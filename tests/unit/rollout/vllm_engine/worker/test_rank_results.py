"""What a worker's method answers, whatever became of it, and what is made of all ranks' answers."""

from __future__ import annotations

from typing import Any

import pytest

from rollout_side.vllm_engine.worker.rank_results import RankResult, check_results, guarded
from weft_rl.contract.errors import CapacityError, LoadFailedError, NotReadyError


class _Worker:
    def __init__(self, rank: int, error: BaseException | None = None) -> None:
        self.rank, self.error = rank, error

    @guarded
    def work(self, value: int) -> dict[str, Any]:
        if self.error is not None:
            raise self.error
        return {"value": value}


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(1), AssertionError()])
def test_no_kind_of_failure_passes_the_guard(error: BaseException) -> None:
    answer = _Worker(1, error).work(2)
    assert (answer["ok"], answer["rank"]) == (False, 1)
    assert type(error).__name__ in answer["error_message"]
    with pytest.raises(LoadFailedError, match=type(error).__name__):
        check_results([answer])


def test_a_typed_error_keeps_its_type_and_metadata() -> None:
    error = CapacityError("full", metadata={"holder": "math@1"})
    answers = [_Worker(0).work(1), _Worker(1, error).work(1)]
    with pytest.raises(CapacityError, match="rank 1 of 2: full") as raised:
        check_results(answers)
    assert raised.value.metadata["holder"] == "math@1"
    assert "dirty" not in raised.value.metadata
    assert check_results([_Worker(0).work(1)]) == [{"value": 1}]


def test_mixed_answers_are_dirty_where_they_leave_mixed_weights() -> None:
    answers: list[RankResult] = [_Worker(0).work(1), _Worker(1, NotReadyError("no")).work(1)]
    with pytest.raises(NotReadyError) as raised:
        check_results(answers, mixed_is_dirty=True)
    assert raised.value.metadata["dirty"] == "true"
    with pytest.raises(NotReadyError) as raised:
        check_results(answers[1:], mixed_is_dirty=True)
    assert "dirty" not in raised.value.metadata
