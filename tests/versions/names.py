"""``python -m tests.versions.names FOLDER ...``: which releases of vLLM have which of the names
that Weft depends on, written to ``names.json``.

A folder holds the package ``vllm`` of one release, as its wheel does; its kernels are not needed::

    pip download --no-deps vllm==0.33.0 && unzip vllm-0.33.0-*.whl '*.py' 'vllm-*' -d 0.33.0
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from rollout_side.vllm_engine.compat import places
from rollout_side.vllm_engine.compat.bridges import check_version

FILE = Path(__file__).with_name("names.json")


def release_of(folder: Path) -> tuple[int, int]:
    """Return the release of vLLM that a folder holds."""
    (info,) = folder.glob("vllm*.dist-info")
    return check_version(info.name.split("-")[1].removesuffix(".dist"))


if __name__ == "__main__":
    packages = sorted((release_of(folder), folder / "vllm") for folder in map(Path, sys.argv[1:]))
    declared = sorted({name for place in places.PLACES for name in place.names})
    listed = {
        name: [
            f"{major}.{minor}"
            for (major, minor), package in packages
            if places.has_name(package, name)
        ]
        for name in declared
    }
    lines = [f" {json.dumps(name)}: {json.dumps(' '.join(of))}" for name, of in listed.items()]
    FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    for release, package in packages:
        print(release, [place.names for place in places.missing(package, release)] or "has all")
