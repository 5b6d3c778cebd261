"""What every Weft server has: errors as statuses, health, reflection, channelz, a port."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_channelz.v1 import channelz_pb2, channelz_pb2_grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2

from tests.contract.calls import error_of, fails
from tests.contract.conftest import Pool
from tests.waits import until
from weft_rl.contract.errors import (
    REASONS,
    CapacityError,
    InvalidRequestError,
    NotReadyError,
    PeerUnavailableError,
    TransferTimeoutError,
    UnsupportedError,
    WeftError,
    error_from_reason,
)
from weft_rl.coordinator.config import CoordinatorConfig
from weft_rl.coordinator.runtime.catalog.database import Catalog, CatalogError
from weft_rl.coordinator.server import Coordinator
from weft_rl.rpc.channel import open_aio_channel, open_channel
from weft_rl.rpc.security.credentials import Credentials
from weft_rl.rpc.server import Servicer, bind, make_server
from weft_rl.rpc.status import error_from_rpc, status_from_error
from weft_rl.v1 import (
    inspect_pb2,
    inspect_pb2_grpc,
    publish_pb2,
    publish_pb2_grpc,
    registry_pb2,
    registry_pb2_grpc,
    types_pb2,
)

_SERVICES = [
    "weft.v1.AdminService",
    "weft.v1.InspectService",
    "weft.v1.PublishService",
    "weft.v1.RegistryService",
    "weft.v1.RendezvousService",
]


@pytest.fixture(autouse=True)
def keeps_to_comments() -> None:
    """Not here: a servicer that fails in every way there is."""


class _Raising(inspect_pb2_grpc.InspectServiceServicer):
    """Raises what it is told to, from a unary and from a streaming method."""

    def __init__(self) -> None:
        self.error: Exception = WeftError("unset")
        self.calls = 0

    async def GetPool(self, request: Any, context: Any) -> Any:  # noqa: N802
        self.calls += 1
        raise self.error

    async def ListPolicies(self, request: Any, context: Any) -> Any:  # noqa: N802
        await asyncio.sleep(60)

    async def WatchEvents(self, request: Any, context: Any) -> AsyncIterator[Any]:  # noqa: N802
        yield inspect_pb2.WatchEventsResponse(subject="first")
        raise self.error


@pytest.fixture
async def raising() -> AsyncIterator[tuple[_Raising, grpc.aio.Channel]]:
    servicer = _Raising()
    add = inspect_pb2_grpc.add_InspectServiceServicer_to_server
    made = await make_server([Servicer("weft.v1.InspectService", servicer, add)])
    port = bind(made.server, "127.0.0.1:0")
    await made.server.start()
    async with open_aio_channel(f"127.0.0.1:{port}") as channel:
        yield servicer, channel
    await made.server.stop(0)


Raising = tuple[_Raising, grpc.aio.Channel]


def _get_pool(channel: grpc.aio.Channel) -> Any:
    return inspect_pb2_grpc.InspectServiceStub(channel).GetPool(inspect_pb2.GetPoolRequest())


async def test_every_reason_arrives_as_its_type(raising: Raising) -> None:
    servicer, channel = raising
    for reason, kind in REASONS.items():
        servicer.error = error_from_reason(reason, f"about {reason}", {"member": "r0"})
        error = await fails(_get_pool(channel), kind.status, reason)
        assert type(error) is kind
        assert (error.message, error.metadata) == (f"about {reason}", {"member": "r0"})
    assert servicer.calls == len(REASONS)  # typed failures are not retried blindly


async def test_streams_fail_as_typed_too(raising: Raising) -> None:
    servicer, channel = raising
    servicer.error = CapacityError("too slow", reason="TOO_SLOW")
    stub = inspect_pb2_grpc.InspectServiceStub(channel)
    stream = stub.WatchEvents(inspect_pb2.WatchEventsRequest())
    assert (await stream.read()).subject == "first"
    assert (await error_of(stream)).reason == "TOO_SLOW"


async def test_a_bug_is_logged_here_and_internal_there(
    raising: Raising, caplog: pytest.LogCaptureFixture
) -> None:
    servicer, channel = raising
    servicer.error = ZeroDivisionError("secret detail")
    with pytest.raises(grpc.RpcError) as failed:
        await _get_pool(channel)
    assert failed.value.code() is grpc.StatusCode.INTERNAL
    assert "secret" not in failed.value.details()
    assert "secret detail" in caplog.text


async def test_a_very_long_message_still_arrives(raising: Raising) -> None:
    servicer, channel = raising
    metadata = {f"key{i}": "v" * 9000 for i in range(50)}
    servicer.error = InvalidRequestError("ä" * 50_000, metadata=metadata)
    assert isinstance(await error_of(_get_pool(channel)), InvalidRequestError)


def test_capacity_says_when_to_retry() -> None:
    status = status_from_error(CapacityError("full"))
    assert [d.TypeName() for d in status.details] == [
        "google.rpc.ErrorInfo",
        "google.rpc.RetryInfo",
    ]


async def test_failures_without_details(raising: Raising) -> None:
    _, channel = raising
    async with open_aio_channel("127.0.0.1:1") as away:
        error = await error_of(_get_pool(away))
        assert (type(error), error.reason) == (PeerUnavailableError, "COORDINATOR_AWAY")
    stub = inspect_pb2_grpc.InspectServiceStub(channel)
    error = await error_of(stub.ListReplicas(inspect_pb2.ListReplicasRequest()))
    assert isinstance(error, UnsupportedError)
    elsewhere = registry_pb2_grpc.RegistryServiceStub(channel)
    error = await error_of(elsewhere.Leave(registry_pb2.LeaveRequest()))
    assert error.message.startswith("UNIMPLEMENTED")
    late = stub.ListPolicies(inspect_pb2.ListPoliciesRequest(), timeout=0.05)
    assert isinstance(await error_of(late), TransferTimeoutError)


async def test_health(pool: Pool) -> None:
    async with open_aio_channel(pool.target) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        for service in ("", *_SERVICES):
            answer = await stub.Check(health_pb2.HealthCheckRequest(service=service))
            assert answer.status == health_pb2.HealthCheckResponse.SERVING


@pytest.mark.parametrize("version", ["v1", "v1alpha"])
async def test_reflection(pool: Pool, version: str) -> None:
    name = f"grpc.reflection.{version}.ServerReflection"
    asks = [
        reflection_pb2.ServerReflectionRequest(list_services=""),
        reflection_pb2.ServerReflectionRequest(file_containing_symbol=_SERVICES[0]),
        reflection_pb2.ServerReflectionRequest(file_containing_symbol=name),
    ]
    async with open_aio_channel(pool.target) as channel:
        method = channel.stream_stream(
            f"/{name}/ServerReflectionInfo",
            request_serializer=reflection_pb2.ServerReflectionRequest.SerializeToString,
            response_deserializer=reflection_pb2.ServerReflectionResponse.FromString,
        )
        listed, weft, itself = [answer async for answer in method(iter(asks))]
    names = {service.name for service in listed.list_services_response.service}
    assert {
        *_SERVICES,
        "grpc.health.v1.Health",
        "grpc.channelz.v1.Channelz",
        "grpc.reflection.v1.ServerReflection",
        "grpc.reflection.v1alpha.ServerReflection",
    } <= names
    assert weft.file_descriptor_response.file_descriptor_proto
    assert itself.file_descriptor_response.file_descriptor_proto


async def test_channelz(pool: Pool) -> None:
    async with open_aio_channel(pool.target) as channel:
        stub = channelz_pb2_grpc.ChannelzStub(channel)
        assert (await stub.GetServers(channelz_pb2.GetServersRequest())).server


async def test_buf_curl_reads_the_pool(pool: Pool) -> None:
    buf = shutil.which("buf") or shutil.which("buf", path=str(Path(sys.executable).parent))
    if buf is None:
        pytest.skip("buf is not installed")
    await pool.replica()
    url = f"http://{pool.target}/weft.v1.InspectService/GetPool"
    for reflect in ("grpc-v1", "grpc-v1alpha"):
        process = await asyncio.create_subprocess_exec(
            buf, "curl", "--protocol", "grpc", "--http2-prior-knowledge",
            "--reflect-protocol", reflect, "-d", "{}", url,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip
        out, err = await process.communicate()
        assert process.returncode == 0, err
        assert b"REPLICA_STATE_READY" in out


# -- the process ---------------------------------------------------------------


async def test_two_coordinators_cannot_share_a_catalog_or_a_port(
    pool: Pool, tmp_path: Path
) -> None:
    config = CoordinatorConfig(catalog=pool.catalog, listen="127.0.0.1:0")
    with pytest.raises(CatalogError):
        await Coordinator(config).start()
    config = CoordinatorConfig(catalog=tmp_path / "other.db", listen=pool.target)
    for _ in range(2):  # a failed start lets go of its catalog
        with pytest.raises(NotReadyError):
            await Coordinator(config).start()


@pytest.mark.parametrize(
    "options",
    [
        {"listen": "50051"},
        {"listen": "host:70000"},
        {"lease_seconds": 0},
        {"retain_versions": 0},
        {"heartbeat_seconds": 11},
        {"stop_seconds": -1},
    ],
)
def test_config(options: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequestError, match=next(iter(options)).split("_")[0]):
        CoordinatorConfig(catalog=Path("x"), **options)


async def test_waiting_calls_and_streams_end_when_it_stops(pool: Pool) -> None:
    trainer = await pool.trainer()
    waiting = asyncio.create_task(trainer.begin())
    watch = trainer.inspect.WatchEvents(inspect_pb2.WatchEventsRequest())
    await watch.initial_metadata()
    assert pool.coordinator is not None
    await asyncio.wait_for(pool.coordinator.stop(), 5)
    for call in (waiting, watch.read()):
        with pytest.raises(grpc.RpcError) as failed:
            await call
        assert error_from_rpc(failed.value).reason == "COORDINATOR_AWAY"


_SERVE = """
import asyncio, sys
from pathlib import Path
from weft_rl.coordinator.config import CoordinatorConfig
from weft_rl.coordinator.server import serve
config = CoordinatorConfig(catalog=Path(sys.argv[1]), listen="127.0.0.1:0")
asyncio.run(serve(config, ready=lambda port, _: print(port, flush=True)))
assert "torch" not in sys.modules
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_serve_stops_in_order_when_told(catalog_path: Path, number: signal.Signals) -> None:
    child = subprocess.Popen(
        [sys.executable, "-c", _SERVE, str(catalog_path)], stdout=subprocess.PIPE, text=True
    )
    assert child.stdout is not None
    with child.stdout, open_channel(f"127.0.0.1:{int(child.stdout.readline())}") as channel:
        stub = inspect_pb2_grpc.InspectServiceStub(channel)
        watch = stub.WatchEvents(inspect_pb2.WatchEventsRequest())
        list(watch.initial_metadata())
        child.send_signal(number)
        assert child.wait(5) == 0
        with pytest.raises(grpc.RpcError):
            next(watch)


def test_a_coordinator_that_is_told_to_reads_its_files_again(
    catalog_path: Path, tmp_path: Path
) -> None:
    """It goes on: also where rules have changed and the file looks as it did."""
    access = tmp_path / "access.toml"
    rule = '[[identity]]\ntoken_sha256 = "{}"\nname = "a"\nroles = ["inspect"]\n'
    access.write_text(rule.format(hashlib.sha256(b"one").hexdigest()))
    was = access.stat()
    child = subprocess.Popen(
        [sys.executable, "-m", "weft_rl", "coordinator", "--listen", "127.0.0.1:0",
         "--catalog", str(catalog_path), "--access", str(access)],
        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
    )  # fmt: skip
    assert child.stdout is not None
    try:
        target = child.stdout.readline().split()[-1]
        own = Credentials(token="two")
        with open_channel(target, own) as channel:
            stub = inspect_pb2_grpc.InspectServiceStub(channel)
            with pytest.raises(grpc.RpcError) as refused:
                stub.GetPool(inspect_pb2.GetPoolRequest(), timeout=10)
            assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
            with access.open("r+") as file:
                file.write(rule.format(hashlib.sha256(b"two").hexdigest()))
            os.utime(access, ns=(was.st_atime_ns, was.st_mtime_ns))
            child.send_signal(signal.SIGHUP)

            def is_let_in() -> bool:
                with contextlib.suppress(grpc.RpcError):
                    return bool(stub.GetPool(inspect_pb2.GetPoolRequest(), timeout=10))
                return False

            until(is_let_in)
        assert child.poll() is None
    finally:
        child.terminate()
        assert child.wait(10) == 0
        child.stdout.close()


def test_a_disk_that_fills_up_ends_it_in_one_line_and_keeps_what_was_answered(
    catalog_path: Path,
) -> None:
    child = subprocess.Popen(
        [sys.executable, "-m", "weft_rl", "coordinator", "--listen", "127.0.0.1:0",
         "--catalog", str(catalog_path), "--log-level", "warning"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert child.stdout is not None
    target = child.stdout.readline().split()[-1]
    room = catalog_path.stat().st_size
    resource.prlimit(child.pid, resource.RLIMIT_FSIZE, (room, room))
    answered = []
    with open_channel(target) as channel:
        stub = publish_pb2_grpc.PublishServiceStub(channel)

        def acquire_until_refused() -> None:
            while True:
                name = f"p{len(answered)}"
                kind = types_pb2.POLICY_KIND_ADAPTER
                request = publish_pb2.AcquirePolicyRequest(
                    trainer_id="t", session_id="s", policy=name, kind=kind
                )
                stub.AcquirePolicy(request, timeout=10)
                answered.append(name)

        with pytest.raises(grpc.RpcError) as refused:
            acquire_until_refused()
    assert error_from_rpc(refused.value).reason == "COORDINATOR_AWAY"
    _, said = child.communicate(timeout=10)
    assert child.returncode == 1
    line = "".join(said.split())  # folded to the terminal's width
    assert line.startswith(f"error:thecatalog{catalog_path}cannotbewritten:thediskisfull")
    assert line.endswith("(CATALOG_UNWRITABLE)")
    catalog = Catalog.open(catalog_path)
    known = {policy.name for policy in catalog.snapshot().policies}
    catalog.close()
    assert known == {*answered} != set()
