"""Ranks, alphas and scalings that are no numbers: JSON readers take them, vLLM serves NaN."""

from __future__ import annotations

import pytest

from weft.contract.adapter import parse_config
from weft.contract.errors import InvalidAdapterError


def config(**changes: str) -> str:
    settings = {"peft_type": '"LORA"', "r": "8", "lora_alpha": "16"} | changes
    return "{" + ", ".join(f'"{key}": {value}' for key, value in settings.items()) + "}"


@pytest.mark.parametrize(
    ("setting", "value", "words"),
    [
        ("lora_alpha", "NaN", "lora_alpha is nan"),
        ("lora_alpha", "Infinity", "lora_alpha is inf"),
        ("lora_alpha", "-Infinity", "lora_alpha is -inf"),
        ("lora_alpha", "1e999", "lora_alpha is inf"),
        ("lora_alpha", "1" + "0" * 400, "many digits"),
        ("lora_alpha", "1e200", "a finite number"),
        ("lora_alpha", "true", "lora_alpha is True"),
        ("r", "1" + "0" * 400, "many digits"),
        ("r", "1e999", "r is inf"),
        ("alpha_pattern", '{"q_proj": NaN}', r"alpha_pattern\['q_proj'\] is nan"),
        ("alpha_pattern", '{"q_proj": "16"}', "a finite number"),
        ("rank_pattern", '{"q_proj": Infinity}', r"rank_pattern\['q_proj'\] is inf"),
        ("rank_pattern", '{"q_proj": 0}', "a positive integer"),
        ("rank_pattern", '{"q_proj": 2.5}', "a positive integer"),
    ],
)
def test_what_is_no_number_is_refused_by_name(setting: str, value: str, words: str) -> None:
    with pytest.raises(InvalidAdapterError, match=words):
        parse_config(config(**{setting: value}))


def test_numbers_that_people_use_are_taken() -> None:
    for alpha in ("0", "-16", "0.5", "1e30"):
        parse_config(config(lora_alpha=alpha, use_rslora="true", rank_pattern='{"q": 1}'))


def test_a_scaling_that_no_served_type_can_hold_is_refused() -> None:
    assert parse_config(config(lora_alpha="3e38", r="8"))
    with pytest.raises(InvalidAdapterError, match="a finite number"):
        parse_config(config(alpha_pattern='{"q_proj": 3.5e38}'))
