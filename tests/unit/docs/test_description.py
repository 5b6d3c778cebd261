"""The long description of the package, and its addresses: what an index shows."""

from __future__ import annotations

import runpy
from pathlib import Path

_ROOT = Path(__file__).parents[3]
_SETUP = runpy.run_path(str(_ROOT / "setup.py"))
_README = (
    "See [the demo](docs/operations.md#the-demo), [TRL](docs/trl.md),\n"
    "[PEP 8](https://peps.python.org) and `pip install 'weft-rl[trainer]'` (torch); [1] (2)\n"
)


def test_links_to_files_become_their_text_and_others_stay() -> None:
    assert _SETUP["long_description"](_README, "", "1.2") == (
        "See the demo, TRL,\n[PEP 8](https://peps.python.org) and `pip install 'weft-rl[trainer]'` "
        "(torch); [1] (2)\n"
    )
    assert _SETUP["project_urls"]("", "1.2") == {}


def test_with_a_public_address_links_are_to_the_files_of_the_release() -> None:
    home = "https://example.org/a/weft"
    assert _SETUP["long_description"](_README, home, "1.2") == (
        f"See [the demo]({home}/blob/v1.2/docs/operations.md#the-demo), "
        f"[TRL]({home}/blob/v1.2/docs/trl.md),\n"
        "[PEP 8](https://peps.python.org) and `pip install 'weft-rl[trainer]'` (torch); [1] (2)\n"
    )
    linked = [
        address.removeprefix(f"{home}/blob/v1.2/")
        for address in _SETUP["project_urls"](home, "1.2").values()
        if "/blob/" in address
    ]
    assert linked
    assert all((_ROOT / path).is_file() for path in linked)
