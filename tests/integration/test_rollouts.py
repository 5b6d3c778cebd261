"""RolloutClient over a real coordinator and replicas' real services; engine doubles sample, and
their tokens name the versions that made them. tests/e2e has the same over real vLLM."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import random
import socket
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
import torch

from tests.doubles.answers import token
from tests.doubles.engine import EngineDouble
from tests.doubles.pool import Pool
from tests.integration.models import Model, peft_of, until, weights
from tests.integration.replicas import is_ready
from tests.waits import stays
from trainer_side import (
    ImagePrompt,
    PolicyVersion,
    Publisher,
    RolloutClient,
    SampleGroup,
    Sampling,
)
from weft_rl.contract.errors import (
    InvalidRequestError,
    NotFoundError,
    PeerUnavailableError,
    TransferTimeoutError,
    UnsupportedError,
    VersionChangedError,
)
from weft_rl.rpc.channel import open_channel
from weft_rl.v1 import admin_pb2
from weft_rl.v1.admin_pb2_grpc import AdminServiceStub


@pytest.fixture
def rollouts(pool: Pool, engines: list[EngineDouble]) -> Iterator[RolloutClient]:
    # A client that comes before a replica is routed has the others answer all that it asks.
    until(lambda: is_ready(pool, "replica-0") and is_ready(pool, "replica-1"))
    with RolloutClient(pool.target, timeout_seconds=20) as client:
        yield client


def test_groups_come_whole_with_what_made_them(
    rollouts: RolloutClient, publisher: Publisher
) -> None:
    groups = rollouts.generate([[1, 2], "ab"], n=3, sampling=Sampling(max_tokens=4))
    assert [group.prompt_token_ids for group in groups] == [[1, 2], [97, 98]]
    assert [group.index for group in groups] == [0, 1]
    for group in groups:
        for index, sample in enumerate(group.samples):
            assert sample.token_ids.tolist() == [token(0, 0, index, at) for at in range(4)]
            assert torch.equal(sample.logprobs, torch.full((4,), -0.5))
            assert sample.versions.tolist() == sample.base_versions.tolist() == [0] * 4
            assert (sample.finish_reason, sample.adapter, sample.error) == ("length", None, None)


def test_a_prompt_with_images_is_told_with_their_tokens(rollouts: RolloutClient) -> None:
    pixels = torch.zeros(3, 4, 2, dtype=torch.uint8)  # four rows: four tokens to the double
    prompts = [ImagePrompt([1, 2], [pixels, b"PNG"]), ImagePrompt("ab", [pixels])]
    how = Sampling(max_tokens=2)
    wanted = [[1, 2, *[7] * 7], [97, 98, *[7] * 4]]
    groups = rollouts.generate(prompts, sampling=how)
    assert [group.prompt_token_ids for group in groups] == wanted
    with rollouts.stream(prompts, batch_size=1, max_staleness=0, sampling=how) as stream:
        for tokens in wanted:
            assert next(stream).prompt_token_ids == tokens
            stream.consumed(1)


def _push(publisher: Publisher, policy: str) -> PolicyVersion:
    return publisher.push_adapter(peft_of(Model()), policy).version


def test_versions_are_insisted_on(rollouts: RolloutClient, publisher: Publisher) -> None:
    first, second = _push(publisher, "math"), _push(publisher, "math")
    how = Sampling(max_tokens=2)
    for asked, number in (
        ({"model": "math"}, 2),
        ({"model": "math@1"}, 1),
        ({"model": first}, 1),
        ({"model": "math", "min_version": second}, 2),
        ({"model": "math", "min_version": "math@1"}, 2),
    ):
        (group,) = rollouts.generate([[1]], sampling=how, **asked)
        (sample,) = group.samples
        assert sample.adapter == PolicyVersion("math", number)
        assert sample.versions.tolist() == [number] * 2
        assert sample.token_ids.tolist() == [token(0, number, 0, at) for at in range(2)]


def test_samples_over_another_base_say_so(
    rollouts: RolloutClient, publisher: Publisher, caplog: pytest.LogCaptureFixture
) -> None:
    model = peft_of(Model())
    publisher.push_adapter(model, "math", base="base@0")
    (group,) = rollouts.generate([[1, 2]], model="math@1")
    assert group.remarks == ()
    publisher.push_base(Model(2))
    remark = "math@1 was trained on base@0, served over base@1"

    def remarks() -> tuple[str, ...]:
        (group,) = rollouts.generate([[1, 2]], model="math@1")
        return group.remarks

    until(lambda: remarks() == (remark,))
    assert remarks() == (remark,)
    assert len([text for text in caplog.messages if text.startswith(remark)]) == 1
    (group,) = rollouts.generate([[1, 2]], model="base")
    assert group.remarks == ()
    publisher.push_adapter(model, "math", base="base@1")
    (group,) = rollouts.generate([[1, 2]], model="math@2")
    assert group.remarks == ()


def test_a_version_to_come_is_waited_for(rollouts: RolloutClient, publisher: Publisher) -> None:
    _push(publisher, "math")
    with ThreadPoolExecutor() as threads:
        asked = [
            threads.submit(rollouts.generate, [[1]], **how)
            for how in ({"model": "math@2"}, {"model": "math", "min_version": "math@2"})
        ]
        stays(lambda: not any(each.done() for each in asked), 0.5)
        _push(publisher, "math")
        for each in asked:
            (group,) = each.result(10)
            assert group.samples[0].adapter == PolicyVersion("math", 2)


def test_what_never_comes_says_so(rollouts: RolloutClient, publisher: Publisher) -> None:
    for _ in range(2):
        _push(publisher, "math")
    for asked in ("maht", "maht@3"):
        with pytest.raises(NotFoundError, match=f"nothing here is called {asked}"):
            rollouts.generate([[1]], model=asked)
    with pytest.raises(
        TransferTimeoutError, match="math@9 or a newer one; the newest of math is @2"
    ):
        rollouts.generate([[1]], model="math", min_version="math@9", timeout_seconds=0.5)
    rollouts.generate([[1]] * 8)  # connected to both: what follows has no time for that
    with pytest.raises(TransferTimeoutError, match=r"math@9 did .*math@9 is not here yet"):
        rollouts.generate([[1]], model="math@9", timeout_seconds=1.0)
    publisher.push_base(Model())
    with pytest.raises(NotFoundError, match="base@0 was retired, rolled back or replaced"):
        rollouts.generate([[1]], model="base@0")


def test_what_no_replica_may_answer_says_why(
    pool: Pool,
    rollouts: RolloutClient,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In the log while it waits, once for each reason, and in the error."""
    caplog.set_level("INFO", "trainer_side.rollouts.sampler")
    monkeypatch.setattr("trainer_side.rollouts.sampler._SAY_SECONDS", 0.2)
    with open_channel(pool.target) as channel:
        admin = AdminServiceStub(channel)
        rollouts.generate([[1]] * 2)  # which has heard of the routes
        for name in ("replica-0", "replica-1"):
            admin.Cordon(admin_pb2.CordonRequest(replica_id=name, reason="to be repaired"))
        dispatch = rollouts._sampler._dispatch
        until(lambda: not any(target.is_listed for target in dispatch.targets.values()))
        why = "replica-0 is out of service: by an operator: to be repaired"
        with pytest.raises(TransferTimeoutError, match=f"no replica may be sent requests .{why}"):
            # The client looks every 2.5 s until then, for it was made before.
            rollouts.generate([[1]], timeout_seconds=3.5)
        lines = [record.getMessage() for record in caplog.records]
        (line,) = [line for line in lines if "is not answered yet" in line]
        assert why in line
        for name in ("replica-0", "replica-1"):
            admin.Uncordon(admin_pb2.UncordonRequest(replica_id=name))
    assert rollouts.generate([[1]])
    until(lambda: "no prompt waits any more" in caplog.text)


def test_a_failed_prompt_is_kept_apart_where_asked(
    rollouts: RolloutClient, engines: list[EngineDouble]
) -> None:
    (group,) = rollouts.generate([[1]], model="math", n=2, on_error="keep")
    for sample in group.samples:
        assert isinstance(sample.error, NotFoundError)
        assert (len(sample.token_ids), sample.finish_reason) == (0, "abort")


def test_prompts_are_spread_and_groups_kept_together(rollouts: RolloutClient) -> None:
    groups = rollouts.generate([[1]] * 40, n=2, sampling=Sampling(max_tokens=5))
    used = [group.replica_ids for group in groups]
    assert all(first == second for first, second in used)
    assert {first for first, _ in used} == {"replica-0", "replica-1"}
    assert 10 <= sum(first == "replica-0" for first, _ in used) <= 30


def test_replicas_that_join_are_used_and_those_out_of_service_are_not(
    pool: Pool, rollouts: RolloutClient
) -> None:
    pool.add_replica(
        "replica-2", EngineDouble(weights(Model()), logprobs_mode="processed_logprobs")
    )
    with open_channel(pool.target) as channel:
        admin = AdminServiceStub(channel)
        for name in ("replica-0", "replica-1"):
            admin.Cordon(admin_pb2.CordonRequest(replica_id=name))

    def only_the_third() -> bool:
        groups = rollouts.generate([[1]] * 8, sampling=Sampling(max_tokens=1))
        return {group.replica_ids for group in groups} == {("replica-2",)}

    until(only_the_third)


def _generate_beside(rollouts: RolloutClient, **how: Any) -> Future[list[SampleGroup]]:
    threads = ThreadPoolExecutor(1)
    try:
        return threads.submit(rollouts.generate, [[1]] * 4, **how)
    finally:
        threads.shutdown(wait=False)


def _half_way(engines: list[EngineDouble], asked: int) -> None:
    """Wait until so many prompts are with the replicas, and have tokens."""
    until(lambda: sum(len(engine.answers) for engine in engines) == asked)
    until(lambda: all(a.num_steps > 2 for engine in engines for a in [*engine.answers]))


def test_a_replica_that_dies_loses_no_sample(
    pool: Pool, engines: list[EngineDouble], rollouts: RolloutClient, publisher: Publisher
) -> None:
    _push(publisher, "math")
    how = Sampling(max_tokens=3000)
    asked = _generate_beside(rollouts, model="math", n=3, sampling=how)
    _half_way(engines, 4)
    pool.call(engines[0].stepping.clear)
    _push(publisher, "math")  # what starts again is of the version that it began with
    pool.remove_replica("replica-0")
    groups = asked.result(30)
    for group in groups:
        assert set(group.replica_ids) == {"replica-1"}
        for index, sample in enumerate(group.samples):
            assert sample.token_ids.tolist() == [token(0, 1, index, at) for at in range(3000)]
            assert sample.adapter == PolicyVersion("math", 1)


def test_a_replica_that_stands_still_loses_no_sample(
    pool: Pool, engines: list[EngineDouble]
) -> None:
    with RolloutClient(pool.target, timeout_seconds=20, stall_seconds=0.5) as rollouts:
        pool.call(engines[1].stepping.clear)
        began = time.monotonic()
        groups = rollouts.generate([[1]] * 4, n=2, sampling=Sampling(max_tokens=3))
        assert time.monotonic() - began < 10
        assert {name for group in groups for name in group.replica_ids} == {"replica-0"}
        until(lambda: not engines[1].answers)
        pool.call(engines[1].stepping.set)


def test_a_base_that_changes_is_told_or_refused(
    pool: Pool, engines: list[EngineDouble], rollouts: RolloutClient, publisher: Publisher
) -> None:
    how = Sampling(max_tokens=5000)
    for engine in engines:
        pool.call(engine.stepping.clear)
    goes_on = _generate_beside(rollouts, sampling=how)
    ends = _generate_beside(rollouts, model="base@0", sampling=how, on_error="keep")
    until(lambda: sum(len(engine.answers) for engine in engines) == 8)
    for engine in engines:
        pool.call(engine.stepping.set)
    _half_way(engines, 8)
    for engine in engines:
        pool.call(engine.stepping.clear)
    publisher.push_base(Model())
    for engine in engines:
        pool.call(engine.stepping.set)
    for group in goes_on.result(20):
        (sample,) = group.samples
        assert sorted(set(sample.versions.tolist())) == [0, 1]
        assert sample.token_ids.tolist() == [
            token(base, 0, 0, at) for at, base in enumerate(sample.base_versions.tolist())
        ]
    for group in ends.result(20):
        (sample,) = group.samples
        assert isinstance(sample.error, VersionChangedError)
        assert 0 < len(sample.token_ids) < 5000
        assert set(sample.versions.tolist()) == {0}


def test_what_a_replica_aborts_is_made_anew_by_the_new_base(
    pool: Pool, engines: list[EngineDouble], rollouts: RolloutClient, publisher: Publisher
) -> None:
    for engine in engines:
        engine.capabilities = dataclasses.replace(engine.capabilities, running_requests="abort")
    asked = _generate_beside(rollouts, sampling=Sampling(max_tokens=2000))
    _half_way(engines, 4)
    for engine in engines:
        pool.call(engine.stepping.clear)
    publisher.push_base(Model())
    for engine in engines:
        pool.call(engine.stepping.set)
    for group in asked.result(20):
        (sample,) = group.samples
        assert sample.token_ids.tolist() == [token(1, 0, 0, at) for at in range(2000)]
        assert (sample.finish_reason, sample.error) == ("length", None)


async def test_cancelling_ends_it_in_the_engine(
    pool: Pool, engines: list[EngineDouble], rollouts: RolloutClient
) -> None:
    for engine in engines:
        pool.call(engine.stepping.clear)
    asked = asyncio.create_task(rollouts.agenerate([[1]] * 4))
    while sum(len(engine.answers) for engine in engines) < 4:
        await asyncio.sleep(0.01)
    asked.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asked
    while any(engine.answers for engine in engines):
        await asyncio.sleep(0.01)
    for engine in engines:
        pool.call(engine.stepping.set)
    (group,) = await rollouts.agenerate([[1]], sampling=Sampling(max_tokens=1))
    assert len(group.samples[0].token_ids) == 1


def test_closing_ends_what_runs(pool: Pool, engines: list[EngineDouble]) -> None:
    for engine in engines:
        pool.call(engine.stepping.clear)
    rollouts = RolloutClient(pool.target)
    asked = _generate_beside(rollouts)
    until(lambda: sum(len(engine.answers) for engine in engines) == 4)
    rollouts.close()
    rollouts.close()
    with pytest.raises(InvalidRequestError, match="RolloutClient is closed"):
        asked.result(10)
    with pytest.raises(InvalidRequestError, match="RolloutClient is closed"):
        rollouts.generate([[1]])
    until(lambda: not any(engine.answers for engine in engines))


def test_the_last_routes_stand_while_the_coordinator_is_away(
    pool: Pool, rollouts: RolloutClient, publisher: Publisher
) -> None:
    _push(publisher, "math")
    rollouts.generate([[1]], model="math@1")
    pool.stop_coordinator()
    (group,) = rollouts.generate([[1]], model="math@1", sampling=Sampling(max_tokens=1))
    assert group.samples[0].adapter == PolicyVersion("math", 1)


def test_a_coordinator_that_is_not_there_is_named(pool: Pool) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        target = f"127.0.0.1:{unused.getsockname()[1]}"
        with (
            RolloutClient(target, connect_seconds=0.5) as rollouts,
            pytest.raises(PeerUnavailableError, match=f"coordinator at {target} was not") as caught,
        ):
            rollouts.generate([[1]])
    assert caught.value.reason == "COORDINATOR_UNREACHABLE"


def test_other_log_probabilities_are_refused(pool: Pool, engines: list[EngineDouble]) -> None:
    with (
        RolloutClient(pool.target, logprobs_mode="raw_logprobs") as rollouts,
        pytest.raises(UnsupportedError, match="start it with --logprobs-mode raw_logprobs"),
    ):
        rollouts.generate([[1]])
    with (
        RolloutClient(pool.target, logprobs_truncated=True) as rollouts,
        pytest.raises(UnsupportedError, match="before top-k, top-p and min-p"),
    ):
        rollouts.generate([[1]])


def test_a_client_never_has_more_requests_than_it_may(
    pool: Pool, engines: list[EngineDouble]
) -> None:
    for engine in engines:
        pool.call(engine.stepping.clear)
    with RolloutClient(pool.target, max_requests_per_replica=3) as rollouts:
        asked = [_generate_beside(rollouts) for _ in range(2)]
        until(lambda: sum(len(engine.answers) for engine in engines) == 6)
        stays(lambda: [len(engine.answers) for engine in engines] == [3, 3], 0.2)
        for engine in engines:
            pool.call(engine.stepping.set)
        assert sum(len(each.result(10)) for each in asked) == 8


@pytest.mark.parametrize("max_staleness", [0, 1, 2])
def test_no_streamed_sample_is_older_than_said(
    pool: Pool, rollouts: RolloutClient, publisher: Publisher, max_staleness: int
) -> None:
    _push(publisher, "math")
    chance = random.Random(max_staleness)
    prompts = ([1] * chance.randrange(1, 5) for _ in range(60))
    how = Sampling(max_tokens=6)
    seen: list[int] = []
    with rollouts.stream(
        prompts, model="math", n=2, sampling=how, batch_size=8, max_staleness=max_staleness
    ) as stream:
        for step in range(1, 16):
            batch = list(itertools.islice(stream, 4))
            assert len(batch) == 4
            for group in batch:
                seen.append(group.index)
                for sample in group.samples:
                    assert sample.adapter is not None
                    assert step - max_staleness <= sample.adapter.version <= step
            stream.consumed(8, version=_push(publisher, "math"))
        assert list(stream) == []
    assert sorted(seen) == list(range(60))


async def test_a_stream_is_asynchronous_too(rollouts: RolloutClient, publisher: Publisher) -> None:
    how = Sampling(max_tokens=2)
    stream = rollouts.stream([[1]] * 6, sampling=how, batch_size=2, max_staleness=0)
    seen = 0
    async for group in stream:
        assert len(group.samples) == 1
        seen += 1
        if not seen % 2:
            stream.consumed(2)
    assert seen == 6


def test_a_stream_that_waits_for_its_caller_says_so(rollouts: RolloutClient) -> None:
    stream = rollouts.stream([[1]] * 6, batch_size=2, max_staleness=0, timeout_seconds=4)
    assert len(list(itertools.islice(stream, 2))) == 2
    with pytest.raises(TransferTimeoutError, match=r"2 samples .* reported as consumed"):
        next(stream)
    with pytest.raises(InvalidRequestError, match="2 samples were handed out"):
        stream.consumed(3)
    stream.consumed(2)
    assert len(next(stream).samples) == 1


def test_prompts_that_cannot_be_drawn_end_the_stream(rollouts: RolloutClient) -> None:
    def prompts() -> Iterator[list[int]]:
        yield [1]
        raise RuntimeError("the data set is gone")

    stream = rollouts.stream(prompts(), batch_size=4, max_staleness=0)
    assert next(stream).index == 0
    with pytest.raises(RuntimeError, match="the data set is gone"):
        next(stream)


async def test_a_closed_stream_says_so_in_whatever_thread(rollouts: RolloutClient) -> None:
    """A StopIteration would end nothing there, and cannot be raised into a future."""
    stream = rollouts.stream([[1]] * 6, batch_size=2, max_staleness=0)
    assert next(stream).samples
    waits = asyncio.create_task(asyncio.to_thread(list, stream))
    await asyncio.sleep(0.1)
    stream.close()
    for closed in (waits, asyncio.to_thread(next, stream), anext(stream)):
        with pytest.raises(InvalidRequestError, match="stream is closed"):
            await closed
    done = rollouts.stream([[1]], batch_size=1, max_staleness=1)
    assert len(list(done)) == 1
    done.close()
    assert list(done) == []
