"""Messages from their descriptors: random ones, and valid ones that something is done to."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from typing import Any, Final

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

_INTS: Final = (
    0, 1, 2, 3, 7, 100, -1, -2, 2**16, 2**31 - 1, 2**31, -(2**31), 2**32 - 1, 10**7, 2**53 - 1,
    2**53, 2**62, 2**63 - 1, -(2**63), 2**64 - 1,
)  # fmt: skip
_FLOATS: Final = (0.0, 0.5, 1.0, 2.0, -1.0, 1e-300, 1e300, math.inf, -math.inf, math.nan)
_TEXTS: Final = (
    "", "x", "base", "math", "math@1", "../up", "a" * 63, "a" * 64, "a" * 300, "a" * 5_000, "\0",
    "line\nline", "é" * 100, "\U0001f9f6", "%s%n", "9" * 5_000, "127.0.0.1:1", "127.0.0.1:99999",
    "http://127.0.0.1:1", "gloo", "nccl", "LOAD_FAILED", "{}", "[" * 30_000,
    '{"peft_type": "LORA", "r": 4, "lora_alpha": 8, "rank_pattern": ["x"]}',
    '{"peft_type": "LORA", "r": 4, "lora_alpha": 8, "layers_to_transform": [[1]]}',
    '{"peft_type": "LORA", "r": 4, "lora_alpha": NaN, "target_modules": "(.*.*)*x"}',
)  # fmt: skip
_BYTES: Final = (b"", b"\0", b"\1" * 8, b"\xff" * 32, b"d" * 64, b"d" * 65, b"1", b"9" * 5_000)
_RANGES: Final = {
    FieldDescriptor.CPPTYPE_INT32: (-(2**31), 2**31 - 1),
    FieldDescriptor.CPPTYPE_INT64: (-(2**63), 2**63 - 1),
    FieldDescriptor.CPPTYPE_UINT32: (0, 2**32 - 1),
    FieldDescriptor.CPPTYPE_UINT64: (0, 2**64 - 1),
    FieldDescriptor.CPPTYPE_ENUM: (-1, 100),
}
_MAX_DEPTH: Final = 4
_MAX_LIST_BYTES: Final = 1_000_000


class Generator:
    """Makes messages by one stream of random numbers.

    Args:
        chance: Where every choice comes from.
        known: Values that the server gave out or was told, by the field's name: ids,
            tokens and digests that are alive.
    """

    def __init__(self, chance: random.Random, known: Mapping[str, Sequence[Any]]) -> None:
        self._chance, self._known = chance, known

    def message(self, kind: type[Message], depth: int = 0) -> Message:
        """A message of which each field is set or not, to anything."""
        made = kind()
        for field in made.DESCRIPTOR.fields:
            if self._chance.random() < 0.7:
                self.put(made, field, depth)
        return made

    def mutate(self, message: Message) -> None:
        """Do something to one field, of it or of what is nested in it."""
        fields = message.DESCRIPTOR.fields
        if not fields:
            return
        field = self._chance.choice(fields)
        is_nested = field.message_type is not None and not _is_list(field)
        if is_nested and message.HasField(field.name) and self._chance.random() < 0.8:
            self.mutate(getattr(message, field.name))
        elif self._chance.random() < 0.2:
            message.ClearField(field.name)
        else:
            self.put(message, field, 0)

    def put(self, message: Message, field: Any, depth: int) -> None:
        """Set one field to anything that it can hold."""
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            return  # none comes in
        if _is_list(field):
            message.ClearField(field.name)
            count = self._chance.choice((0, 1, 1, 2, 3, 20, 70_000))
            entries = [self._one(message, field, depth) for _ in range(min(count, 3))]
            entries = [entry for entry in entries if entry is not None]
            size = max((1, *map(_size, entries)))
            if entries and depth < 2:
                entries *= min(count, _MAX_LIST_BYTES // size) // len(entries)
            getattr(message, field.name).extend(entries)
        elif field.message_type is None:
            setattr(message, field.name, self._one(message, field, depth))
        elif (nested := self._one(message, field, depth)) is not None:
            getattr(message, field.name).CopyFrom(nested)

    def _one(self, message: Message, field: Any, depth: int) -> Any:
        known = [value for value in self._known.get(field.name, ()) if _suits(field, value)]
        if known and self._chance.random() < 0.6:
            return self._chance.choice(known)
        if field.message_type is not None:
            if depth >= _MAX_DEPTH:
                return None
            return self.message(field.message_type._concrete_class, depth + 1)
        if field.type == FieldDescriptor.TYPE_BYTES:
            return self._chance.choice(_BYTES)
        if field.cpp_type == FieldDescriptor.CPPTYPE_STRING:
            return self._chance.choice(_TEXTS)
        if field.cpp_type == FieldDescriptor.CPPTYPE_BOOL:
            return self._chance.random() < 0.5
        if field.cpp_type == FieldDescriptor.CPPTYPE_DOUBLE:
            return self._chance.choice(_FLOATS)
        return self._chance.choice([value for value in _INTS if _fits(field, value)])

    def spoil(self, data: bytes) -> bytes:
        """Bytes that may be no message any more."""
        cut = self._chance.randrange(len(data) + 1)
        noise = self._chance.randbytes(self._chance.randrange(1, 12))
        return self._chance.choice((data[:cut], data[:cut] + noise + data[cut:], noise))


def _is_list(field: Any) -> bool:
    return isinstance(field.default_value, list)


def _fits(field: Any, value: int) -> bool:
    low, high = _RANGES.get(field.cpp_type, (0, -1))
    return low <= value <= high


def _size(value: Any) -> int:
    if isinstance(value, Message):
        return value.ByteSize() + 3
    return len(value) + 3 if isinstance(value, str | bytes) else 10


def _suits(field: Any, value: Any) -> bool:
    if isinstance(value, Message):
        return value.DESCRIPTOR is field.message_type
    if isinstance(value, int):
        return _fits(field, value)
    wanted = bytes if field.type == FieldDescriptor.TYPE_BYTES else str
    return field.message_type is None and isinstance(value, wanted)
