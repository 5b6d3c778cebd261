"""Origin of this installation of Weft, as pip takes it."""

from __future__ import annotations

import json
import shlex
import tomllib
from importlib import metadata
from pathlib import Path
from typing import Any, Final
from urllib.parse import unquote, urlsplit

_NAME: Final = "weft-rl"


def distribution_with(extras: str, package: Path = Path(__file__).parent) -> str:
    """Name the distribution that this code is of, with extras, as an argument of ``pip install``.

    It is found by the folder that the code lies in: other records of its name (a left-over
    ``*.egg-info``, the environment of another checkout) are of other code. What was not installed
    from an index is named by its path or its URL: no index need have it.

    Args:
        extras: Their names, with commas between them.
        package: Folder of the package.
    """
    folder = package.resolve().parent
    if _is_checkout(folder):
        return f"-e {shlex.quote(f'{folder}[{extras}]')}"
    found = metadata.distributions(name=_NAME, path=[str(folder)])
    texts = (distribution.read_text("direct_url.json") for distribution in found)
    facts: dict[str, Any] = json.loads(next(texts, None) or "{}")
    url = facts.get("url", "")
    if url.startswith("file:"):
        return shlex.quote(f"{unquote(urlsplit(url).path)}[{extras}]")
    if "vcs_info" in facts:
        vcs = facts["vcs_info"]
        url = f"{vcs['vcs']}+{url}@{vcs['commit_id']}"
    return shlex.quote(f"{_NAME}[{extras}]{url and ' @ '}{url}")


def _is_checkout(folder: Path) -> bool:
    """Return whether a folder is a checkout of Weft."""
    try:
        facts = tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return bool(facts.get("project", {}).get("name") == _NAME)
