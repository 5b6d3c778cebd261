"""A bucket on a GPU, as another rank of a replica maps it: another process, by what it is told."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from rollout_side.memory.messages import MESSAGES, Buffers
from rollout_side.memory.segment import DeviceSegment, HostSegment, Segment

DRY = "WEFT_GPU_DRY_RUN" in os.environ  # the same on the CPU: for writing this file
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available() and not DRY, reason="needs an NVIDIA GPU"),
]
SIZE = 5 * 2**20 + 256


def test_another_process_maps_what_it_is_told_of() -> None:
    """Both buffers of one message: the second begins within an allocation of torch's."""
    segments = [_made(SIZE), _made(3 * SIZE)]
    for number, segment in enumerate(segments):
        segment.data.copy_(torch.arange(segment.num_bytes) % (97 + number))
    number, told = MESSAGES.encode(Buffers([segment.ref for segment in segments]))
    command = [sys.executable, "-m", "tests.gpu.test_rank_buffers", str(number)]
    done = subprocess.run(command, input=told, capture_output=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr.decode()[-2000:]
    sums = [int(segment.data.sum(dtype=torch.int64)) for segment in segments]
    assert done.stdout.decode().split() == list(map(str, sums))


def _made(num_bytes: int) -> Segment:
    if DRY:
        return HostSegment.allocate(num_bytes)
    return DeviceSegment.allocate(num_bytes, torch.device("cuda:0"))


def _map() -> None:
    """The other process: says the sum of each buffer's bytes."""
    message = MESSAGES.decode(int(sys.argv[1]), sys.stdin.buffer.read())
    assert isinstance(message, Buffers)
    for ref in message.refs:
        print(int(ref.attach().data.sum(dtype=torch.int64)))


if __name__ == "__main__":
    _map()
