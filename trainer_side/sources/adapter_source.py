"""LoRA adapter of a PEFT model, in the names PEFT saves it by, and its config without patterns.

PEFT's ``target_modules``, ``exclude_modules``, ``rank_pattern`` and ``alpha_pattern`` may be
regular expressions. Only the owner of the model can say what they match, and only their author
should pay for matching them. So the config that is sent names modules.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from enum import Enum
from typing import Any

import torch

from trainer_side.params.choose import OpenedModel
from trainer_side.params.lora_layers import (
    LoraSettings,
    check_all_sent,
    check_base_unchanged,
    layer_scalings,
    lora_layers,
)
from trainer_side.params.names import IN_PEFT, adapter_tensor_name, base_name_in_peft
from trainer_side.params.params import Params, last_walk, own_class
from trainer_side.sources.source import Adapter, CastRule, ParamsSource
from weft_rl.contract.adapter import TrainedBase
from weft_rl.contract.adapter_config import (
    MAX_CONFIG_BYTES,
    check_known,
    check_settings,
    named_value,
    parse_config,
    unknown_settings,
)
from weft_rl.contract.errors import InvalidAdapterError
from weft_rl.contract.stacked_experts import parameter_of


def adapter_of_model(
    opened: OpenedModel, adapter_name: str, cast: CastRule, *, check_base: bool
) -> Adapter:
    """Return the adapter ``adapter_name`` of a PEFT model; its tensors by reference.

    The base is not read.

    Raises:
        InvalidAdapterError: Not a PEFT model, no such adapter, no tensors, a variant that cannot be
            served, or the model computes with more than would be sent; says with what.
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
    check_config(config_json)
    layers = lora_layers(last_walk(model), adapter_name, "adapter")
    check_base_unchanged(configs, adapter_name)
    _check_all_sent(opened, adapter_name)
    key = adapter_name, config_json, (*layers.scalings.values(),), cast.key, check_base
    kept: Adapter | None = opened.sources.get(key)
    if kept is None:
        kept = _adapter(opened, adapter_name, config_json, layers, cast, check_base=check_base)
        opened.sources.put(key, kept)
    return kept


def check_config(config_json: str) -> None:
    """Refuse a config that is none, of a variant, or with a setting that Weft does not know."""
    config = parse_config(config_json)
    check_settings(config)
    check_known(config)


def _check_all_sent(opened: OpenedModel, adapter_name: str) -> None:
    check_all_sent(
        last_walk(opened.module),
        adapter_name,
        adapter_parameters(opened.params, adapter_name),
        opened.params.metas,
        "push all weights (push_merged); or, if these are not meant to be trained, freeze them "
        "before anything changes them (param.requires_grad_(False))",
    )


def _adapter(
    opened: OpenedModel,
    adapter_name: str,
    config_json: str,
    layers: LoraSettings,
    cast: CastRule,
    *,
    check_base: bool,
) -> Adapter:
    params = opened.params
    names = adapter_parameters(params, adapter_name)
    if not names:
        raise InvalidAdapterError(f"adapter {adapter_name!r} has no tensors")
    source = ParamsSource(params, names, cast, f"{params.kind} PEFT adapter {adapter_name!r}")
    live = _live_values(config_json, layers, adapter_name, params)
    config_json = config_in_names(config_json, names.values(), lambda: _matrices(params), live)
    return Adapter(source, config_json, _trained_base(opened.base, params) if check_base else None)


def _live_values(
    config_json: str, layers: LoraSettings, adapter_name: str, params: Params
) -> dict[str, tuple[int, float]]:
    """Return rank and alpha of each module, by the name that PEFT saves it by. Alphas are those
    that a receiver must be told, that it multiplies by what the layer multiplies by."""
    config = json.loads(config_json)
    alphas = dict.fromkeys([config["lora_alpha"], *(config.get("alpha_pattern") or {}).values()])
    found: dict[str, tuple[int, float]] = {}
    for path, scaling in layers.scalings.items():
        meta = params.metas.get(f"{path}.lora_A.{adapter_name}.weight")
        if meta is None:  # of an embedding, which is refused by its tensors
            continue
        rank = meta.shape[0] // layers.experts.get(path, 1)
        divisor = math.sqrt(rank) if config.get("use_rslora") else rank
        alpha = next((own for own in alphas if own / divisor == scaling), scaling * divisor)
        found[path.removeprefix(_PEFT_PREFIX)] = rank, alpha
    return found


_PEFT_PREFIX = "base_model.model."


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
    scalings = layer_scalings(last_walk(model), adapter_name)
    return {
        f"its config's {key}": repr(value) for key, value in vars(configs[adapter_name]).items()
    } | {f"the scaling of {path}": scaling for path, scaling in scalings.items()}


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
    kept, since of several the first that matches counts. Settings of a newer PEFT that are at its
    default are left out."""
    settings = without_defaults(config.to_dict(), type(config))
    return json.dumps({key: settings[key] for key in sorted(settings)}, default=_plain)


def without_defaults(settings: Mapping[str, Any], kind: type) -> dict[str, Any]:
    """Return a config without those settings that Weft does not know and that have the default of
    PEFT's class."""
    unknown = set(unknown_settings(settings))
    if not unknown or not dataclasses.is_dataclass(kind):
        return dict(settings)
    defaults: dict[str, Any] = {}
    for each in dataclasses.fields(kind):
        made = each.default_factory() if callable(each.default_factory) else each.default
        defaults[each.name] = vars(made) if dataclasses.is_dataclass(made) else made
    is_off = {key for key in unknown if key in defaults and settings[key] == defaults[key]}
    return {key: value for key, value in settings.items() if key not in is_off}


def config_of_dir(config_json: str) -> str:
    """Return a saved config as ``config_to_json`` would give it, where PEFT is there to say what
    its defaults are."""
    config = parse_config(config_json)
    if not unknown_settings(config):
        return config_json
    try:
        from peft import LoraConfig
    except ImportError:
        return config_json
    return json.dumps(without_defaults(config, LoraConfig))


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
    config_json: str,
    tensors: Iterable[str],
    modules: Callable[[], Collection[str]] | None,
    live: Mapping[str, tuple[int, float]] | None = None,
) -> str:
    """Return the text of a config with names for patterns; unchanged if it has no patterns.

    See ``named_config``.

    Args:
        config_json: PEFT's adapter_config.json.
        tensors: Names that PEFT saves the adapter's tensors by.
        modules: Lists every module of the base that has a matrix; None where they are not
            known.
        live: Rank and alpha that each module has, where they are not those of the patterns.

    Raises:
        InvalidAdapterError: The config cannot be read, or its names are too long.
    """
    config = parse_config(config_json)
    has_values = any(config.get(setting) for setting in _DEFAULTS)
    if live is not None:
        default = (config["r"], config["lora_alpha"])
        has_values = has_values or any(value != default for value in live.values())
    if not (_has_patterns(config) or has_values):
        return config_json
    given = {match[1] for name in tensors if (match := _LORA_PAIR.fullmatch(name))}
    text = json.dumps(named_config(config, given, modules() if modules else None, live))
    parse_config(text)
    return text


def named_config(
    config: Mapping[str, Any],
    given: Collection[str],
    modules: Collection[str] | None,
    live: Mapping[str, tuple[int, float]] | None = None,
) -> dict[str, Any]:
    """Return a PEFT config with names in place of its patterns.

    Args:
        config: PEFT's config, read from JSON.
        given: Modules that the adapter has tensors for.
        modules: Every module of the base that has a matrix; None where they are not known: then the
            given modules are the targets.
        live: See ``config_in_names``.

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
    for number, (setting, default) in enumerate(_DEFAULTS.items()):
        if live is not None:
            values = {module: live[module][number] for module in sorted(live)}
            named[setting] = _by_name(values, config.get(default))
        elif patterns := config.get(setting):
            values = _matched_values(setting, patterns, given, config.get(default))
            named[setting] = _by_name(values, config.get(default))
    return named


#: By the setting that has values of single modules, that which has the others'.
_DEFAULTS = {"rank_pattern": "r", "alpha_pattern": "lora_alpha"}


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
# A name, and what ``_matched_values`` puts around one: matched in a moment.
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


def _matched_values(
    setting: str, patterns: Any, given: Collection[str], default: Any
) -> dict[str, Any]:
    """Return the rank or alpha that patterns give each module.

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
    return {
        module: next((value for found, value in keys if parameters[module] in found), default)
        for module in sorted(given)
    }


def _by_name(values: Mapping[str, Any], default: Any) -> dict[str, Any]:
    """Return the values that are not the default, each by a name that stands for its modules."""
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
