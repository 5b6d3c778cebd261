"""What ranks say to each other, as it travels: whole, cut short, too long, or made up."""

from __future__ import annotations

import struct

import pytest
import torch

from rollout_side.memory import segment
from rollout_side.memory.messages import (
    MESSAGES,
    Arrived,
    Buffers,
    Complete,
    Failed,
    Layout,
    Loaded,
    LoadRequest,
    Message,
    Working,
    unpacked,
)
from rollout_side.memory.segment import DeviceRef, HostRef, SegmentRef
from rollout_side.memory.versions import StagedHandle
from weft_rl.contract.errors import (
    NotReadyError,
    WeftError,
)
from weft_rl.contract.manifest import plan_buckets
from weft_rl.contract.names import PolicyVersion
from weft_rl.contract.tensors import DataType, TensorMeta
from weft_rl.ipc.bytes_codec import bytes_codec
from weft_rl.ipc.connection import PeerError

MANIFEST = plan_buckets([TensorMeta(f"w{i}", DataType.BFLOAT16, (64, 8)) for i in range(9)], 2048)
DEVICE_REF = DeviceRef(
    device=1,
    num_bytes=2**33,
    first_byte=512,
    storage_bytes=2**34,
    storage_offset=2**21,
    handle=b"h" * 66,
    counter_handle=b"/torch_1_2_3",
    counter_offset=7,
    event_handle=b"e" * 64,
    event_sync=True,
)
SAID: list[Message] = [
    LoadRequest("transfer-ä", 3),
    Layout(MANIFEST),
    Buffers(()),
    Buffers((HostRef(17, 4, 2**40), DEVICE_REF, HostRef(1, 0, 1))),
    Arrived(2, ()),
    Arrived(0, (0, 2**64 - 1, 5)),
    Working(),
    Loaded(),
    Complete(),
    Failed("PEER_GONE", "why\nit was so"),
]


@pytest.mark.parametrize("message", SAID, ids=lambda message: type(message).__name__)
def test_a_message_arrives_as_it_was_sent(message: Message) -> None:
    assert MESSAGES.decode(*MESSAGES.encode(message)) == message


def test_there_are_no_more_buffers_than_may_be() -> None:
    refs = tuple([HostRef(1, 2, 3)] * 257)
    with pytest.raises(ValueError, match="more than 256 entries"):
        MESSAGES.encode(Buffers(refs))
    _, of_one = MESSAGES.encode(Buffers(refs[:1]))
    body = struct.pack("<I", 257 * len(of_one[4:])) + of_one[4:] * 257
    with pytest.raises(PeerError, match="Buffers, garbled: more than 256 entries"):
        MESSAGES.decode(3, body)


def test_memory_of_an_unknown_kind_is_refused() -> None:
    with pytest.raises(PeerError, match="Buffers, garbled: a value of kind 07"):
        MESSAGES.decode(3, struct.pack("<IIB", 5, 1, 7))


def test_an_endless_error_is_cut() -> None:
    said = MESSAGES.decode(*MESSAGES.encode(Failed("LOAD_FAILED", "ä" * 100_000)))
    assert isinstance(said, Failed)
    assert 30_000 < len(said.message) < 40_000
    assert said.error().reason == "LOAD_FAILED"


def test_what_torch_says_of_memory_on_an_accelerator_comes_back_to_torch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The order of ``reduce_tensor``'s and ``rebuild_cuda_tensor``'s arguments is torch's own."""
    data = torch.zeros(64, dtype=torch.uint8)
    given = (
        torch.Tensor, data.size(), data.stride(), 5, torch.storage.TypedStorage, torch.uint8, 0,
        b"handle", 4096, 256, False, b"counter", 3, b"event", True,
    )  # fmt: skip
    rebuilt: list[tuple[object, ...]] = []

    def rebuild(*arguments: object) -> torch.Tensor:
        rebuilt.append(arguments)
        return data

    monkeypatch.setattr(segment.reductions, "reduce_tensor", lambda data: (rebuild, given))
    monkeypatch.setattr(segment.reductions, "rebuild_cuda_tensor", rebuild)
    said = MESSAGES.decode(*MESSAGES.encode(Buffers((DeviceRef.of(data),))))
    assert isinstance(said, Buffers)
    assert said.refs[0].attach().num_bytes == 64
    assert rebuilt == [given]


def test_memory_that_cannot_be_mapped_is_not_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    def rebuild(*arguments: object) -> torch.Tensor:
        raise RuntimeError("CUDA error: invalid device context")

    monkeypatch.setattr(segment.reductions, "rebuild_cuda_tensor", rebuild)
    with pytest.raises(NotReadyError, match="cannot be mapped"):
        DEVICE_REF.attach()


@pytest.mark.parametrize("ref", [HostRef(17, 5, 4096), DEVICE_REF])
def test_a_staged_versions_handle_comes_as_it_was(ref: SegmentRef) -> None:
    handle = StagedHandle("t7", PolicyVersion("math", 17), MANIFEST, ref, b"digest")
    packed = bytes_codec(StagedHandle).pack(handle)
    assert unpacked(StagedHandle, packed) == handle
    for garbled in (b"", b"garbage", packed[:-1], packed + b"x"):
        with pytest.raises(WeftError):
            unpacked(StagedHandle, garbled)
