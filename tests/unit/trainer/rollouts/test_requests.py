"""What is asked, refused before anything is sent where it cannot be right; what comes back."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from trainer_side.rollouts.dispatch import NextStep, after
from trainer_side.rollouts.requests import (
    PromptRequest,
    WantedVersions,
    check_sampling,
    checked_prompts,
    wanted_of,
)
from trainer_side.rollouts.sample import PartialSample
from weft_rl.contract.errors import (
    CapacityError,
    InvalidNameError,
    InvalidRequestError,
    NotFoundError,
    PeerUnavailableError,
    VersionChangedError,
    WeftError,
)
from weft_rl.contract.names import PolicyVersion
from weft_rl.contract.sampling import MAX_SEED, Sampling
from weft_rl.v1 import generate_pb2 as pb
from weft_rl.v1 import types_pb2


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        (("math", None), WantedVersions("math")),
        (("math@3", None), WantedVersions("math", exact=3)),
        ((PolicyVersion("math", 3), None), WantedVersions("math", exact=3)),
        (("base@0", None), WantedVersions("base", exact=0)),
        (("math", "math@2"), WantedVersions("math", at_least=2)),
        (("math", PolicyVersion("math", 2)), WantedVersions("math", at_least=2)),
    ],
)
def test_a_version_is_said_in_one_way(given: tuple[Any, Any], wanted: WantedVersions) -> None:
    assert wanted_of(*given) == wanted


@pytest.mark.parametrize(
    ("given", "what"),
    [
        (("math@3", "math@3"), "model=math@3 is one version, and min_version=math@3 asks for"),
        (("math", "poet@3"), "min_version=poet@3 is no version of math"),
    ],
)
def test_contradictions_are_refused(given: tuple[Any, Any], what: str) -> None:
    with pytest.raises(InvalidRequestError, match=what):
        wanted_of(*given)


@pytest.mark.parametrize("name", ["", "a b", "math@", "math@x", "@3", 7])
def test_names_that_nothing_has_are_refused(name: Any) -> None:
    with pytest.raises(InvalidNameError):
        wanted_of(name, None)


@pytest.mark.parametrize("version", [3, True, "3", "math", "math@-1", 1.5])
def test_what_is_no_version_is_refused(version: Any) -> None:
    with pytest.raises(InvalidNameError):
        wanted_of("math", version)


def test_prompts_are_taken_as_they_come() -> None:
    given = ["ab", [1, 2], (3,), torch.tensor([4, 5]), [torch.tensor(6)]]
    assert [p.prompt for p in checked_prompts(given)] == ["ab", [1, 2], [3], [4, 5], [6]]
    assert checked_prompts(torch.tensor([[1, 2], [3, 4]])) == [([1, 2], ()), ([3, 4], ())]
    assert checked_prompts([]) == []


@pytest.mark.parametrize("given", ["ab", [1, 2], [[]], [""], [[-1]], [[2**32]], [[1.5]], [None]])
def test_what_is_no_list_of_prompts_is_refused(given: Any) -> None:
    with pytest.raises(InvalidRequestError):
        checked_prompts(given)


@pytest.mark.parametrize("given", [None, {"temperature": 1}, pb.Sampling()])
def test_sampling_of_another_kind_is_refused(given: Any) -> None:
    with pytest.raises(InvalidRequestError, match="sampling="):
        check_sampling(given, 1)


def test_the_seeds_of_all_samples_are_such_as_a_replica_takes() -> None:
    ask = _ask(Sampling(seed=MAX_SEED), index=3)
    assert ask.request(ask.wanted, [2]).sampling.seed == 3 * 5 + 2 - 1


@pytest.mark.parametrize("n", [0, True, "2", None, 1.0])
def test_a_number_of_samples_is_one(n: Any) -> None:
    with pytest.raises(InvalidRequestError, match="n="):
        check_sampling(Sampling(), n)


def _ask(how: Sampling, num_samples: int = 5, index: int = 0) -> PromptRequest:
    return PromptRequest(
        index=index,
        prompt=[1, 2],
        wanted=WantedVersions("math", exact=3),
        num_samples=num_samples,
        sampling=how,
        strict=True,
        timeout_seconds=1,
    )


def test_samples_that_are_missing_are_asked_for_together_unless_seeds_forbid_it() -> None:
    whole = [True, False, True, False, False]
    assert _ask(Sampling()).next_samples(whole) == [1, 3, 4]
    seeded = _ask(Sampling(seed=1))
    assert seeded.next_samples(whole) == [1]
    assert seeded.next_samples([True, True, True, False, False]) == [3, 4]
    assert seeded.next_samples([True] * 5) == []


def test_a_request_says_it_all() -> None:
    how = Sampling(
        temperature=0.5, top_p=0.9, top_k=3, min_p=0.1, repetition_penalty=1.1,
        seed=7, max_tokens=5, min_tokens=2, stop=("x",), stop_token_ids=(2,), ignore_eos=True,
    )  # fmt: skip
    ask = _ask(how, num_samples=4, index=10)
    request = ask.request(ask.wanted, [2, 3])
    assert (request.policy, request.strict, list(request.token_ids.ids)) == ("math@3", True, [1, 2])
    told = request.sampling
    assert (told.num_samples, told.seed, told.max_tokens, told.min_tokens) == (
        2,
        7 + 10 * 4 + 2,
        5,
        2,
    )
    assert (told.temperature, told.top_p, told.top_k, told.min_p) == (0.5, 0.9, 3, 0.1)
    assert (told.repetition_penalty, told.stop, told.stop_token_ids) == (1.1, ["x"], [2])
    assert told.ignore_eos
    assert ask.cost_tokens == 2 + 4 * 5


def test_a_sample_knows_the_versions_of_its_tokens() -> None:
    draft = PartialSample()
    draft.add(pb.SampleChunk(token_ids=[5, 6], logprobs=[-1, -2]))
    assert not draft.is_whole
    draft.add(
        pb.SampleChunk(
            token_ids=[7],
            logprobs=[-3],
            finish_reason=pb.FINISH_REASON_STOP,
            base_spans=[
                pb.BaseSpan(version=3, end=2),
                pb.BaseSpan(version=4, start=2, end=3, older_cache=True),
            ],
        )
    )
    assert draft.is_whole
    sample = draft.sample()
    assert (sample.token_ids.tolist(), sample.logprobs.tolist()) == ([5, 6, 7], [-1, -2, -3])
    assert sample.versions.tolist() == sample.base_versions.tolist() == [3, 3, 4]
    assert sample.older_cache.tolist() == [False, False, True]
    assert sample.finish_reason == "stop"
    assert draft.last is not None
    draft.last.adapter.CopyFrom(types_pb2.PolicyVersion(policy="math", version=9))
    assert draft.sample().versions.tolist() == [9, 9, 9]
    assert draft.sample().base_versions.tolist() == [3, 3, 4]


def test_one_that_was_ended_from_elsewhere_is_not_whole() -> None:
    draft = PartialSample()
    draft.add(pb.SampleChunk(finish_reason=pb.FINISH_REASON_ABORT))
    assert not draft.is_whole


@pytest.mark.parametrize(
    ("error", "has_begun", "was_failing", "what"),
    [
        (InvalidRequestError("x"), False, False, NextStep.END),
        (VersionChangedError("x"), True, False, NextStep.END),
        (NotFoundError("x"), False, False, NextStep.ASK_OTHERS),
        (PeerUnavailableError("x", reason="VERSION_AHEAD"), False, False, NextStep.WAIT),
        (PeerUnavailableError("x", reason="REFUSING"), False, False, NextStep.LEAVE),
        (CapacityError("x", reason="TOO_MANY_CALLS"), False, False, NextStep.LEAVE),
        (PeerUnavailableError("x", reason="COORDINATOR_AWAY"), False, True, NextStep.LEAVE),
        (PeerUnavailableError("x", reason="COORDINATOR_AWAY"), False, False, NextStep.RESTART),
        (PeerUnavailableError("x"), True, True, NextStep.RESTART),
        (WeftError("x"), False, False, NextStep.RESTART),
    ],
)
def test_a_failure_decides_what_is_next(
    error: WeftError, has_begun: bool, was_failing: bool, what: NextStep
) -> None:
    assert after(error, strict=True, has_begun=has_begun, was_failing=was_failing) is what


def test_what_was_ended_for_another_base_is_asked_again_unless_it_insists() -> None:
    ended = VersionChangedError("x")
    assert after(ended, strict=False, has_begun=True, was_failing=False) is NextStep.AGAIN


def test_stops_are_one_or_several() -> None:
    assert Sampling(stop="w5").stop == ("w5",)
    assert Sampling(stop=["w5", "w6"]).stop == ("w5", "w6")
    assert Sampling(stop_token_ids=7).stop_token_ids == (7,)
    assert Sampling(stop_token_ids=range(2)).stop_token_ids == (0, 1)


@pytest.mark.parametrize(
    "stops", [{"stop": 5}, {"stop": ["a", 5]}, {"stop": b"ab"}, {"stop_token_ids": "5"},
              {"stop_token_ids": [True]}, {"stop": None}]
)  # fmt: skip
def test_stops_of_another_kind_are_refused(stops: dict[str, Any]) -> None:
    (name,) = stops
    with pytest.raises(InvalidRequestError, match=f"{name}="):
        Sampling(**stops)


def test_numbers_beyond_all_versions_are_refused() -> None:
    for model, min_version in ((f"math@{10**20}", None), ("math", f"math@{10**20}")):
        with pytest.raises(InvalidNameError, match="has a number above"):
            wanted_of(model, min_version)
