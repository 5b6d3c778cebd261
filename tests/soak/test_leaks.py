"""Sixty pushes to the engine double leave nothing behind; 300 to vLLM by ``make soak``."""

import pytest

from tests.soak.leaks import double_course, problems_of


@pytest.mark.timeout(300)
def test_nothing_grows_over_sixty_pushes(tmp_path):
    course = double_course(tmp_path, 60, say=print)
    print(course.table())
    assert {growth.process for growth in course.growths()} >= {
        "coordinator", "replica-0", "replica-1", "trainer"
    }  # fmt: skip
    assert problems_of(course) == []
