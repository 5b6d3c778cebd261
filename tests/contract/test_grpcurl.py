"""What the manual says of grpcurl: run with it where it is installed, else through the
reflection protocol that it speaks."""

from __future__ import annotations

import asyncio
import re
import shlex
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import pytest_asyncio
from google.protobuf import descriptor_pb2, descriptor_pool, json_format, message_factory
from grpc_reflection.v1alpha import reflection_pb2 as pb

from tests.contract.conftest import Pool
from weft.rpc import reflection
from weft.rpc.channel import open_aio_channel
from weft.v1 import inspect_pb2

_PAGE = Path(__file__).parents[2] / "docs/operations.md"
_TARGET = "127.0.0.1:50051"
_DESCRIBED = "weft.v1.PublishService.BeginTransfer"
_METHODS = 2  # in the path of a method: its service's field, and its own


def _lines() -> list[list[str]]:
    """The page's commands, as words without the target."""
    found = re.findall(rf"^grpcurl -plaintext {_TARGET} (.*)$", _PAGE.read_text(), re.MULTILINE)
    return [shlex.split(line, comments=True) for line in found]


class Grpcurl:
    """grpcurl's three verbs through the reflection service of one version."""

    def __init__(self, channel: grpc.aio.Channel, version: str) -> None:
        self._channel = channel
        self._ask = channel.stream_stream(
            f"/grpc.reflection.{version}.ServerReflection/ServerReflectionInfo",
            request_serializer=pb.ServerReflectionRequest.SerializeToString,
            response_deserializer=pb.ServerReflectionResponse.FromString,
        )

    async def ask(self, **question: Any) -> pb.ServerReflectionResponse:
        (answer,) = [a async for a in self._ask(iter([pb.ServerReflectionRequest(**question)]))]
        return answer

    async def files(self, symbol: str) -> list[descriptor_pb2.FileDescriptorProto]:
        answer = await self.ask(file_containing_symbol=symbol)
        assert not answer.HasField("error_response"), answer.error_response
        files = answer.file_descriptor_response.file_descriptor_proto
        return [descriptor_pb2.FileDescriptorProto.FromString(file) for file in files]

    async def run(self, words: list[str]) -> str:
        match words:
            case ["list"]:
                answer = await self.ask(list_services="")
                return "\n".join(s.name for s in answer.list_services_response.service)
            case ["describe", symbol]:
                return await self._describe(symbol)
            case [method]:
                return await self._call(method)
        raise AssertionError(words)

    async def _describe(self, symbol: str) -> str:
        owner, _, name = symbol.rpartition(".")
        file = (await self.files(symbol))[0]
        for i, service in enumerate(file.service):
            for j, method in enumerate(service.method):
                if (f"{file.package}.{service.name}", method.name) == (owner, name):
                    path = [6, i, _METHODS, j]
                    places = file.source_code_info.location
                    comments = [p.leading_comments for p in places if [*p.path] == path]
                    return "".join(comments) + f"rpc {method.name} ( {method.input_type} )"
        raise AssertionError(f"{symbol} is not in {file.name}")

    async def _call(self, method: str) -> str:
        service, _, name = method.partition("/")
        pool = descriptor_pool.DescriptorPool()
        for file in reversed(await self.files(service)):
            pool.Add(file)
        found = pool.FindServiceByName(service).methods_by_name[name]
        request, response = map(
            message_factory.GetMessageClass, (found.input_type, found.output_type)
        )
        call = self._channel.unary_unary(
            f"/{method}",
            request_serializer=request.SerializeToString,
            response_deserializer=response.FromString,
        )
        return json_format.MessageToJson(await call(request()))


@pytest_asyncio.fixture(params=["v1", "v1alpha"])
async def grpcurl(pool: Pool, request: pytest.FixtureRequest) -> AsyncIterator[Grpcurl]:
    async with open_aio_channel(pool.target) as channel:
        yield Grpcurl(channel, request.param)


async def _run(pool: Pool, words: list[str], otherwise: Grpcurl) -> str:
    program = shutil.which("grpcurl")
    if program is None:
        return await otherwise.run(words)
    process = await asyncio.create_subprocess_exec(
        program, "-plaintext", pool.target, *words,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    out, err = await process.communicate()
    assert process.returncode == 0, err.decode()
    return out.decode()


async def test_the_lines_of_the_manual(pool: Pool, grpcurl: Grpcurl) -> None:
    await pool.replica()
    lines = _lines()
    assert ["describe", _DESCRIBED] in lines
    shown = {" ".join(words): await _run(pool, words, grpcurl) for words in lines}
    assert "weft.v1.PublishService" in shown["list"]
    assert '"r0"' in shown["weft.v1.InspectService/GetPool"]
    described = shown[f"describe {_DESCRIBED}"]
    assert "BeginTransfer ( .weft.v1.BeginTransferRequest" in described
    if _is_described("weft/v1/publish.proto"):
        assert "Idempotent by (trainer_id, request_id)" in described
        assert "MANIFEST_UNKNOWN" in described


def _is_described(name: str) -> bool:
    """Whether the committed comments are of the protos that the stubs are of (``make protos``
    makes sure that they are)."""
    file = descriptor_pool.Default().FindFileByName(name)
    return bool(reflection.described(file).source_code_info.location)


@pytest.mark.parametrize(
    "symbol",
    [
        "weft.v1.PublishService",
        "weft.v1.InspectService.GetPool",
        "weft.v1.Version",
        "weft.v1.Version.content_digest",
        "weft.v1.AttendRequest.message",
        "weft.v1.VersionState",
        "weft.v1.VersionState.VERSION_STATE_COMMITTED",
        "grpc.health.v1.Health.Check",
        "grpc.reflection.v1.ServerReflection.ServerReflectionInfo",
        "google.protobuf.Duration.seconds",
    ],
)
async def test_what_can_be_described(grpcurl: Grpcurl, symbol: str) -> None:
    files = await grpcurl.files(symbol)
    names = [file.name for file in files]
    assert len(set(names)) == len(names)
    assert all(dependency in names for file in files for dependency in file.dependency)
    assert symbol.startswith(files[0].package)


async def test_what_cannot(grpcurl: Grpcurl) -> None:
    for symbol in ("weft.v1.PublishService.Nope", "weft.v1.Nope.x", "Nope", "", "."):
        answer = await grpcurl.ask(file_containing_symbol=symbol)
        assert answer.error_response.error_code == grpc.StatusCode.NOT_FOUND.value[0]
        assert answer.original_request.file_containing_symbol == symbol
    answer = await grpcurl.ask(file_by_filename="nope.proto")
    assert answer.error_response.error_code == grpc.StatusCode.NOT_FOUND.value[0]
    answer = await grpcurl.ask(host="x")
    assert answer.error_response.error_code == grpc.StatusCode.INVALID_ARGUMENT.value[0]
    answer = await grpcurl.ask(file_by_filename="weft/v1/types.proto")
    assert answer.file_descriptor_response.file_descriptor_proto


def test_comments_of_another_state_of_a_file_are_not_shown(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    file = inspect_pb2.DESCRIPTOR
    commented = descriptor_pb2.FileDescriptorProto()
    file.CopyToProto(commented)
    commented.message_type[0].field.add(name="added", number=1)
    commented.source_code_info.location.add(path=[4, 0], leading_comments="Old.")
    monkeypatch.setattr(reflection, "_commented", lambda: {file.name: commented})
    assert not reflection.described(file).source_code_info.location
    del commented.message_type[0].field[-1]
    assert reflection.described(file).source_code_info.location[0].leading_comments == "Old."


async def test_listings_show_digests_as_errors_do(pool: Pool) -> None:
    await pool.replica()
    trainer = await pool.trainer()
    transfer = await trainer.push()
    versions = inspect_pb2.ListVersionsRequest(policy="math")
    (version,) = (await trainer.inspect.ListVersions(versions)).versions
    await pool.restart()
    trainer = await pool.trainer()
    recorded = await trainer.wait(transfer.transfer_id)
    for shown in (transfer, version, recorded):
        assert shown.content_digest_hex == transfer.content_digest.value.hex() != ""
        assert shown.layout_digest_hex == trainer.manifest.layout_digest.hex()
