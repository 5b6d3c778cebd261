"""A trainer of several ranks that has closed its publisher ends by itself, with status 0."""

import subprocess
import sys

import pytest

_SECONDS = 60.0
_RANK = """
import atexit, sys, time
import torch.distributed as dist
from trainer_side.torch_ranks import TorchRanks

dist.init_process_group(
    "gloo", init_method=f"file://{sys.argv[2]}", rank=int(sys.argv[1]), world_size=2
)
links = [TorchRanks(None) for _ in range(4)]
for link in links:
    link.open(time.monotonic() + 30)

def leave():
    for link in links:
        link.abandon()

"""
_NOW = "leave(); dist.destroy_process_group()"
_AT_EXIT = "atexit.register(leave)"


@pytest.mark.parametrize("when", [_NOW, _AT_EXIT], ids=["now", "at exit"])
def test_the_end_of_python_does_not_abort_a_rank_that_leaves(tmp_path, when):
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", _RANK + when, str(rank), str(tmp_path / "store")],
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        said = [rank.communicate(timeout=_SECONDS)[1] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0, 0], said
