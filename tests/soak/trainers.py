"""Trainers of the soak: PEFT and transformers models whose weights follow from a seed.

``python -m tests.soak.trainers COORDINATOR MODEL_DIR|double``: a process that owns
all policies; each line "POLICY SEED" of its standard input is one push, which it
answers with a line of JSON. After "another publisher" it goes on as if started anew.
"""

from __future__ import annotations

import json
import random
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tests.models import draw_adapter, draw_base, load_hf
from tests.soak.double_models import DoubleModels
from tests.soak.ledger import Ledger
from tests.soak.weights import RANKS, adapter_model
from trainer_side import Publisher
from weft_rl.contract.errors import WeftError
from weft_rl.contract.names import BASE_POLICY, PolicyVersion

POLICIES = (BASE_POLICY, *RANKS)
_PUSH_SECONDS = 120.0
_WAIT_SECONDS = (0.2, 2.5)

#: Pushes a policy's weights of a seed.
PushSeed = Callable[[Publisher, str, int], PolicyVersion]


class RealModels:
    """One transformers or PEFT model a policy, drawn anew for each push."""

    def __init__(self, base: Path, policies: tuple[str, ...] = POLICIES) -> None:
        self._models: dict[str, Any] = {
            policy: load_hf(base) if policy == BASE_POLICY else adapter_model(base, policy)
            for policy in policies
        }

    def push(self, publisher: Publisher, policy: str, seed: int) -> PolicyVersion:
        """Push the weights of a seed."""
        model = self._models[policy]
        if policy == BASE_POLICY:
            draw_base(model, seed)
            return publisher.push_base(model).version
        draw_adapter(model, seed)
        return publisher.push_adapter(model, policy).version


def push_at_random(
    target: str,
    base: Path,
    policy: str,
    ledger: Ledger,
    rng: random.Random,
    stopping: threading.Event,
) -> None:
    """One trainer with one policy: push now and then until told to stop.

    Every push must succeed, whoever comes and goes: it requires one replica, and
    one always stays.
    """
    models = RealModels(base, (policy,))
    with Publisher(
        target, trainer_id=f"trainer-of-{policy}", require=1, timeout_seconds=_PUSH_SECONDS,
        progress=None,
    ) as publisher:  # fmt: skip
        while not stopping.wait(rng.uniform(*_WAIT_SECONDS)):
            seed, began_at = rng.randrange(1, 2**31), time.monotonic()
            ledger.record(models.push(publisher, policy, seed), seed, began_at)


def main(target: str, models: str) -> None:
    """Serve until standard input closes."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as directory:
        made = DoubleModels(Path(directory)) if models == "double" else RealModels(Path(models))
        print("ready", flush=True)
        while _serve(target, made):
            pass


def _serve(target: str, made: DoubleModels | RealModels) -> bool:
    """Push as told, with one publisher; whether to go on with another."""
    with Publisher(
        target, trainer_id="trainer", timeout_seconds=_PUSH_SECONDS, progress=None
    ) as publisher:
        for line in sys.stdin:
            if line.strip() == "another publisher":
                return True
            policy, seed = line.split()
            try:
                answer = {"version": str(made.push(publisher, policy, int(seed)))}
            except WeftError as error:
                answer = {"error": error.reason, "message": error.message}
            print(json.dumps(answer), flush=True)
    return False


if __name__ == "__main__":
    main(*sys.argv[1:])
