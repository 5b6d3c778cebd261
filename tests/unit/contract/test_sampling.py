"""What sampling settings may be: one rule for those who make them and those who take them."""

from __future__ import annotations

import dataclasses
from decimal import Decimal
from typing import Any

import numpy
import pytest

from rollout_side.agent.servicers import decode_sampling
from weft_rl.contract.errors import InvalidRequestError
from weft_rl.contract.sampling import MAX_SEED, Sampling, check_num_samples
from weft_rl.v1 import generate_pb2 as pb

NAN, INF = float("nan"), float("inf")
#: Values of each setting that no engine can sample by.
WRONG: dict[str, list[Any]] = {
    "temperature": [-1, -1e-9, NAN, INF, -INF, 1e39, 10**400, "1", None, True, Decimal(1)],
    "top_p": [0, -0.1, 1.0001, NAN, INF, "1", None],
    "top_k": [-1, 2**32, 1.0, NAN, "1", None, True],
    "min_p": [-0.1, 1.1, NAN, INF, None],
    "repetition_penalty": [0, -1, NAN, INF, 1e39, None],
    "seed": [-1, MAX_SEED + 1, 2**70, 1.5, NAN, True, "1"],
    "max_tokens": [0, -1, 2**32, 1.5, INF, True, "1"],
    "min_tokens": [-1, 2**32, 0.5, None, True],
    "stop": [[""], ["x"] * 17, ["x" * 1025], 3, [3], None, b"x"],
    "stop_token_ids": [[-1], [2**32], [1] * 1025, ["x"], [True], None, 1.5],
    "ignore_eos": [1, None, "yes"],
}


def test_every_setting_is_tried() -> None:
    assert WRONG.keys() == {field.name for field in dataclasses.fields(Sampling)}


@pytest.mark.parametrize(
    ("name", "value"),
    [(name, value) for name, values in WRONG.items() for value in values],
    ids=lambda given: repr(given)[:20],
)
def test_what_cannot_be_is_refused_by_name_at_once(name: str, value: Any) -> None:
    with pytest.raises(InvalidRequestError, match=rf"^{name}=.*: give ") as refused:
        Sampling(**{name: value})
    assert refused.value.metadata == {"field": f"Sampling.{name}"}
    assert len(refused.value.message) < 250
    with pytest.raises(InvalidRequestError):
        dataclasses.replace(Sampling(), **{name: value})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -1), ("temperature", NAN), ("temperature", 1e39), ("top_p", 0),
        ("top_p", 1.5), ("min_p", -0.1), ("repetition_penalty", 0), ("seed", -1), ("stop", [""]),
        ("stop", ["x" * 1025]), ("stop_token_ids", [1] * 1025),
    ],
)  # fmt: skip
def test_a_replica_refuses_the_same_in_the_same_words(name: str, value: Any) -> None:
    with pytest.raises(InvalidRequestError) as there:
        decode_sampling(pb.Sampling(**{name: value}))
    with pytest.raises(InvalidRequestError) as here:
        Sampling(**{name: value})
    assert there.value.metadata == here.value.metadata
    assert there.value.message.partition("give")[2] == here.value.message.partition("give")[2]


def test_settings_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(InvalidRequestError, match="min_tokens=5: give at most max_tokens, 4"):
        Sampling(min_tokens=5, max_tokens=4)
    assert Sampling(min_tokens=4, max_tokens=4).min_tokens == 4


def test_numbers_of_other_libraries_are_taken_and_kept_as_our_own() -> None:
    how = Sampling(temperature=numpy.float32(0.5), top_k=numpy.int64(3), top_p=1, seed=0)
    assert (how.temperature, how.top_k, how.top_p) == (0.5, 3, 1.0)
    assert (type(how.temperature), type(how.top_k), type(how.top_p)) == (float, int, float)
    assert how == Sampling(temperature=0.5, top_k=3, top_p=1.0, seed=0)
    extremes = Sampling(temperature=0, min_p=1, top_p=1e-9, max_tokens=2**32 - 1, seed=MAX_SEED)
    assert extremes.temperature == 0


@pytest.mark.parametrize("number", [0, -1, 1025, 1.0, NAN, True, "2", None])
def test_a_number_of_samples_is_one(number: Any) -> None:
    with pytest.raises(InvalidRequestError, match=r"^n=.*: give a whole number") as refused:
        check_num_samples(number, Sampling(), name="n")
    assert refused.value.metadata == {"field": "Sampling.num_samples"}


def test_there_is_one_most_likely_sample() -> None:
    assert check_num_samples(1, Sampling(temperature=0)) == 1
    assert check_num_samples(1024, Sampling()) == 1024
    with pytest.raises(InvalidRequestError, match="num_samples=2: give 1 with temperature=0"):
        check_num_samples(2, Sampling(temperature=0))
