"""The kernels of changes on a CPU, compiled by g++: their threads take turns there.

This shows that the arithmetic is right and that warps meet where they must. What a GPU does at the
same time it does not show: ``tests/gpu/test_changes.py`` has the same cases.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from rollout_side.memory import served_delta
from tests.gpu.test_changes import check_case
from tests.unit.rollout.memory.test_served_delta import Engine, changed, same
from tests.unit.trainer.deltas.test_delta_push import BASE, copied, push_of, send
from trainer_side.deltas import delta_push
from trainer_side.deltas.delta_push import DeltaPush, compare, delta_packing
from weft_rl.transport.wire import change_kernels, changes
from weft_rl.transport.wire.changes import join_changes

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
CPU = torch.device("cpu")
_HEADER = Path(__file__).with_name("cuda_threads.h")
_LAUNCH = """
extern "C" void launch(unsigned programs, unsigned num_threads, void** args) {
  threads::launch_with(%s, programs, num_threads, args);
}
"""


@pytest.fixture(scope="module")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Compile all kernels for the CPU."""
    folder, found = tmp_path_factory.mktemp("kernels"), {}
    for name in change_kernels.KERNELS:
        path = folder / f"{name}.cpp"
        path.write_text(f'#include "{_HEADER}"\n{change_kernels.source_of(name)}{_LAUNCH % name}')
        flags = ["-O1", "-std=c++17", "-shared", "-fPIC", "-w"]
        subprocess.run(["g++", *flags, str(path), "-o", f"{path}.so"], check=True)
        found[name] = ctypes.CDLL(f"{path}.so")
    return found


@pytest.fixture(autouse=True)
def _on_the_cpu(libraries: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(change_kernels, "_compiled", lambda name, _: _caller(libraries[name]))


def _caller(library: Any) -> Callable[..., None]:
    def launch(grid: tuple[int, ...], block: tuple[int, ...], args: list[Any]) -> None:
        values = [
            ctypes.c_void_p(arg.data_ptr()) if isinstance(arg, torch.Tensor) else ctypes.c_int(arg)
            for arg in args
        ]
        pointers = (ctypes.c_void_p * len(values))(*[ctypes.addressof(value) for value in values])
        library.launch(grid[0], block[0], pointers)

    return launch


def test_the_check_of_a_device_passes() -> None:
    assert change_kernels.works(CPU)


@pytest.mark.parametrize("seed", range(16))
def test_small_runs(seed: int) -> None:
    check_case(seed, CPU, max_elements=2000)


@pytest.mark.parametrize("seed", range(100, 108))
def test_runs_of_several_blocks(seed: int) -> None:
    check_case(seed, CPU)


@pytest.mark.parametrize("is_dense", [False, True])
def test_buckets_are_compared_together(is_dense: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """And each by itself, where more of them has changed than usually."""
    torch.manual_seed(3)
    old = {f"{n:02}.weight": torch.randn(30 + n, 9) for n in range(20)}
    new = {name: tensor.clone() for name, tensor in old.items()}
    for tensor in new.values():
        tensor.view(-1)[:: 1 if is_dense else 600] *= -1.5
    copy, push = copied(old), push_of(new)
    by_torch = compare(push, copy, CPU, finite=False)
    for module in (changes, delta_push):
        monkeypatch.setattr(module, "has_kernels", lambda device: True)
    monkeypatch.setattr(changes, "has_host_coder", lambda device: False)
    found = compare(push, copy, CPU, finite=False)
    assert push.packing.runs is not None
    num_buckets = len(push.packing.runs)
    together = [1] * num_buckets if is_dense else [1, 8, 8, num_buckets - 17]
    assert [each.num_buckets for each in found.coded] == together
    assert join_changes(found.coded).equal(join_changes(by_torch.coded))
    assert found.totals(copy) == by_torch.totals(copy)
    assert sum(size > 0 for size in found.sizes) == len(found.joined)
    assert len(found.sizes) == num_buckets
    payloads, digests = send(push)
    packing = delta_packing(push.packing, BASE, found.sizes)
    delta = DeltaPush(push, packing, found, copy, 0.1)
    assert send(delta)[1] == digests
    delta.committed(BASE)
    assert all(copy.payload(nth).equal(each) for nth, each in enumerate(payloads))


def test_they_read_deltas_of_served_weights_one_after_the_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The second time, the memory of the runs is known."""
    engine = Engine(in_one_piece=True)
    monkeypatch.setattr(served_delta, "has_kernels", lambda device: True)
    monkeypatch.setattr(served_delta, "has_host_coder", lambda device: False)
    monkeypatch.setattr(served_delta, "_read", None)
    made = [engine.tensors()]
    for number in (2, 3):
        new = changed(made[-1], number)
        engine.slot.apply(engine.stage(number, new))
        made.append(new)
        assert same(engine.tensors(), new)
        assert len(engine.base.run_memory) == 1
    for former, old in zip(engine.slot.reachable, reversed(made[:-1]), strict=True):
        assert engine.slot.switch_to(former.transfer_id, former.content_digest)
        assert same(engine.tensors(), old)


def test_what_takes_a_delta_back_counts_with_its_payload(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which is read again when it is taken back: it stays as long as the lists."""
    engine, read, decode = Engine(in_one_piece=True), list[tuple[int, int]](), change_kernels.decode

    def noted(payload: torch.Tensor, *args: Any) -> change_kernels.ListedChanges:
        found = decode(payload, *args)
        read.append((payload.numel(), found.num_bytes))
        return found

    monkeypatch.setattr(served_delta, "has_kernels", lambda device: True)
    monkeypatch.setattr(served_delta, "has_host_coder", lambda device: False)
    monkeypatch.setattr(change_kernels, "decode", noted)
    old = engine.tensors()
    new = changed(old, 2)
    staged = engine.stage(2, new)
    num_changes = sum(int((a != b).sum()) for a, b in zip(old, new, strict=True))
    for payload_bytes, num_bytes in read:  # of tied weights twice
        assert num_bytes >= payload_bytes + num_changes * (2 + 4 + 4)
    engine.slot.apply(staged)
    assert engine.slot.undo_bytes == staged.num_bytes == sum(num_bytes for _, num_bytes in read)
