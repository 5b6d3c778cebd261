"""What the manual says of grpcurl: run with it where it is installed, else through the
reflection protocol that it speaks."""

from __future__ import annotations

import asyncio
import hashlib
import os
import re
import shutil
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from string import Template
from typing import Any

import grpc
import pytest
import pytest_asyncio
from google.protobuf import descriptor_pb2, descriptor_pool, json_format, message_factory
from grpc_reflection.v1alpha import reflection_pb2 as pb

from tests.contract.conftest import Pool
from tests.contract.served_replica import Served
from tests.contract.test_access import TOKEN, Secured
from weft_rl.rpc import reflection
from weft_rl.rpc.channel import open_aio_channel
from weft_rl.v1 import inspect_pb2

_PAGE = Path(__file__).parents[2] / "docs/operations.md"
_DESCRIBED = "weft.v1.PublishService.BeginTransfer"
_METHODS = 2  # in the path of a method: its service's field, and its own


#: Prints its environment and arguments as the shell hands them over.
_SHOWN = """grpcurl() { printf '%s\\0' "${TOKEN-}" "$@"; }
"""


def _lines() -> list[str]:
    """The page's commands, as they would be pasted."""
    text = _PAGE.read_text().replace("\\\n", " ")
    return re.findall(r"^(?:TOKEN=.*)?grpcurl .*$", text, re.MULTILINE)


@dataclass
class Command:
    """A line as a shell understands it in some folder."""

    words: list[str]
    environment: dict[str, str]
    files: dict[str, bytes] = field(default_factory=dict)
    headers: list[tuple[str, str]] = field(default_factory=list)
    request: str = "{}"
    is_plaintext: bool = False
    target: str = ""
    verb: list[str] = field(default_factory=list)

    @classmethod
    async def of(cls, line: str, folder: Path) -> Command:
        shell = await asyncio.create_subprocess_exec(
            "bash", "-euc", _SHOWN + line, cwd=folder, stdout=asyncio.subprocess.PIPE
        )
        out, _ = await shell.communicate()
        assert shell.returncode == 0, line
        token, *words = out.decode().split("\0")[:-1]
        made = cls(words, {"TOKEN": token} if token else {})
        left = iter(made.words)
        for word in left:
            match word:
                case "-plaintext":
                    made.is_plaintext = True
                case "-cacert" | "-cert" | "-key":
                    made.files[word] = (folder / next(left)).read_bytes()
                case "-H":
                    assert "-expand-headers" in made.words
                    name, _, value = (
                        Template(next(left)).substitute(made.environment).partition(": ")
                    )
                    made.headers.append((name, value))
                case "-expand-headers":
                    pass
                case "-d":
                    made.request = next(left)
                case _:
                    assert not word.startswith("-"), f"unknown to us: {word}"
                    made.target = word
                    made.verb = list(left)
        return made

    def channel(self, target: str) -> grpc.aio.Channel:
        """What it dials, at another address than the page's."""
        if self.is_plaintext:
            return grpc.aio.insecure_channel(target)
        files = (self.files.get(name) for name in ("-cacert", "-key", "-cert"))
        return grpc.aio.secure_channel(target, grpc.ssl_channel_credentials(*files))


class Grpcurl:
    """grpcurl's three verbs through the reflection service of one version."""

    def __init__(
        self, channel: grpc.aio.Channel, version: str, headers: Sequence[tuple[str, str]] = ()
    ) -> None:
        self._channel, self._headers = channel, tuple(headers)
        self._ask = channel.stream_stream(
            f"/grpc.reflection.{version}.ServerReflection/ServerReflectionInfo",
            request_serializer=pb.ServerReflectionRequest.SerializeToString,
            response_deserializer=pb.ServerReflectionResponse.FromString,
        )

    async def ask(self, **question: Any) -> pb.ServerReflectionResponse:
        request = pb.ServerReflectionRequest(**question)
        while True:
            try:
                answers = [a async for a in self._ask(iter([request]), metadata=self._headers)]
            except grpc.aio.AioRpcError as error:
                # gRPC's Python client hides a refusal that comes while it writes.
                if "execute_batch" not in (error.debug_error_string() or ""):
                    raise
            else:
                (answer,) = answers
                return answer

    async def files(self, symbol: str) -> list[descriptor_pb2.FileDescriptorProto]:
        answer = await self.ask(file_containing_symbol=symbol)
        assert not answer.HasField("error_response"), answer.error_response
        files = answer.file_descriptor_response.file_descriptor_proto
        return [descriptor_pb2.FileDescriptorProto.FromString(file) for file in files]

    async def run(self, words: list[str], request: str = "{}") -> str:
        match words:
            case ["list"]:
                answer = await self.ask(list_services="")
                return "\n".join(s.name for s in answer.list_services_response.service)
            case ["describe", symbol]:
                return await self._describe(symbol)
            case [method]:
                return await self._call(method, request)
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

    async def _call(self, method: str, given: str) -> str:
        service, _, name = method.partition("/")
        pool = descriptor_pool.DescriptorPool()
        for file in reversed(await self.files(service)):
            pool.Add(file)
        found = pool.FindServiceByName(service).methods_by_name[name]
        request, response = map(
            message_factory.GetMessageClass, (found.input_type, found.output_type)
        )
        make = self._channel.unary_stream if found.server_streaming else self._channel.unary_unary
        call = make(
            f"/{method}",
            request_serializer=request.SerializeToString,
            response_deserializer=response.FromString,
        )(json_format.Parse(given, request(), descriptor_pool=pool), metadata=self._headers)
        answers = [answer async for answer in call] if found.server_streaming else [await call]
        return "\n".join(json_format.MessageToJson(a, descriptor_pool=pool) for a in answers)


@pytest.fixture(params=["v1", "v1alpha"])
def version(request: pytest.FixtureRequest) -> str:
    """Of the reflection service."""
    return str(request.param)


@pytest_asyncio.fixture
async def grpcurl(pool: Pool, version: str) -> AsyncIterator[Grpcurl]:
    async with open_aio_channel(pool.target) as channel:
        yield Grpcurl(channel, version)


async def _paste(line: str, target: str, folder: Path, version: str) -> str:
    """What a line answers when it is pasted into a shell in ``folder``, but for the address."""
    command = await Command.of(line, folder)
    program = shutil.which("grpcurl")
    if program is None:
        async with command.channel(target) as channel:
            return await Grpcurl(channel, version, command.headers).run(
                command.verb, command.request
            )
    words = [target if word == command.target else word for word in command.words]
    process = await asyncio.create_subprocess_exec(
        program, *words, cwd=folder, env={**os.environ, **command.environment},
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    out, err = await process.communicate()
    assert process.returncode == 0, err.decode()
    return out.decode()


async def test_the_lines_of_the_manual(pool: Pool, tmp_path: Path, version: str) -> None:
    await pool.replica("replica-1")
    trainer = await pool.trainer()
    await trainer.push()
    lines = [line for line in _lines() if " -plaintext " in line and ":50051" in line]
    shown = {
        re.sub(r" +#.*", "", line).rpartition("50051 ")[2]: await _paste(
            line, pool.target, tmp_path, version
        )
        for line in lines
    }
    assert "weft.v1.PublishService" in shown["list"]
    assert '"replica-1"' in shown["weft.v1.InspectService/GetPool"]
    assert "SERVING" in shown["grpc.health.v1.Health/Check"]
    assert '"VERSION_STATE_COMMITTED"' in shown["weft.v1.InspectService/ListVersions"]
    cordoned = (await pool.seen()).replicas[0]
    assert (cordoned.state, cordoned.state_reason) == (
        inspect_pb2.REPLICA_STATE_OUT_OF_SERVICE,
        "by an operator: new disk",
    )
    described = shown[f"describe {_DESCRIBED}"]
    assert "BeginTransfer ( .weft.v1.BeginTransferRequest" in described
    if _is_described("weft/v1/publish.proto"):
        assert "Idempotent by (trainer_id, request_id)" in described
        assert "MANIFEST_UNKNOWN" in described


async def test_the_line_that_asks_a_replica(served: Served, tmp_path: Path, version: str) -> None:
    await served.commit("math@1")
    (line,) = [line for line in _lines() if "GenerateService" in line]
    shown = await _paste(line, served.agent.address, tmp_path, version)
    assert '"adapter"' in shown
    assert shown.count('"FINISH_REASON_LENGTH"') == 2


@pytest.mark.parametrize("known_by", ["certificates", "tokens"])
async def test_the_lines_of_the_manual_where_callers_are_asked(
    tmp_path: Path, version: str, known_by: str
) -> None:
    rule = f'token_sha256 = "{hashlib.sha256(TOKEN.encode()).hexdigest()}"\nname = "me"'
    if known_by == "certificates":
        rule = 'san = "me.test"'
    pool = Secured(tmp_path, f'[[identity]]\n{rule}\nroles = ["inspect"]\n')
    me = pool.authority.credentials("me.test", file="me")
    assert (me.tls_cert, me.tls_key) == (f"{tmp_path}/me.pem", f"{tmp_path}/me.key")
    shutil.copy(pool.authority.path, tmp_path / "ca.pem")
    (tmp_path / "token").write_text(TOKEN + "\n")
    lines = [line for line in _lines() if "-cacert " in line]
    (mine,) = [line for line in lines if (" -cert " in line) == (known_by == "certificates")]
    await pool.start()
    try:
        shown = await _paste(mine, pool.target, tmp_path, version)
        assert '"coordinatorGeneration": "1"' in shown
        (tmp_path / "token").write_text("a-guess")
        if known_by == "tokens" and not shutil.which("grpcurl"):
            with pytest.raises(grpc.aio.AioRpcError, match="none of the access file's"):
                await _paste(mine, pool.target, tmp_path, version)
    finally:
        await pool.stop()


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
    (version,) = await pool.versions()
    await pool.restart()
    trainer = await pool.trainer()
    recorded = await trainer.wait(transfer.transfer_id)
    for shown in (transfer, version, recorded):
        assert shown.content_digest_hex == transfer.content_digest.value.hex() != ""
        assert shown.layout_digest_hex == trainer.manifest.layout_digest.hex()
