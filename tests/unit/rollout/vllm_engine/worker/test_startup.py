"""What a worker decides by what it is told."""

from __future__ import annotations

import pytest
import torch

from rollout_side.vllm_engine.worker.startup import usable_backends
from weft_rl.contract.errors import UnsupportedError


def test_a_worker_without_the_backend_that_was_chosen_says_what_it_has() -> None:
    cpu = torch.device("cpu")
    assert "gloo" in usable_backends(cpu, "auto")
    assert usable_backends(cpu, "gloo") == ("gloo",)
    with pytest.raises(UnsupportedError, match=r"nccl cannot be used: a worker on cpu has .*gloo;"):
        usable_backends(cpu, "nccl")
