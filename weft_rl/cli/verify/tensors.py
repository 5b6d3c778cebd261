"""Comparison of served tensors with those of the local files."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from enum import StrEnum

from weft_rl.contract.checkpoint import StoredTensor
from weft_rl.contract.tensors import DataType, shape_text


class Verdict(StrEnum):
    """Result for one tensor; the first two are fine."""

    EQUAL = "equal"
    EQUAL_AFTER_CAST = "equal after a cast"
    DIFFERENT = "different"
    MISSING = "missing"
    """Local tensor that is not served."""
    EXTRA = "extra"
    """Served tensor that the local files lack."""


FINE = frozenset({Verdict.EQUAL, Verdict.EQUAL_AFTER_CAST})


@dataclass(frozen=True)
class Compared:
    """One tensor and its verdict."""

    name: str
    verdict: Verdict
    says: str = ""
    """Description of the difference, for messages."""


#: Digests a tensor that lies here as it would be in another type of floats.
Cast = Callable[[str, DataType], int]


def compare(
    served: Iterable[StoredTensor],
    local: Iterable[StoredTensor],
    cast: Cast,
    tied: Collection[str] = (),
) -> list[Compared]:
    """Compare every tensor of either side, by name.

    Args:
        served: Tensors that a replica holds.
        local: Tensors of the local files.
        cast: Asked where only the types of floats differ.
        tied: Names of tensors that are others' copies: where one side lacks them, nothing
            is missing.
    """
    theirs, ours = ({t.name: t for t in tensors} for tensors in (served, local))
    found = []
    for name in sorted(theirs.keys() | ours.keys()):
        if name in tied and (name not in theirs or name not in ours):
            continue
        if name not in theirs:
            found.append(Compared(name, Verdict.MISSING, f"here {_text(ours[name])}"))
        elif name not in ours:
            found.append(Compared(name, Verdict.EXTRA, f"served {_text(theirs[name])}"))
        else:
            found.append(_compare_one(theirs[name], ours[name], cast))
    return found


def _compare_one(served: StoredTensor, local: StoredTensor, cast: Cast) -> Compared:
    name = served.name
    if (served.dtype, served.shape) == (local.dtype, local.shape):
        if served.digest == local.digest:
            return Compared(name, Verdict.EQUAL)
        values = f"{_text(served)} of other values: {served.digest:016x}, here {local.digest:016x}"
        return Compared(name, Verdict.DIFFERENT, values)
    both = f"served {_text(served)}, here {_text(local)}"
    wanted, given = (DataType.of_safetensors(t.dtype) for t in (served, local))
    is_cast = wanted is not None and given is not None and wanted.is_float and given.is_float
    if served.shape != local.shape or not is_cast:
        return Compared(name, Verdict.DIFFERENT, both)
    assert wanted is not None
    if cast(name, wanted) == served.digest:
        return Compared(name, Verdict.EQUAL_AFTER_CAST, both)
    return Compared(name, Verdict.DIFFERENT, f"{both}, of other values after a cast")


def counts(found: Iterable[Compared]) -> dict[str, int]:
    """Count the tensors of each verdict, leaving out verdicts without any."""
    counted = Counter(compared.verdict for compared in found)
    return {verdict.value: counted[verdict] for verdict in Verdict if counted[verdict]}


def _text(tensor: StoredTensor) -> str:
    return f"{tensor.dtype} ({shape_text(tensor.shape)})"
