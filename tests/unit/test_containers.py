"""``replace`` is ``dataclasses.replace``, faster; an ``LruMapping`` keeps what was used last."""

from __future__ import annotations

import dataclasses
from functools import cached_property

import pytest

from weft_rl.containers import LruMapping, replace
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
    new = replace(old, size=5)
    assert new == _Group(5, "a") == dataclasses.replace(old, size=5)
    assert new.double == 10
    assert (old.size, hash(new)) == (2, hash(_Group(5, "a")))
    with pytest.raises(dataclasses.FrozenInstanceError):
        new.size = 1  # type: ignore[misc]


def test_what_it_cannot_do_it_refuses() -> None:
    with pytest.raises(TypeError, match="_Group has no field sise"):
        replace(_Group(2), sise=1)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="PolicyVersion"):  # slots
        replace(PolicyVersion("math", 1), version=2)


def test_the_least_recently_used_is_dropped():
    dropped = list[int]()
    kept = LruMapping(2, dropped.append)
    kept.put("a", 1)
    kept.put("b", 2)
    assert kept.get("a") == 1
    kept.put("c", 3)
    assert (kept.get("a"), kept.get("b"), kept.get("c"), dropped) == (1, None, 3, [2])
    assert "b" not in kept
    assert "a" in kept


def test_a_value_that_is_replaced_counts_as_used_and_is_not_dropped():
    dropped = list[int]()
    kept = LruMapping(2, dropped.append)
    kept.put("a", 1)
    kept.put("b", 2)
    kept.put("a", 3)
    kept.put("c", 4)
    assert (kept.get("a"), kept.get("b"), dropped) == (3, None, [2])


def test_its_owner_may_drop_more_than_the_bound_asks_for():
    dropped = list[int]()
    kept = LruMapping(9, dropped.append)
    for number in range(3):
        kept.put(number, number)
    while kept:
        kept.drop_oldest()
    assert dropped == [0, 1, 2]
    with pytest.raises(KeyError):
        kept.drop_oldest()
