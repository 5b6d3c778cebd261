"""Side-group backends, and the facts that decide where each can be used."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Final, Literal

ONE_SIDED: Final = "one-sided"
NCCL: Final = "nccl"
STREAM: Final = "stream"
GLOO: Final = "gloo"
#: Choice of one end: the best backend that both have, or this one and no other.
BackendChoice = Literal["auto", "nccl", "one-sided", "stream", "gloo"]


@dataclass(frozen=True, kw_only=True)
class BackendFacts:
    """Facts about a backend that decide where it can be used."""

    on_host: bool = False
    """True if it carries buckets between hosts' memories."""
    on_gpu: bool = False
    """True if it carries them between GPUs' memories, where members have GPUs."""
    within_host: bool = False
    """True if receivers read the sender's memory: each tries that before the push."""
    one_per_gpu: bool = False
    """True if no two members may share a GPU."""
    blocks_gpu: bool = False
    """True if a receive that waits for its sender occupies the GPU."""


class _Facts(dict[str, BackendFacts]):
    """Facts by the backend's name; of one that only a peer knows none is true."""

    def __missing__(self, name: str) -> BackendFacts:
        return BackendFacts()


#: Backends, best first. One-sided is as fast as NCCL, forms at once, and works where two members
#: share a GPU. Streams cost the sender's link one copy, whatever the number of receivers.
BACKENDS: Final[Mapping[str, BackendFacts]] = _Facts(
    {
        ONE_SIDED: BackendFacts(on_host=True, on_gpu=True, within_host=True),
        NCCL: BackendFacts(on_gpu=True, one_per_gpu=True, blocks_gpu=True),
        STREAM: BackendFacts(on_host=True),
        GLOO: BackendFacts(on_host=True),
    }
)


def best_first(backends: Iterable[str], nccl_networks: Collection[str]) -> list[str]:
    """Sort backends that all members of a group have, for these members.

    Args:
        backends: As they are preferred where all members share a network of NCCL's.
        nccl_networks: ``Capabilities.nccl_network`` of the members. Where these differ, NCCL would
            use its plain sockets: slower than streams, and never encrypted.
    """
    names = [*backends]
    if len({*nccl_networks}) > 1 and NCCL in names and STREAM in names:
        names.remove(NCCL)
        names.insert(names.index(STREAM) + 1, NCCL)
    return names
