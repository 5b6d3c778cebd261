"""The ``weft`` script, and ``python -m weft_cli``."""

from __future__ import annotations

import sys
from typing import Final

#: The extra that brings a package which an environment may lack.
_EXTRAS: Final = {
    "grpc_channelz": "coordinator",
    "grpc_health": "coordinator",
    "grpc_reflection": "coordinator",
    "h11": "coordinator",
    "prometheus_client": "coordinator",
    "rich": "coordinator",
    "typer": "coordinator",
    "torch": "trainer",
    "xxhash": "trainer",
    "openai": "examples",
    "peft": "examples",
    "safetensors": "examples",
    "transformers": "examples",
}


def main() -> None:
    """Run a command; one that lacks a package says which extra of Weft brings it."""
    try:
        from weft_cli.main import run

        run()
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in _EXTRAS:
            raise
        extra = "rollout" if sys.argv[1:2] == ["rollout"] else _EXTRAS[package]
        sys.exit(
            f"weft: this command needs {package}, which is not installed: "
            f"pip install 'weft-rl[{extra}]'"
        )


if __name__ == "__main__":
    main()
