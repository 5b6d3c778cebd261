"""A trainer of the network's cases, one process a rank, told by lines of its standard input.

``python -m tests.network.trainer COORDINATOR SETTINGS``: SETTINGS is an object of JSON, see
``TrainerSettings``. Rank 0 of several prints "store PORT", which the others are told. Each line
"push SEED TIMEOUT" is one push, answered by one line of JSON; while buckets are sent it prints
lines "sent N of M".
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from tests.doubles.replica_weights import model
from tests.fault.trainer import sharded
from trainer_side import Publisher
from weft_rl.contract.errors import WeftError
from weft_rl.transport.digests.wsum64 import content_digest, digests_of

_STORE_SECONDS = 60.0


@dataclass(frozen=True, kw_only=True)
class TrainerSettings:
    """Settings of a rank."""

    rank: int = 0
    num_ranks: int = 1
    store_host: str = ""
    store_port: int = 0
    backend: str = "auto"
    data_host: str | None = None
    require: int | str = 1
    num_tensors: int
    elements: int
    bucket_bytes: int | None = None

    @property
    def words(self) -> tuple[str, str]:
        """Return the arguments of Python that start it, but for the coordinator's address."""
        return "tests.network.trainer", json.dumps(asdict(self))


def weights(seed: int, num_tensors: int, elements: int) -> nn.Module:
    """Make a model in which no two places hold the same, so that an exchange of them is seen."""
    made = model(1.0, num_tensors=num_tensors, elements=elements)
    generator = torch.Generator().manual_seed(seed)
    for parameter in made.parameters():
        parameter.data.normal_(generator=generator)
    return made.bfloat16()


def _join(settings: TrainerSettings) -> None:
    """Meet the other ranks, at a port that the system chose."""
    store = dist.TCPStore(  # type: ignore[attr-defined]
        settings.store_host,
        settings.store_port,
        settings.num_ranks,
        is_master=settings.rank == 0,
        timeout=timedelta(seconds=_STORE_SECONDS),
        wait_for_workers=False,
    )
    if settings.rank == 0:
        print(f"store {store.port}", flush=True)
    dist.init_process_group("gloo", store=store, rank=settings.rank, world_size=settings.num_ranks)


def push(
    publisher: Publisher, settings: TrainerSettings, seed: int, timeout_seconds: float
) -> dict[str, Any]:
    """Push a model; return how it ended."""
    whole = weights(seed, settings.num_tensors, settings.elements)
    digest = content_digest(digests_of([p.detach() for p in whole.parameters()])).hex()
    pushed = sharded(whole) if settings.num_ranks > 1 else whole
    began = time.monotonic()
    try:
        version, report = publisher.push_base(pushed, timeout_seconds=timeout_seconds)
    except WeftError as error:
        outcome: dict[str, Any] = {"error": error.reason, "message": error.message}
    else:
        outcome = {
            "version": version.version,
            "digest": digest,
            "backend": report.backend,
            "bytes": report.total_bytes,
            "replicas": report.num_replicas,
            "forming": report.forming_seconds,
            "staging": report.staging_seconds,
            "committing": report.committing_seconds,
            "remarks": report.remarks,
        }
    return {**outcome, "seconds": time.monotonic() - began}


def main(coordinator: str, settings: TrainerSettings) -> None:
    """Push as often as told, until standard input closes."""
    if settings.num_ranks > 1:
        _join(settings)
    with Publisher(
        coordinator,
        trainer_id="trainer",
        backend=settings.backend,  # type: ignore[arg-type]  # it is refused where it is none
        require=settings.require,  # type: ignore[arg-type]
        data_host=settings.data_host,
        bucket_bytes=settings.bucket_bytes,
        delta="never",
        progress=lambda what, done, count: print(f"sent {done} of {count}", flush=True),
    ) as publisher:
        print("ready", flush=True)
        for line in sys.stdin:
            _, seed, timeout_seconds = line.split()
            outcome = push(publisher, settings, int(seed), float(timeout_seconds))
            print(json.dumps(outcome), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], TrainerSettings(**json.loads(sys.argv[2])))
