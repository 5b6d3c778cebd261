"""The checks of ``make tenants`` find what they are for: unfair turns, and answers of another
version. No engine."""

import itertools
import math

import pytest
import torch

from tests.models import make_model
from tests.tenants.answers import MIN_APART, Answer, Judge, least_apart
from tests.tenants.fairness import (
    MAX_OVERTAKEN,
    Push,
    largest_lead,
    most_overtaken,
    percentile,
)
from tests.tenants.models import Tenant
from weft_rl.contract.names import PolicyVersion

PROMPT = [5, 9, 33, 70]


def pushes_in_turns(order):
    """A push a letter, one second each: a tenant asks again as soon as it was served."""
    asked, numbers, pushes = dict.fromkeys(order, 0.0), dict.fromkeys(order, 0), []
    for ended_at, policy in enumerate(order, start=1):
        numbers[policy] += 1
        pushes.append(Push(PolicyVersion(policy, numbers[policy]), asked[policy], ended_at))
        asked[policy] = ended_at
    return pushes


def test_tenants_that_take_turns_are_treated_fairly():
    pushes = pushes_in_turns("abcd" * 6)
    assert most_overtaken(pushes)[0] == 1
    assert largest_lead(pushes) == 1


def test_a_tenant_that_is_passed_over_is_seen():
    overtaken, who = most_overtaken(pushes_in_turns("abc" + "ab" * 4 + "c"))
    assert overtaken == 4 > MAX_OVERTAKEN
    assert who.endswith("while c@2 waited")
    assert largest_lead(pushes_in_turns("abc" + "ab" * 4 + "c")) == 4


@pytest.mark.parametrize(("count", "percent", "want"), [(20, 95, 19), (21, 95, 20), (1, 95, 1)])
def test_a_percentile_is_one_of_the_values(count, percent, want):
    assert percentile(range(1, count + 1), percent) == want


@pytest.fixture(scope="module")
def tenants(tmp_path_factory):
    base = make_model("qwen2", tmp_path_factory.mktemp("tenants") / "model")
    return [Tenant(base, index) for index in (0, 8)]


@torch.no_grad()
def answer_of(tenant, number, **changes):
    """What an engine with a version's weights would say to ``PROMPT``."""
    tokens = []
    tenant.draw(number)
    for _ in range(3):
        tokens.append(int(tenant.model(torch.tensor([[*PROMPT, *tokens]])).logits[0, -1].argmax()))
    version = tenant.version(number)
    told = {"asked": version, "named": version, "replica": "r0", "prompt": PROMPT}
    logprobs = tenant.logprobs(number, PROMPT, tokens)
    return Answer(**{**told, "tokens": tokens, "logprobs": logprobs, **changes})


def judged(tenants, answer):
    judge = Judge({tenant.policy: tenant for tenant in tenants})
    judge.judge(answer)
    return judge


def test_tenants_have_ranks_and_modules_of_their_own(tenants):
    assert tenants[0].rank == tenants[1].rank == 1
    several, few = (sum("lora_A" in n for n, _ in t.model.named_parameters()) for t in tenants)
    assert several > few > 0


def test_an_answer_of_the_version_that_was_asked_passes(tenants):
    for tenant, number in itertools.product(tenants, (1, 2)):
        judge = judged(tenants, answer_of(tenant, number))
        assert judge.problems == []
        assert judge.num_logprobs == 3


@pytest.mark.parametrize(("tenant", "number"), [(0, 2), (1, 1)], ids=["version", "policy"])
def test_tokens_of_another_version_are_seen_whatever_they_are_named(tenants, tenant, number):
    asked = tenants[0].version(1)
    wrong = answer_of(tenants[tenant], number, asked=asked, named=asked)
    (problem,) = judged(tenants, wrong).problems
    assert problem.startswith("tenant-00@1 at r0: log-probabilities are off")


def test_an_answer_that_names_another_version_or_has_no_tokens_is_seen(tenants):
    other = tenants[0].version(2)
    (named,) = judged(tenants, answer_of(tenants[0], 1, named=other)).problems
    assert named == "tenant-00@1 at r0 was answered by tenant-00@2"
    (empty,) = judged(tenants, answer_of(tenants[0], 1, tokens=[], logprobs=[])).problems
    assert empty.endswith("answered nothing")


def test_versions_whose_answers_are_alike_are_seen(tenants):
    one = answer_of(tenants[0], 1)
    near = [value + 1e-5 for value in one.logprobs]
    alike = answer_of(tenants[0], 2, tokens=one.tokens, logprobs=near)
    assert least_apart([one, alike]) < MIN_APART
    far = answer_of(tenants[0], 2, tokens=[*one.tokens[:-1], 1])
    assert math.isinf(least_apart([one, one, far]))
