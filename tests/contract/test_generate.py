"""GenerateService as a replica serves it: what answers, what ends it, what is refused."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from tests.contract.calls import fails, refused
from tests.contract.served_replica import Served
from tests.doubles.agent import hear
from tests.doubles.answers import token
from tests.waits import eventually
from weft_rl.v1 import generate_pb2 as pb
from weft_rl.v1 import replica_pb2, types_pb2


def _request(policy: str, *, strict: bool = False, **sampling: Any) -> pb.GenerateRequest:
    return pb.GenerateRequest(
        policy=policy,
        token_ids=pb.TokenIds(ids=[1, 2, 3]),
        strict=strict,
        sampling=pb.Sampling(**sampling),
    )


def _spans(chunk: pb.SampleChunk) -> list[tuple[int, int, int]]:
    return [(span.version, span.start, span.end) for span in chunk.base_spans]


def _last(responses: list[pb.GenerateResponse], index: int = 0) -> pb.SampleChunk:
    chunks = [c for r in responses for c in r.chunks if c.index == index]
    assert all(not c.finish_reason and not c.base_spans for c in chunks[:-1])
    return chunks[-1]


def _tokens(responses: list[pb.GenerateResponse], index: int = 0) -> list[int]:
    return [t for r in responses for c in r.chunks if c.index == index for t in c.token_ids]


async def test_each_sample_says_what_made_it(served: Served) -> None:
    await served.commit("base@1")
    await served.commit("math@1")
    await served.commit("math@2")
    for asked, exact in (("math", 2), ("math@2", 2), ("math@1", 1), ("base", 0), ("base@1", 0)):
        call = served.generate.Generate(_request(asked, num_samples=2, max_tokens=3))
        responses = [response async for response in call]
        first = responses[0].admission
        assert first.base_version == 1
        assert first.adapter.version == exact
        assert not any(r.HasField("admission") for r in responses[1:])
        for i in range(2):
            assert _tokens(responses, i) == [token(1, exact, i, at) for at in range(3)]
            assert sum(len(c.logprobs) for r in responses for c in r.chunks if c.index == i) == 3
            last = _last(responses, i)
            assert last.finish_reason == pb.FINISH_REASON_LENGTH
            assert (last.HasField("adapter"), last.adapter.version) == (exact > 0, exact)
            assert _spans(last) == [(1, 0, 3)]
    assert served.engine.num_requests() == 0


async def test_tokens_come_in_chunks_of_the_length_that_is_asked(served: Served) -> None:
    request = _request("base", max_tokens=12)
    request.chunk_tokens = 5
    responses = [response async for response in served.generate.Generate(request)]
    lengths = [len(chunk.token_ids) for response in responses for chunk in response.chunks]
    assert lengths == [1, 5, 5, 1]
    assert _tokens(responses) == [token(0, 0, 0, at) for at in range(12)]


async def test_text_is_told_as_tokens(served: Served) -> None:
    request = pb.GenerateRequest(policy="base", text="ab", sampling=pb.Sampling(max_tokens=2))
    responses = [response async for response in served.generate.Generate(request)]
    assert list(responses[0].admission.prompt_token_ids) == [97, 98]


async def test_images_come_with_a_prompt(served: Served) -> None:
    """Files and pixels keep their order; the prompt is told with the tokens that stand for them."""
    request = _request("base", max_tokens=2)
    request.images.add(file=b"PNG")
    request.images.add(pixels=pb.Pixels(height=2, width=1, rgb=bytes(6)))
    responses = [response async for response in served.generate.Generate(request)]
    assert list(responses[0].admission.prompt_token_ids) == [1, 2, 3, *[7] * 5]


async def test_a_prompt_with_large_images_is_read(served: Served) -> None:
    request = _request("base", max_tokens=1)
    request.images.add(pixels=pb.Pixels(height=2_000, width=2_000, rgb=bytes(12_000_000)))
    responses = [response async for response in served.generate.Generate(request)]
    assert len(responses[0].admission.prompt_token_ids) == 2_003


async def _begun(served: Served, request: pb.GenerateRequest) -> tuple[Any, pb.GenerateResponse]:
    call = served.generate.Generate(request)
    first = await call.read()
    served.engine.stepping.clear()
    return call, first


async def test_an_answer_goes_on_under_another_base_and_says_so(served: Served) -> None:
    await served.commit("base@1")
    call, first = await _begun(served, _request("base@1", max_tokens=200))
    await served.commit("base@2")
    served.engine.stepping.set()
    responses = [first]
    while (response := await call.read()) is not grpc.aio.EOF:
        responses.append(response)
    last = _last(responses)
    (_, _, boundary), (version, start, end) = _spans(last)
    assert (version, start, end) == (2, boundary, 200)
    tokens = _tokens(responses)
    assert tokens == [token(1 if at < boundary else 2, 0, 0, at) for at in range(200)]


async def test_a_strict_answer_ends_with_the_tokens_so_far(served: Served) -> None:
    await served.commit("base@1")
    call, first = await _begun(served, _request("base", strict=True, max_tokens=200))
    await served.commit("base@2")
    served.engine.stepping.set()
    responses = [first]
    while not (responses[-1].chunks and responses[-1].chunks[0].finish_reason):
        responses.append(await call.read())
    await fails(call, "ABORTED", "VERSION_CHANGED")
    last, tokens = _last(responses), _tokens(responses)
    assert last.finish_reason == pb.FINISH_REASON_ABORT
    assert _spans(last) == [(1, 0, len(tokens))]
    assert tokens == [token(1, 0, 0, at) for at in range(len(tokens))]


async def test_an_answer_that_keeps_its_cache_says_where_that_is_older(served: Served) -> None:
    _choose(served, "keep")
    await served.commit("base@1")
    call, _ = await _begun(served, _request("base@1", max_tokens=200))
    await served.commit("base@2")
    served.engine.stepping.set()
    responses = []
    while (response := await call.read()) is not grpc.aio.EOF:
        responses.append(response)
    before, after = _last(responses).base_spans
    assert [(span.version, span.older_cache) for span in (before, after)] == [(1, False), (2, True)]


async def test_an_answer_is_aborted_where_it_has_tokens(served: Served) -> None:
    _choose(served, "abort")
    await served.commit("base@1")
    call, first = await _begun(served, _request("base@1", max_tokens=200))
    waiting = served.generate.Generate(_request("base@1", max_tokens=5))
    await eventually(lambda: served.engine.num_requests() >= 2)
    await served.commit("base@2")
    served.engine.stepping.set()
    responses = [first]
    while not (responses[-1].chunks and responses[-1].chunks[0].finish_reason):
        responses.append(await call.read())
    await fails(call, "ABORTED", "VERSION_CHANGED")
    assert _spans(_last(responses)) == [(1, 0, len(_tokens(responses)))]
    assert _tokens([r async for r in waiting]) == [token(2, 0, 0, at) for at in range(5)]


def _choose(served: Served, running_requests: str) -> None:
    engine = served.engine
    engine.capabilities = dataclasses.replace(
        engine.capabilities, running_requests=running_requests
    )


async def _no_requests(served: Served) -> bool:
    return served.engine.num_requests() == 0


async def _begun_within(served: Served, seconds: float | None) -> Any:
    """Return a call whose first tokens came before its deadline, however busy the machine is."""
    while True:
        call = served.generate.Generate(_request("base", max_tokens=100_000), timeout=seconds)
        try:
            await call.read()
        except grpc.aio.AioRpcError as error:
            if seconds is None or error.code() is not grpc.StatusCode.DEADLINE_EXCEEDED:
                raise
            seconds *= 3
            await eventually(lambda: _no_requests(served))
        else:
            return call


@pytest.mark.parametrize("how", ["cancel", "deadline"])
async def test_who_hangs_up_ends_it_in_the_engine(served: Served, how: str) -> None:
    call = await _begun_within(served, 0.3 if how == "deadline" else None)
    answer = list(served.engine.answers)[-1]
    if how == "cancel":
        call.cancel()
    await eventually(lambda: _no_requests(served))
    assert answer.has_ended
    steps = answer.num_steps
    await asyncio.sleep(0.05)
    assert answer.num_steps == steps < 100_000
    wanted = grpc.StatusCode.CANCELLED if how == "cancel" else grpc.StatusCode.DEADLINE_EXCEEDED
    assert await call.code() is wanted


async def test_a_call_that_ends_while_its_reader_takes_nothing(served: Served) -> None:
    """The handler waits in a write then, and not for the engine."""
    call = served.generate.Generate(_request("base", num_samples=1024, max_tokens=60_000))
    await call.read()
    (answer,) = served.engine.answers

    async def stands_still() -> bool:
        before = answer.num_steps
        await asyncio.sleep(0.1)
        return answer.num_steps == before

    await eventually(stands_still)
    call.cancel()
    await eventually(lambda: _no_requests(served))


async def test_versions_that_are_not_here(served: Served) -> None:
    for version in ("base@1", "base@2", "math@1", "math@2", "math@3"):
        await served.commit(version)
    await served.stub.RetireVersions(
        replica_pb2.RetireVersionsRequest(
            versions=[types_pb2.PolicyVersion(policy="math", version=1)]
        )
    )
    back = types_pb2.PolicyVersion(policy="base", version=1)
    await served.stub.SwitchVersion(replica_pb2.SwitchVersionRequest(version=back))
    for asked, there in (("math@1", "math@2, math@3"), ("base@2", "base@1"), ("base@0", "base@1")):
        call = served.generate.Generate(_request(asked))
        error = await fails(call, "NOT_FOUND", "VERSION_UNKNOWN")
        assert error.metadata["versions"] == there
    error = await fails(served.generate.Generate(_request("code")), "NOT_FOUND", "POLICY_UNKNOWN")
    assert error.metadata["versions"] == "math@3, base@1"
    error = await fails(served.generate.Generate(_request("code@1")), "NOT_FOUND", "POLICY_UNKNOWN")
    assert error.metadata["versions"] == "math@3, base@1"
    for asked in ("math@4", "base@3"):
        call = served.generate.Generate(_request(asked))
        await fails(call, "UNAVAILABLE", "VERSION_AHEAD")
        status = await rpc_status.aio.from_call(call)
        retry = error_details_pb2.RetryInfo()
        assert [d for d in status.details if d.Unpack(retry)]
        assert retry.retry_delay.seconds == 1


async def test_it_refuses_as_the_openai_server_does(served: Served) -> None:
    await served.commit("math@1")
    served.engine.stepping.clear()
    running = served.generate.Generate(_request("math", max_tokens=2))
    await eventually(lambda: _is_running(served))
    served.engine.refuse_requests("it is leaving")
    how, error = await refused(served.generate.Generate(_request("math")))
    assert (how, error.message) == ("UNAVAILABLE/REFUSING", "it is leaving")
    served.engine.stepping.set()  # what runs goes on
    assert len([response async for response in running]) == 2
    served.engine.refuse_requests("")
    hear(served.agent).in_contact = False
    served.agent._update_aliases()
    for asked in ("math", "base"):
        call = served.generate.Generate(_request(asked))
        await fails(call, "UNAVAILABLE", "COORDINATOR_AWAY")
    for asked in ("math@1", "base@0"):
        assert [r async for r in served.generate.Generate(_request(asked))]


async def test_an_alias_is_answered_by_who_serves_what_it_stands_for_in_the_pool(
    served: Served,
) -> None:
    """Ready or not: from former weights nobody is answered who did not ask for them."""
    for version in ("base@1", "math@1", "code@1"):
        await served.commit(version)
    hear(served.agent, "math@2", "other@1")
    for asked in ("math", "other"):
        error = await fails(served.generate.Generate(_request(asked)), "UNAVAILABLE", "REFUSING")
        assert "the pool serves" in error.message
    for asked in ("math@1", "code", "base"):
        assert [r async for r in served.generate.Generate(_request(asked))]
    hear(served.agent, "base@7")
    for asked in ("base", "math", "code"):
        error = await fails(served.generate.Generate(_request(asked)), "UNAVAILABLE", "REFUSING")
        assert "this replica serves base@1, and the pool serves base@7" in error.message
    for asked in ("base@1", "math@1"):
        assert [r async for r in served.generate.Generate(_request(asked))]
    await served.commit("base@7")  # no heartbeat is waited for
    assert [r async for r in served.generate.Generate(_request("base"))]


async def _is_running(served: Served) -> bool:
    return served.engine.num_requests() == 1


@pytest.mark.parametrize(
    ("request_", "reason"),
    [
        (pb.GenerateRequest(policy="base"), "INVALID_REQUEST"),
        (_request("base@x"), "INVALID_NAME"),
        (_request(""), "INVALID_NAME"),
        (_request("base", num_samples=1025), "INVALID_REQUEST"),
        (_request("base", stop=["x"] * 17), "INVALID_REQUEST"),
        (_request("base", stop=["x" * 1025]), "INVALID_REQUEST"),
        (_request("base", stop_token_ids=range(1025)), "INVALID_REQUEST"),
        (_request("base", temperature=float("nan")), "INVALID_REQUEST"),
        (_request("base", seed=-1), "INVALID_REQUEST"),
        (_request("base", min_tokens=3, max_tokens=2), "INVALID_REQUEST"),
    ],
)
async def test_what_cannot_be(served: Served, request_: pb.GenerateRequest, reason: str) -> None:
    await fails(served.generate.Generate(request_), "INVALID_ARGUMENT", reason)
    assert not served.engine.answers
