"""Ranks bring bytes to each other through mapped memory, with a double of CUDA's runtime."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from tests.doubles.cudart import UUIDS, CudartDouble, as_tensor
from trainer_side.ranks import torch_ranks
from trainer_side.ranks.torch_ranks import ExchangeMemory
from weft_rl.transport.one_sided import memory

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def cudart(monkeypatch: pytest.MonkeyPatch) -> CudartDouble:
    double = CudartDouble()
    monkeypatch.setattr(memory, "cudart", lambda: double)
    monkeypatch.setattr(memory, "as_tensor", as_tensor)
    monkeypatch.setattr(memory, "uuid_of", lambda index: UUIDS[index].bytes)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch_ranks, "is_gpu", lambda device: True)
    return double


class _Link:
    """Of one rank of this process's threads."""

    def __init__(self, rank: int, said: list[Any], barrier: threading.Barrier) -> None:
        self.rank, self.size, self._said, self._barrier = rank, len(said), said, barrier

    def _gather(self, mine: Any) -> list[Any]:
        self._said[self.rank] = mine
        self._barrier.wait(10)
        said = list(self._said)
        self._barrier.wait(10)
        return said

    def agree(self, error: BaseException | None = None, flags: int = 0) -> int:
        return int(max(self._gather(flags)))

    def exchange(self, messages: Sequence[torch.Tensor]) -> None:
        for message, said in zip(messages, self._gather(messages[self.rank].clone()), strict=True):
            message.copy_(said)


class Together:
    def __init__(self, size: int) -> None:
        said: list[Any] = [None] * size
        barrier = threading.Barrier(size)
        self.ranks = [ExchangeMemory(_Link(rank, said, barrier)) for rank in range(size)]

    def bring(self, contents: Sequence[bytes]) -> list[list[bytes] | None]:
        sizes = [len(content) for content in contents]

        def one(rank: int) -> list[bytes] | None:
            def fill(out: torch.Tensor) -> None:
                out.copy_(torch.frombuffer(bytearray(contents[rank]), dtype=torch.uint8))

            brought = self.ranks[rank].bring(sizes, fill, CPU)
            return None if brought is None else [bytes(each.numpy()) for each in brought]

        with ThreadPoolExecutor(len(contents)) as threads:
            return list(threads.map(one, range(len(contents))))

    def close(self) -> None:
        for each in self.ranks:
            each.close()


def test_all_have_what_each_gave_and_memory_is_mapped_once(cudart: CudartDouble) -> None:
    together = Together(3)
    for value in (b"a", b"b"):
        contents = [value * 10, b"", value * 300]
        assert together.bring(contents) == [contents] * 3
        assert len(cudart.allocated) == 2
        assert len(cudart.mapped) == 4
    together.close()
    assert not cudart.mapped
    assert not cudart.allocated


def test_more_bytes_are_mapped_anew_after_all_have_unmapped_the_former(
    cudart: CudartDouble,
) -> None:
    together = Together(2)
    for size in (10, 2**22, 7):
        contents = [b"x" * size, b"y" * (size + 1)]
        assert together.bring(contents) == [contents] * 2
    assert len(cudart.allocated) == len(cudart.mapped) == 2
    assert not cudart.freed_while_mapped
    together.close()


@pytest.mark.parametrize("call", ["cudaMalloc", "cudaIpcGetMemHandle", "cudaIpcOpenMemHandle"])
def test_if_one_cannot_all_know_and_nothing_is_left(cudart: CudartDouble, call: str) -> None:
    together = Together(2)
    cudart.errors[call] = 2
    assert together.bring([b"12", b"34"]) == [None, None]
    cudart.errors.clear()
    assert not cudart.mapped
    assert not cudart.allocated


def test_what_lies_on_the_host_is_not_mapped(
    monkeypatch: pytest.MonkeyPatch, cudart: CudartDouble
) -> None:
    monkeypatch.setattr(torch_ranks, "is_gpu", lambda device: False)
    assert Together(2).bring([b"12", b"34"]) == [None, None]
    assert not cudart.allocated
