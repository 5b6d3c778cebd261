"""A trainer of several ranks that has closed its publisher ends by itself, with status 0."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time

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
from weft_rl.contract.errors import PeerUnavailableError

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
        link.agree() if rank == 2 else link.add_up(torch.ones(4, dtype=torch.int64)).result()
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


_HALF_A_MESSAGE = """
import os, signal, sys, threading, time
import torch
import torch.distributed as dist
from trainer_side.ranks.torch_ranks import TorchRanks
from weft_rl.contract.errors import PeerUnavailableError

rank, killed = int(sys.argv[1]), int(sys.argv[3])
dist.init_process_group("gloo", init_method=f"file://{sys.argv[2]}", rank=rank, world_size=2)
link = TorchRanks(None)
link.open(time.monotonic() + 60)
child = os.fork() if rank == killed else 0  # it loads data, say
if rank == killed and not child:
    time.sleep(30)
    os._exit(0)
print(child, flush=True)
message = torch.zeros(2**26, dtype=torch.int64)  # more than a quarter of a second's
if rank == killed:
    threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGKILL)).start()
began = time.monotonic()
try:
    link.add_up(message).result()
    link.agree()
except PeerUnavailableError as error:
    assert error.reason == "RANK_GONE"
assert time.monotonic() - began < 10
print("told", flush=True)
os._exit(0)
"""


@pytest.mark.parametrize("killed", [0, 1])
def test_a_rank_that_dies_in_half_a_message_is_gone_at_once(tmp_path, killed):
    """Also where a child of it lives on."""
    numbers = [(rank, tmp_path / "store", killed) for rank in range(2)]
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", _HALF_A_MESSAGE, *map(str, each)],
            stdout=subprocess.PIPE,
            text=True,
        )
        for each in numbers
    ]
    child = int(ranks[killed].stdout.readline())
    try:
        assert ranks[killed].wait(20) == -signal.SIGKILL
        assert ranks[1 - killed].communicate(timeout=10)[0] == "0\ntold\n"
        os.kill(child, 0)  # it was there all the time
    finally:
        os.kill(child, signal.SIGKILL)
        for rank in ranks:
            rank.kill()
            rank.communicate()


_FEW_FILES = """
import json, resource, sys, threading, time
resource.setrlimit(resource.RLIMIT_NOFILE, (80, 80))
import torch.distributed as dist
from trainer_side.ranks.link import meet

store, links = dist.HashStore(), []
def come(rank):
    links.append(meet(store, rank, 2, time.monotonic() + 30))
first = threading.Thread(target=come, args=(0,))
first.start()
store.wait(["0", "secret"])
print(store.get("0").decode(), flush=True)
sys.stdin.readline()
open("/dev/null").close()  # others of this process find one
come(1)
first.join()
print(len(links), flush=True)
"""


def test_strangers_take_no_descriptor_that_ranks_meet_by(tmp_path):
    """More of them than the rank may have open files."""
    with (
        subprocess.Popen(
            [sys.executable, "-c", _FEW_FILES],
            env={**os.environ, "GLOO_SOCKET_IFNAME": "lo"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        ) as rank,
        contextlib.ExitStack() as held,
    ):
        host, port = json.loads(rank.stdout.readline())
        for _ in range(150):
            held.enter_context(socket.create_connection((host, port), 5))
        time.sleep(0.5)
        rank.stdin.write("\n")
        rank.stdin.flush()
        assert rank.stdout.readline() == "2\n"
