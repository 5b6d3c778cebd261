"""No sample is older than said when it is used, whatever order samples get ready in."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer_side.rollouts.window import AdmittedGroup, Window
from weft_rl.contract.errors import InvalidRequestError


@given(
    group_size=st.integers(1, 3),
    groups_a_step=st.integers(1, 4),
    max_staleness=st.integers(0, 3),
    reports=st.integers(1, 4),
    data=st.data(),
)
def test_no_group_is_older_than_said_and_none_is_lost(
    group_size: int, groups_a_step: int, max_staleness: int, reports: int, data: st.DataObject
) -> None:
    batch = group_size * groups_a_step
    window = Window(batch, max_staleness, group_size)
    version = 0  # of the weights that training holds, and that are served
    admitted_at: dict[int, int] = {}
    running: list[AdmittedGroup] = []
    handed: list[int] = []
    for _ in range(8):
        taken = 0
        while taken < groups_a_step:
            while window.may_admit:
                group = window.admit()
                admitted_at[group.index] = version
                running.append(group)
            assert window.num_admitted - window.num_consumed <= (max_staleness + 1) * batch
            group_now = window.next()
            if group_now is None:
                done = data.draw(st.sampled_from(running))
                done.is_ready = True
                running.remove(done)
                continue
            handed.append(group_now.index)
            assert version - admitted_at[group_now.index] <= max_staleness
            taken += 1
        version += 1  # pushed; then reported, perhaps in several parts
        left = batch
        for part in range(reports):
            count = left if part == reports - 1 else data.draw(st.integers(0, left))
            window.consume(count)
            left -= count
            while window.may_admit and data.draw(st.booleans()):
                group = window.admit()
                admitted_at[group.index] = version if not left else version - 1
                running.append(group)
    assert len(handed) == len(set(handed)) == 8 * groups_a_step
    assert set(handed) | {group.index for group in window.waiting} == set(admitted_at)


def _admitted(window: Window, count: int) -> list[AdmittedGroup]:
    return [window.admit() for _ in range(count)]


def test_a_slow_group_is_passed_until_it_is_due() -> None:
    window = Window(batch_size=2, max_staleness=1, group_size=1)
    slow, *others = _admitted(window, 4)
    assert not window.may_admit
    for group in others:
        group.is_ready = True
    assert [window.next() for _ in range(3)] == others
    assert window.next() is None
    window.consume(2)
    late = window.admit()
    late.is_ready = True
    assert window.next() is None  # the slow one would be too old behind it
    slow.is_ready = True
    assert [window.next(), window.next()] == [slow, late]


def test_a_step_that_is_consumed_in_parts_admits_when_it_is_whole() -> None:
    window = Window(batch_size=4, max_staleness=0, group_size=1)
    for group in _admitted(window, 4):
        group.is_ready = True
        assert window.next() is group
    window.consume(3)
    assert not window.may_admit
    window.consume(1)
    assert window.may_admit


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        ((0, 0, 1), "batch_size=0"),
        ((4, -1, 1), "max_staleness=-1"),
        ((4, True, 1), "max_staleness=True"),
        ((6, 0, 4), "no multiple of n=4"),
    ],
)
def test_what_does_not_fit_is_refused(arguments: tuple[int, int, int], what: str) -> None:
    with pytest.raises(InvalidRequestError, match=what):
        Window(*arguments)


def test_more_than_was_handed_out_cannot_be_consumed() -> None:
    window = Window(2, 0, 1)
    with pytest.raises(InvalidRequestError, match="0 samples were handed out"):
        window.consume(1)
    with pytest.raises(InvalidRequestError, match="give a number"):
        window.consume(-1)
