"""Origin of this installation of Weft, as pip takes it."""

from __future__ import annotations

import json
from importlib import metadata
from typing import Final
from urllib.parse import unquote, urlsplit

_NAME: Final = "weft-rl"


def distribution_with(extras: str) -> str:
    """Name this distribution with extras, as an argument of ``pip install``.

    A checkout or a wheel is named by its path: no package index need have it.
    """
    try:
        text = metadata.distribution(_NAME).read_text("direct_url.json")
    except metadata.PackageNotFoundError:
        text = None
    facts = json.loads(text or "{}")
    url = urlsplit(facts.get("url", ""))
    if url.scheme != "file":
        return f"'{_NAME}[{extras}]'"
    is_editable = facts.get("dir_info", {}).get("editable", False)
    return f"{'-e ' if is_editable else ''}'{unquote(url.path)}[{extras}]'"
