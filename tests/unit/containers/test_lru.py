import pytest

from weft_rl.containers.lru import LruMapping


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
