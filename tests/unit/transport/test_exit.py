"""A process that ends with side groups that are open or were given up.

In a process of its own, because it is the process's end that is looked at.
"""

from __future__ import annotations

import subprocess
import sys

import pytest

_BEGIN = """
import threading, time
import torch
import torch.distributed as dist
from weft_rl.contract.errors import TransferAbortedError
from weft_rl.transport.group import SideGroup, num_parked_groups
from weft_rl.transport.wire.lane_options import LaneOptions

store = dist.HashStore()

def bucket():
    return torch.zeros(64, dtype=torch.uint8)

def give_up(group):
    group.abort(TransferAbortedError("given up"))
    group.close()
    assert num_parked_groups() == 1
"""
#: Its peer never comes: gloo waits for it in the store, for minutes.
_FORMING = """
group = SideGroup(store, 0, 2, LaneOptions(host="127.0.0.1"))
threading.Thread(target=lambda: group.broadcast(bucket(), 60.0), daemon=True).start()
time.sleep(0.5)
give_up(group)
"""
#: Its peer sends nothing more, and closes its connections as the process ends.
_RECEIVING = """
ranks = {}

def join(rank):
    ranks[rank] = SideGroup(store, rank, 2, LaneOptions(host="127.0.0.1"))
    ranks[rank].broadcast(bucket(), 60.0).wait(time.monotonic() + 60)

threads = [threading.Thread(target=join, args=(rank,)) for rank in (0, 1)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
operation = ranks[1].broadcast(bucket(), 60.0)
give_up(ranks[1])
"""
#: Gloo's threads still tell of an operation's end, and the machine has stood still meanwhile.
_TELLING = """
import itertools
from weft_rl.transport import backends
from weft_rl.transport.backends import _EndCallback

told = _EndCallback.__call__

def tell_slowly(self, future):
    told(self, future)
    threading.Event().wait(0.3)

_EndCallback.__call__ = tell_slowly
ranks = [SideGroup(store, rank, 2, LaneOptions(host="127.0.0.1")) for rank in (0, 1)]
works = [group.broadcast(bucket(), 60.0)._work for group in ranks]
for work in works:
    assert work.wait_until(time.monotonic() + 60)
hours = itertools.count(0, 3600)
time.monotonic = lambda: float(next(hours))
"""


@pytest.mark.parametrize(
    "script", [_FORMING, _RECEIVING, _TELLING], ids=["forming", "receiving", "telling"]
)
def test_a_process_with_side_groups_ends_at_once_and_well(script: str) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", _BEGIN + script], timeout=30, capture_output=True, text=True
    )
    assert (ended.returncode, ended.stderr) == (0, "")
