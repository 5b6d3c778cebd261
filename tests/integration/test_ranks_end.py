"""A trainer of several ranks that has closed its publisher ends by itself, with status 0."""

import subprocess
import sys

import pytest

_SECONDS = 60.0
_RANK = """
import atexit, sys, time
import torch.distributed as dist
from trainer_side.ranks.torch_ranks import TorchRanks

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


_OF_THREE = """
import os, sys, time
import torch
import torch.distributed as dist
from trainer_side.ranks.torch_ranks import TorchRanks
from weft.contract.errors import PeerUnavailableError

rank = int(sys.argv[1])
dist.init_process_group("gloo", init_method=f"file://{sys.argv[2]}", rank=rank, world_size=3)
link = TorchRanks(None)
link.open(time.monotonic() + 30)
began = time.monotonic()
if rank == 0:
    under_way = link.add_up(torch.ones(4, dtype=torch.int64))  # the last one never takes part
    time.sleep(0.5)
    link.abandon()
    assert under_way.done
else:
    try:
        link.take(0, torch.zeros(1)) if rank == 2 else link.add_up(
            torch.ones(4, dtype=torch.int64)
        ).result()
    except PeerUnavailableError as error:
        assert error.reason == "RANK_GONE"
    else:
        raise AssertionError("it got what was never given")
assert time.monotonic() - began < 10
print("told", flush=True)
sys.stdin.read()  # its own end must not be what tells the others
os._exit(0)
"""


def test_a_rank_that_leaves_in_the_middle_tells_all_at_once(tmp_path):
    """Whatever is in flight there: connections that stayed open let the others wait."""
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", _OF_THREE, str(rank), str(tmp_path / "store")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(3)
    ]
    try:
        assert [rank.stdout.readline() for rank in ranks] == ["told\n"] * 3
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()
