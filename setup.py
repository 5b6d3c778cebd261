"""Long description of the package: README.md, whose links lead somewhere in a package index.

All else is in pyproject.toml. Files of a checkout have no address there: a link to one becomes its
text.
"""

import re
from pathlib import Path

from setuptools import setup

_LINK = re.compile(r"\[([^\]\n]+)\]\((?![a-z]+://)[^)\n]+\)")


def long_description(readme: str) -> str:
    """Return the README without links to files of a checkout."""
    return _LINK.sub(r"\1", readme)


if __name__ == "__main__":
    setup(
        long_description=long_description(
            (Path(__file__).parent / "README.md").read_text(encoding="utf-8")
        ),
        long_description_content_type="text/markdown",
    )
