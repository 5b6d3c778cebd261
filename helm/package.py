"""Packages the chart, byte for byte the same for the same files.

    python helm/package.py [--helm HELM] [--out DIRECTORY]

`helm package` checks and collects the files. It takes their times from the clock: here they are
SOURCE_DATE_EPOCH, or 1980 without it.
"""

from __future__ import annotations

import argparse
import gzip
import os
import subprocess
import tarfile
import tempfile
from pathlib import Path

CHART = Path(__file__).parent / "weft"
_YEAR_1980 = 315532800


def package(helm: str, out: Path, chart: Path = CHART) -> Path:
    """Write the archive of the chart, `weft-VERSION.tgz`, into a directory; returns its path."""
    seconds = int(os.environ.get("SOURCE_DATE_EPOCH", _YEAR_1980))
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as work:
        subprocess.run(
            [helm, "package", chart, "--destination", work], check=True, stdout=subprocess.DEVNULL
        )
        (made,) = Path(work).iterdir()
        archive = out / made.name
        with (
            tarfile.open(made) as source,
            archive.open("wb") as file,
            gzip.GzipFile("", "wb", mtime=seconds, fileobj=file) as packed,
            tarfile.open(fileobj=packed, mode="w", format=tarfile.USTAR_FORMAT) as target,
        ):
            for member in source:
                member.mtime = seconds
                target.addfile(member, source.extractfile(member))
    return archive


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--helm", default="helm", help="the program that packages")
    parser.add_argument("--out", type=Path, default=Path("build/chart"))
    options = parser.parse_args()
    print(package(options.helm, options.out))


if __name__ == "__main__":
    main()
