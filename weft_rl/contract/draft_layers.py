"""Names of the tensors that a model drafts tokens with.

They are layers for multi-token prediction, which a checkpoint holds beside those of the model
itself, or another model. A model that serves without drafts has no place for them.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping

#: What names of a draft's tensors begin with in a base, where it has a checkpoint of its own.
DRAFT_MODEL = "draft_model."
#: Largest number of tensors of one draft: one message lists them all (DescribeTargetResponse).
MAX_DRAFT_TENSORS = 16_384
#: Largest number of bytes of their names: with the most tensors, the message has 3 MiB.
MAX_DRAFT_NAME_BYTES = 2**20
#: Largest number of ``Reference.draft_prefixes``.
MAX_DRAFT_PREFIXES = 64
#: Layer of the language model's own stack, not of an encoder's: ``model.layers.61``.
_LAYER = re.compile(r"(?:(?:model|language_model)\.)*layers\.(\d+)\.")
#: Modules beside the stack: ``mtp``, ``model.mtp_block``, ``model.mtp_layers``.
_NAMED = re.compile(r"(?:model\.)?mtp[^.]*\.")
#: Module that every layer for drafts has which is numbered behind the model's own.
_EH_PROJ = "eh_proj."


def draft_prefixes(names: Iterable[str], num_layers: int) -> tuple[str, ...]:
    """Return what the names of such tensors begin with, "." included, in order.

    Source: config.json's ``num_hidden_layers`` counts the layers of the model itself; DeepSeek-V3
    and GLM-4.5 number the others behind these, Qwen3-Next, MiMo and ERNIE name them ``mtp``.

    Args:
        names: Names of a checkpoint's tensors.
        num_layers: Layers of the model itself; 0 where that is not known.
    """
    found = set()
    for name in names:
        if (named := _NAMED.match(name)) is not None:
            found.add(named.group())
        elif (layer := _LAYER.match(name)) is not None and 0 < num_layers <= int(layer[1]):
            found.add(layer.group())
    return tuple(sorted(found))


def prefixes_beside(names: Iterable[str], base: Iterable[str]) -> tuple[str, ...]:
    """Return what the names of tensors for drafts begin with that come beside those of a base.

    The names alone tell, so that every side finds the same. A layer behind the base's last is one
    for drafts only if it has an ``eh_proj``: a deeper model is another model.
    """
    last: dict[str, int] = {}
    for name in base:
        if (layer := _LAYER.match(name)) is not None:
            stack = name[: layer.start(1)]
            last[stack] = max(int(layer[1]), last.get(stack, 0))
    found = set()
    for name in names:
        if (named := _NAMED.match(name)) is not None:
            found.add(named.group())
        elif (layer := _LAYER.match(name)) is not None and name.startswith(_EH_PROJ, layer.end()):
            stack = name[: layer.start(1)]
            if stack in last and int(layer[1]) > last[stack]:
                found.add(layer.group())
    return tuple(sorted(found))


def why_too_large(num_tensors: int, name_bytes: int) -> str:
    """Return why a draft of so many tensors, with names of so many bytes in all, is not described;
    empty if it is."""
    if num_tensors > MAX_DRAFT_TENSORS:
        return f"has more than {MAX_DRAFT_TENSORS} tensors"
    if name_bytes > MAX_DRAFT_NAME_BYTES:
        return f"has names of more than {MAX_DRAFT_NAME_BYTES} bytes in all"
    return ""


def num_layers_of(config: Mapping[str, object]) -> int:
    """Return how many layers a config.json says that the model has, without those for drafts; 0 if
    it does not."""
    text = config.get("text_config")
    for settings in (config, text if isinstance(text, Mapping) else {}):
        number = settings.get("num_hidden_layers")
        if isinstance(number, int) and number > 0:
            return number
    return 0


def is_draft(name: str, prefixes: Collection[str]) -> bool:
    """Return whether a tensor's name begins with one of these prefixes."""
    return bool(prefixes) and name.startswith(tuple(prefixes))
