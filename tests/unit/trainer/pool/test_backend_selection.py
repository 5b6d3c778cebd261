"""Which backend carries a push, and what is said of it."""

from __future__ import annotations

import pytest
import torch

from trainer_side.pool import backend_selection as module
from trainer_side.pool.backend_selection import BackendSelection
from weft_rl.contract.errors import NotReadyError
from weft_rl.transport.one_sided import trial
from weft_rl.v1.publish_pb2 import DescribeTargetResponse

ALL = ("nccl", "one-sided", "gloo")


def target(*backends: str, gpus: tuple[str, ...] = ()) -> DescribeTargetResponse:
    return DescribeTargetResponse(backends=backends, trial_names=["r0", "r1"], gpu_uuids=gpus)


@pytest.fixture(autouse=True)
def readable(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Why replicas cannot read this process's memory; none can unless a test empties it."""
    why = ["it is on another host"]
    monkeypatch.setattr(trial, "why_not_readable", lambda names, device: "".join(why))
    return why


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that has one."""
    monkeypatch.setattr(module, "why_unavailable", lambda *_: "")
    monkeypatch.setattr(module, "gpu_uuid", lambda device: f"GPU-{device.index}")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)


def test_without_an_accelerator_and_elsewhere_bytes_take_gloo() -> None:
    selected = BackendSelection().backend(target(*ALL))
    assert selected.name == "gloo"
    assert selected.why == (
        "the best that all have; not nccl: it moves weights between NVIDIA GPUs, and this "
        "process has none; not one-sided: it is on another host"
    )
    assert BackendSelection().device_of("nccl") == torch.device("cpu")


def test_on_one_host_replicas_read_the_senders_memory(readable: list[str]) -> None:
    readable.clear()
    selected = BackendSelection().backend(target("one-sided", "gloo"))
    assert (selected.name, selected.why) == (
        "one-sided",
        "every replica reads this process's memory",
    )
    again = BackendSelection().backend(target("one-sided", "gloo"), without=["one-sided"])
    assert again.name == "gloo"
    assert "not one-sided: this push has found" in again.why


def test_replicas_on_gpus_do_not_read_from_the_host(readable: list[str]) -> None:
    readable.clear()
    selected = BackendSelection().backend(target("one-sided", "gloo", gpus=("GPU-0",)))
    assert selected.name == "gloo"
    assert "not one-sided: replicas receive on GPUs" in selected.why


def test_a_process_that_cannot_take_part_asks_nobody(
    readable: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    readable.clear()
    monkeypatch.setenv("WEFT_ONE_SIDED_DIR", "/nowhere/at/all")
    assert "not one-sided: /nowhere/at/all" in BackendSelection().backend(target(*ALL)).why


def test_a_pool_from_before_backends_were_told_takes_gloo() -> None:
    assert BackendSelection().backend(target()).name == "gloo"


@pytest.mark.usefixtures("gpu")
def test_with_one_they_take_what_the_pool_likes_best() -> None:
    assert BackendSelection().backend(target(*ALL, gpus=("GPU-0", "GPU-2"))).name == "nccl"
    assert BackendSelection().backend(target("gloo")).name == "gloo"
    assert BackendSelection("gloo").backend(target(*ALL)).name == "gloo"


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("gpus", [("GPU-1", "GPU-2"), ("GPU-0", "GPU-0")])
def test_nccl_is_never_used_where_two_share_a_gpu(
    gpus: tuple[str, ...], readable: list[str]
) -> None:
    selected = BackendSelection().backend(target(*ALL, gpus=gpus))
    assert selected.name == "gloo"
    assert "not nccl: two members share a GPU" in selected.why
    readable.clear()
    assert BackendSelection().backend(target(*ALL, gpus=gpus)).name == "one-sided"
    with pytest.raises(NotReadyError, match="not nccl: two members share a GPU"):
        BackendSelection("nccl").backend(target(*ALL, gpus=gpus))


@pytest.mark.usefixtures("gpu")
def test_streams_come_before_the_plain_sockets_of_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "nccl_network", lambda: "sockets of host a")
    pool = target("nccl", "stream", "gloo", gpus=("GPU-0",))
    pool.nccl_networks.append("sockets of host a")
    assert BackendSelection().backend(pool).name == "nccl"
    pool.nccl_networks.append("sockets of host b")
    selected = BackendSelection().backend(pool)
    assert (selected.name, selected.why) == (
        "stream",
        "the best that all have; not nccl: it would use plain sockets between these hosts",
    )
    assert BackendSelection().backend(pool, without=["stream"]).name == "nccl"
    assert BackendSelection("nccl").backend(pool).why == "chosen by the trainer"
    pool.backends[:] = ["nccl"]
    assert BackendSelection().backend(pool).why == "the best that all have"


@pytest.mark.usefixtures("gpu")
def test_memory_of_a_gpu_is_what_is_tried_where_there_is_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tried: list[torch.device] = []
    monkeypatch.setattr(trial, "why_not_readable", lambda names, device: tried.append(device))
    assert BackendSelection().backend(target("one-sided", "nccl")).name == "one-sided"
    assert tried == [torch.device("cuda", 1)]
    missing = {"one-sided": "no libcudart"}
    monkeypatch.setattr(module, "why_unavailable", lambda name, _: missing.get(name, ""))
    selected = BackendSelection().backend(target("one-sided", "nccl"))
    assert (selected.name, len(tried)) == ("nccl", 1)
    assert "not one-sided: no libcudart" in selected.why


@pytest.mark.usefixtures("gpu")
def test_the_device_is_the_current_one_or_as_chosen() -> None:
    assert BackendSelection().device_of("nccl") == torch.device("cuda", 1)
    chosen = BackendSelection(device=torch.device("cuda", 3))
    assert chosen.device_of("nccl") == torch.device("cuda", 3)
    assert chosen.device_of("one-sided") == torch.device("cuda", 3)
    assert chosen.device_of("gloo") == torch.device("cpu")


def test_no_shared_backend_is_refused() -> None:
    with pytest.raises(NotReadyError, match="offers nccl, this process has") as caught:
        BackendSelection().backend(target("nccl"))
    assert caught.value.reason == "BACKEND_MISMATCH"
    cannot = "backend='nccl' cannot carry a push: "
    with pytest.raises(NotReadyError, match=cannot + "not nccl: it moves .* has none. backend="):
        BackendSelection("nccl").backend(target(*ALL))
    with pytest.raises(NotReadyError, match=cannot + "the pool offers gloo. backend='auto' takes"):
        BackendSelection("nccl").backend(target("gloo"))
    with pytest.raises(NotReadyError, match="cannot carry a push: not one-sided: it is on another"):
        BackendSelection("one-sided").backend(target(*ALL))
