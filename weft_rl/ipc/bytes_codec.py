"""Codec between dataclasses and bytes, derived from the annotations of their fields.

The bytes, little-endian, are a head of fixed size and the parts of varying sizes, each in the order
of the fields; in the head a part has its number of bytes. Nothing that is decoded is executed, and
what does not fit exactly is refused. Each codec is generated once, as source. The kinds of fields:

- ``bool``, ``float``, and ``int``, which is unsigned, of 64 bits: in the head.
- ``bytes``, ``str`` and a ``Literal`` of texts; an ``Enum`` of numbers; another dataclass; a type
  with ``register``: a part.
- ``X | Y`` and ``X | None`` of such types: a part, which a byte with the number of the type begins.
- ``tuple[X, ...]``: a part.

``Annotated`` says more. A text is a ``struct`` format: the field is in the head then. A number is
the largest number of bytes (a longer ``str`` is cut), or of entries.
"""

from __future__ import annotations

import dataclasses
import enum
import struct
import types
import typing
from collections.abc import Callable
from typing import Annotated, Any, Final, Generic, TypeVar

_V = TypeVar("_V")
U32 = Annotated[int, "I"]
#: Largest part without a bound of its own.
_MOST: Final = 2**32 - 1
_FORMATS: Final = {bool: "?", int: "Q", float: "d"}


@dataclasses.dataclass(frozen=True)
class BytesCodec(Generic[_V]):
    """Codec of one type of value."""

    pack: Callable[[_V], bytes]
    """Raises ValueError of a value beyond its bounds."""
    unpack: Callable[[bytes], _V]
    """Raises ValueError or ``struct.error`` of other bytes, and what the value's type does."""
    max_bytes: int = _MOST


_CODECS: Final[dict[Any, BytesCodec[Any]]] = {}


def register(value: type[_V], codec: BytesCodec[_V]) -> None:
    """Register the codec of a type that is no dataclass of such fields."""
    _CODECS[value] = codec


def bytes_codec(value: type[_V]) -> BytesCodec[_V]:
    """Return the codec of a type: that registered, or else of a dataclass.

    Raises:
        TypeError: A field is of another kind; names it.
    """
    if value not in _CODECS:
        _CODECS[value] = _make(value)
    return _CODECS[value]


def _make(value: type[_V]) -> BytesCodec[_V]:
    if not dataclasses.is_dataclass(value):
        raise TypeError(f"no bytes are known of {value}")
    hints = typing.get_type_hints(value, include_extras=True)
    form, head, read, made = "<", list[str](), list[str](), list[str]()
    parts: dict[str, int] = {}
    known: dict[str, Any] = {"_Value": value}
    for field in dataclasses.fields(value):
        name, found = field.name, _encoding(hints[field.name])
        read.append(name)
        if isinstance(found, str):
            form += found
            head.append(f"value.{name}")
            made.append(f"{name}=got_{name}" if field.kw_only else f"got_{name}")
            continue
        form += "H" if found.max_bytes < 2**16 else "I"
        known |= {f"pack_{name}": found.pack, f"unpack_{name}": found.unpack}
        head.append(f"len(part_{name})")
        parts[name] = found.max_bytes
        came = f"unpack_{name}(part_{name})"
        made.append(f"{name}={came}" if field.kw_only else came)
    layout = struct.Struct(form)
    known |= {"_pack": layout.pack, "_unpack": layout.unpack_from}
    checks = [
        f" if len(part_{n}) > {most}: raise ValueError('{n} is above {most:,} bytes')"
        for n, most in parts.items()
    ]
    lines = ["def pack(value):"]
    lines += [f" part_{name} = pack_{name}(value.{name})" for name in parts]
    lines += checks
    packed = [f"_pack({', '.join(head)})", *(f"part_{name}" for name in parts)]
    lines += [f" return {' + '.join(packed)}"]
    lines += ["def unpack(content):", f" end = {layout.size}"]
    lines += [f" {''.join(f'got_{name}, ' for name in read)} = _unpack(content)"] if read else []
    lines += [f" part_{n} = content[end : end + got_{n}]; end += got_{n}" for n in parts]
    lines += checks
    lines += [" if end != len(content): raise ValueError(f'{len(content):,} bytes, not {end:,}')"]
    lines += [f" return _Value({', '.join(made)})"]
    # No input: the source is made of names of fields alone.
    exec(compile("\n".join(lines), f"<bytes of {value.__name__}>", "exec"), known)
    return BytesCodec(known["pack"], known["unpack"], min(_MOST, layout.size + sum(parts.values())))


def _encoding(hint: Any) -> str | BytesCodec[Any]:
    """Return a ``struct`` format, or the codec of a part."""
    bound = None
    if typing.get_origin(hint) is Annotated:
        hint, bound = typing.get_args(hint)
        if isinstance(bound, str):
            return bound
    if hint in _FORMATS:
        return _FORMATS[hint]
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is tuple and arguments[1:] == (...,):
        return _entries(_encoding(arguments[0]), _MOST if bound is None else bound)
    if origin is typing.Literal:
        hint = str
    if hint in (bytes, str):
        return _content(hint, _MOST if bound is None else bound)
    if origin in (types.UnionType, typing.Union):
        return _union(arguments)
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        number = struct.Struct("<I")
        return BytesCodec(
            lambda member: number.pack(member.value),
            lambda content: hint(*number.unpack(content)),
            number.size,
        )
    return bytes_codec(hint)


def _content(kind: type, most: int) -> BytesCodec[Any]:
    def cut(text: str) -> bytes:
        content = text.encode("utf-8", "replace")
        if len(content) > most:
            content = content[:most].decode("utf-8", "ignore").encode()
        return content

    return BytesCodec(bytes, bytes, most) if kind is bytes else BytesCodec(cut, bytes.decode, most)


def _entries(entry: str | BytesCodec[Any], most: int) -> BytesCodec[Any]:
    def check(count: int) -> None:
        if count > most:
            raise ValueError(f"more than {most:,} entries")

    if isinstance(entry, str):
        size = struct.calcsize(f"<{entry}")

        def pack(values: tuple[Any, ...]) -> bytes:
            check(len(values))
            return struct.pack(f"<{len(values)}{entry}", *values)

        def unpack(content: bytes) -> tuple[Any, ...]:
            check(len(content) // size)
            return struct.unpack(f"<{len(content) // size}{entry}", content)

        return BytesCodec(pack, unpack, min(_MOST, most * size))
    length = struct.Struct("<I")

    def pack_parts(values: tuple[Any, ...]) -> bytes:
        check(len(values))
        return b"".join(length.pack(len(part)) + part for part in map(entry.pack, values))

    def unpack_parts(content: bytes) -> tuple[Any, ...]:
        values, at = list[Any](), 0
        while at < len(content):
            at, (size,) = at + length.size, length.unpack_from(content, at)
            if at + size > len(content) or size > entry.max_bytes:
                raise ValueError(f"an entry of {size:,} bytes")
            values.append(entry.unpack(content[at : at + size]))
            at += size
            check(len(values))
        return tuple(values)

    return BytesCodec(pack_parts, unpack_parts, min(_MOST, most * (length.size + entry.max_bytes)))


def _union(kinds: tuple[type, ...]) -> BytesCodec[Any]:
    codecs = [_NONE if kind is types.NoneType else _part(kind) for kind in kinds]
    numbers = {kind: number for number, kind in enumerate(kinds)}

    def pack(value: Any) -> bytes:
        number = numbers[type(value)]
        return bytes([number]) + codecs[number].pack(value)

    def unpack(content: bytes) -> Any:
        if not content or content[0] >= len(codecs):
            raise ValueError(f"a value of kind {content[:1].hex() or None}")
        return codecs[content[0]].unpack(content[1:])

    return BytesCodec(pack, unpack, min(_MOST, 1 + max(each.max_bytes for each in codecs)))


def _part(kind: type) -> BytesCodec[Any]:
    found = _encoding(kind)
    if isinstance(found, str):
        raise TypeError(f"{kind} is no part")
    return found


def _nothing(content: bytes) -> None:
    if content:
        raise ValueError(f"{len(content):,} bytes of nothing")


_NONE: Final[BytesCodec[None]] = BytesCodec(lambda _: b"", _nothing, 0)
