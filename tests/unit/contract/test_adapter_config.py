"""Adapter configs of odd types, and of odd depths: refused by setting, never a crash."""

from __future__ import annotations

import json
from typing import Any

import pytest

from weft_rl.contract.adapter_config import check_settings, parse_config, shown
from weft_rl.contract.errors import InvalidAdapterError

CONFIG = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]}


def _deep(depth: int) -> str:
    return "[" * depth + "]" * depth


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("rank_pattern", ["q_proj"]),
        ("rank_pattern", "q_proj"),
        ("alpha_pattern", [8]),
        ("layers_to_transform", [[1]]),
        ("layers_to_transform", {"0": 1}),
        ("layers_to_transform", True),
        ("layers_to_transform", 1.5),
        ("target_modules", [["q_proj"]]),
        ("target_modules", {"q_proj": 1}),
        ("target_modules", 7),
        ("exclude_modules", [None]),
        ("target_parameters", 1),
        ("layers_pattern", [1]),
        ("bias", ["none"]),
        ("init_lora_weights", {}),
    ],
)
def test_a_setting_of_another_type_is_refused_by_name(setting: str, value: Any) -> None:
    with pytest.raises(InvalidAdapterError, match=f"^{setting} is ") as refused:
        parse_config(json.dumps({**CONFIG, setting: value}))
    assert refused.value.metadata["setting"] == setting


@pytest.mark.parametrize(
    "value",
    [
        {"rank_pattern": {}, "alpha_pattern": None, "target_modules": "q_proj"},
        {"layers_to_transform": [0, 1], "layers_pattern": "layers", "exclude_modules": ["x"]},
        {"layers_to_transform": 0, "bias": "none", "init_lora_weights": True},
        {"init_lora_weights": "gaussian", "target_parameters": ["experts.up"]},
    ],
)
def test_the_types_that_peft_writes_are_taken(value: dict[str, Any]) -> None:
    assert parse_config(json.dumps({**CONFIG, **value}))["r"] == 4


@pytest.mark.parametrize("depth", [30_000, 900, 400])
@pytest.mark.parametrize("setting", ["r", "rank_pattern", "use_dora", "bias", "anything"])
def test_no_depth_is_too_much_for_a_refusal(setting: str, depth: int) -> None:
    text = json.dumps({**CONFIG, setting: "?"}).replace('"?"', _deep(depth))
    if setting == "anything" and depth < 30_000:
        check_settings(parse_config(text))
        return
    with pytest.raises(InvalidAdapterError) as refused:
        check_settings(parse_config(text))
    assert len(refused.value.message) < 300


def test_what_is_shown_is_bounded() -> None:
    for value in ("x" * 9_000, ["x" * 9_000] * 9_000, {str(i): i for i in range(9_000)}, 10**4000):
        assert len(shown(value)) < 800


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
