"""Which backend carries a trainer's bytes, and how they are cut for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from weft.contract.capabilities import GLOO, NCCL, BackendChoice
from weft.contract.errors import NotReadyError
from weft.contract.manifest import DEFAULT_BUCKET_BYTES, WSUM64, XXH3_64
from weft.transport.backends import available_backends
from weft.transport.group import CPU

#: Between two H200s a base of 16 GB was staged in 51 ms with buckets of 1 GiB and in 62 ms
#: with 512 MiB: a bucket must take longer than the release of the one before it.
DEVICE_BUCKET_BYTES = 2**30


@dataclass(frozen=True)
class BucketSettings:
    """How payloads are cut and digested for a backend; the same on every rank."""

    bucket_bytes: int
    digest_algorithm: int


def bucket_settings(backend: str, bucket_bytes: int | None) -> BucketSettings:
    """The settings of a backend; with ``bucket_bytes`` where the user chose them."""
    if backend == NCCL:
        return BucketSettings(bucket_bytes or DEVICE_BUCKET_BYTES, WSUM64)
    return BucketSettings(bucket_bytes or DEFAULT_BUCKET_BYTES, XXH3_64)


@dataclass(frozen=True)
class BackendSelection:
    """Which backends the sender may use, and the accelerator that they need.

    Args:
        choice: The best that both sides have, or this one and no other.
        device: A CUDA device for NCCL; None is the current one when a push begins.
    """

    choice: BackendChoice = "auto"
    device: torch.device | None = None

    def backend(self, offered: Sequence[str]) -> str:
        """The backend to use with a pool that offers these, best first.

        Raises:
            NotReadyError: None is shared, or not the one that was asked for.
        """
        have = available_backends(self.device_of(NCCL))
        usable = [name for name in offered or (GLOO,) if name in have]
        if self.choice != "auto":
            usable = [name for name in usable if name == self.choice]
        if not usable:
            raise NotReadyError(
                f"no side-group backend to push over: the pool offers {', '.join(offered)}, this "
                f"process has {', '.join(have)}"
                + (f" and may use {self.choice} only" if self.choice != "auto" else ""),
                reason="BACKEND_MISMATCH",
            )
        return usable[0]

    def device_of(self, backend: str) -> torch.device:
        """Where the buckets of a backend are packed."""
        if backend != NCCL or not torch.cuda.is_available():
            return CPU
        if self.device is not None:
            return self.device
        return torch.device("cuda", torch.cuda.current_device())
