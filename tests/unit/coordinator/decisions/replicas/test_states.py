"""Each reason for a replica's state: the sentence that explains it, and the exit that ends it.

Other tests say when a replica is in a state; its sentence stands here alone.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Final

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.coordinator.decisions.machine import CAPABILITIES, Machine
from weft_rl.contract.checkpoint import DUMMY, READING, Checkpoint, CheckpointState, FileDigest
from weft_rl.contract.names import VersionVector
from weft_rl.contract.replica_report import DrainNote, ReplicaReport, Sleep
from weft_rl.contract.tensors import DataType
from weft_rl.coordinator.decisions.state import events
from weft_rl.coordinator.decisions.state.effects import EventKind
from weft_rl.coordinator.decisions.state.replica import Suspect
from weft_rl.coordinator.decisions.state.replica_state import state_reason
from weft_rl.coordinator.decisions.state.values import Phase, ReplicaState, StateReason

#: r1 is the replica that something is wrong with.
R1: Final = "r1"
OURS, OTHER = (
    Checkpoint(CheckpointState.DIGESTED, digest * 32, (FileDigest("m", digest * 32),))
    for digest in (b"x", b"y")
)


def _pool() -> Machine:
    """Two replicas that serve math@1 over base@0."""
    m = Machine().pool()
    for name in ("r0", R1):
        m.register(name, can_sleep=True, checkpoint=OURS)
    m.do(events.ReferenceKnown(CAPABILITIES.base_fingerprint))
    m.acquire("base")
    m.acquire("math")
    m.run_to(Phase.COMMITTED)
    m.now += 5.0  # heartbeats are believed again
    m.do(events.Heartbeat(0, "r0", "i1", _report(m)))
    m.do(events.Heartbeat(0, R1, "i1", _report(m)))
    return m


def _report(m: Machine, **said: object) -> ReplicaReport:
    return ReplicaReport(version_vector=m.state.vector, order_number=m.state.order_number, **said)  # type: ignore[arg-type]


def _beats(**said: object) -> Callable[[Machine], object]:
    """r1 is heard, and serves what the pool does unless it says otherwise."""
    return lambda m: m.do(events.Heartbeat(0, R1, "i1", dataclasses.replace(_report(m), **said)))  # type: ignore[arg-type]


def _starts_anew(m: Machine, **changes: object) -> None:
    """Another process, with what the pool serves."""
    replica = m.state.replicas.get(R1)
    if replica is not None:
        m.do(events.Leave(0, R1, replica.incarnation))
    m.register(R1, vector=m.state.vector, can_sleep=True, checkpoint=OURS, **changes)


def _is_silent(m: Machine) -> None:
    """r0 is heard meanwhile, and the trainer is."""
    for _ in range(13):
        m.now += 0.5
        m.do(events.Heartbeat(0, "r0", "i1", _report(m)))
        for policy, token in m.tokens.items():
            m.do(events.RenewLease(0, policy, token))
        m.do(events.Tick())


def _cordons(reason: str = "", *, no_pushes: bool = False) -> Callable[[Machine], object]:
    return lambda m: m.do(events.Cordon(0, R1, reason, no_pushes))


def _is_put_back(m: Machine) -> None:
    m.do(events.Uncordon(0, R1))
    m.do(events.RefuseAnswered(R1, m.state.replicas[R1].incarnation, "", m.state.order_number))


def _sleeps(m: Machine, sleep: Sleep | None = None) -> None:
    m.do(events.SleepReplica(0, R1, False, 1.0, m.now + 9.0))
    if sleep is not None:
        m.do(events.SleepAnswered(R1, m.state.replicas[R1].incarnation, sleep, None))


def _is_woken(m: Machine) -> None:
    m.do(events.WakeReplica(0, R1, m.now + 9.0))


def _has_woken(m: Machine) -> None:
    _is_woken(m)
    m.do(events.WakeAnswered(R1, m.state.replicas[R1].incarnation, None))


def _changes(**fields: object) -> Callable[[Machine], None]:
    def apply(m: Machine) -> None:
        changed = dataclasses.replace(m.state.replicas[R1], **fields)  # type: ignore[arg-type]
        m.state = dataclasses.replace(m.state, replicas={**m.state.replicas, R1: changed})
        m.do(events.ReportCheckpoint(0, R1, changed.incarnation, changed.checkpoint))

    return apply


_NOT_READY: Final = "it has not said yet that it takes requests"
_OTHER_FILES: Final = (
    "its base@0 is not the pool's: m differ from those of r0, which bound it; start it from the "
    "same files, or push a base. If the pool's is the wrong one, stop all replicas and bind it "
    "anew: weft base --rebind"
)
Step = Callable[[Machine], object]
#: By what has happened: the reason, the sentence, and the exit.
STATES: Final[dict[str, tuple[Step, StateReason, str, Step]]] = {
    "all is well": (lambda m: None, StateReason.READY, "", lambda m: None),
    "it is silent": (_is_silent, StateReason.SILENT, "no heartbeat", _starts_anew),
    "it left a transfer": (
        _changes(unheard_reason="its stream broke"),
        StateReason.LEFT_TRANSFER,
        "its stream broke",
        lambda m: _starts_anew(m) if m.state.replicas[R1].lost else _beats()(m),
    ),
    "its weights are mixed": (
        _beats(dirty_reason="the engine broke"),
        StateReason.MIXED_WEIGHTS,
        "the engine broke",
        _beats(),
    ),
    "it drains": (
        _beats(drain=DrainNote(60.0, "by an operator: old card")),
        StateReason.LEAVING,
        "by an operator: old card",
        _starts_anew,
    ),
    "it is cordoned": (_cordons(), StateReason.OPERATOR, "by an operator", _is_put_back),
    "it is cordoned for a reason": (
        _cordons("new disk"),
        StateReason.OPERATOR,
        "by an operator: new disk",
        _is_put_back,
    ),
    "it is cordoned without pushes": (
        _cordons("nonsense", no_pushes=True),
        StateReason.OPERATOR,
        "by an operator: nonsense; it has not said yet that it refuses requests",
        _is_put_back,
    ),
    "it is to sleep": (
        _sleeps,
        StateReason.SLEEP_ORDERED,
        "by an operator, once its requests have ended",
        _has_woken,
    ),
    "it sleeps": (
        lambda m: _sleeps(m, Sleep("")),
        StateReason.SLEEP_ORDERED,
        "by an operator",
        _has_woken,
    ),
    "its weights are awake": (
        lambda m: _sleeps(m, Sleep("", weights_awake=True)),
        StateReason.SLEEP_ORDERED,
        "by an operator, its weights awake",
        _has_woken,
    ),
    "it is being woken": (
        lambda m: (_sleeps(m, Sleep("")), _is_woken(m)),
        StateReason.WAKING,
        "it is being woken",
        _has_woken,
    ),
    "a thread of it hangs": (
        _changes(suspect=Suspect("it makes no progress", float("inf"))),
        StateReason.STALLED,
        "it makes no progress",
        _starts_anew,
    ),
    "it lacks a version": (
        _beats(version_vector=VersionVector()),
        StateReason.VERSIONS_MISSING,
        "lacks math@1",
        _beats(),
    ),
    "its checkpoint is read": (
        _changes(checkpoint=READING),
        StateReason.OTHER_BASE,
        "its checkpoint is being read, to compare its base@0 with the pool's",
        _changes(checkpoint=OURS),
    ),
    "its weights are dummies": (
        _changes(checkpoint=DUMMY),
        StateReason.OTHER_BASE,
        "it was started with dummy weights, which are nobody's base@0: push a base, or start it "
        "without --load-format dummy",
        _starts_anew,
    ),
    "its files are others": (
        _changes(checkpoint=OTHER),
        StateReason.OTHER_BASE,
        _OTHER_FILES,
        _starts_anew,
    ),
    "its dtype is another": (
        lambda m: _starts_anew(m, base_dtype=DataType.FLOAT16),
        StateReason.OTHER_BASE,
        "it serves base@0 in float16, r0 bound it in bfloat16: start it with the same --dtype, or "
        "push a base",
        _starts_anew,
    ),
    "its quantisation is another": (
        lambda m: _starts_anew(m, quantization="fp8"),
        StateReason.OTHER_BASE,
        "it serves base@0 quantised by fp8, r0 bound it quantised by nothing: start it with the "
        "same --quantization, or push a base",
        _starts_anew,
    ),
    "it refuses by itself": (
        _beats(refusing="it starts"),
        StateReason.NOT_OPEN,
        f"{_NOT_READY}, it said last: it starts",
        _beats(),
    ),
    "it has not heard that it may": (
        lambda m: (_cordons("nonsense", no_pushes=True)(m), m.do(events.Uncordon(0, R1))),
        StateReason.NOT_OPEN,
        _NOT_READY,
        _beats(),
    ),
}


def test_every_reason_has_its_sentence() -> None:
    assert {known for _, known, _, _ in STATES.values()} == set(StateReason)
    assert {known.state for known in StateReason} == set(ReplicaState)
    assert all(f"REPLICA_{state.name}" in EventKind.__members__ for state in ReplicaState)


@pytest.mark.parametrize("name", STATES)
def test_a_reason_is_explained_and_its_exit_ends_it(name: str) -> None:
    happens, known, sentence, exit_ = STATES[name]
    m = _pool()
    happens(m)
    assert state_reason(m.state, m.state.replicas[R1]) is known
    assert m.standing(R1) == (known.state, sentence)
    exit_(m)
    assert m.standing(R1) == (ReplicaState.READY, "")


@settings(max_examples=150, deadline=None)
@given(st.lists(st.sampled_from(sorted(STATES)), max_size=4, unique=True))
def test_whatever_has_happened_the_exits_of_what_is_explained_end_it(names: list[str]) -> None:
    """Each exit ends one reason that is told; together they leave a ready replica."""
    m = _pool()
    for name in names:
        STATES[name][0](m)
        m.standing(R1)
    for _ in range(12):
        known, (_, why) = state_reason(m.state, m.state.replicas[R1]), m.standing(R1)
        if not why:
            break
        told = [
            exit_ for _, of, sentence, exit_ in STATES.values() if of is known and sentence in why
        ]
        told[-1](m)
        m.now += 5.0
        m.do(events.Tick())
    assert m.standing(R1) == (ReplicaState.READY, "")
