"""AdminService on the base: what a pool is bound to, and letting go of it (``weft base``)."""

from __future__ import annotations

import asyncio

import grpc
import pytest

from tests.contract.calls import refusal
from tests.contract.conftest import Pool
from tests.doubles.tiny_model import REFERENCE
from weft_rl.cli import orders
from weft_rl.contract.errors import NotReadyError
from weft_rl.rpc.status import error_from_rpc
from weft_rl.v1 import admin_pb2, inspect_pb2, types_pb2

OTHER = "0" * 64


async def _base(pool: Pool) -> admin_pb2.GetBaseResponse:
    return await pool.order("GetBase", admin_pb2.GetBaseRequest())


async def test_a_base_that_was_pushed_to_is_let_go_of_by_an_operator(
    pool: Pool, capsys: pytest.CaptureFixture[str]
) -> None:
    replica = await pool.replica()
    trainer = await pool.trainer()
    await trainer.push()
    bound = admin_pb2.RebindBaseRequest(base_fingerprint=REFERENCE.fingerprint)
    other = admin_pb2.RebindBaseRequest(base_fingerprint=OTHER)
    assert await refusal(pool.order("RebindBase", other)) == "FAILED_PRECONDITION/BASE_MISMATCH"
    in_contact = "FAILED_PRECONDITION/REPLICAS_IN_CONTACT"
    assert await refusal(pool.order("RebindBase", bound)) == in_contact
    with pytest.raises(NotReadyError, match="r0 would be left"):
        await asyncio.to_thread(orders.base, rebind=True, coordinator=pool.target)
    await replica.leave()
    waiting = asyncio.create_task(trainer.begin())
    while not (await _base(pool)).num_transfers:
        await asyncio.sleep(0.01)
    under_way = "FAILED_PRECONDITION/TRANSFER_UNDER_WAY"
    assert await refusal(pool.order("RebindBase", bound)) == under_way
    waiting.cancel()
    while (await _base(pool)).num_transfers:
        await asyncio.sleep(0.01)
    await asyncio.to_thread(orders.base, coordinator=pool.target)
    await asyncio.to_thread(orders.base, rebind=True, coordinator=pool.target)
    await asyncio.to_thread(orders.base, coordinator=pool.target)
    shown = " ".join(capsys.readouterr().out.split())
    assert f"bound to TinyForCausalLM {REFERENCE.fingerprint[:12]}; its replicas serve" in shown
    assert "no longer bound to TinyForCausalLM; retired: math@1; the next replica" in shown
    assert "the pool is bound to no base model" in shown
    await pool.restart()
    assert not (await _base(pool)).base_fingerprint
    (kept,) = await pool.versions()
    assert kept.state == inspect_pb2.VERSION_STATE_RETIRED
    await pool.replica("r1")
    trainer = await pool.trainer()
    assert (await trainer.push()).version == types_pb2.PolicyVersion(policy="math", version=2)


async def test_a_wrong_first_model_is_forgotten_with_its_replica(pool: Pool) -> None:
    wrong = await pool.replica("r0", base_fingerprint=OTHER)
    with pytest.raises(grpc.aio.AioRpcError, match="weft base --rebind") as caught:
        await pool.replica("r1")
    assert error_from_rpc(caught.value).reason == "BASE_MISMATCH"
    await wrong.leave()
    await pool.replica("r2")
    assert (await _base(pool)).base_fingerprint == REFERENCE.fingerprint
    await (await pool.trainer()).push()
