"""The README is one that people read."""

import re

from tests.unit.docs.pages import page

MAX_WORDS = 900


def words(text):
    """What is between blanks and has a letter or a digit: lines of tables, diagrams and code
    count as prose does."""
    return [word for word in text.split() if re.search(r"\w", word)]


def test_the_readme_has_at_most_900_words():
    counted = words(page("README.md").path.read_text())
    assert len(counted) <= MAX_WORDS, f"{len(counted)} words"


def test_words_of_tables_and_code_count():
    assert len(words("# A\n\n| b | c |\n|---|---|\n```\nd e=1 ─┐\n```\n")) == 5
