"""Element types and tensor descriptions, without torch."""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass


class DataType(enum.IntEnum):
    """Element type on the wire; numbers are those of ``weft.v1.DataType``."""

    FLOAT32 = 1
    FLOAT16 = 2
    BFLOAT16 = 3
    FLOAT64 = 4
    FLOAT8_E4M3FN = 5
    FLOAT8_E5M2 = 6
    INT8 = 7
    INT16 = 8
    INT32 = 9
    INT64 = 10
    UINT8 = 11
    BOOL = 12

    @property
    def itemsize_bytes(self) -> int:
        """Bytes of one element."""
        return _ITEMSIZE[self]

    @property
    def is_float(self) -> bool:
        """Whether a sender may cast it to another float type."""
        return self in _FLOATS

    @property
    def torch_name(self) -> str:
        """Its name in torch (``bfloat16``)."""
        return self.name.lower()

    @property
    def safetensors_name(self) -> str:
        """Its name in the headers of safetensors files (``BF16``)."""
        return _SAFETENSORS_NAMES[self]

    @classmethod
    def of_safetensors(cls, name: str) -> DataType | None:
        """The type of that ``safetensors_name``; None for one that cannot be sent."""
        return _OF_SAFETENSORS.get(name)


_ITEMSIZE = {
    DataType.FLOAT32: 4,
    DataType.FLOAT16: 2,
    DataType.BFLOAT16: 2,
    DataType.FLOAT64: 8,
    DataType.FLOAT8_E4M3FN: 1,
    DataType.FLOAT8_E5M2: 1,
    DataType.INT8: 1,
    DataType.INT16: 2,
    DataType.INT32: 4,
    DataType.INT64: 8,
    DataType.UINT8: 1,
    DataType.BOOL: 1,
}
_SAFETENSORS_NAMES = {
    DataType.FLOAT32: "F32",
    DataType.FLOAT16: "F16",
    DataType.BFLOAT16: "BF16",
    DataType.FLOAT64: "F64",
    DataType.FLOAT8_E4M3FN: "F8_E4M3",
    DataType.FLOAT8_E5M2: "F8_E5M2",
    DataType.INT8: "I8",
    DataType.INT16: "I16",
    DataType.INT32: "I32",
    DataType.INT64: "I64",
    DataType.UINT8: "U8",
    DataType.BOOL: "BOOL",
}
_OF_SAFETENSORS = {name: dtype for dtype, name in _SAFETENSORS_NAMES.items()}
_FLOATS = frozenset({DataType.FLOAT32, DataType.FLOAT16, DataType.BFLOAT16, DataType.FLOAT64})


@dataclass(frozen=True, slots=True)
class TensorMeta:
    """Name, element type and full (unsharded, row-major) shape of a tensor."""

    name: str
    dtype: DataType
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes of its elements, without padding."""
        return math.prod(self.shape) * self.dtype.itemsize_bytes


def shape_text(shape: tuple[int, ...]) -> str:
    """``(4096, 32)`` as ``4096,32``; empty for a scalar."""
    return ",".join(map(str, shape))
