"""Codec between values and messages, derived from a dataclass and the descriptor of its message.

A value is a frozen dataclass whose fields bear the names of its message's fields. Each codec is
generated once, as source, when it is made: it costs what code written by hand does. What does not
fit raises a ``SchemaError`` then, not when a value is first sent. The kinds of fields:

- ``bool``, ``int``, ``float``, ``str``, ``bytes``: the scalar. An ``int`` may be an enum's number.
- An ``Enum``: the enum whose names are the members', prefixed with the enum's own name in capitals
  (``DataType.INT8`` is ``DATA_TYPE_INT8``). Zero is unset, which only an optional field may be.
- ``X | None``: None where the message does not have the field.
- A dataclass: the nested message, by the codec of the two; a type with a ``converter``: as that
  says.
- ``tuple[X, ...]`` and ``frozenset[X]``: a list, which is sorted of a set.
- ``Mapping[X, Y]``: a map, of scalars or enums.

A field that its message can lack, and that is not optional, has its default then. The metadata of
a field may say more:

- ``wire``: None for one that is on no wire; ``why`` gives the reason. It has its default.
- ``unset``: value that stands for zero, or for an empty text, where a message has that.
- ``most``: number of entries of a list that are decoded; the others are left.
"""

from __future__ import annotations

import dataclasses
import enum
import inspect
import re
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, Generic, TypeVar

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from weft_rl.contract.errors import InvalidRequestError

_V = TypeVar("_V")
_M = TypeVar("_M", bound=Message)


class SchemaError(TypeError):
    """Difference between a value and its message, found while their codec is made."""


@dataclasses.dataclass(frozen=True)
class MessageCodec(Generic[_V, _M]):
    """Codec of one kind of value and one kind of message."""

    value: type[_V]
    message: type[_M]
    encode: Callable[..., _M]
    """Takes a value, and by keyword the fields of the message that no value has; returns the
    message."""
    decode: Callable[..., _V]
    """Takes a message, and by keyword the fields of the value that no message has; returns the
    value, or raises what its ``__post_init__`` does."""
    source: str
    """Source of both functions, for readers of a traceback."""
    beside: frozenset[str] = frozenset()
    """Names of fields that only one of the two has."""
    flat: str = ""
    """Template of the arguments of the message, where all of them are plain fields of the value:
    such a message is nested without a call of its own."""


@dataclasses.dataclass(frozen=True)
class _Conversion:
    encode: Callable[[Any], Any]
    decode: Callable[[Any], Any]
    suffix: str


#: Codecs of nested values, by value and the name of the message.
_CODECS: dict[tuple[type, str], MessageCodec[Any, Any]] = {}
_CONVERTERS: dict[tuple[Any, str], _Conversion] = {}
#: Every codec that was made, in order; tests go through all of them.
MADE: Final[list[MessageCodec[Any, Any]]] = []


def converter(
    value: type[_V],
    message: type[_M],
    encode: Callable[[_V], _M],
    decode: Callable[[_M], _V],
    *,
    suffix: str = "",
) -> None:
    """Register the functions that convert one type of value, which is no dataclass of the
    message's fields.

    Args:
        suffix: Ending of the value's field where the message's has none: a duration ``pause`` is
            ``pause_seconds`` as a number.
    """
    _CONVERTERS[value, message.DESCRIPTOR.full_name] = _Conversion(encode, decode, suffix)


def codec(
    value: type[_V],
    message: type[_M],
    *,
    given: Iterable[str] = (),
    told: Iterable[str] = (),
) -> MessageCodec[_V, _M]:
    """Make the codec of a dataclass and its message.

    Args:
        given: Fields of the value that the message does not have; ``decode`` takes them.
        told: Fields of the message that the value does not have; ``encode`` takes them, and
            ``decode`` leaves them. One without an argument stays unset.

    Raises:
        SchemaError: A field differs, or only one of the two has it; names it.
    """
    made = _CodecFactory(value, message, frozenset(given), frozenset(told)).make()
    MADE.append(made)
    if not made.beside:
        _CODECS[value, message.DESCRIPTOR.full_name] = made
    return made


def listing(value: type[Any], message: type[_M], *, told: Iterable[str] = ()) -> Callable[..., _M]:
    """Make the function that encodes what a message tells of a value, and nothing decodes.

    It reads the fields of the message that are attributes of the value, its properties included,
    and takes all others by keyword; one without an argument stays unset. So does a field of a
    message whose value is None or 0.

    Args:
        told: Fields that are taken by keyword, too, though the value has an attribute of the name.

    Raises:
        SchemaError: An attribute does not fit its field; names it.
    """
    made, keywords = _CodecFactory(value, message, frozenset(), frozenset(told)).listing()
    if not keywords:
        converter(value, message, made, _not_decoded)
    return made


def _not_decoded(message: Message) -> Any:
    raise SchemaError(f"{message.DESCRIPTOR.full_name} is encoded only")


def enum_name(descriptor: Any, member: enum.Enum) -> str:
    """Return the name that a member of an enum has in ``weft.v1``: the prefix is the enum's own."""
    prefix = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", descriptor.name).upper()
    return f"{prefix}_{member.name}"


class _Members(dict[int, Any]):
    """Members of an enum by number, of one field, which refuses other numbers by its name."""

    def __init__(self, members: Mapping[int, Any], field: str) -> None:
        super().__init__(members)
        self._field = field

    def __missing__(self, number: int) -> Any:
        why = f"is {number}, which means nothing" if number else "is not set"
        raise InvalidRequestError(f"{self._field} {why}", metadata={"field": self._field})


class _CodecFactory(Generic[_V, _M]):
    """Generator of one codec: an expression for each field, each way."""

    def __init__(
        self, value: type[_V], message: type[_M], given: frozenset[str], told: frozenset[str]
    ) -> None:
        if not dataclasses.is_dataclass(value):
            raise SchemaError(f"{value.__name__} is no dataclass")
        self._value, self._message = value, message
        self._given, self._told = given, told
        self._names: dict[str, Any] = {"_new": object.__new__, "_Value": value, "_Message": message}

    def make(self) -> MessageCodec[_V, _M]:
        descriptor = self._message.DESCRIPTOR
        hints = typing.get_type_hints(self._value)
        encoded, decoded, absent = list[str](), list[str](), set[str]()
        known = set(self._told)
        for field in dataclasses.fields(typing.cast(Any, self._value)):
            if field.name in self._given:
                decoded.append(f"{field.name}={field.name}")
            elif "wire" in field.metadata:
                if not field.metadata.get("why"):
                    raise SchemaError(f"{self._value.__name__}.{field.name}: no reason is given")
                absent.add(field.name)
                decoded.append(f"{field.name}={self._default(field)}")
            else:
                theirs = self._field_of(descriptor, field.name, hints[field.name])
                known.add(theirs.name)
                there, back = self._pair(field, hints[field.name], theirs)
                encoded.append(f"{theirs.name}={there}")
                decoded.append(f"{field.name}={back}")
        self._check(descriptor, known)
        encoded += [f"{name}={name}" for name in sorted(self._told)]
        source = self._compile(
            [*self._encode_lines(encoded, sorted(self._told)), *self._decode_lines(decoded)]
        )
        return MessageCodec(
            self._value,
            self._message,
            self._names["encode"],
            self._names["decode"],
            source,
            self._given | self._told | absent,
            self._flat(encoded),
        )

    def listing(self) -> tuple[Callable[..., _M], Sequence[str]]:
        """Make the function, and list the fields that it takes by keyword."""
        ours, descriptor = _attributes(self._value), typing.cast(Any, self._message.DESCRIPTOR)
        suffixes = ["", *{one.suffix for one in _CONVERTERS.values() if one.suffix}]
        encoded, told = list[str](), list[str]()
        for theirs in descriptor.fields:
            names = [theirs.name + suffix for suffix in suffixes if theirs.name + suffix in ours]
            if not names or theirs.name in self._told:
                told.append(theirs.name)
                encoded.append(f"{theirs.name}={theirs.name}")
                continue
            there, _ = self._pair(*ours[names[0]], theirs)
            if theirs.message_type and not _is_list(theirs):
                there += f" if value.{names[0]} else None"
            encoded.append(f"{theirs.name}={there}")
        if unknown := self._told - {*told}:
            raise SchemaError(f"{descriptor.full_name} has no field {unknown}")
        self._compile(self._encode_lines(encoded, told))
        return self._names["encode"], told

    def _flat(self, encoded: Sequence[str]) -> str:
        plain = [_PLAIN.fullmatch(one) for one in encoded]
        first, *others = [f"{one[1]}={{0}}.{one[2]}" for one in plain if one] or [""]
        if not all(plain):
            return ""
        return ", ".join([first.format("(_n := {0})"), *(one.format("_n") for one in others)])

    def _compile(self, lines: Sequence[str]) -> str:
        """Define the functions of a source under their names; return the source."""
        source = "\n".join(lines) + "\n"
        # No input: the source is made of names of fields alone.
        exec(compile(source, f"<codec of {self._value.__name__}>", "exec"), self._names)
        return source

    def _encode_lines(self, encoded: Sequence[str], told: Sequence[str]) -> list[str]:
        given = "".join(f", {name}=None" for name in told)
        return [
            f"def encode(value{given and ', *' + given}):",
            f"    return _Message({', '.join(encoded)})",
        ]

    def _decode_lines(self, decoded: Sequence[str]) -> list[str]:
        given = "".join(f", {name}" for name in sorted(self._given))
        lines = [f"def decode(message{given and ', *' + given}):"]
        if hasattr(self._value, "__dict__") and not hasattr(self._value, "__slots__"):
            # Not by __init__, which sets each field of a frozen dataclass in a call of its own.
            lines += ["    made = _new(_Value)", f"    made.__dict__.update({', '.join(decoded)})"]
            if hasattr(self._value, "__post_init__"):
                lines.append("    made.__post_init__()")
            return [*lines, "    return made"]
        return [*lines, f"    return _Value({', '.join(decoded)})"]

    def _field_of(self, descriptor: Any, name: str, hint: Any) -> Any:
        """Return the field of the message that has a value's field's name, or the name without the
        suffix of its converter."""
        fields = descriptor.fields_by_name
        if name in fields:
            return fields[name]
        for suffix in {one.suffix for one in _CONVERTERS.values() if one.suffix}:
            field = fields.get(name.removesuffix(suffix))
            if field is not None and self._converter(without_none(hint), field) is not None:
                return field
        raise SchemaError(f"{self._value.__name__}.{name} is no field of {descriptor.full_name}")

    def _check(self, descriptor: Any, known: set[str]) -> None:
        fields = descriptor.fields_by_name
        if missing := [name for name in fields if name not in known]:
            what = f"{descriptor.full_name}.{missing[0]}"
            raise SchemaError(f"{what} is no field of {self._value.__name__}")
        if unknown := sorted(self._told - set(fields)):
            raise SchemaError(f"{descriptor.full_name} has no field {unknown[0]} to be told")
        names = {field.name for field in dataclasses.fields(typing.cast(Any, self._value))}
        if unknown := sorted(self._given - names):
            raise SchemaError(f"{self._value.__name__} has no field {unknown[0]} to be given")

    def _name(self, what: Any) -> str:
        """Return a name under which the source finds an object."""
        name = f"_{len(self._names)}"
        self._names[name] = what
        return name

    def _default(self, field: dataclasses.Field[Any]) -> str:
        if field.default is not dataclasses.MISSING:
            return self._name(field.default)
        if field.default_factory is not dataclasses.MISSING:
            return f"{self._name(field.default_factory)}()"
        raise SchemaError(f"{self._value.__name__}.{field.name} has no default to be decoded to")

    def _pair(
        self, field: dataclasses.Field[Any], hint: Any, theirs: FieldDescriptor
    ) -> tuple[str, str]:
        """Return the expressions that encode and decode one field."""
        if field.metadata.keys() - {"unset", "most"}:
            raise SchemaError(f"{self._where(field, theirs)}: metadata {dict(field.metadata)}")
        bare = without_none(hint)
        is_optional = bare is not hint
        ours, got = f"value.{field.name}", f"message.{theirs.name}"
        if _is_list(theirs):
            return self._several(field, bare, theirs)
        there, back = self._one(field, bare, theirs, is_optional)
        if is_optional and there != "{}":
            encoded = f"None if (_ := {ours}) is None else {there.format('_')}"
        else:  # a message takes None for a field that it is not to have
            encoded = there.format(ours)
        decoded = back.format(got)
        if "unset" in field.metadata:
            decoded = f"{decoded} or {self._name(field.metadata['unset'])}"
        elif theirs.has_presence and (is_optional or field.default is not dataclasses.MISSING):
            otherwise = "None" if is_optional else self._name(field.default)
            decoded = f"{decoded} if message.HasField({theirs.name!r}) else {otherwise}"
        elif is_optional and theirs.enum_type is None:
            raise SchemaError(f"{self._where(field, theirs)}: no message lacks it")
        return encoded, decoded

    def _several(
        self, field: dataclasses.Field[Any], hint: Any, theirs: FieldDescriptor
    ) -> tuple[str, str]:
        origin, parts = typing.get_origin(hint), typing.get_args(hint)
        ours, got = f"value.{field.name}", f"message.{theirs.name}"
        if origin is not None and issubclass(origin, Mapping):
            entry = theirs.message_type
            if entry is None or not entry.GetOptions().map_entry:
                raise SchemaError(f"{self._where(field, theirs)}: it is no map")
            key, value = entry.fields_by_name["key"], entry.fields_by_name["value"]
            self._one(field, parts[0], key, False)
            there, back = self._one(field, parts[1], value, False)
            if back == "{}":
                return ours, f"dict({got})"
            return ours, f"{{k: {back.format('v')} for k, v in {got}.items()}}"
        if origin not in (tuple, frozenset) or (origin is tuple and parts[1:] != (...,)):
            raise SchemaError(f"{self._where(field, theirs)}: a list is a tuple or a frozenset")
        there, back = self._one(field, parts[0], theirs, False)
        given = f"sorted({ours})" if origin is frozenset else ours
        # A list, by a slice: the container itself is slow to walk.
        got = f"{got}[:{field.metadata.get('most', '')}]"
        if (call := _call(there)) is not None:
            there = f"map({call}, {given})"
        else:
            there = given if there == "{}" else f"[{there.format('v')} for v in {given}]"
        if (call := _call(back)) is not None:
            back = f"{origin.__name__}(map({call}, {got}))"
        else:
            got = got if back == "{}" else f"[{back.format('v')} for v in {got}]"
            back = f"{origin.__name__}({got})"
        return there, back

    def _one(
        self,
        field: dataclasses.Field[Any],
        hint: Any,
        theirs: FieldDescriptor,
        is_optional: bool,
    ) -> tuple[str, str]:
        """Return the templates that encode and decode a single entry."""
        where = self._where(field, theirs)
        if theirs.message_type is not None:
            found = self._converter(hint, theirs)
            if found is None:
                nested = self._nested(hint, theirs.message_type, where)
                if nested.flat:
                    there = f"{self._name(nested.message)}({nested.flat})"
                    return there, f"{self._name(nested.decode)}({{}})"
                found = _Conversion(nested.encode, nested.decode, "")
            return f"{self._name(found.encode)}({{}})", f"{self._name(found.decode)}({{}})"
        if typing.get_origin(hint) is typing.Literal:
            hint = type(typing.get_args(hint)[0])
        if theirs.enum_type is not None and hint is not int:
            return self._enum(hint, theirs, where, is_optional)
        if hint is not (bytes if theirs.type == _BYTES else _SCALARS.get(theirs.cpp_type)):
            raise SchemaError(f"{where}: {hint} is not of the message's kind")
        return "{}", "{}"

    def _enum(
        self, hint: Any, theirs: FieldDescriptor, where: str, is_optional: bool
    ) -> tuple[str, str]:
        if not (isinstance(hint, type) and issubclass(hint, enum.Enum)):
            raise SchemaError(f"{where}: {hint} is no enum")
        assert theirs.enum_type is not None
        numbers = {one.name: one.number for one in theirs.enum_type.values}
        names = {enum_name(theirs.enum_type, member): member for member in hint}
        if odd := sorted(names.keys() ^ {name for name, number in numbers.items() if number}):
            raise SchemaError(f"{where}: {odd[0]} is of one enum alone")
        members = {numbers[name]: member for name, member in names.items()}
        table = _Members({0: None, **members} if is_optional else members, where.split(",")[0])
        back = f"{self._name(table)}[{{}}]"
        if issubclass(hint, int) and all(one.value == number for number, one in members.items()):
            return "{}", back  # it is its number
        return f"{self._name({member: n for n, member in members.items()})}[{{}}]", back

    def _converter(self, hint: Any, theirs: FieldDescriptor) -> _Conversion | None:
        if theirs.message_type is None:
            return None
        return _CONVERTERS.get((hint, theirs.message_type.full_name))

    def _nested(self, hint: Any, descriptor: Any, where: str) -> MessageCodec[Any, Any]:
        if not dataclasses.is_dataclass(hint) or not isinstance(hint, type):
            raise SchemaError(f"{where}: {hint} is no message")
        return _CODECS.get((hint, descriptor.full_name)) or codec(hint, descriptor._concrete_class)

    def _where(self, field: dataclasses.Field[Any], theirs: FieldDescriptor) -> str:
        holder = theirs.containing_type
        assert holder is not None  # none is an extension
        return f"{holder.name}.{theirs.name}, which is {self._value.__name__}.{field.name}"


_PLAIN: Final = re.compile(r"(\w+)=value\.(\w+)")
_BYTES: Final = FieldDescriptor.TYPE_BYTES
_SCALARS: Final[Mapping[int, type]] = {
    FieldDescriptor.CPPTYPE_INT32: int,
    FieldDescriptor.CPPTYPE_INT64: int,
    FieldDescriptor.CPPTYPE_UINT32: int,
    FieldDescriptor.CPPTYPE_UINT64: int,
    FieldDescriptor.CPPTYPE_ENUM: int,
    FieldDescriptor.CPPTYPE_DOUBLE: float,
    FieldDescriptor.CPPTYPE_FLOAT: float,
    FieldDescriptor.CPPTYPE_BOOL: bool,
    FieldDescriptor.CPPTYPE_STRING: str,
}


def _attributes(value: type) -> dict[str, tuple[dataclasses.Field[Any], Any]]:
    """Return the fields and properties of a dataclass, with their types."""
    hints = typing.get_type_hints(value)
    found = {one.name: (one, hints[one.name]) for one in dataclasses.fields(value)}
    for name, member in inspect.getmembers_static(value):
        function = getattr(member, "fget", getattr(member, "func", None))  # cached or not
        if function is not None and not name.startswith("_"):
            found[name] = _named(name), typing.get_type_hints(function)["return"]
    return found


def _named(name: str) -> Any:
    field = dataclasses.field()
    field.name = name
    return field


def _is_list(field: FieldDescriptor) -> bool:
    # Not by its label: protobuf 5 and 7 have no common way to ask for that.
    return isinstance(field.default_value, list)


def without_none(hint: Any) -> Any:
    """Return X of ``X | None``; another type as it is."""
    if typing.get_origin(hint) in (types.UnionType, typing.Union):
        parts = [part for part in typing.get_args(hint) if part is not types.NoneType]
        if len(parts) == 1:
            return parts[0]
    return hint


def _call(template: str) -> str | None:
    """Return the function of a template that does no more than call one."""
    return template.removesuffix("({})") if template.endswith("({})") else None
