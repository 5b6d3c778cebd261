"""Log-probabilities beside those of the model that lies here, and how far apart they may be."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.models import Referee, make_adapter, make_model
from tests.vision_models import IMAGE_TOKEN, make_vision_model
from weft_rl.cli.verify import parity
from weft_rl.cli.verify.parity import LocalModel, SampledTokens, bound_of, compared, default_prompts
from weft_rl.contract.errors import InvalidRequestError
from weft_rl.contract.tensors import DataType


def sampled(logprobs: list[float], prompt: int = 5) -> SampledTokens:
    tokens = tuple(range(10, 10 + len(logprobs)))
    return SampledTokens((prompt, 6, 7), tokens, tuple(logprobs), "processed_logprobs")


def test_what_is_farthest_apart_counts() -> None:
    found = compared([sampled([-1.0, -2.0]), sampled([-3.0])], [[-1.0, -2.5], [-3.1]], 0.4)
    assert (found.num_tokens, found.largest) == (3, 0.5)
    assert found.mean == pytest.approx(0.2)
    assert not found.is_fine
    assert compared([sampled([-1.0])], [[-1.4]], 0.4).is_fine
    assert compared([sampled([-1.0])], [[-9.0]], 0.0).is_fine  # nobody can say


def test_a_bound_is_what_rounding_does_to_the_model_itself() -> None:
    assert bound_of(DataType.FLOAT32, 9.0) == 5e-5
    assert bound_of(DataType.BFLOAT16, 0.02) == pytest.approx(0.08)
    assert bound_of(DataType.BFLOAT16, 0.0) == 2**-8
    assert bound_of(DataType.FLOAT16, 0.0) == 2**-11


def test_prompts_are_of_the_vocabulary_and_always_the_same() -> None:
    for size in (32, 151_936):
        prompts = [list(prompt.ids) for prompt in default_prompts(size)]
        assert prompts == [list(prompt.ids) for prompt in default_prompts(size)]
        assert all(0 <= token < size for prompt in prompts for token in prompt)
        assert len({tuple(prompt) for prompt in prompts}) == 3
        others = [token for prompt in default_prompts(size, {*prompts[0]}) for token in prompt.ids]
        assert not {*prompts[0]} & {*others}


def test_the_model_here_is_scored_as_transformers_does(tmp_path: Path) -> None:
    base = make_model("qwen2", tmp_path / "base")
    adapter = make_adapter(base, tmp_path / "adapter", seed=1)
    referee = Referee()
    asked = [sampled([0.0] * 5), sampled([0.0] * 3, prompt=9), sampled([0.0] * 5)]
    for of in (None, adapter):
        expected = [referee.logprobs(base, one.prompt, one.tokens, of) for one in asked]
        model = LocalModel(base, of, DataType.FLOAT32)
        assert model.vocab_size == 256
        exact, rounding = model.score(asked)
        assert rounding == 0.0
        for one, wanted in zip(exact, expected, strict=True):
            assert one == pytest.approx(wanted, abs=1e-5)
        short = LocalModel(base, of, DataType.BFLOAT16)
        exact, rounding = short.score(asked)
        assert 1e-3 < rounding < 0.5
        assert exact[0] != pytest.approx(expected[0], abs=1e-5), "of rounded weights"
    with pytest.raises(InvalidRequestError, match="transformers cannot load"):
        LocalModel(tmp_path, None, DataType.FLOAT32)


@pytest.mark.parametrize("kind", ["qwen2_5_vl", "gemma3"])
def test_a_model_that_sees_is_loaded_by_the_class_that_its_files_name(
    kind: str, tmp_path: Path
) -> None:
    base = make_vision_model(kind, tmp_path / "base")
    model = LocalModel(base, None, DataType.FLOAT32)
    assert model.vocab_size == 256
    assert {IMAGE_TOKEN, 11, 12} <= model.special_tokens
    (exact,), _ = model.score([sampled([0.0] * 5)])
    one = sampled([0.0] * 5)
    assert exact == pytest.approx(Referee().logprobs(base, one.prompt, one.tokens), abs=1e-5)


def test_token_ids_are_found_in_lists_and_in_configurations_inside() -> None:
    config = {
        "eos_token_id": [2, 7],
        "pad_token_id": None,
        "hidden_size": 9,
        "vision_config": {"image_token_id": 3},
        "image_token_index": 4,
        "id2label": {0: "no", 1: "yes"},
    }
    assert sorted(parity._token_ids(config)) == [2, 3, 4, 7]
