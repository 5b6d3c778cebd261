"""A pool of real processes on hosts of a network: a coordinator, a trainer's ranks, replicas."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from tests.fault.strikes import CUT, VICTIM, Strike
from tests.network.hosts import Host, Network, network
from tests.network.trainer import TrainerSettings
from tests.waits import until
from weft_rl.cli.demo.processes import Process
from weft_rl.contract.backends import BACKENDS
from weft_rl.contract.group import SITE_VARIABLE

#: Backends that carry bytes between hosts' memories, by the table of all.
BETWEEN_HOSTS = tuple(
    name for name, facts in BACKENDS.items() if facts.on_host and not facts.within_host
)
#: Seconds of the coordinator's patience, so short that a case takes seconds.
HEARTBEAT_SECONDS, LOST_SECONDS, STALL_SECONDS = 0.3, 2.0, 3.0
_NUM_TENSORS, _FLOAT_BYTES = 24, 2
#: Of every host with a dead end: it leads nowhere, so they need not differ.
_DEAD_ADDRESS = "192.0.2.1"
_FAR = "far"
_START_SECONDS, _ASK_SECONDS, _SETTLE_SECONDS = 60.0, 20.0, 40.0


@dataclass(frozen=True, kw_only=True)
class PoolPlan:
    """Layout of a pool: who is on which host, over which links."""

    num_replicas: int = 4
    num_ranks: int = 1
    megabytes: float = 2.0
    mbit: float | None = 1000.0
    """Rate of every host's link, but for those in ``slow``."""
    slow: Mapping[str, float] = field(default_factory=dict)
    """Links of some hosts, by name, in Mbit/s."""
    backend: str = "auto"
    family: int = 4
    """Family of the addresses that processes listen at and are told."""
    bucket_bytes: int | None = None
    translated: tuple[str, ...] = ()
    """Hosts behind a router that translates their addresses."""
    hidden: Mapping[str, str] = field(default_factory=dict)
    """Further addresses of some hosts, by name, that the coordinator has no route to."""
    dead_ends: bool = False
    """True if each host has a second interface, from which nobody is reached."""
    options: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Options of some replicas, by name; "INSIDE" and "OUTSIDE" are their hosts' addresses."""
    far: tuple[str, ...] = ()
    """Hosts at another site."""
    between_mbit: float = 10.0
    """Rate of the link between the sites."""
    heartbeat_seconds: float = HEARTBEAT_SECONDS
    lost_seconds: float = LOST_SECONDS
    stall_seconds: float = STALL_SECONDS

    @property
    def elements(self) -> int:
        """Elements of each tensor."""
        return int(self.megabytes * 1e6 / _NUM_TENSORS / _FLOAT_BYTES)

    @property
    def replicas(self) -> list[str]:
        """Names of the replicas, and of their hosts."""
        return [f"replica-{n}" for n in range(self.num_replicas)]

    @property
    def ranks(self) -> list[str]:
        """Names of the trainer's ranks, and of their hosts."""
        return [f"trainer-{n}" for n in range(self.num_ranks)]


@dataclass(frozen=True, kw_only=True)
class Push:
    """Outcome of a push, and what the replicas held when it ended."""

    answer: dict[str, Any]
    """Answer of rank 0."""
    lost: tuple[str, ...]
    """Replicas that did not serve the version, or were not known to."""
    wrong: tuple[str, ...]
    """Replicas that served other bytes under its name."""

    @property
    def is_committed(self) -> bool:
        """True if the pool serves it."""
        return "error" not in self.answer


class HostedPool:
    """Processes of a pool on hosts of a network."""

    def __init__(self, net: Network, plan: PoolPlan) -> None:
        self.net, self.plan = net, plan
        self.strike: Strike | None = None
        self._num_strikes = self._num_pushes = 0
        self.coordinator: Process
        self.target = ""
        self.ranks: list[Process] = []
        self.replicas: dict[str, Process] = {}
        self._digests: dict[int, str] = {}
        if plan.far:
            net.add_site(_FAR, plan.between_mbit)
        for name in ("coordinator", *plan.ranks, *plan.replicas):
            make = net.translated_host if name in plan.translated else net.host
            host = make(name, plan.slow.get(name, plan.mbit))
            if name in plan.far:
                host.move_to(_FAR)
            if plan.dead_ends:
                host.add_dead_end(_DEAD_ADDRESS)
        for name, address in plan.hidden.items():
            known_to = {*plan.ranks, *plan.replicas} - {name}
            net[name].add_address(address, *(net[each] for each in known_to))

    def address(self, host: Host) -> str:
        """Return a host's address of the plan's family, as it stands before a port."""
        return f"[{host.address6}]" if self.plan.family == 6 else host.address

    def start(self) -> None:
        """Start all; return once every replica has registered and every rank is ready."""
        self.start_coordinator()
        for name in self.plan.replicas:
            self.start_replica(name)
        self.start_ranks()
        self.await_ready()

    def start_coordinator(self, listen: str | None = None) -> None:
        """Start the coordinator, on a port that the system chooses; return once it listens."""
        host = self.net["coordinator"]
        plan = self.plan
        args = ("-m", "weft_rl", "coordinator", "--insecure", "--listen",
                listen or f"{self.address(host)}:0", "--catalog", str(host.folder / "weft.db"),
                "--heartbeat-seconds", str(plan.heartbeat_seconds),
                "--lost-after-seconds", str(plan.lost_seconds),
                "--stall-seconds", str(plan.stall_seconds), "--log-level", "info")  # fmt: skip
        self.coordinator = host.start("coordinator", args)
        self.target = self.coordinator.line_after("listening on ", _START_SECONDS)

    def start_replica(self, name: str) -> None:
        """Start a replica with the engine double; do not wait for it."""
        host = self.net[name]
        env: dict[str, str] = {}
        module = ["-m", "tests.doubles.replica_process"]
        if self.strike and name == VICTIM:
            module, env = ["-m", "tests.fault.victims", module[1]], self.strike.env
        known = {"INSIDE": host.address, "OUTSIDE": host.outside}
        options = [known.get(word, word) for word in self.plan.options.get(name, ())]
        if name in self.plan.far:
            env[SITE_VARIABLE] = _FAR
        if "--listen" not in options:
            options += ["--listen", self.address(host)]
        size = str(_NUM_TENSORS), str(self.plan.elements)
        args = (*module, self.target, name, *size, "--keep", "--bfloat16", *options)
        self.replicas[name] = host.start(name, args, env)

    def arm(self, point: str) -> Strike:
        """Start ``VICTIM`` again, so that it waits when a push comes to a point; return the strike,
        to be told when it may go on."""
        self._num_strikes += 1
        directory = self.net.folder / f"strike-{self._num_strikes}"
        directory.mkdir()
        self.strike = Strike("replica", point, CUT, str(directory))
        self.replicas[VICTIM].stop()
        self.start_replica(VICTIM)
        self.replicas[VICTIM].line(lambda text: text == "ready", _START_SECONDS)
        return self.strike

    def start_ranks(self, env: dict[str, str] | None = None, **settings: Any) -> None:
        """Start the trainer's ranks; do not wait until they are ready."""
        plan = self.plan
        said = TrainerSettings(
            num_ranks=plan.num_ranks,
            num_tensors=_NUM_TENSORS,
            elements=plan.elements,
            backend=plan.backend,
            bucket_bytes=plan.bucket_bytes,
            store_host=plan.ranks[0],
        )
        said = dataclasses.replace(said, **settings)
        for rank, name in enumerate(plan.ranks):
            module, text = dataclasses.replace(said, rank=rank).words
            process = self.net[name].start(name, ("-m", module, self.target, text), env)
            self.ranks.append(process)
            if rank == 0 and plan.num_ranks > 1:
                port = int(process.line_after("store ", _START_SECONDS))
                said = dataclasses.replace(said, store_port=port)

    def await_ready(self) -> None:
        """Return once every replica has registered and every rank is ready."""
        for process in (*self.replicas.values(), *self.ranks):
            process.line(lambda text: text == "ready", _START_SECONDS)

    def ended(self) -> list[str]:
        """Name the processes that have ended."""
        processes = (self.coordinator, *self.ranks, *self.replicas.values())
        return [process.name for process in processes if process.poll() is not None]

    def begin_push(self, timeout_seconds: float) -> None:
        """Have every rank push a model that was never pushed before."""
        self._num_pushes += 1
        for rank in self.ranks:
            rank.tell(f"push {self._num_pushes} {timeout_seconds}")

    def end_push(self, timeout_seconds: float) -> Push:
        """Wait for every rank's answer; ask every replica what it serves."""
        answers = [rank.answer(timeout_seconds) for rank in self.ranks]
        answer = answers[0]
        served = {name: self.served(name) for name in self.replicas}
        if "version" not in answer:
            return Push(answer=answer, lost=(), wrong=self._wrong(served))
        self._digests[answer["version"]] = answer["digest"]
        lost = {name for name, said in served.items() if said["base"] != answer["version"]}
        lost |= {name for name in served for said in answer["remarks"] if said.startswith(name)}
        return Push(answer=answer, lost=tuple(sorted(lost)), wrong=self._wrong(served))

    def push(self, timeout_seconds: float) -> Push:
        """Push a model and wait for the end."""
        self.begin_push(timeout_seconds)
        return self.end_push(timeout_seconds + 20)

    def await_sent(self, num_buckets: int, timeout_seconds: float) -> None:
        """Return once the push under way has so many buckets verified by all."""

        def is_sent(line: str) -> bool:
            words = line.split()
            return words[:1] == ["sent"] and int(words[1]) >= num_buckets

        self.ranks[0].line(is_sent, timeout_seconds)

    def served(self, name: str) -> dict[str, Any]:
        """Return what a replica serves, by itself; its host need not be reached."""
        return self.replicas[name].ask("", _ASK_SECONDS)

    def await_served(self, version: int, seconds: float = _SETTLE_SECONDS) -> tuple[str, ...]:
        """Return once every replica serves a version; name those that serve wrong bytes."""
        served: dict[str, dict[str, Any]] = {}

        def is_served() -> bool:
            served.update({name: self.served(name) for name in self.replicas})
            return all(said["base"] == version for said in served.values())

        until(is_served, seconds, every_seconds=0.2, why=lambda: f"not all serve it: {served}")
        return self._wrong(served)

    def _wrong(self, served: Mapping[str, dict[str, Any]]) -> tuple[str, ...]:
        """Name the replicas that hold other bytes than were pushed as what they serve."""
        return tuple(
            name
            for name, said in served.items()
            if (pushed := self._digests.get(said["base"])) and said["digests"]["base"] != pushed
        )

    def sent_far(self) -> int:
        """Return the bytes that have crossed the link to the other site."""
        return self.net.sent_to(_FAR)

    def tails(self) -> str:
        """Return the ends of the logs of all, for a failure."""
        processes = (self.coordinator, *self.ranks, *self.replicas.values())
        return "\n".join(f"-- {p.name}\n{p.tail()}" for p in processes)


@contextmanager
def hosted_pool(plan: PoolPlan) -> Iterator[HostedPool]:
    """A pool that is started, on a network of its own; both are gone afterwards."""
    with network() as net:
        pool = HostedPool(net, plan)
        pool.start()
        yield pool
