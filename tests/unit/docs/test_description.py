"""The long description of the package: the README without links to files of a checkout."""

from __future__ import annotations

import runpy
from pathlib import Path

_SETUP = runpy.run_path(str(Path(__file__).parents[3] / "setup.py"))


def test_links_to_files_become_their_text_and_others_stay() -> None:
    readme = (
        "See [the demo](docs/operations.md#the-demo), [TRL](docs/trl.md),\n"
        "[PEP 8](https://peps.python.org) and `pip install 'weft-rl[trainer]'` (torch); [1] (2)\n"
    )
    assert _SETUP["long_description"](readme) == (
        "See the demo, TRL,\n[PEP 8](https://peps.python.org) and `pip install 'weft-rl[trainer]'` "
        "(torch); [1] (2)\n"
    )
