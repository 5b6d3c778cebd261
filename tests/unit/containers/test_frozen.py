"""``replace`` is ``dataclasses.replace``, faster."""

from __future__ import annotations

import dataclasses
from functools import cached_property

import pytest

from weft_rl.containers import frozen
from weft_rl.contract.names import PolicyVersion


@dataclasses.dataclass(frozen=True)
class _Group:
    size: int
    name: str = dataclasses.field(default="g", repr=False)

    @cached_property
    def double(self) -> int:
        return 2 * self.size


def test_fields_change_and_nothing_cached_is_taken_over() -> None:
    old = _Group(2, "a")
    assert old.double == 4
    new = frozen.replace(old, size=5)
    assert new == _Group(5, "a") == dataclasses.replace(old, size=5)
    assert new.double == 10
    assert (old.size, hash(new)) == (2, hash(_Group(5, "a")))
    with pytest.raises(dataclasses.FrozenInstanceError):
        new.size = 1  # type: ignore[misc]


def test_what_it_cannot_do_it_refuses() -> None:
    with pytest.raises(TypeError, match="_Group has no field sise"):
        frozen.replace(_Group(2), sise=1)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="PolicyVersion"):  # slots
        frozen.replace(PolicyVersion("math", 1), version=2)
