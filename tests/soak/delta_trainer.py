"""A trainer process that pushes a small base by deltas.

``python -m tests.soak.delta_trainer COORDINATOR``: each line "push SEED" of its standard input
changes some elements and pushes; it answers a line of JSON with the digest of what it holds then.
"""

from __future__ import annotations

import json
import sys

import torch

from tests.doubles.replica_weights import model
from trainer_side import Publisher
from weft_rl.transport.digests.wsum64 import content_digest, digests_of

#: Of the base: 1 MiB and the layer that adapters are of.
NUM_TENSORS, ELEMENTS = 8, 2**15
_SHARE = 0.03


def main() -> None:
    """Serve until standard input closes."""
    trained = model(1.0, num_tensors=NUM_TENSORS, elements=ELEMENTS)
    parameters = [parameter.detach() for parameter in trained.parameters()]
    with Publisher(sys.argv[1], trainer_id="trainer-a", progress=None, delta="always") as publisher:
        print("ready", flush=True)
        for line in sys.stdin:
            generator = torch.Generator().manual_seed(int(line.split()[1]))
            for parameter in parameters:
                changed = torch.rand(parameter.shape, generator=generator) < _SHARE
                parameter += changed * torch.randn(parameter.shape, generator=generator)
            version, report = publisher.push_base(trained, timeout_seconds=60)
            answer = {
                "version": version.version,
                "digest": content_digest(digests_of(parameters)).hex(),
                "is_delta": report.delta.is_delta,
                "why": report.delta.whole_reason,
                "sent_bytes": report.sent_bytes,
                "num_replicas": report.num_replicas,
            }
            print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
