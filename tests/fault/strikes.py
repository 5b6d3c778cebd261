"""Where a process strikes itself: named points of a push, in each role.

The production code knows nothing of this: a victim's entry point wraps functions
of its own process. A strike happens once, when the file ``arm`` exists; it writes
the time to ``struck`` first, so that detection can be measured.
"""

from __future__ import annotations

import asyncio
import functools
import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.fault.pool import DELTAS
from tests.waits import until

#: Points of a push, in order.
POINTS = (
    "before begin",
    "in rendezvous",
    "at a bucket",
    "before commit",
    "inside commit",
    "after commit",
)
SIGNALS = ("SIGKILL", "SIGSTOP")
#: Further points of a push that is a delta; and the last two where no push is under way: a rollback
#: that takes deltas back in place, and a replica that comes and clones what a delta made.
COMPARED, CHECKED = "after the comparing", "after the check"
SCATTER, SCATTERED = "in the scatter", "after the scatter"
UNDO, CLONE = "in an undo", "in a clone"
#: No signal: the thread that comes to the point hangs, and its process goes on beating.
HANG = "HANG"
#: Nor is this one: the event loop of a replica's agent is held, and its other threads go on.
LOOP = "LOOP"
#: Nor is this one: the thread waits at the point until who watches has cut a host off the network.
CUT = "CUT"
#: For how long; many times what the coordinator of the matrix allows.
HANG_SECONDS = 15.0
#: Where the base is none of it: a version of another policy is dropped.
RETIRE = "in retire"
#: Where nothing is pushed: replicas are put to sleep; they sleep, and a lease is renewed.
SLEEP_POINTS = ("inside sleep", "asleep")
#: The replica that is struck.
VICTIM = "replica-1"
#: "at a bucket" is this many buckets into the push.
BUCKET = 4
_ENV = "WEFT_TEST_STRIKE"
_STOPPED_SECONDS = 0.02


@dataclass(frozen=True)
class Strike:
    """One strike; carried to the victim in its environment."""

    role: str
    point: str
    signal: str
    directory: str

    @property
    def process(self) -> str:
        """Which of a case's processes is the victim, or the parent of the victim."""
        return ROLES[self.role].process

    @property
    def in_place(self) -> bool:
        """Whether the replicas load in place."""
        return ROLES[self.role].in_place

    @property
    def asleep(self) -> bool:
        """Whether the replicas can be put to sleep, and are."""
        return self.point in SLEEP_POINTS

    @property
    def sends_deltas(self) -> bool:
        """Whether the base is pushed by deltas."""
        return ROLES[self.role].sends_deltas

    @property
    def pool_env(self) -> dict[str, str]:
        """For every process of a case."""
        env = {DELTAS: "1"} if self.sends_deltas else {}
        return env | (
            {"WEFT_ONE_SIDED_DIR": "/nowhere/at/all"} if ROLES[self.role].over_streams else {}
        )

    @property
    def env(self) -> dict[str, str]:
        """For the victim's process."""
        return {_ENV: "|".join((self.role, self.point, self.signal, self.directory))}

    @property
    def armed(self) -> Path:
        """Exists while the strike may happen."""
        return Path(self.directory) / "arm"

    @property
    def struck(self) -> Path:
        """Holds ``time.time()`` of the strike and the victim's pid."""
        return Path(self.directory) / "struck"

    @property
    def cut(self) -> Path:
        """Exists once who watches has cut a host off."""
        return Path(self.directory) / "cut"

    @property
    def target(self) -> Path:
        """Holds pid and signal, if the victim is not the one that comes to the point."""
        return Path(self.directory) / "target"

    def maybe(self) -> None:
        """Strike, if armed and not yet done."""
        if self.armed.exists() and not self.struck.exists():
            words = self.target.read_text().split() if self.target.exists() else []
            pid, name = (int(words[0]), words[1]) if words else (os.getpid(), self.signal)
            self.struck.write_text(f"{time.time()} {pid}")
            if name == HANG:
                time.sleep(HANG_SECONDS)
            elif name == CUT:
                until(self.cut.exists, HANG_SECONDS)
            elif name == LOOP:
                _loops[-1].call_soon_threadsafe(time.sleep, HANG_SECONDS)
            else:
                os.kill(pid, getattr(signal, name))
                # Another thread may take the signal: this one is not to pass the point before.
                time.sleep(_STOPPED_SECONDS)

    def await_struck(self, timeout_seconds: float) -> tuple[float, int]:
        """When it struck (``time.time()``), and whom."""
        until(
            lambda: self.struck.exists() and self.struck.read_text(),
            timeout_seconds,
            why=lambda: "the point was never reached",
        )
        at, pid = self.struck.read_text().split()
        return float(at), int(pid)


#: The loops of this process's agents.
_loops: list[asyncio.AbstractEventLoop] = []


def install(role: str) -> None:
    """Wrap this process's functions if it is the victim."""
    if _ENV not in os.environ:
        return
    strike = Strike(*os.environ[_ENV].split("|"))
    owner = strike.role.partition(", ")[0]
    if role == ("replica" if owner == "replica loop" else owner):
        (ROLES | REAL_ROLES)[strike.role].arm(strike)


def _before(owner: Any, name: str, strike: Strike, when: Callable[..., bool] | None = None) -> None:
    original = getattr(owner, name)

    @functools.wraps(original)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        if when is None or when(*args, **kwargs):
            strike.maybe()
        return original(*args, **kwargs)

    setattr(owner, name, wrapped)


def _after(owner: Any, name: str, strike: Strike) -> None:
    original = getattr(owner, name)

    @functools.wraps(original)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        strike.maybe()
        return result

    setattr(owner, name, wrapped)


def _count(wanted: int, strike: Strike) -> Callable[..., bool]:
    """True from the ``wanted``-th call on, counted while armed."""
    seen = 0

    def when(*args: Any, **kwargs: Any) -> bool:
        nonlocal seen
        seen = seen + 1 if strike.armed.exists() else 0
        return seen >= wanted

    return when


def _trainer(strike: Strike) -> None:
    from trainer_side.packing.packer import Packer
    from trainer_side.pool.client import PoolClient
    from trainer_side.pushing import PushExecutor
    from weft_rl.transport.member import AttendStream
    from weft_rl.transport.sender import SendingRank, TransferSender

    match strike.point:
        case "before begin":
            _before(PoolClient, "begin", strike)
        case "in rendezvous":
            _before(SendingRank, "send", strike)
        case "at a bucket":
            _before(Packer, "pack", strike, lambda self, nth, *rest, **more: nth >= BUCKET)
        case "before commit":
            _before(AttendStream, "send", strike, lambda self, message: message.HasField("staged"))
        case "inside commit":
            _after(TransferSender, "send", strike)
        case "after commit":
            _after(PushExecutor, "_carry_out", strike)


def _sending_rank(strike: Strike) -> None:
    """Points of a trainer rank that sends what it holds beside others."""
    from trainer_side.packing.packer import Packer
    from trainer_side.pushes.rank_push import RankPushFactory
    from trainer_side.pushing import PushExecutor
    from weft_rl.transport.member import AttendStream
    from weft_rl.transport.sender import SendingRank, TransferSender

    match strike.point:
        case "before begin":
            _before(RankPushFactory, "_packing", strike)
        case "in rendezvous":
            _before(SendingRank, "send", strike)
        case "at a bucket":
            _before(Packer, "pack", strike, lambda self, nth, *rest, **more: nth >= BUCKET)
        case "before commit":
            _before(AttendStream, "send", strike, lambda self, message: message.HasField("staged"))
        case "inside commit":
            _after(TransferSender, "send", strike)
        case "after commit":
            _after(PushExecutor, "_carry_out", strike)


def _gathering_rank(strike: Strike) -> None:
    """Points of a trainer rank from which another gathers."""
    from trainer_side.params.sharded import ShardedParams
    from trainer_side.pushes.rank_push import GatheredPush
    from trainer_side.pushing import PushExecutor

    match strike.point:
        case "in rendezvous":
            _before(GatheredPush, "assist", strike)
        case "at a bucket":
            _before(ShardedParams, "fetch", strike, _count(BUCKET, strike))
        case "before commit":
            _after(GatheredPush, "assist", strike)
        case "after commit":
            _after(PushExecutor, "_carry_out", strike)


def _replica(strike: Strike) -> None:
    from rollout_side.agent.servicers import ReplicaServicer
    from tests.doubles.engine import EngineDouble

    match strike.point:
        case "before begin":
            _before(ReplicaServicer, "check", strike)
        case "in rendezvous":
            _before(EngineDouble, "join_group", strike)
        case _:
            (_delta_receiver if strike.sends_deltas else _receiving)(strike)


def _worker(strike: Strike) -> None:
    from rollout_side.receive import receiver

    match strike.point:
        case "before begin" if strike.signal == HANG:
            # The thread that will receive, before it does anything of the push.
            _before(receiver.GroupReceiver, "_prepare", strike)
        case "before begin":
            threading.Thread(target=_at_once, args=(strike,), daemon=True).start()
        case "in rendezvous":
            _before(receiver, "Membership", strike)
        case _:
            (_delta_receiver if strike.sends_deltas else _receiving)(strike)


def _loop(strike: Strike) -> None:
    """Points of a replica at which its agent's loop is held, wherever they are come to."""
    from rollout_side.agent.agent import Agent

    run = Agent.run

    async def wrapped(self: Agent) -> None:
        _loops.append(asyncio.get_running_loop())
        await run(self)

    Agent.run = wrapped  # type: ignore[method-assign]
    _replica(strike)


def _at_once(strike: Strike) -> None:
    while not strike.struck.exists():
        strike.maybe()
        time.sleep(0.005)


def _receiving(strike: Strike) -> None:
    """Points of the process that receives: the agent's own, or the worker's."""
    from rollout_side.memory.store import WorkerStore
    from rollout_side.receive import incoming_buckets
    from tests.doubles.engine import EngineDouble

    match strike.point:
        case "at a bucket" | "in a clone":
            when = _count(BUCKET, strike)
            _before(incoming_buckets, "start_bucket", strike, when)
            _before(incoming_buckets, "start_runs", strike, when)  # of several senders
        case "before commit":
            _before(WorkerStore, "put_staged", strike)
        case "inside commit":
            _before(EngineDouble, "apply_base", strike)
        case "after commit":
            _after(WorkerStore, "keep_base", strike)  # the double's last act in apply_base
        case "in retire":
            _before(EngineDouble, "retire", strike)


def _delta_trainer(strike: Strike) -> None:
    """Points of a trainer rank that sends a delta."""
    from trainer_side import delta_selection
    from trainer_side.deltas.delta_push import DeltaPush

    match strike.point:
        case "after the comparing":
            _after(delta_selection, "compare", strike)
        case "at a bucket":
            # What few bytes have changed may travel in one.
            _before(DeltaPush, "changes", strike, lambda self, nth: nth >= min(BUCKET, _last(self)))
        case _:
            _sending_rank(strike)


def _last(push: Any) -> int:
    """The number of the last bucket that a rank sends."""
    return len(push.packing.plan.sent_by(push.sender)) - 1


def _delta_receiver(strike: Strike) -> None:
    """Points of the process that receives a delta, and stages it or reads it in place."""
    from rollout_side.memory.served_delta import ServedSlot, StagedDelta
    from rollout_side.receive import incoming_buckets
    from rollout_side.receive.delta_transfer import DeltaTransfer, ServedDeltaTransfer

    match strike.point:
        case "at a bucket":
            _before(incoming_buckets, "start_changes", strike)
        case "after the check":
            _after(ServedDeltaTransfer if strike.in_place else DeltaTransfer, "finish", strike)
        case "in the scatter":
            _amid(StagedDelta, "apply", strike)
        case "after the scatter":
            _after(ServedSlot, "apply", strike)
        case "in an undo":
            _amid(StagedDelta, "take_back", strike)
        case _:  # "in a clone" is a whole one
            _receiving(strike)


def _amid(owner: Any, name: str, strike: Strike) -> None:
    """Strike where ``name`` has written some of a delta's changes."""
    write_each, writing = owner.write_each, getattr(owner, name)
    inside: list[int] = []

    def each(self: Any, write: Callable[[Any], None]) -> None:
        last = min(BUCKET, len(self.changes) - 1)

        def wrapped(changes: Any) -> None:
            if inside and changes is self.changes[last]:
                strike.maybe()
            write(changes)

        write_each(self, wrapped)

    def wrapped(self: Any, *args: Any) -> Any:
        inside.append(1)
        try:
            return writing(self, *args)
        finally:
            inside.pop()

    owner.write_each = each
    setattr(owner, name, wrapped)


def _copying(strike: Strike) -> None:
    """Where it copies out of the sender's memory, which is lent to it."""
    from weft_rl.transport.wire import buckets

    _before(buckets, "copy_digesting", strike, _count(BUCKET, strike))


def _loading(strike: Strike) -> None:
    """Points of a replica that loads in place."""
    from rollout_side.receive.incoming_buckets import InPlaceTransfer
    from tests.doubles.engine import EngineDouble

    match strike.point:
        case "at a bucket":
            # The model's weights are mixed.
            _before(EngineDouble, "_load_bucket", strike, _count(BUCKET, strike))
        case "before commit":
            _after(InPlaceTransfer, "finish", strike)
        case "inside commit":
            _before(EngineDouble, "apply_base", strike)
        case "after commit":
            _after(EngineDouble, "_commit_in_place", strike)


def _rank(strike: Strike) -> None:
    """Points of a rank that loads in place what another one receives."""
    from rollout_side.memory.handoff import RankHandoff
    from tests.doubles.ranks import LoadingRank

    match strike.point:
        case "at a bucket":
            _before(LoadingRank, "load_bucket", strike, _count(BUCKET, strike))
        case "before commit":
            _before(RankHandoff, "complete", strike)
        case "inside commit":
            _before(LoadingRank, "confirm", strike)
        case "after commit":
            _after(LoadingRank, "confirm", strike)


def _vllm_replica(strike: Strike) -> None:
    from rollout_side.agent import servicers
    from rollout_side.vllm_engine.server.base_switch import BaseSwitch

    match strike.point:
        case "inside commit":  # the workers have loaded, the KV cache is still the old one
            _before(BaseSwitch, "_forget_old_base", strike)
        case "in a generation":  # the first tokens of an answer are about to leave
            _before(servicers, "_response", strike)


def _coordinator(strike: Strike) -> None:
    from weft_rl.coordinator.decisions.state import effects, events
    from weft_rl.coordinator.runtime import driver, live_groups

    if strike.point == "at a bucket" and not strike.sends_deltas:
        _before(live_groups.LiveGroups, "_verified", strike, _count(3 * BUCKET, strike))
        return
    if strike.point in ("at the first bucket", "at a bucket"):
        _before(live_groups.LiveGroups, "_verified", strike)
        return
    if strike.point == "inside sleep":

        def is_sleep(self: Any, effect: Any) -> bool:
            return isinstance(effect, effects.CallSleep)

        _before(driver.Driver, "_carry_out", strike, is_sleep)
        return
    if strike.point in ("inside commit", UNDO):
        order = effects.CallSwitch if strike.point == UNDO else effects.CallCommit

        def is_commit(self: Any, effect: Any) -> bool:
            return isinstance(effect, order)

        _before(driver.Driver, "_carry_out", strike, is_commit)
        return
    kind = {
        "before begin": events.BeginTransfer,
        "in rendezvous": events.RankAttends,
        "before commit": events.RankStaged,
        "after commit": events.CommitAnswered,
        "asleep": events.RenewLease,
    }[strike.point]
    _before(driver, "step", strike, lambda state, event, now: isinstance(event, kind))


@dataclass(frozen=True)
class Role:
    """A kind of victim."""

    process: str
    """Which of a case's processes it is, or is a child of."""
    arm: Callable[[Strike], None]
    """Wraps functions of the victim's process."""
    points: tuple[str, ...] = POINTS
    """Those that it comes by."""
    signals: tuple[str, ...] = SIGNALS
    in_place: bool = False
    """Whether the pool's replicas load bases as they come."""
    over_streams: bool = False
    """Whether all are kept from reading each other's memory, which they choose by themselves."""
    num_ranks: int = 1
    """Of the trainer."""
    max_senders: int = 2
    """How many of them send what they hold."""
    sends_deltas: bool = False
    """Whether the base is pushed by deltas."""


_FROM_A_BUCKET = POINTS[2:]
_AND_RETIRE = (*POINTS, RETIRE)
_OF_A_DELTA = (COMPARED, *POINTS[2:])
_STAGED = ("at a bucket", CHECKED, "inside commit", "after commit")
_WRITTEN = ("at a bucket", CHECKED, SCATTER, SCATTERED, UNDO)
ROLES = {
    "trainer sender": Role("trainer", _trainer),
    "trainer sender, of two": Role("trainer", _sending_rank, POINTS[1:5], num_ranks=2),
    "trainer rank": Role("rank-1", _sending_rank, num_ranks=2),
    # To a rank that is gathered from, all from the last bucket to the outcome is one wait.
    "trainer rank, gathering": Role(
        "rank-1", _gathering_rank, (*POINTS[1:4], POINTS[5]), num_ranks=2, max_senders=1
    ),
    "replica": Role(VICTIM, _replica),
    "replica worker": Role(VICTIM, _worker, _AND_RETIRE, signals=(*SIGNALS, HANG)),
    "replica loop": Role(VICTIM, _loop, _AND_RETIRE, signals=(LOOP,)),
    "coordinator": Role("coordinator", _coordinator),
    "coordinator, of sleepers": Role("coordinator", _coordinator, SLEEP_POINTS),
    "trainer sender, in place": Role("trainer", _trainer, _FROM_A_BUCKET[:3], in_place=True),
    "replica, in place": Role(
        VICTIM, _loading, _FROM_A_BUCKET, signals=(*SIGNALS, HANG), in_place=True
    ),
    "replica rank, in place": Role(VICTIM, _rank, _FROM_A_BUCKET, in_place=True),
    "replica, copying": Role(VICTIM, _copying, ("at a bucket",)),
    "trainer rank, over streams": Role(
        "rank-1", _sending_rank, ("at a bucket",), over_streams=True, num_ranks=2
    ),
    "trainer sender, over streams": Role("trainer", _trainer, POINTS[1:4], over_streams=True),
    "replica worker, over streams": Role(VICTIM, _worker, POINTS[1:4], over_streams=True),
    "coordinator, in place": Role("coordinator", _coordinator, _FROM_A_BUCKET, in_place=True),
    "trainer sender, delta": Role("trainer", _delta_trainer, _OF_A_DELTA, sends_deltas=True),
    "trainer rank, delta": Role(
        "rank-1", _delta_trainer, _OF_A_DELTA, num_ranks=2, sends_deltas=True
    ),
    "replica, delta": Role(VICTIM, _replica, (*_STAGED, CLONE), sends_deltas=True),
    "replica worker, delta": Role(
        VICTIM, _worker, (CHECKED, "inside commit"), (*SIGNALS, HANG), sends_deltas=True
    ),
    "replica, delta in place": Role(
        VICTIM, _replica, _WRITTEN, (*SIGNALS, HANG), in_place=True, sends_deltas=True
    ),
    "coordinator, delta in place": Role(
        "coordinator", _coordinator, (*_FROM_A_BUCKET, UNDO), in_place=True, sends_deltas=True
    ),
}
#: Those of ``tests.fault.real`` and ``tests.integrations.struck``, with vLLM.
REAL_ROLES = {"vllm replica": Role(VICTIM, _vllm_replica)}
#: Role, point and signal of every case.
CASES = [
    (name, point, signum)
    for name, role in ROLES.items()
    for point in role.points
    for signum in role.signals
]
