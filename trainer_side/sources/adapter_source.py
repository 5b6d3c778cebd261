"""LoRA adapter of a PEFT model, in the names PEFT saves it by, and its config without patterns.

PEFT's ``target_modules``, ``exclude_modules``, ``rank_pattern`` and ``alpha_pattern`` may be
regular expressions. Only the owner of the model can say what they match, and only their author
should pay for matching them. So the config that is sent names modules.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch

from trainer_side.params.choose import OpenedModel
from trainer_side.params.names import IN_PEFT, adapter_tensor_name, base_name_in_peft
from trainer_side.params.params import Params, own_class
from trainer_side.sources.source import CastRule, ParamsSource
from weft_rl.contract.adapter import TrainedBase
from weft_rl.contract.adapter_config import (
    MAX_CONFIG_BYTES,
    check_settings,
    named_value,
    parse_config,
)
from weft_rl.contract.errors import InvalidAdapterError
from weft_rl.contract.stacked_experts import parameter_of


@dataclass(frozen=True)
class Adapter:
    """Adapter that is ready to push."""

    source: ParamsSource
    config_json: str
    base: TrainedBase | None
    """Base that it is on, to be compared with the pool's; None where that is not to be done."""


def adapter_of_model(
    opened: OpenedModel, adapter_name: str, cast: CastRule, *, check_base: bool
) -> Adapter:
    """Return the adapter ``adapter_name`` of a PEFT model; its tensors by reference.

    The base is not read.

    Raises:
        InvalidAdapterError: Not a PEFT model, no such adapter, no tensors, or a variant
            that cannot be served.
    """
    model = opened.module
    if not opened.is_adapted:
        raise InvalidAdapterError(
            f"{type(model).__name__} is not a PEFT model; give get_peft_model's result, or the "
            "directory that save_pretrained wrote"
        )
    configs: dict[str, Any] = getattr(model, "peft_config", {})
    if adapter_name not in configs:
        raise InvalidAdapterError(
            f"the model has no adapter {adapter_name!r}; it has {', '.join(sorted(configs))}"
        )
    config_json = config_to_json(configs[adapter_name])
    key = adapter_name, config_json, cast.key, check_base
    kept: Adapter | None = opened.sources.get(key)
    if kept is None:
        kept = _adapter(opened, adapter_name, config_json, cast, check_base=check_base)
        opened.sources.put(key, kept)
    return kept


def _adapter(
    opened: OpenedModel, adapter_name: str, config_json: str, cast: CastRule, *, check_base: bool
) -> Adapter:
    params = opened.params
    check_settings(parse_config(config_json))
    names = adapter_parameters(params, adapter_name)
    if not names:
        raise InvalidAdapterError(f"adapter {adapter_name!r} has no tensors")
    source = ParamsSource(params, names, cast, f"{params.kind} PEFT adapter {adapter_name!r}")
    config_json = config_in_names(config_json, names.values(), lambda: _matrices(params))
    return Adapter(source, config_json, _trained_base(opened.base, params) if check_base else None)


def adapter_parameters(params: Params, adapter_name: str) -> dict[str, str]:
    """Map an adapter's parameter names to those PEFT saves them by."""
    return {
        own: name if name.startswith(IN_PEFT) else IN_PEFT + name  # put into the model's own layers
        for own in params.metas
        if (name := adapter_tensor_name(own, adapter_name)) is not None
    }


def adapter_settings(model: Any, adapter_name: str) -> dict[str, object]:
    """Return the settings of a PEFT model that its pushed adapter depends on."""
    configs = getattr(model, "peft_config", None)
    if not isinstance(configs, dict) or adapter_name not in configs:
        return {f"having an adapter {adapter_name!r}": False}
    return {
        f"its config's {key}": repr(value) for key, value in vars(configs[adapter_name]).items()
    }


def active_remarks(model: torch.nn.Module, adapter_name: str) -> tuple[str, ...]:
    """Return remarks on how the trainer's own forward differs from the pushed adapter's answers.

    Args:
        model: A PEFT model, unwrapped; its first adapted layer stands for all, since PEFT
            switches them together.
        adapter_name: The adapter that is pushed.
    """
    layer: Any = next(
        (module for module in model.modules() if hasattr(module, "_disable_adapters")), None
    )
    if layer is None:
        return ()
    if layer._disable_adapters:
        return (
            f"adapter {adapter_name!r} was pushed, but adapters are disabled in the trainer: its "
            "own answers are those of the base alone",
        )
    active = list(layer.active_adapters)
    if active == [adapter_name]:
        return ()
    named = ", ".join(map(repr, active)) or "none"
    return (
        f"adapter {adapter_name!r} was pushed, but the trainer computes with {named}: say "
        "adapter_name= if that is what should be served",
    )


def config_to_json(config: Any) -> str:
    """Return a PEFT config as its save_pretrained would write it, as JSON. The order of patterns is
    kept, since of several the first that matches counts."""
    settings = config.to_dict()
    return json.dumps({key: settings[key] for key in sorted(settings)}, default=_plain)


def _matrices(params: Params) -> list[str]:
    """Return modules of a PEFT model's base whose weight is a matrix."""
    suffix = ".weight"
    return [
        name.removesuffix(suffix)
        for raw, meta in params.metas.items()
        if meta.dim() == 2
        and (name := base_name_in_peft(raw)) is not None
        and name.endswith(suffix)
    ]


def _plain(value: object) -> object:
    if isinstance(value, set | frozenset):
        return sorted(value)
    if isinstance(value, Enum):
        return value.value
    return str(value)


def _trained_base(base: torch.nn.Module, params: Params) -> TrainedBase:
    """Return the base of a PEFT model, less the weights whose packed shapes say nothing."""
    architectures = getattr(getattr(base, "config", None), "architectures", None)
    suffix = ".weight"
    shapes = {
        name.removesuffix(suffix): tuple(meta.shape)
        for raw, meta in params.metas.items()
        if meta.dim() == 2
        and meta.is_floating_point()
        and (name := base_name_in_peft(raw)) is not None
        and name.endswith(suffix)
    }
    return TrainedBase(architectures[0] if architectures else own_class(base).__name__, shapes)


_ALL_LINEAR = "all-linear"
#: For PEFT's own: an index after the first name in the path.
_LAYER_SETTINGS = ("layers_to_transform", "layers_pattern")


_LORA_PAIR = re.compile(r"(?:base_model\.model\.)?(.+)\.lora_[AB]\.weight")


def config_in_names(
    config_json: str, tensors: Iterable[str], modules: Callable[[], Collection[str]] | None
) -> str:
    """Return the text of a config with names for patterns; unchanged if it has no patterns.

    See ``named_config``.

    Args:
        config_json: PEFT's adapter_config.json.
        tensors: Names that PEFT saves the adapter's tensors by.
        modules: Lists every module of the base that has a matrix; None where they are not
            known.

    Raises:
        InvalidAdapterError: The config cannot be read, or its names are too long.
    """
    config = parse_config(config_json)
    if not (_has_patterns(config) or config.get("rank_pattern") or config.get("alpha_pattern")):
        return config_json
    given = {match[1] for name in tensors if (match := _LORA_PAIR.fullmatch(name))}
    text = json.dumps(named_config(config, given, modules() if modules else None))
    parse_config(text)
    return text


def named_config(
    config: Mapping[str, Any], given: Collection[str], modules: Collection[str] | None
) -> dict[str, Any]:
    """Return a PEFT config with names in place of its patterns.

    Args:
        config: PEFT's config, read from JSON.
        given: Modules that the adapter has tensors for.
        modules: Every module of the base that has a matrix; None where they are not known: then the
            given modules are the targets.

    Raises:
        InvalidAdapterError: A pattern is no regular expression, or a setting is of another
            type than PEFT's.
    """
    named = dict(config)
    if _has_patterns(config):
        targets = _targets(config, given, modules)
        known = None if modules is None else {*modules, *given}
        named["target_modules"] = _shortest(targets, known)
        named["exclude_modules"] = None
        named.update({key: None for key in _LAYER_SETTINGS if key in config})
    for setting, default in (("rank_pattern", "r"), ("alpha_pattern", "lora_alpha")):
        if patterns := config.get(setting):
            named[setting] = _named_values(setting, patterns, given, config.get(default))
    return named


def _has_patterns(config: Mapping[str, Any]) -> bool:
    texts = [config.get("target_modules"), config.get("exclude_modules")]
    return any(isinstance(text, str) for text in texts) or bool(config.get("layers_pattern"))


def _targets(
    config: Mapping[str, Any], given: Collection[str], modules: Collection[str] | None
) -> set[str]:
    """Return the modules that PEFT wrapped, and those that it would have wrapped in the base.

    Source: peft.tuners.tuners_utils.check_target_module_exists.
    """
    wanted, excluded = config.get("target_modules"), config.get("exclude_modules")
    if modules is None or wanted == _ALL_LINEAR or any(map(config.get, _LAYER_SETTINGS)):
        return set(given)
    is_wanted, is_excluded = (
        _matcher("target_modules", wanted, modules),
        _matcher("exclude_modules", excluded, modules),
    )
    return {*given, *(m for m in modules if is_wanted(m) and not is_excluded(m))}


def _matcher(setting: str, targets: Any, modules: Collection[str]) -> Callable[[str], bool]:
    if isinstance(targets, str) and targets:
        _compile(setting, targets, targets)
        matched = _matched(setting, [targets], modules)[0]
        return matched.__contains__
    names = {name for name in targets or () if isinstance(name, str)}
    return lambda module: named_value(dict.fromkeys(names, True), module, False)


def _matched(setting: str, patterns: Sequence[str], modules: Iterable[str]) -> list[set[str]]:
    """Return the modules that each regular expression matches as a whole, within a bounded time.

    Strangers wrote the patterns, and one can take for ever: patterns beyond plain names are matched
    by a process of its own, which can be ended.

    Raises:
        InvalidAdapterError: Matching took too long.
    """
    names = list(modules)
    if all(_PLAIN.fullmatch(pattern) for pattern in patterns):
        compiled = [re.compile(pattern) for pattern in patterns]
        return [{name for name in names if each.fullmatch(name)} for each in compiled]
    try:
        done = subprocess.run(
            [sys.executable, "-I", "-S", "-c", _MATCHER],
            input=json.dumps([list(patterns), names]),
            capture_output=True,
            text=True,
            timeout=_MATCH_SECONDS,
            check=True,
        )
    except subprocess.TimeoutExpired:
        raise InvalidAdapterError(
            f"{setting} has regular expressions that take longer than {_MATCH_SECONDS:g} s to "
            "match: give the modules' names in place of them",
            metadata={"setting": setting},
        ) from None
    return [{names[i] for i in found} for found in json.loads(done.stdout)]


_MATCH_SECONDS = 5.0
_MATCHER = """
import json, re, sys
patterns, names = json.load(sys.stdin)
compiled = [re.compile(p) for p in patterns]
json.dump([[i for i, n in enumerate(names) if c.fullmatch(n)] for c in compiled], sys.stdout)
"""
# A name, and what ``_named_values`` puts around one: matched in a moment.
_PLAIN = re.compile(r"(\(\.\*\\\.\)\?\()?[A-Za-z0-9_.-]+(\))?")


def _compile(setting: str, given: str, pattern: str) -> None:
    """Refuse a pattern that is not a regular expression."""
    try:
        re.compile(pattern)
    except re.error as error:
        raise InvalidAdapterError(
            f"{setting} has {given[:80]!r}, which is no regular expression: {error}",
            metadata={"setting": setting},
        ) from None


def _by_last(modules: Iterable[str]) -> dict[str, set[str]]:
    found: dict[str, set[str]] = defaultdict(set)
    for module in modules:
        found[module.rpartition(".")[2]].add(module)
    return found


def _shortest(targets: Collection[str], known: Collection[str] | None) -> list[str]:
    """Return names that stand for ``targets``: last components where they mean the same.

    Where the base's modules are not known, last components are used only if full names are too
    long.
    """
    full = sorted(targets)
    if known is None and sum(map(len, full)) < MAX_CONFIG_BYTES // 2:
        return full
    everywhere = _by_last(known if known is not None else targets)
    names: list[str] = []
    for last, modules in _by_last(targets).items():
        names += [last] if modules == everywhere[last] else sorted(modules)
    return sorted(names)


def _named_values(
    setting: str, patterns: Any, given: Collection[str], default: Any
) -> dict[str, Any]:
    """Return a rank or alpha for each name that has another than the default.

    Source: peft.utils.other.get_pattern_key: the first key that matches the end of a name
    counts, from a "." on.
    """
    if not isinstance(patterns, Mapping):
        raise InvalidAdapterError(
            f"{setting} is {str(patterns)[:80]!r}; it must map names to numbers",
            metadata={"setting": setting},
        )
    wholes = [rf"(.*\.)?({key})" for key in patterns]
    for key, whole in zip(patterns, wholes, strict=True):
        _compile(setting, key, whole)
    parameters = {module: parameter_of(module) for module in given}
    matched = _matched(setting, wholes, parameters.values())
    keys = list(zip(matched, patterns.values(), strict=True))
    values = {
        module: next((value for found, value in keys if parameters[module] in found), default)
        for module in sorted(given)
    }
    named: dict[str, Any] = {}
    for last, modules in _by_last(values).items():
        found = {str(values[module]): values[module] for module in modules}
        if len(found) > 1:
            named.update({m: values[m] for m in sorted(modules) if values[m] != default})
        elif (value := found.popitem()[1]) != default:
            named[last] = value
    if any(named_value(named, module, default) != value for module, value in values.items()):
        # One name is the end of another: all of them, the longest first.
        named = {module: values[module] for module in sorted(values, key=len, reverse=True)}
    return named
