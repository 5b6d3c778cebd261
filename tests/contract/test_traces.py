"""What the coordinator makes of the trace that a push says it is a part of."""

from __future__ import annotations

from collections.abc import Iterator

import grpc
import pytest

from tests.contract.conftest import Pool
from tests.doubles.collector import Collector, Seen
from tests.doubles.trainer import FakeTrainer
from weft_rl.telemetry.config import TelemetryConfig

_TRACE, _SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    with Collector() as running:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", running.endpoint)
        monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "20")
        yield running


def _transfers(collector: Collector, number: int) -> list[Seen]:
    return [s for s in collector.wait(number, "weft.transfer") if s.name == "weft.transfer"]


async def _push(trainer: FakeTrainer, traceparent: str) -> None:
    metadata = (("traceparent", traceparent),)
    begun = await trainer.stub.BeginTransfer(trainer.begin_request(), timeout=15, metadata=metadata)
    await trainer.send(begun)
    await trainer.wait(begun.transfer_id)


async def test_a_traceparent_is_followed_and_one_that_is_none_is_ignored(
    pool: Pool, collector: Collector
) -> None:
    await pool.restart(telemetry=TelemetryConfig(traces=True))
    await pool.replica()
    trainer = await pool.trainer()
    given = [f"00-{_TRACE}-{_SPAN}-01", "nonsense", "x" * 2_000, f"00-{_TRACE}-{'0' * 16}-01"]
    for number, traceparent in enumerate(given, start=1):
        await _push(trainer, traceparent)
        _transfers(collector, number)
    first, *others = _transfers(collector, len(given))
    assert (first.trace_id.hex(), first.parent_id.hex()) == (_TRACE, _SPAN)
    assert {other.parent_id for other in others} == {b""}
    assert len({first.trace_id, *(other.trace_id for other in others)}) == len(given)


async def test_a_push_that_never_had_its_turn_says_why(pool: Pool, collector: Collector) -> None:
    await pool.restart(telemetry=TelemetryConfig(traces=True))
    trainer = await pool.trainer()
    with pytest.raises(grpc.aio.AioRpcError):  # there is no replica
        await trainer.stub.BeginTransfer(trainer.begin_request(), timeout=0.5)
    (ended,) = _transfers(collector, 1)
    assert ended.failed
    assert ended.attributes["error.type"] == "POOL_EMPTY"
    waiting = [s for s in collector.spans() if s.name == "weft.transfer.waiting"]
    assert [s.parent_id for s in waiting] == [ended.span_id]
