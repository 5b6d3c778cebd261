"""Long description of the package, README.md with links that lead somewhere, and its addresses.

All else is in pyproject.toml. Until the project has a public address, a link to a file of a
checkout becomes its text.
"""

import re
from pathlib import Path

from setuptools import setup

#: Public address of the repository, "https://host/owner/weft"; empty until there is one. A release
#: has the addresses that follow from it, and no other setting.
HOME = ""

_ROOT = Path(__file__).parent
_LINK = re.compile(r"\[([^\]\n]+)\]\((?![a-z]+://)([^)\n]+)\)")


def long_description(readme: str, home: str, version: str) -> str:
    """Return the README with links to the files of a release, or without those links."""
    if not home:
        return _LINK.sub(r"\1", readme)
    return _LINK.sub(rf"[\1]({home}/blob/v{version}/\2)", readme)


def project_urls(home: str, version: str) -> dict[str, str]:
    """Return the addresses that an index lists beside the package."""
    if not home:
        return {}
    return {
        "Homepage": home,
        "Documentation": f"{home}/blob/v{version}/docs/README.md",
        "Changelog": f"{home}/blob/v{version}/CHANGELOG.md",
        "Issues": f"{home}/issues",
    }


if __name__ == "__main__":
    code = (_ROOT / "weft_rl" / "__init__.py").read_text(encoding="utf-8")
    (release,) = re.findall(r'^__version__ = "(.+)"$', code, re.MULTILINE)
    setup(
        long_description=long_description(
            (_ROOT / "README.md").read_text(encoding="utf-8"), HOME, release
        ),
        long_description_content_type="text/markdown",
        project_urls=project_urls(HOME, release),
    )
