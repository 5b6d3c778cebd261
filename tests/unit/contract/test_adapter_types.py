"""Adapter configs of odd types, and of odd depths: refused by setting, never a crash."""

from __future__ import annotations

import json
from typing import Any

import pytest

from weft.contract.adapter import check_settings, parse_config
from weft.contract.adapter_types import shown
from weft.contract.errors import InvalidAdapterError

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
