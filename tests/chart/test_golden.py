"""Each profile and each case renders what golden/ has, which people have read."""

import pytest

from tests.chart.golden import CASES, FOLDER, of_case, of_profile
from tests.chart.rendering import PROFILES

ANEW = "run `python -m tests.chart.golden`, and read what `git diff tests/chart/golden` shows"


@pytest.mark.parametrize("profile", PROFILES)
def test_a_profile_renders_its_file(profile):
    assert of_profile(profile) == (FOLDER / f"{profile}.yaml").read_text(), ANEW


@pytest.mark.parametrize("case", CASES)
def test_a_case_changes_what_its_part_of_the_file_says(case):
    assert of_case(case) in (FOLDER / "cases.txt").read_text(), ANEW


def test_each_file_is_of_a_profile():
    assert {path.name for path in FOLDER.iterdir()} == {
        *(f"{p}.yaml" for p in PROFILES),
        "cases.txt",
    }
