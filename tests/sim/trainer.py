"""A trainer's process, a model of ``trainer_side``: leases and pushes."""

from __future__ import annotations

import contextlib
from collections.abc import Generator
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from tests.sim.clock import Future, Process
from tests.sim.data import both_plans, change_between, delta_plan, layout_of, plan_of
from tests.sim.sender import Sender, Sending
from tests.sim.services import Target
from tests.unit.coordinator.decisions.machine import SPEC
from weft_rl.contract.errors import (
    LeaseFencedError,
    NotReadyError,
    PeerUnavailableError,
    StaleEpochError,
    TransferTimeoutError,
    WeftError,
)
from weft_rl.contract.manifest import WSUM64, SendPlan
from weft_rl.contract.names import BASE_POLICY, PolicyVersion
from weft_rl.coordinator.decisions.state.effects import BeginAnswer
from weft_rl.coordinator.decisions.state.transfer import Group
from weft_rl.coordinator.decisions.state.values import (
    ContentDigest,
    PolicyKind,
    VersionLayout,
    base_content,
)

if TYPE_CHECKING:
    from tests.sim.world import World


#: Reasons of a push that ended before its commit point for certain.
_NOT_COMMITTED = frozenset(
    {
        "DELTA_REFUSED",
        "TRANSFER_ABORTED",
        "DIGEST_MISMATCH",
        "STAGING_FULL",
        "POOL_EMPTY",
        "POLICY_OWNED",
        "STALLED",
    }
)


@dataclass
class Push:
    """One push as its trainer sees it."""

    policy: str
    request_id: str
    deadline: float
    min_replicas: int
    version: PolicyVersion | None = None
    transfer_id: str = ""
    token: int = 0
    """Token of the lease that it was begun under, by its last call."""
    plan: SendPlan | None = None
    error: WeftError | None = None
    done: bool = False


class SimTrainer(Process):
    """One session of one trainer."""

    def __init__(self, world: World, name: str, session: str, policies: list[str]) -> None:
        super().__init__(world.clock, name)
        self.world = world
        self.session = session
        self.policies = policies
        self.tokens: dict[str, int] = {}
        self._last: dict[str, tuple[int, int]] = {}
        self.sender: Sender | None = None
        self.pushes: list[Push] = []
        self._put: set[bytes] = set()
        self.pushing = False
        #: The threads that train and push; leases are renewed by another one.
        self.worker = Process(world.clock, f"{name}'s push")
        #: Its further ranks, which send with it in some pushes; ended with it.
        self.others = [Process(world.clock, f"{name}.1")] * world.random.choice([0, 0, 1])
        self._senders: list[Sender] = []
        self._pool_id = ""
        #: What the pool committed last of the base, as far as it knows for certain.
        self._committed: ContentDigest | None = None
        self.is_of_another_pool = False
        self.spawn(self._renew())
        self.worker.spawn(self._train())

    def crash(self) -> None:
        """End it at once."""
        self.worker.crash()
        for rank in self.others:
            rank.crash()
        super().crash()

    def _train(self) -> Generator[Any, Any, None]:
        random = self.world.random
        while True:
            seconds = random.uniform(0.1, 3.0)
            yield seconds / (10 if self.world.goes_back else 4 if self.world.sends_deltas else 1)
            if self.world.quiet:
                return
            if BASE_POLICY in self.policies and random.random() < 0.15:
                with contextlib.suppress(WeftError):
                    yield from self._sleep_or_wake()
                continue
            policy = random.choice(self.policies)
            if self.world.sends_deltas and BASE_POLICY in self.policies:
                often = 0.9 if self.world.goes_back else 0.6
                policy = BASE_POLICY if self.world.deltas.random() < often else policy
            quorum = min(random.choice([0, 0, 1, 1, 2]), len(self.world.replicas))
            yield from self.push(policy, random.choice([3.0, 6.0, 10.0, 40.0]), quorum)

    def _sleep_or_wake(self) -> Generator[Any, Any, None]:
        random, names = self.world.random, sorted(self.world.replicas)
        lease: dict[str, Any] = {
            "fencing_token": (yield from self._token(BASE_POLICY)), "session_id": self.session
        }  # fmt: skip
        try:
            if random.random() < 0.4:
                yield self._call("wake_rollouts", 5.0, **lease)
                return
            gpus = frozenset(random.sample(names, random.randint(1, len(names))))
            more = {"gpu_uuids": gpus, "aborts": False, "timeout_seconds": 2.0,
                    "level": random.choice([1, 2])}  # fmt: skip
            yield self._call("sleep_rollouts", random.choice([0.3, 5.0]), **lease, **more)
        except LeaseFencedError:
            self.tokens.pop(BASE_POLICY, None)

    def _renew(self) -> Generator[Any, Any, None]:
        while True:
            yield self.world.settings.lease_seconds / 3
            for policy, token in list(self.tokens.items()):
                try:
                    seconds = self.world.settings.lease_seconds
                    answer = yield self._call(
                        "renew",
                        seconds,
                        policy=policy,
                        fencing_token=token,
                        session_id=self.session,
                    )
                    self._pool_id = answer.pool_id
                except (PeerUnavailableError, TransferTimeoutError):
                    pass
                except WeftError as error:
                    self.is_of_another_pool |= error.reason == "POOL_MISMATCH"
                    if self.tokens.get(policy) == token:
                        del self.tokens[policy]
                        if isinstance(error, LeaseFencedError) and "holder" not in error.metadata:
                            with contextlib.suppress(WeftError):
                                yield from self._token(policy)

    def _call(self, method: str, timeout: float, **args: Any) -> Future:
        return self.world.network.call(self, "coordinator", method, timeout, **args)

    def push(self, policy: str, timeout: float, min_replicas: int = 0) -> Generator[Any, Any, Push]:
        """Push a version; its outcome, never raised. ``min_replicas`` 0 requires all."""
        number = next(self.world.numbers)
        push = Push(
            policy, self._request_id(policy, number), self.clock.now + timeout, min_replicas
        )
        self.pushes.append(push)
        try:
            assert not self.pushing
            self.pushing = True
            yield from self._push(push, f"{number:08d}".encode())
        except WeftError as error:
            push.error = error
            self.is_of_another_pool |= error.reason == "POOL_MISMATCH"
        self.pushing = False
        push.done = True
        self.world.checks.push_ended(self, push)
        return push

    def _request_id(self, policy: str, number: int) -> str:
        """A new one; now and then one that made a version of another policy."""
        used = [p.request_id for p in self.pushes if p.version and p.version.policy != policy]
        if used and not self.world.quiet and self.world.random.random() < 0.05:
            return self.world.random.choice(used)
        return f"q{number}"

    def _push(self, push: Push, content: bytes) -> Generator[Any, Any, None]:
        layout, target = layout_of(push.policy), (yield self._call("describe", self._left(push)))
        self.others = [r if r.alive else Process(self.clock, r.name) for r in self.others]
        if self.others and self.world.random.random() < 0.7:
            push.plan = plan_of(layout)
        digest = ContentDigest(WSUM64, content, layout.total_bytes)
        if push.policy != BASE_POLICY:
            yield from self._send(push, layout, digest)
            return
        known, self._committed = self._committed, None
        try:
            is_sent = yield from self._send_base(push, layout, digest, target, known)
        except WeftError as error:
            self._committed = known if error.reason in _NOT_COMMITTED else None
            raise
        self._committed = digest if is_sent else None

    def _send_base(
        self,
        push: Push,
        layout: VersionLayout,
        digest: ContentDigest,
        target: Target,
        known: ContentDigest | None,
    ) -> Generator[Any, Any, bool]:
        """Send it as a delta, and whole where that is refused; or whole at once."""
        world = self.world
        if self._sends_delta(target, layout, known):
            whole, request_id = push.plan, push.request_id
            # Now and then from what the pool never had.
            base = known or replace(digest, value=b"invented")
            is_mixed = bool(target.num_delta_replicas) and world.mixed.random() < 0.8
            plan_of_kind = both_plans if is_mixed else delta_plan
            push.plan = plan_of_kind(layout, base, whole.num_senders if whole else 1)
            try:
                change = self._change(base, digest.value)
                return (yield from self._send(push, layout, digest, change))
            except WeftError as error:
                if push.plan.num_senders > 1 and not all(rank.alive for rank in self.others):
                    self.world.trace(self.name, "has lost a sender of its delta")
                if error.reason != "DELTA_REFUSED":
                    raise
                self.world.trace(self.name, f"sends it whole: {error.message}")
            push.plan, push.request_id = whole, f"{request_id}w"
            push.version, push.transfer_id = None, ""
        return (yield from self._send(push, layout, digest))

    def _sends_delta(
        self, target: Target, layout: VersionLayout, base: ContentDigest | None
    ) -> bool:
        """Whether the base is sent as a delta; now and then also where it is to be refused."""
        world = self.world
        if not world.sends_deltas:
            return False
        is_served = base is not None and target.content == base_content(layout.digest, base)
        can_some = target.num_delta_replicas and world.mixed.random() < 0.9
        fits = is_served and (can_some or not target.delta_refusal)
        return world.deltas.random() < (0.85 if fits else 0.2)

    def _change(self, base: ContentDigest, content: bytes) -> bytes:
        """Now and then of a copy that is not what its trainer takes it for."""
        world = self.world
        has_drifted = world.deltas.random() < world.delta_failure / 4
        return change_between(b"drifted!" if has_drifted else base.value, content)

    def _send(
        self, push: Push, layout: VersionLayout, digest: ContentDigest, change: bytes = b""
    ) -> Generator[Any, Any, bool]:
        """Send a version, or a change to the base; returns once all is well. False where it
        was the outcome of an earlier call that was heard."""
        begun = yield from self._begin(push, layout)
        push.version, push.transfer_id = begun.version, begun.transfer_id
        if begun.group is None:
            yield from self._outcome(push, None, None)
            return False
        self.world.checks.sending(begun, digest)
        if push.plan and push.plan.num_senders > 1 and not all(rank.alive for rank in self.others):
            error = PeerUnavailableError("a rank ended while the push began", reason="RANK_GONE")
            yield from self._give_up(push, error)
            raise error
        sending = Sending(
            begun.transfer_id, layout, digest, push.deadline, push.plan, change=change
        )
        known = replace(push)  # what its ranks ask about, though a further attempt has begun
        sender = self._sender_for(begun.group)
        ended = Future()
        for rank, (process, other) in enumerate(zip(self.others, self._senders, strict=False), 1):
            part = replace(sending, rank=rank)
            process.spawn(self._send_part(known, layout, other, part, ended))
        try:
            with contextlib.suppress(StaleEpochError, PeerUnavailableError):
                yield from sender.carry(sending, partial(self._group_now, known, layout))
            yield from self._outcome(push, sender, sending)
            return True
        except WeftError as error:
            yield from self._give_up(push, error)
            raise
        finally:
            ended.set()

    def _send_part(
        self, push: Push, layout: VersionLayout, sender: Sender, part: Sending, ended: Future
    ) -> Generator[Any, Any, None]:
        """What a further rank does, until rank 0 has told it over their link that all is over."""
        with contextlib.suppress(WeftError):
            yield from sender.carry(part, partial(self._group_now, push, layout))
            yield from sender.stand_by(part, ended)

    def _begin(self, push: Push, layout: VersionLayout) -> Generator[Any, Any, BeginAnswer]:
        fenced = False
        while True:
            token = yield from self._token(push.policy)
            if layout.digest not in self._put:
                yield self._call("put_manifest", self._left(push), digest=layout.digest)
                self._put.add(layout.digest)
            is_kept = self.sender is not None and self.sender.usable
            group_id = self.sender.epoch.group.group_id if self.sender and is_kept else ""
            push.token = token
            self.world.checks.leases.asking(self, push)
            try:
                begun: BeginAnswer = yield self._begin_call(push, layout, group_id)
            except LeaseFencedError:
                self.tokens.pop(push.policy, None)
                if fenced:
                    raise
                fenced = True
            except NotReadyError as error:
                if error.reason != "MANIFEST_UNKNOWN":
                    raise
                self._put.discard(layout.digest)
            except PeerUnavailableError as error:  # as gRPC's own retries, with wait_for_ready
                if error.reason != "COORDINATOR_AWAY":
                    raise
                yield 0.5
            else:
                last_version, last_token = self._last[push.policy]
                last_version = max(last_version, begun.version.version)
                self._last[push.policy] = last_version, last_token
                return begun

    def _begin_call(self, push: Push, layout: VersionLayout, group_id: str) -> Future:
        return self._call(
            "begin",
            self._left(push),
            request_id=push.request_id,
            policy=push.policy,
            fencing_token=push.token,
            session_id=self.session,
            layout=layout,
            adapter=None if push.policy == BASE_POLICY else SPEC,
            min_replicas=push.min_replicas,
            group_id=group_id,
            time_left=self._left(push),
            send_plan=push.plan,
        )

    def _group_now(
        self, push: Push, layout: VersionLayout, known: str
    ) -> Generator[Any, Any, Group | None]:
        """The group that the push has now, if it goes on: as ``PoolClient._group_now``."""
        try:
            begun: BeginAnswer = yield self._begin_call(push, layout, "")
        except WeftError:
            return None
        is_other = begun.group is not None and begun.group.group_id != known
        return begun.group if is_other and begun.transfer_id == push.transfer_id else None

    def _token(self, policy: str) -> Generator[Any, Any, int]:
        if policy not in self.tokens:
            kind = PolicyKind.BASE if policy == BASE_POLICY else PolicyKind.ADAPTER
            last_version, last_token = self._last.get(policy, (0, 0))
            answer = yield self._call(
                "acquire",
                3.0,
                trainer_id=self.name,
                session_id=self.session,
                policy=policy,
                kind=kind,
                last_version=last_version,
                last_fencing_token=last_token,
                pool_id=self._pool_id,
            )
            self._pool_id = answer.pool_id
            self.tokens[policy] = token = answer.lease.fencing_token
            self.world.checks.leases.acquired(self, policy, token, last_token)
            self._last[policy] = max(last_version, answer.last_version), max(last_token, token)
        return self.tokens[policy]

    def _left(self, push: Push) -> float:
        left = push.deadline - self.clock.now
        if left <= 0:
            raise TransferTimeoutError("the push's deadline passed")
        return left

    def _sender_for(self, group: Group) -> Sender:
        if self.sender is not None:
            if self.sender.usable and self.sender.epoch.group.group_id == group.group_id:
                return self.sender
            self._close_senders()
        self.sender = Sender(self.world, self, group)
        self._senders = [
            Sender(self.world, process, group, rank)
            for rank, process in enumerate(self.others, 1)
            if rank in group.senders
        ]
        return self.sender

    def _close_senders(self) -> None:
        for sender in (self.sender, *self._senders):
            if sender is not None:
                sender.close()
        self.sender, self._senders = None, []

    def _outcome(
        self, push: Push, sender: Sender | None, sending: Sending | None
    ) -> Generator[Any, Any, None]:
        while True:
            left = self._left(push)
            outcome = self._call("await_transfer", left, transfer_id=push.transfer_id)
            if sender is not None and sending is not None:
                yield from sender.stand_by(sending, outcome)
            try:
                yield outcome
                return
            except PeerUnavailableError as error:
                if error.reason != "COORDINATOR_AWAY" or self.clock.now > push.deadline:
                    raise
                yield 0.5

    def _give_up(self, push: Push, error: WeftError) -> Generator[Any, Any, None]:
        if isinstance(error, TransferTimeoutError):
            token = self.tokens.get(push.policy, 0)
            with contextlib.suppress(WeftError):
                yield self._call(
                    "abort",
                    2.0,
                    transfer_id=push.transfer_id,
                    policy=push.policy,
                    fencing_token=token,
                )
        self._close_senders()
