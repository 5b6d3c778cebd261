"""What TRL's trainers are told to sample by, and what they get of the pool, without TRL itself."""

from collections import defaultdict
from types import SimpleNamespace

import pytest
import torch

from tests.unit.trainer.integrations.test_hf import REPORT
from trainer_side.integrations.trl import PoolGeneration, sampling_of
from trainer_side.push_request import PushResult
from trainer_side.rollouts.sample import Sample, SampleGroup
from weft_rl.contract.errors import PeerUnavailableError, UnsupportedError
from weft_rl.contract.names import PolicyVersion
from weft_rl.contract.sampling import Sampling


def trainer(generation_kwargs=None, regex=None, **settings):
    """What GRPOTrainer and RLOOTrainer have of their configuration, TRL's defaults."""
    usual = {
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": 0,
        "min_p": None,
        "repetition_penalty": 1.0,
        "max_completion_length": 256,
        "model_wrapped": torch.nn.Linear(1, 1),
        "_metrics": {"train": defaultdict(list), "eval": defaultdict(list)},
        "accelerator": SimpleNamespace(is_main_process=True, process_index=0),
    }
    args = SimpleNamespace(generation_kwargs=generation_kwargs, vllm_structured_outputs_regex=regex)
    return SimpleNamespace(args=args, **{**usual, **settings})


class Publisher:
    def push_base(self, model):
        return PushResult(PolicyVersion("base", 3), REPORT)

    def push_adapter(self, model, policy):
        return PushResult(PolicyVersion(policy, 17), REPORT)


class Rollouts:
    """Samples count on from their prompt; the log-probability of a token is a thousandth of it."""

    def __init__(self, error=None):
        self.asked, self.error = [], error

    def generate(self, prompts, **how):
        if self.error is not None:
            raise self.error
        self.asked.append((prompts, how))
        return [self._group(i, p, how["n"]) for i, p in enumerate(prompts)]

    def _group(self, index, prompt, num_samples):
        samples = []
        for n in range(num_samples):
            ids = torch.arange(n + 1) + 10 * prompt[-1]
            versions = torch.full((n + 1,), 17)
            samples.append(
                Sample(
                    token_ids=ids,
                    logprobs=-ids / 1024,
                    versions=versions,
                    base_versions=versions,
                    older_cache=versions < 0,
                    adapter=None,
                    finish_reason="stop",
                )
            )
        return SampleGroup(
            index=index,
            prompt_token_ids=prompt,
            samples=tuple(samples),
            replica_ids=("replica-0",) * num_samples,
        )


def test_sampling_is_all_that_a_trainer_was_told():
    assert sampling_of(trainer()) == Sampling(max_tokens=256)
    told = trainer(
        temperature=0.7, top_p=0.9, top_k=40, min_p=0.05, repetition_penalty=1.1,
        max_completion_length=None,
    )  # fmt: skip
    assert sampling_of(told) == Sampling(
        temperature=0.7, top_p=0.9, top_k=40, min_p=0.05, repetition_penalty=1.1
    )
    further = {"seed": 5, "stop": "end", "stop_token_ids": [7], "min_tokens": 2, "max_tokens": 9}
    assert sampling_of(trainer(generation_kwargs=further)) == Sampling(
        seed=5, stop=("end",), stop_token_ids=(7,), min_tokens=2, max_tokens=9
    )


@pytest.mark.parametrize(
    ("told", "named"),
    [
        ({"generation_kwargs": {"frequency_penalty": 0.5}}, "frequency_penalty"),
        ({"generation_kwargs": {"structured_outputs": {"regex": "a"}}}, "structured_outputs"),
        ({"generation_kwargs": {"n": 4}}, "n"),
        ({"regex": "[0-9]+"}, "vllm_structured_outputs_regex"),
    ],
)
def test_what_the_pool_cannot_do_is_refused_by_name(told, named):
    with pytest.raises(UnsupportedError, match=f"cannot sample with {named};"):
        PoolGeneration(trainer(**told), Publisher(), Rollouts(), "math")


def test_a_prompt_is_sent_once_and_answered_as_often_as_it_stands_there():
    rollouts = Rollouts()
    generation = PoolGeneration(trainer(temperature=0.5), Publisher(), rollouts, "math")
    generation.sync_weights()
    assert generation.pushed.version == PolicyVersion("math", 17)
    prompts = [[1, 2], [1, 2], [3], [3]]
    echoed, completions, logprobs, tokens = generation.generate(prompts, None, 2)
    ((sent, how),) = rollouts.asked
    assert sent == [[1, 2], [3]]
    assert how == {
        "model": PolicyVersion("math", 17),
        "n": 2,
        "sampling": Sampling(temperature=0.5, max_tokens=256),
    }
    assert echoed == prompts
    assert completions == [[20], [20, 21], [30], [30, 31]]
    assert tokens == [[[20]], [[20], [21]], [[30]], [[30], [31]]]
    assert logprobs == [[[-t / 1024 for t in each] for each in ids] for ids in tokens]


def test_images_are_refused_and_places_without_one_are_not():
    generation = PoolGeneration(trainer(), Publisher(), Rollouts(), "base")
    generation.sync_weights()
    assert generation.generate([[1]], [None], 1)[1] == [[10]]
    with pytest.raises(UnsupportedError, match="images"):
        generation.generate([[1]], [["image"]], 1)


def test_what_the_client_fails_with_is_what_the_trainer_gets():
    rollouts = Rollouts(PeerUnavailableError("nobody is there", reason="PEER_GONE"))
    generation = PoolGeneration(trainer(), Publisher(), rollouts, "base")
    generation.sync_weights()
    with pytest.raises(PeerUnavailableError, match="nobody is there"):
        generation.generate([[1]], None, 1)


def test_what_pushes_cost_is_among_the_trainers_metrics():
    own = trainer()
    logged = vars(own)["_metrics"]
    generation = PoolGeneration(own, Publisher(), Rollouts(), "base")
    for number in (1, 2):
        generation.sync_weights()
        assert logged["train"]["weft/version"] == [3.0] * number
    own.model_wrapped.eval()
    generation.sync_weights()
    assert logged["eval"]["weft/sent_bytes"] == [REPORT.sent_bytes]
    expected = PushResult(PolicyVersion("base", 3), REPORT).metrics()
    assert logged["train"].keys() == expected.keys()
