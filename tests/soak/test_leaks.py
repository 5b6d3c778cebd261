"""Sixty pushes and 200 deltas to engine doubles leave nothing behind; 300 pushes to vLLM by
``make soak``."""

import pytest

from tests.soak.leaks import delta_course, double_course, problems_of


@pytest.mark.timeout(300)
def test_nothing_grows_over_sixty_pushes(tmp_path):
    course = double_course(tmp_path, 60, say=print)
    print(course.table())
    assert {growth.process for growth in course.growths()} >= {
        "coordinator", "replica-0", "replica-1", "trainer"
    }  # fmt: skip
    assert problems_of(course) == []


@pytest.mark.timeout(300)
def test_two_hundred_deltas_in_a_row_are_all_of_the_trainers_content_and_nothing_grows(tmp_path):
    course = delta_course(tmp_path, 200, say=print)
    print(course.table())
    assert {growth.process for growth in course.growths()} >= {
        "coordinator", "staging", "in-place", "trainer"
    }  # fmt: skip
    assert problems_of(course) == []
