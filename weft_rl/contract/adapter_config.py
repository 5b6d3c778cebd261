"""PEFT's adapter_config.json as a value, and the checks that need it alone: before a tensor is
read.

A replica could serve what is refused here late, wrongly or as NaN. The rules are those
measured against vLLM 0.26 and 0.32 and PEFT 0.21; each has a test.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import reprlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

from weft_rl.contract.errors import InvalidAdapterError

#: Longest adapter_config.json, in bytes.
MAX_CONFIG_BYTES = 2**20
#: Remedy for an adapter that is neither served nor merged during a push.
MERGE_A_COPY: Final = (
    "merge a copy of the model (model.merge_and_unload(), where PEFT has it) and push_base that"
)
# Names of modules that mean nothing else as a regular expression ("." aside).
_PLAIN_NAME = re.compile(r"[A-Za-z0-9_.-]+")
# Starts that leave an ordinary LoRA behind; any other (PiSSA, OLoRA, CorDA,
# LoftQ...) changes the base weights at initialisation.
_PLAIN_STARTS = {"gaussian", "eva", "orthogonal", "mica"}
# Settings whose mere presence changes what the adapter means, with what to do.
_REFUSED = {
    "use_dora": "DoRA is not served by vLLM: push it merged (it has no plain delta)",
    "lora_bias": "lora_bias is not served by vLLM: train without it or push it merged",
    "modules_to_save": "modules_to_save is not served by vLLM: push the whole model merged",
    "trainable_token_indices": f"vLLM silently ignores trainable_token_indices: {MERGE_A_COPY}",
    "alora_invocation_tokens": "activated LoRA is not served by vLLM",
    "layer_replication": "layer_replication is not served by vLLM",
    "use_qalora": "QA-LoRA is not served by vLLM",
    "use_bdlora": "block-diagonal LoRA is not served by vLLM",
    "megatron_config": "LoRA on Megatron's layers is sharded by it, and is not served",
    "arrow_config": "a router between adapters (Arrow) is not served by vLLM",
    "velora_config": f"VeLoRA is not served: {MERGE_A_COPY}",
    "monteclora_config": f"MonteCLoRA is not served: {MERGE_A_COPY}",
    "kasa_config": f"KaSA changes the base weights and is not served: {MERGE_A_COPY}",
}
# Settings that are compared with the tensors, or that change no answer by themselves.
_TAKEN = frozenset(
    {
        *("peft_type", "task_type", "auto_mapping", "peft_version", "inference_mode"),
        *("base_model_name_or_path", "revision", "r", "lora_alpha", "rank_pattern"),
        *("alpha_pattern", "use_rslora", "target_modules", "exclude_modules", "target_parameters"),
        *("layers_to_transform", "layers_pattern", "bias", "fan_in_fan_out", "lora_dropout"),
        *("init_lora_weights", "loftq_config", "eva_config", "corda_config", "lora_ga_config"),
        *("qalora_group_size", "megatron_core", "runtime_config", "ensure_weight_tying"),
    }
)
#: Largest number of the type that scalings are multiplied in (float32).
_LARGEST = 3.4028234663852886e38
_REPR = reprlib.Repr()
_REPR.maxstring = _REPR.maxother = _REPR.maxlong = 80


@dataclass(frozen=True)
class AdapterSpec:
    """An adapter apart from its tensors.

    Raises:
        InvalidAdapterError: Its config is too long.
    """

    config_json: str
    base_fingerprint: str = ""
    trained_on_base_version: int | None = None
    """Version of the base that it was trained on; None if nobody knows."""

    def __post_init__(self) -> None:
        if len(self.config_json.encode()) > MAX_CONFIG_BYTES:
            raise InvalidAdapterError(f"the adapter config is longer than {MAX_CONFIG_BYTES} bytes")

    @cached_property
    def config_digest(self) -> bytes:
        """SHA-256 of the config."""
        return hashlib.sha256(self.config_json.encode()).digest()


def parse_config(config_json: str) -> dict[str, Any]:
    """Read adapter_config.json.

    Raises:
        InvalidAdapterError: Not a JSON object of a LoRA config, or too long.
    """
    if len(config_json.encode()) > MAX_CONFIG_BYTES:
        raise InvalidAdapterError(f"the adapter config is longer than {MAX_CONFIG_BYTES} bytes")
    try:
        config = json.loads(config_json)
    except ValueError as error:
        raise InvalidAdapterError(f"the adapter config is not JSON: {error}") from None
    except RecursionError:
        raise InvalidAdapterError("the adapter config is nested too deeply") from None
    if not isinstance(config, dict):
        raise InvalidAdapterError("the adapter config is not a JSON object")
    if config.get("peft_type") != "LORA":
        raise InvalidAdapterError(
            f"peft_type is {shown(config.get('peft_type'))}; only LORA can be served as an "
            f"adapter: {MERGE_A_COPY}",
            metadata={"setting": "peft_type"},
        )
    if not _is_positive_int(config.get("r")):
        raise InvalidAdapterError(f"r is {shown(config.get('r'))}; it must be a positive integer")
    if not isinstance(config.get("lora_alpha"), int | float):
        raise InvalidAdapterError(
            f"lora_alpha is {shown(config.get('lora_alpha'))}; it must be a number"
        )
    _check_types(config)
    _check_numbers(config)
    return config


def _is_positive_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def check_settings(config: Mapping[str, Any]) -> None:
    """Refuse variants by the config alone; a trainer asks before it gathers a tensor.

    Raises:
        InvalidAdapterError: Names the setting, and what to do.
    """
    for key, advice in _REFUSED.items():
        if config.get(key):
            raise InvalidAdapterError(
                f"{key}={shown(config[key])}: {advice}", metadata={"setting": key}
            )
    if config.get("bias", "none") != "none":
        raise InvalidAdapterError(
            f"bias={shown(config['bias'])}: trained biases are not served by vLLM; use bias='none'",
            metadata={"setting": "bias"},
        )
    start = config.get("init_lora_weights", True)
    if _changes_base(start):
        raise InvalidAdapterError(
            f"init_lora_weights={shown(start)} changes the base weights; convert it to a plain "
            "LoRA with PEFT's path_initial_model_for_weight_conversion, or push it merged",
            metadata={"setting": "init_lora_weights"},
        )


def check_known(config: Mapping[str, Any]) -> None:
    """Refuse settings that are on and that Weft does not know: an adapter would be served without.

    Raises:
        InvalidAdapterError: Names the setting.
    """
    for key in unknown_settings(config):
        raise InvalidAdapterError(
            f"{key[:80]}={shown(config[key])} is a setting that Weft does not know, and the "
            f"adapter would be served without it: {MERGE_A_COPY}",
            metadata={"setting": key[:200]},
        )


def unknown_settings(config: Mapping[str, Any]) -> list[str]:
    """Return the settings that are on and that Weft does not know, of a newer PEFT's for one."""
    return [key for key, on in config.items() if on and key not in _TAKEN and key not in _REFUSED]


def base_changing_setting(config: Mapping[str, Any]) -> str | None:
    """Return the setting by which PEFT changed a base when it added an adapter; None if it did not,
    as far as the config tells."""
    if config.get("peft_type") != "LORA":
        return None
    if _changes_base(start := config.get("init_lora_weights", True)):
        return f"init_lora_weights={shown(start)}"
    for key in ("layer_replication", "kasa_config"):
        if config.get(key):
            return f"{key}={shown(config[key])}"
    return None


def _changes_base(start: object) -> bool:
    return isinstance(start, str) and start.lower() not in _PLAIN_STARTS


def check_names(config: Mapping[str, Any]) -> None:
    """Refuse regular expressions: matching one can take for ever, and PEFT's own rule for
    them needs the trainer's model. Publishers send names in place of them."""
    for setting in ("target_modules", "exclude_modules"):
        if config.get(setting) and isinstance(config[setting], str):
            raise _needs_names(setting, config[setting], "a list of modules")
    for setting in ("rank_pattern", "alpha_pattern"):
        patterns = config.get(setting) or {}
        if not isinstance(patterns, Mapping):
            raise _needs_names(setting, str(patterns), "a map of modules to numbers")
        for name in patterns:
            if not _PLAIN_NAME.fullmatch(name):
                raise _needs_names(setting, name, "the name of a module, or the end of one")


def _needs_names(setting: str, given: str, wanted: str) -> InvalidAdapterError:
    return InvalidAdapterError(
        f"{setting} has {given[:80]!r}; it must be {wanted}, without patterns (a Publisher puts "
        "the names that they match in their place)",
        metadata={"setting": setting},
    )


def named_value(values: Mapping[str, Any], module: str, default: Any) -> Any:
    """Return the value of a module: of the first pattern that equals its name or a dotted suffix.

    That is PEFT's rule for names; O(components of the name).

    Source: peft.utils.other.get_pattern_key.
    """
    parts = module.split(".")
    ends = {end for i in range(len(parts)) if (end := ".".join(parts[i:])) in values}
    if len(ends) > 1:
        return next(value for name, value in values.items() if name in ends)
    return values[ends.pop()] if ends else default


# -- types


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _is_switch(value: object) -> bool:
    return isinstance(value, bool | str)


def _is_index(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_object(value: object) -> bool:
    return isinstance(value, Mapping)


def _or_list_of(one: Callable[[object], bool]) -> Callable[[object], bool]:
    def test(value: object) -> bool:
        return one(value) or (isinstance(value, list) and all(map(one, value)))

    return test


_NAMES = (_or_list_of(_is_text), "a text or a list of texts")
#: By setting, in PEFT's types; null, or none at all, will do for each.
_TYPES: Final[Mapping[str, tuple[Callable[[object], bool], str]]] = {
    "target_modules": _NAMES,
    "exclude_modules": _NAMES,
    "target_parameters": _NAMES,
    "layers_pattern": _NAMES,
    "layers_to_transform": (_or_list_of(_is_index), "an integer or a list of integers"),
    "rank_pattern": (_is_object, "an object"),
    "alpha_pattern": (_is_object, "an object"),
    "bias": (_is_text, "a text"),
    "init_lora_weights": (_is_switch, "true, false or a text"),
}


def _check_types(config: Mapping[str, Any]) -> None:
    """Refuse a setting of a type that PEFT does not give it."""
    for setting, (is_right, wanted) in _TYPES.items():
        value = config.get(setting)
        if value is not None and not is_right(value):
            raise InvalidAdapterError(
                f"{setting} is {shown(value)}; it must be {wanted}", metadata={"setting": setting}
            )


# -- numbers


def _check_numbers(config: Mapping[str, Any]) -> None:
    """Refuse non-finite ranks, alphas and scalings: Python's reader takes NaN and ``1e999``."""
    rank = _rank("r", config["r"])
    alpha = _alpha("lora_alpha", config["lora_alpha"])
    ranks = [rank, *(_rank(f"rank_pattern[{k!r}]", v) for k, v in _pattern(config, "rank"))]
    alphas = [alpha, *(_alpha(f"alpha_pattern[{k!r}]", v) for k, v in _pattern(config, "alpha"))]
    largest = max(abs(alpha) for alpha in alphas)
    smallest = min(ranks)
    scaling = largest / (math.sqrt(smallest) if config.get("use_rslora") else smallest)
    if scaling > _LARGEST:
        raise InvalidAdapterError(
            f"the scaling of alpha {largest:g} and rank {smallest} is {scaling:g}, which is "
            "infinite in the element types that adapters are served in",
            metadata={"setting": "lora_alpha"},
        )


def _pattern(config: Mapping[str, Any], what: str) -> list[tuple[str, Any]]:
    found = config.get(f"{what}_pattern")
    return list(found.items()) if isinstance(found, Mapping) else []


def _rank(setting: str, value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 < value <= _LARGEST:
        raise _refused(setting, value, "a positive integer")
    return value


def _alpha(setting: str, value: object) -> float:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    # NaN compares as false; an integer of a thousand digits compares, and cannot be a float.
    if not is_number or not abs(value) <= _LARGEST:  # type: ignore[arg-type]
        raise _refused(setting, value, "a finite number")
    return float(value)  # type: ignore[arg-type]


def _refused(setting: str, value: object, wanted: str) -> InvalidAdapterError:
    text = "an integer of many digits" if _is_huge(value) else shown(value)
    return InvalidAdapterError(
        f"{setting} is {text}; it must be {wanted}", metadata={"setting": setting[:200]}
    )


def _is_huge(value: object) -> bool:
    """Return whether a value is an integer too large to print."""
    return isinstance(value, int) and value.bit_length() > 1024


def shown(value: object) -> str:
    """Format a setting's value for messages: bounded, however long or deeply nested it is."""
    return _REPR.repr(value)
