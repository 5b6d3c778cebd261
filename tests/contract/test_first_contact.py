"""What a replica finds out before it loads its model, from a coordinator or for want of one."""

from __future__ import annotations

import logging
import socket
import time
from pathlib import Path
from typing import Any

import pytest

from rollout_side.agent import registration
from rollout_side.agent.registration import check_contact
from rollout_side.config import AgentConfig, RolloutConfig
from rollout_side.service import main
from tests.contract.calls import fails
from tests.contract.conftest import Pool
from weft_rl.contract.errors import InvalidRequestError, NotReadyError, RequestConflictError
from weft_rl.rpc.bounds import PROTOCOL_REVISION
from weft_rl.rpc.server import bind, check_listen, make_server, serve_health
from weft_rl.telemetry.config import TelemetryConfig
from weft_rl.v1 import registry_pb2 as pb


def _request(**changes: Any) -> pb.CheckReplicaRequest:
    fields = {"replica_id": "r0", "incarnation": "i9", "protocol_revision": PROTOCOL_REVISION}
    return pb.CheckReplicaRequest(**fields | changes)  # type: ignore[arg-type]


async def test_check_replica(pool: Pool) -> None:
    one = await pool.replica("r0")
    error = await fails(one.registry.CheckReplica(_request()), "ALREADY_EXISTS", "REQUEST_CONFLICT")
    assert "--replica-id" in error.message
    assert error.metadata["silent_seconds"] == "4"
    call = one.registry.CheckReplica(_request(protocol_revision=PROTOCOL_REVISION + 1))
    await fails(call, "FAILED_PRECONDITION", "REVISION_MISMATCH")
    call = one.registry.CheckReplica(_request(replica_id="../r"))
    await fails(call, "INVALID_ARGUMENT", "INVALID_NAME")
    for free in (_request(replica_id="r1"), _request(incarnation=one.incarnation)):
        await one.registry.CheckReplica(free)
    await one.leave()
    await one.registry.CheckReplica(_request())


@pytest.fixture
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registration, "_MORE_SECONDS", 0.0)
    monkeypatch.setattr(registration, "_CHECK_AGAIN_SECONDS", 0.02)


@pytest.mark.usefixtures("_quick")
async def test_a_name_that_is_taken_ends_the_start_before_the_model_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two replicas on one host, say, each named after it."""
    pool = await Pool(tmp_path / "weft.db").start(heartbeat_seconds=0.2)
    one = await pool.replica("r0")

    async def beat(seconds: float) -> None:
        await one.heartbeat()
        await _slept(seconds)

    _slept = registration.asyncio.sleep
    monkeypatch.setattr(registration.asyncio, "sleep", beat)
    monkeypatch.setattr(main, "open_engine", None)  # it is not called
    config = RolloutConfig(
        agent=AgentConfig(coordinator=pool.target, replica_id="r0"), vllm_args=["m"], http_port=0
    )
    with pytest.raises(RequestConflictError, match="a live replica is named 'r0'"):
        await main.serve(config)
    await pool.stop()


@pytest.mark.usefixtures("_quick")
async def test_a_former_process_that_has_died_is_waited_for(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.WARNING)
    pool = await Pool(tmp_path / "weft.db").start(heartbeat_seconds=0.2)
    await pool.replica("r0")
    monkeypatch.setattr(registration, "_MORE_SECONDS", 10.0)
    await check_contact(AgentConfig(coordinator=pool.target, replica_id="r0"))
    assert caplog.text.count("waiting until a former process") == 1
    await pool.stop()


async def test_a_coordinator_that_is_not_there_is_said_at_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.WARNING)
    began = time.monotonic()
    await check_contact(AgentConfig(coordinator="127.0.0.1:1", replica_id="r0"))
    assert time.monotonic() - began < 5
    assert "no contact with the coordinator at 127.0.0.1:1" in caplog.text
    assert "the model is loaded meanwhile" in caplog.text
    with pytest.raises(InvalidRequestError, match="names no port"):
        await check_contact(AgentConfig(coordinator="weft", replica_id="r0"))


async def test_a_refusal_that_others_mend_is_said_at_once(
    pool: Pool, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.WARNING)
    monkeypatch.setattr(registration, "PROTOCOL_REVISION", PROTOCOL_REVISION + 1)
    await check_contact(AgentConfig(coordinator=pool.target, replica_id="r0"))
    assert "refuses this replica" in caplog.text
    assert "REVISION_MISMATCH" in caplog.text


@pytest.mark.parametrize("which", ["grpc", "metrics", "health", "exposed"])
async def test_a_port_that_is_taken_ends_the_start_before_the_model_is_loaded(
    which: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(main, "open_engine", None)  # it is not called
    with socket.create_server(("127.0.0.1", 0)) as other:
        taken = f"127.0.0.1:{other.getsockname()[1]}"
        listen = {"grpc": taken, "exposed": "0.0.0.0:0"}.get(which, "127.0.0.1:0")
        telemetry = {which: taken} if which in ("metrics", "health") else {}
        config = RolloutConfig(
            agent=AgentConfig(coordinator="127.0.0.1:1", replica_id="r0", listen=listen),
            vllm_args=["m"],
            telemetry=TelemetryConfig(**telemetry),  # type: ignore[arg-type]
        )
        said = InvalidRequestError if which == "exposed" else NotReadyError
        with pytest.raises(said) as caught:
            await main.serve(config)
    if which != "exposed":
        assert caught.value.reason == "ADDRESS_IN_USE"
        assert taken in caught.value.message


async def test_no_two_servers_share_a_port() -> None:
    """gRPC would share it, were it not told otherwise."""
    first, second = await make_server([]), await make_server([])
    port = bind(first.server, "127.0.0.1:0")
    taken = f"127.0.0.1:{port}"
    with pytest.raises(NotReadyError, match=taken):
        bind(second.server, taken)
    with pytest.raises(NotReadyError, match=taken):
        await serve_health(second, taken)
    with pytest.raises(NotReadyError, match=taken):
        check_listen(taken)
    for free in ("", "127.0.0.1:0"):
        check_listen(free)
    await first.server.stop(None)
    await second.server.stop(None)
