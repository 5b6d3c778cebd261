"""Values that a replica's process and its workers send each other arrive as they were."""

from __future__ import annotations

from typing import Any

import pytest

from rollout_side.engine import JoinOrder, SendOrder, SpillOrder
from rollout_side.memory.messages import unpacked
from rollout_side.spill.folder import SpillSettings
from rollout_side.vllm_engine.loading.linear_modules import MemoryModule
from rollout_side.vllm_engine.worker.state import OpenConfig, WorkerDeclaration
from tests.doubles.vllm import TICKET
from weft_rl.contract.errors import PeerUnavailableError
from weft_rl.contract.names import PolicyVersion
from weft_rl.contract.tensors import DataType, LinearModule, Reference, TensorMeta
from weft_rl.ipc.bytes_codec import bytes_codec

_METAS = tuple(TensorMeta(f"w{number}", DataType.FLOAT8_E4M3FN, (2, 3)) for number in range(3))
_OPEN = OpenConfig(
    staging_memory_bytes=2**40, adapter_memory_bytes=0, base_copies=1, receiver_factory="a:b",
    staging="in-place", backend="auto", replica_pid=7, holdings_path="/proc/7/fd/3",
    ranks_secret="s", reference=Reference("Tiny", _METAS, draft_prefixes=("mtp.",)),
    draft_files=_METAS[:1], in_memory=(MemoryModule("up", "up_proj", (4, 5)),),
    spill=SpillSettings(directory="/spill", capacity_bytes=2**38, owner="r0"), reload_verdict="",
)  # fmt: skip
_DECLARED = WorkerDeclaration(
    pid=8, expected_modules=("q_proj",), lora_unapplied=(), sent_as_float32=("w0",),
    untold_modules=(LinearModule("up", (4, 5), ("up_proj",)),), base_refusal="", draft=("w1",),
    reload_verdict=None, staging_bytes=2**39, backends=("gloo",), trial_name="t", gpu_uuid="",
    nccl_network="",
)  # fmt: skip


@pytest.mark.parametrize(
    "value",
    [
        _OPEN,
        _DECLARED,
        JoinOrder(ticket=TICKET, trainer_id="ä", is_probe=True),
        SendOrder(
            ticket=TICKET,
            transfer_id="t",
            version=PolicyVersion("math", 3),
            nonce=2**63,
            timeout_seconds=0.5,
        ),
        SpillOrder(keep=(PolicyVersion("math", 3),), served_base=2, serves_all=True),
    ],
    ids=lambda value: type(value).__name__,
)
def test_it_comes_as_it_was_or_is_refused(value: Any) -> None:
    kind = type(value)
    packed = bytes_codec(kind).pack(value)
    assert unpacked(kind, packed) == value
    for odd in (b"", packed[:-1], packed + b"x"):
        with pytest.raises(PeerUnavailableError, match=f"garbled {kind.__name__}"):
            unpacked(kind, odd)
