"""Hosts of one network: network namespaces joined by a switch, which is a namespace of its own.

All traffic stays inside. A host has addresses of both families, a name that every other host
knows, a link that ``tc`` bounds in both directions, and directories of its own: for temporary
files, for the sockets of the one-sided backend, for shared memory. Processes of two hosts share
what lies at a path that both are told, and nothing else. Needs root.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import shlex
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TypeVar

from tests.processes import is_running
from weft_rl.cli.demo.processes import Process
from weft_rl.transport.one_sided.directory import DIRECTORY_VARIABLE

_PREFIX, _PREFIX6 = "10.77.0", "fd77::"
_INTERFACE = "eth0"
#: Of a host behind a router that translates, and of the router on that side.
_INSIDE, _ROUTER = "192.168.77.2", "192.168.77.1"
_COMMAND_SECONDS = 20.0
#: No interface has it: what is sent there is lost, and nobody says so.
_NOBODY = "02:00:00:00:00:01"
#: What a shaped link may send at once, and what waits in its queue; by the link's speed.
_MIN_BURST_BYTES, _BURST_SECONDS, _QUEUE = 32_768, 0.002, "50ms"
_SPACE = re.compile(r"weft-net-(\d+)-\S+")
#: Enters a host: its name, the names of all hosts, and shared memory of its own.
_ENTER = (
    'echo "$1" >/proc/sys/kernel/hostname && mount --bind "$2" /etc/hosts'
    ' && mount --bind "$3" /dev/shm && shift 3 && exec "$@"'
)
_numbers = itertools.count()
HostT = TypeVar("HostT", bound="Host")


def run(*words: str) -> str:
    """Run a command of the system to its end and return what it prints.

    Raises:
        OSError: It failed; says what it printed.
    """
    done = subprocess.run(
        words, capture_output=True, text=True, timeout=_COMMAND_SECONDS, check=False
    )
    if done.returncode:
        raise OSError(f"{shlex.join(words)} ended with {done.returncode}: {done.stderr.strip()}")
    return done.stdout


def lacking() -> str:
    """Name what this machine lacks for such networks; empty where they can be made."""
    if os.geteuid() != 0:
        return "root"
    try:
        with network() as made:
            made.host("one", mbit=100)
            made["one"].run("true")
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"network namespaces that can be joined and shaped ({error})"
    return ""


def _bound(space: str, device: str, mbit: float | None) -> None:
    """Bound what a device sends, in Mbit/s; None for no bound."""
    if mbit is None:
        with contextlib.suppress(OSError):  # it had none
            run("tc", "-n", space, "qdisc", "del", "dev", device, "root")
        return
    burst = max(_MIN_BURST_BYTES, int(mbit * 1e6 / 8 * _BURST_SECONDS))
    run("tc", "-n", space, "qdisc", "replace", "dev", device, "root", "tbf", "rate",
        f"{int(mbit * 1e6)}bit", "burst", str(burst), "latency", _QUEUE)  # fmt: skip


def _join(space: str, other: str, port: str) -> None:
    """Lay a cable from the interface of a namespace to a port of another."""
    run("ip", "-n", space, "link", "add", _INTERFACE, "type", "veth", "peer", "name", port,
        "netns", other)  # fmt: skip
    run("ip", "-n", other, "link", "set", port, "up")
    for device in ("lo", _INTERFACE):
        run("ip", "-n", space, "link", "set", device, "up")


class Host:
    """A host of a network: what runs in it has its addresses, its name and its directories.

    Made by ``Network.host``.
    """

    def __init__(self, network: Network, name: str, number: int) -> None:
        self.name = name
        self.address, self.address6 = f"{_PREFIX}.{number}", f"{_PREFIX6}{number}"
        #: Address of IPv4 that others reach it by.
        self.outside = self.address
        self._known_as = ""
        self.space = f"{network.name}-{name}"
        #: Its files; nothing of another host writes there.
        self.folder = network.folder / name
        self.mbit: float | None = None
        self._network = network
        self._switch, self._port = network.switch, f"port{number}"
        for folder in ("tmp", "sockets", "shm"):
            (self.folder / folder).mkdir(parents=True)
            (self.folder / folder).chmod(0o700)
        self._connect()

    def _connect(self) -> None:
        _join(self.space, self._switch, self._port)
        self.ip("addr", "add", f"{self.address}/24", "dev", _INTERFACE)
        self.ip("addr", "add", f"{self.address6}/64", "dev", _INTERFACE, "nodad")
        run("ip", "-n", self._switch, "link", "set", self._port, "master", "switch")

    def __repr__(self) -> str:
        return f"{self.name} ({self.address})"

    @property
    def names(self) -> Path:
        """File that its processes have as /etc/hosts."""
        if not self._known_as:
            return self._network.names
        own = self.folder / "hosts"
        own.write_text(f"{self._known_as} {self.name}\n{self._network.names.read_text()}")
        return own

    @property
    def env(self) -> dict[str, str]:
        """Environment of its processes, by which they share no directory."""
        return {
            "HOME": str(self.folder),
            "TMPDIR": str(self.folder / "tmp"),
            DIRECTORY_VARIABLE: str(self.folder / "sockets"),
        }

    @property
    def enter(self) -> tuple[str, ...]:
        """Words before a command that runs it in this host, as the same process."""
        return ("ip", "netns", "exec", self.space, "unshare", "--uts", "--ipc", "--mount",
                "sh", "-c", _ENTER, "sh", self.name, str(self.names),
                str(self.folder / "shm"))  # fmt: skip

    def run(self, *words: str) -> str:
        """Run a command in this host to its end and return what it prints."""
        return run(*self.enter, *words)

    def ip(self, *words: str) -> str:
        """Run ``ip`` on this host's interfaces, routes and neighbours."""
        return run("ip", "-n", self.space, *words)

    def start(self, name: str, args: Sequence[str], env: dict[str, str] | None = None) -> Process:
        """Start Python with these arguments in this host; it is stopped with the network."""
        process = Process(name, args, self.folder, {**self.env, **(env or {})}, self.enter)
        self._network.ends.callback(process.stop)
        return process

    # -- its link ---------------------------------------------------------------------------

    def shape(self, mbit: float | None) -> None:
        """Bound what its link carries in each direction, in Mbit/s; None for no bound."""
        self._shape(mbit, self.space)

    def _shape(self, mbit: float | None, end: str) -> None:
        self.mbit = mbit
        _bound(end, _INTERFACE, mbit)
        _bound(self._switch, self._port, mbit)

    def cut(self) -> None:
        """Lose what it sends and what is sent to it, without a word, as a switch that fails."""
        run("bridge", "-n", self._switch, "link", "set", "dev", self._port, "state", "disabled")

    def restore(self) -> None:
        """Put it back: what is sent from now on arrives."""
        run("bridge", "-n", self._switch, "link", "set", "dev", self._port, "state", "forwarding")

    def move_to(self, switch: str) -> None:
        """Plug its cable into another switch of the network; see ``Network.add_site``."""
        run("ip", "-n", self._switch, "link", "set", self._port, "master", switch)

    def unplug(self) -> None:
        """Take its cable out: its interface shows it. ``plug`` puts it back."""
        run("ip", "-n", self._switch, "link", "set", self._port, "down")

    def plug(self) -> None:
        """Put the cable back in."""
        run("ip", "-n", self._switch, "link", "set", self._port, "up")

    def lose_towards(self, other: Host) -> None:
        """Lose what this host sends to another one, and nothing else: what comes back arrives."""
        for address in (other.outside, other.address6):
            self.ip("neigh", "replace", address, "lladdr", _NOBODY, "dev", _INTERFACE,
                    "nud", "permanent")  # fmt: skip

    def find(self, other: Host) -> None:
        """End ``lose_towards``."""
        for address in (other.outside, other.address6):
            self.ip("neigh", "del", address, "dev", _INTERFACE)

    # -- addresses --------------------------------------------------------------------------

    def add_dead_end(self, address: str) -> None:
        """Give it an interface from which nobody is reached, for which it has its default route,
        and at whose address it knows itself by its own name."""
        self.ip("link", "add", "dead0", "type", "veth", "peer", "name", "dead1")
        self.ip("addr", "add", f"{address}/24", "dev", "dead0")
        for device in ("dead0", "dead1"):
            self.ip("link", "set", device, "up")
        self.ip("route", "add", "default", "dev", "dead0")
        self._known_as = address

    def add_address(self, address: str, *reached_from: Host) -> None:
        """Give it a further address, at which some hosts reach it and others know no route."""
        self.ip("addr", "add", f"{address}/32", "dev", "lo")
        for other in reached_from:
            other.ip("route", "add", f"{address}/32", "via", self.address)


class TranslatedHost(Host):
    """Host behind a router that translates addresses: it has an address of another network, and
    the others reach it at ``outside``, which none of its interfaces has.

    Made by ``Network.translated_host``. Its link is the router's; only IPv4 is translated.
    """

    def _connect(self) -> None:
        self.address = _INSIDE
        router = self._network.add_space(f"{self.name}-router")
        _join(router, self._switch, self._port)
        run("ip", "-n", self._switch, "link", "set", self._port, "master", "switch")
        _join(self.space, router, "inside")
        self.ip("addr", "add", f"{_INSIDE}/24", "dev", _INTERFACE)
        self.ip("route", "add", "default", "via", _ROUTER)
        for words in (
            f"addr add {_ROUTER}/24 dev inside",
            f"addr add {self.outside.replace('.0.', '.1.')}/16 dev {_INTERFACE}",
            "tuntap add dev tun0 mode tun",
            "link set tun0 up",
            f"neigh add proxy {self.outside} dev {_INTERFACE}",
            f"route add {self.outside} dev tun0",
            "rule add iif inside lookup 100",
            "route add default dev tun0 table 100",
        ):
            run("ip", "-n", router, *words.split())
        enter = ("ip", "netns", "exec", router)
        run(*enter, "sh", "-c", "cd /proc/sys/net/ipv4 && echo 1 >ip_forward"
            " && for each in conf/*/rp_filter; do echo 0 >$each; done")  # fmt: skip
        args = ("-m", "tests.network.translation", self.address, self.outside)
        process = Process("router", args, self.folder, {}, enter)
        self._network.ends.callback(process.stop)
        process.line(lambda text: text == "ready", _COMMAND_SECONDS)
        self._router = router

    def shape(self, mbit: float | None) -> None:
        """See ``Host.shape``; the inner cable is as fast as it is."""
        self._shape(mbit, self._router)


class Network:
    """Hosts that reach each other through one switch. Made by ``network``."""

    def __init__(self, folder: Path, ends: ExitStack) -> None:
        self.name = f"weft-net-{os.getpid()}-{next(_numbers)}"
        self.folder = folder
        self.ends = ends
        #: Namespace of the bridge, in which no process runs.
        self.switch = self.add_space("switch")
        #: What hosts have as /etc/hosts.
        self.names = folder / "hosts"
        self.names.write_text("127.0.0.1 localhost\n::1 localhost\n")
        self.hosts: dict[str, Host] = {}
        self._add_switch("switch")

    def _add_switch(self, name: str) -> None:
        run("ip", "-n", self.switch, "link", "add", name, "type", "bridge",
            "forward_delay", "0", "mcast_snooping", "0")  # fmt: skip
        run("ip", "-n", self.switch, "link", "set", name, "up")

    def add_site(self, name: str, mbit: float) -> None:
        """Add a switch that one link of so many Mbit/s each way joins to the first one. Hosts are
        moved to it."""
        self._add_switch(name)
        near, far = f"to-{name}", f"from-{name}"
        run("ip", "-n", self.switch, "link", "add", near, "type", "veth", "peer", "name", far)
        for device, master in ((near, "switch"), (far, name)):
            run("ip", "-n", self.switch, "link", "set", device, "master", master)
            run("ip", "-n", self.switch, "link", "set", device, "up")
            _bound(self.switch, device, mbit)

    def sent_to(self, site: str) -> int:
        """Return the bytes that have crossed the link to a site."""
        shown = run("ip", "-n", self.switch, "-s", "-j", "link", "show", "dev", f"to-{site}")
        return int(json.loads(shown)[0]["stats64"]["tx"]["bytes"])

    def add_space(self, name: str) -> str:
        """Add a network namespace; return its full name."""
        space = f"{self.name}-{name}"
        run("ip", "netns", "add", space)
        self.ends.callback(run, "ip", "netns", "del", space)
        return space

    def __getitem__(self, name: str) -> Host:
        return self.hosts[name]

    def host(self, name: str, mbit: float | None = None) -> Host:
        """Add a host whose link carries so many Mbit/s each way."""
        host = self._add(Host, name, mbit)
        with self.names.open("a") as file:
            file.write(f"{host.outside} {name}\n{host.address6} {name}6\n")
        return host

    def translated_host(self, name: str, mbit: float | None = None) -> TranslatedHost:
        """Add a host behind a router that translates its address."""
        host = self._add(TranslatedHost, name, mbit)
        with self.names.open("a") as file:
            file.write(f"{host.outside} {name}\n")
        return host

    def _add(self, kind: type[HostT], name: str, mbit: float | None) -> HostT:
        self.add_space(name)
        host = kind(self, name, len(self.hosts) + 1)
        self.hosts[name] = host
        host.shape(mbit)
        return host


@contextmanager
def network() -> Iterator[Network]:
    """A network without hosts; its processes, namespaces and files are gone afterwards."""
    _remove_left()
    # A short path: those of sockets have 107 bytes.
    with tempfile.TemporaryDirectory(prefix="weft-net-", dir="/tmp") as folder, ExitStack() as ends:
        yield Network(Path(folder), ends)


def _remove_left() -> None:
    """Remove the namespaces of processes that were ended before they could."""
    for space in run("ip", "netns", "list").split():
        match = _SPACE.fullmatch(space)
        if match and not is_running(int(match[1])):
            with contextlib.suppress(OSError):  # another process did so
                run("ip", "netns", "del", space)
