"""Traces of transfers: a span of each, with one for each phase that it passes.

Spans are made as decisions are carried out. The span of a push is a child of its trainer's; a
clone, a restore or a rollback is a trace of its own.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from weft_rl.containers import LruMapping
from weft_rl.coordinator.decisions.state import effects, events
from weft_rl.coordinator.decisions.state.pool import PoolState
from weft_rl.coordinator.decisions.state.transfer import Transfer
from weft_rl.coordinator.decisions.state.values import Phase, PolicyKind
from weft_rl.tracing import NO_SPAN, Span, Tracer

#: Pushes that were asked for and are not begun yet; further ones become traces of their own.
_MAX_EXPECTED: Final = 1_024
_KINDS: Final = {PolicyKind.BASE: "base", PolicyKind.ADAPTER: "adapter"}


@dataclass
class _TransferSpans:
    """Spans of a transfer that has not ended; as many as the state has transfers."""

    span: Span
    phase: Phase
    phase_span: Span


class TransferTraces:
    """Spans of one coordinator. Used on the event loop; no method blocks.

    Args:
        tracer: Tracer that begins the spans; its owner closes it.
        now: Returns monotonic seconds, as decisions see them.
    """

    def __init__(self, tracer: Tracer, now: Callable[[], float]) -> None:
        self._tracer, self._now = tracer, now
        self._expected: LruMapping[str, str] = LruMapping(_MAX_EXPECTED)
        self._live: dict[str, _TransferSpans] = {}

    def expect(self, transfer_id: str, traceparent: str) -> None:
        """Remember the parent of a transfer's span: a transfer may begin under this id."""
        if traceparent:
            self._expected.put(transfer_id, traceparent)

    def context_of(self, transfer_id: str) -> str:
        """Return the traceparent of a transfer that has not ended; else empty text."""
        traced = self._live.get(transfer_id)
        return traced.span.traceparent if traced else ""

    def follow(
        self,
        event: events.Event,
        before: PoolState,
        after: PoolState,
        done: Sequence[effects.Effect],
    ) -> None:
        """Begin and end the spans that one step has changed; quick.

        Args:
            done: The step's effects.
        """
        if after.transfers is before.transfers:
            return
        for name, transfer in after.transfers.items():
            if before.transfers.get(name) is not transfer:
                self._enter(transfer)
        for name in [name for name in self._live if name not in after.transfers]:
            self._end(self._live.pop(name), before.transfers.get(name), after, done)

    def _enter(self, transfer: Transfer) -> None:
        """Begin a transfer's span, or that of the phase which it has come to."""
        traced = self._live.get(transfer.transfer_id)
        if traced is None:
            began_ns = time.time_ns() - int((self._now() - transfer.begin_at) * 1e9)
            span = self._tracer.start(
                "weft.transfer",
                parent=self._expected.get(transfer.transfer_id) or "",
                began_ns=began_ns,
                transfer_id=transfer.transfer_id,
                purpose=transfer.purpose.name,
                policy=transfer.policy,
                kind=_KINDS[transfer.kind],
                trainer=transfer.trainer_id,
                **({"replica": transfer.replica_id} if transfer.replica_id else {}),
            )
            phase_span = self._begin_phase(span, transfer.phase, began_ns)
            self._live[transfer.transfer_id] = _TransferSpans(span, transfer.phase, phase_span)
        elif traced.phase is not transfer.phase:
            traced.phase_span.end()
            traced.phase = transfer.phase
            traced.phase_span = self._begin_phase(traced.span, transfer.phase)

    def _begin_phase(self, span: Span, phase: Phase, began_ns: int | None = None) -> Span:
        if phase > Phase.COMMITTING:
            return NO_SPAN
        name = f"weft.transfer.{phase.name.lower()}"
        return self._tracer.start(name, parent=span.traceparent, began_ns=began_ns)

    def _end(
        self,
        traced: _TransferSpans,
        last: Transfer | None,
        after: PoolState,
        done: Sequence[effects.Effect],
    ) -> None:
        ended = after.history.get(last.transfer_id) if last else None
        if ended is not None:
            traced.span.set(
                version=ended.version,
                epoch=ended.epoch,
                bytes=ended.layout.total_bytes,
                replicas=len(ended.served_by),
                lost=len(ended.losses),
            )
        if ended is not None and ended.failure is not None:
            for span in (traced.phase_span, traced.span):
                span.set_failed(ended.failure.reason, ended.failure.message)
        elif ended is None and last is not None:
            for effect in done:  # refused before its turn came: nobody keeps it
                if isinstance(effect, effects.Refuse) and effect.ticket in last.begin_tickets:
                    traced.span.fail(effect.error)
        traced.phase_span.end()
        traced.span.end()
