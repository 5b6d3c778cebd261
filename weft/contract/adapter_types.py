"""The types of an adapter's settings, before anybody reads a rule out of them."""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Mapping
from typing import Any, Final

from weft.contract.errors import InvalidAdapterError

_REPR = reprlib.Repr()
_REPR.maxstring = _REPR.maxother = _REPR.maxlong = 80


def shown(value: object) -> str:
    """A setting's value for people: bounded, however long or deeply nested it is."""
    return _REPR.repr(value)


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


def check_types(config: Mapping[str, Any]) -> None:
    """Refuse a setting that is of no type PEFT gives it.

    Raises:
        InvalidAdapterError: Names the setting.
    """
    for setting, (is_right, wanted) in _TYPES.items():
        value = config.get(setting)
        if value is not None and not is_right(value):
            raise InvalidAdapterError(
                f"{setting} is {shown(value)}; it must be {wanted}", metadata={"setting": setting}
            )
