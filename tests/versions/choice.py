"""Which releases of vLLM are tried."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from rollout_side.vllm_engine.compat.bridges import check_version
from weft_rl.contract.errors import UnsupportedError


def listed(output: str) -> list[str]:
    """The releases that `pip index versions` prints, oldest first, without pre-releases."""
    found = re.search(r"^Available versions: (.+)$", output, re.MULTILINE)
    names = found[1].split(", ") if found else []
    return sorted((n for n in names if re.fullmatch(r"\d+(\.\d+)+", n)), key=numbers)


def numbers(release: str) -> tuple[int, ...]:
    """What a release is ordered by."""
    return tuple(map(int, release.split(".")))


def accepted(releases: Iterable[str]) -> list[str]:
    """Those that a replica starts with."""
    return [release for release in releases if _is_accepted(release)]


def _is_accepted(release: str) -> bool:
    try:
        check_version(release)
    except UnsupportedError:
        return False
    return True


def last_of_each(releases: Sequence[str]) -> list[str]:
    """The last of each release, without the others that differ in their third number alone."""
    return [*{numbers(release)[:2]: release for release in releases}.values()]
