"""Pods of a rendered chart, run as processes of this machine within the limits that they name.

A container is a process that is number 1 of a PID namespace, has a network address, a read-only
root, the volumes at their places, /dev/shm of the size of its volume, no capability, the user of
its pod, and a memory cgroup. Needs root, and Linux with overlayfs and network namespaces.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2
from grpc_health.v1.health_pb2_grpc import HealthStub

from tests.chart.rendering import NAMESPACE, ROOT, Resource
from tests.waits import until

_SIZE = re.compile(r"(\d+)(Ki|Mi|Gi)")
_UNITS = {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30}
#: What a container runtime gives who mounts nothing there.
_DEFAULT_SHM_BYTES = 64 * 2**20
_MEMORY = Path("/sys/fs/cgroup/memory")


class PodError(Exception):
    """A pod did what Kubernetes would call a failure; says what, with the end of its log."""


def in_bytes(quantity: str) -> int:
    """The bytes of a quantity such as ``256Mi``."""
    match = _SIZE.fullmatch(quantity)
    assert match, quantity
    return int(match[1]) * _UNITS[match[2]]


def lacking() -> str:
    """What of this machine is missing; empty where pods can run."""
    if os.geteuid() != 0:
        return "root"
    if Path("/tmp") in ROOT.parents:
        return "a checkout that is not below /tmp, which is a volume of the pods"
    if not _MEMORY.is_dir() and "memory" not in _controllers():
        return "a memory cgroup"
    return ""


def _controllers() -> str:
    path = Path("/sys/fs/cgroup/cgroup.controllers")
    return path.read_text() if path.exists() else ""


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


@dataclass
class Network:
    """A bridge of this machine with one address for each pod, and the names of all of them."""

    name: str
    prefix: str
    hosts: Path
    """What pods have as /etc/hosts."""
    _num_pods: int = 0

    def add(self, pod: str, *names: str) -> str:
        """Make a network namespace for a pod, known by names; returns its address."""
        self._num_pods += 1
        address = f"{self.prefix}.{self._num_pods + 1}"
        space, ours, theirs = f"{self.name}-{pod}", f"{self.name}v{self._num_pods}", "eth0"
        _ip("netns", "add", space)
        _ip("link", "add", ours, "type", "veth", "peer", "name", theirs, "netns", space)
        _ip("link", "set", ours, "master", self.name, "up")
        _ip("-n", space, "addr", "add", f"{address}/24", "dev", theirs)
        _ip("-n", space, "link", "set", theirs, "up")
        _ip("-n", space, "link", "set", "lo", "up")
        with self.hosts.open("a") as file:
            file.write(f"{address} {' '.join((*names, pod))}\n")
        return address

    def remove(self, pod: str) -> None:
        """Remove a pod's network namespace."""
        _ip("netns", "del", f"{self.name}-{pod}")


@contextmanager
def network(work: Path) -> Iterator[Network]:
    """A network that is gone afterwards."""
    name = f"wt{os.getpid()}"
    made = Network(name, f"10.213.{os.getpid() % 250}", work / "hosts")
    made.hosts.write_text("127.0.0.1 localhost\n")
    _ip("link", "add", name, "type", "bridge")
    try:
        _ip("addr", "add", f"{made.prefix}.1/24", "dev", name)
        _ip("link", "set", name, "up")
        yield made
    finally:
        _ip("link", "del", name)


@dataclass
class Memory:
    """A cgroup that bounds a container's memory, memory files and /dev/shm included."""

    path: Path
    limit_bytes: int

    def __post_init__(self) -> None:
        self._is_v2 = not _MEMORY.is_dir()
        self.path = (Path("/sys/fs/cgroup") if self._is_v2 else _MEMORY) / self.path
        self.path.mkdir()
        limit = "memory.max" if self._is_v2 else "memory.limit_in_bytes"
        (self.path / limit).write_text(str(self.limit_bytes))

    @property
    def shown_at(self) -> str:
        """Where a container finds its own."""
        return "/sys/fs/cgroup" if self._is_v2 else str(_MEMORY)

    def peak_bytes(self) -> int:
        """The most that was taken at a time."""
        peak = "memory.peak" if self._is_v2 else "memory.max_usage_in_bytes"
        return int((self.path / peak).read_text())

    def remove(self, seconds: float = 30.0) -> None:
        """Remove it once the kernel is done with its processes."""

        def is_gone() -> bool:
            with contextlib.suppress(OSError):
                self.path.rmdir()
            return not self.path.exists()

        until(is_gone, seconds)

    def num_killed(self) -> int:
        """How many processes the kernel ended for want of memory."""
        control = "memory.events" if self._is_v2 else "memory.oom_control"
        match = re.search(r"^oom_kill (\d+)", (self.path / control).read_text(), re.MULTILINE)
        return int(match[1]) if match else 0


@dataclass
class Pod:
    """One pod: its volumes are directories below ``work``, its containers processes."""

    name: str
    spec: Resource
    net: Network
    work: Path
    path: str
    """PATH of its image, as found on this machine."""
    names: tuple[str, ...] = ()
    files: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """What is in the ConfigMaps of the release, by name."""

    def __post_init__(self) -> None:
        self._ends = ExitStack()
        self.work.mkdir()
        self.address = self.net.add(self.name, *self.names)
        self._ends.callback(self.net.remove, self.name)
        self.process: subprocess.Popen[bytes] | None = None
        self.memory: Memory | None = None
        self.log = self.work / "log"
        self._own_lines = 0
        self._volumes = {volume["name"]: volume for volume in self.spec.get("volumes", [])}
        for name, volume in self._volumes.items():
            self._make_volume(name, volume)

    # -- what Kubernetes does -----------------------------------------------------------

    def start(self) -> None:
        """Run the init containers to their end, and start the one container."""
        for container in self.spec.get("initContainers", []):
            self._run(container)
            if (code := self.wait(300)) != 0:
                raise PodError(f"{self.name}: {container['name']} ended with {code}\n{self.tail()}")
        if self.log.exists():  # an init container's lines are its own
            self._own_lines = len(self.log.read_text().splitlines())
        (container,) = self.spec["containers"]
        self._run(container)

    def answers(self, probe: str) -> bool:
        """Ask as a probe of the container does."""
        asked = self.spec["containers"][0][probe]
        seconds = asked.get("timeoutSeconds", 1)
        with grpc.insecure_channel(f"{self.address}:{asked['grpc']['port']}") as channel:
            request = health_pb2.HealthCheckRequest(service=asked["grpc"].get("service", ""))
            try:
                answer = HealthStub(channel).Check(request, timeout=seconds)
            except grpc.RpcError:
                return False
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)

    def wait_until_ready(self, seconds: float) -> float:
        """Wait for the startup probe within its limit, and for readiness; returns the seconds."""
        began = time.monotonic()
        probe = self.spec["containers"][0]["startupProbe"]
        limit = min(seconds, probe["periodSeconds"] * probe["failureThreshold"])
        for name in ("startupProbe", "readinessProbe"):
            while not self.answers(name):
                if (code := self.process.poll() if self.process else 0) is not None:
                    raise PodError(f"{self.name} ended with {code}\n{self.tail()}")
                if time.monotonic() > began + limit:
                    raise PodError(f"{self.name}: no {name} in {limit:.0f} s\n{self.tail()}")
                time.sleep(0.5)
            limit = seconds
        return time.monotonic() - began

    def wait(self, seconds: float) -> int | None:
        """Wait for the container's end; returns its exit status, None if it has not ended."""
        assert self.process
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None

    def execute(self, *words: str) -> str:
        """Run a command in the container, as `kubectl exec` does; returns what it prints."""
        command = ["nsenter", f"--target={self._first()}", "--all", "--root", "--wd=/"]
        command += self._as_user(self.spec["containers"][0], words)
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        if done.returncode:
            raise PodError(f"{self.name}: {shlex.join(words)} ended so:\n{done.stderr}")
        return done.stdout

    def delete(self) -> float:
        """Stop it as Kubernetes does: preStop, SIGTERM, and at most the grace period."""
        began = time.monotonic()
        stop = self.spec["containers"][0].get("lifecycle", {}).get("preStop")
        time.sleep(stop["sleep"]["seconds"] if stop else 0)
        os.kill(self._first(), signal.SIGTERM)
        left = self.spec["terminationGracePeriodSeconds"] - (time.monotonic() - began)
        code = self.wait(left)
        if code != 0:
            raise PodError(f"{self.name}: told to stop, it ended with {code}\n{self.tail()}")
        return time.monotonic() - began

    def close(self) -> None:
        """End what runs, and remove what was made of it."""
        with self._ends:
            self._end_container()

    # -- what was seen ------------------------------------------------------------------

    def tail(self, lines: int = 30) -> str:
        """The end of what the last container printed."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])

    def check_lines(self) -> None:
        """Raise PodError for a line that is no JSON object, if the pod is told to write them."""
        (container,) = self.spec["containers"]
        if "--log-format=json" not in container.get("args", []):
            return
        for number, line in enumerate(self.log.read_text().splitlines()[self._own_lines :], 1):
            try:
                json.loads(line)["time"]  # one of the audit log has no message
            except (ValueError, TypeError, KeyError):
                raise PodError(f"{self.name}: line {number} is no JSON object: {line}") from None

    def check_limits(self) -> list[str]:
        """What each limit was, and how much of it was taken; raises PodError for one exceeded."""
        assert self.memory
        if self.memory.num_killed():
            raise PodError(f"{self.name}: ended for want of memory\n{self.tail()}")
        found = [("memory", self.memory.peak_bytes(), self.memory.limit_bytes)]
        for name, volume in self._volumes.items():
            limit = volume.get("emptyDir", {}).get("sizeLimit")
            if limit and volume["emptyDir"].get("medium") != "Memory":
                used = sum(file.lstat().st_blocks * 512 for file in (self.work / name).rglob("*"))
                found.append((name, used, in_bytes(limit)))
        for name, used, limit in found:
            if used > limit:
                raise PodError(f"{self.name}: {name} takes {used} of {limit} bytes")
        return [
            f"{name} {used / 2**20:.0f} of {limit / 2**20:.0f} MiB" for name, used, limit in found
        ]

    # -- how ----------------------------------------------------------------------------

    def _first(self) -> int:
        """The container's first process, as this machine numbers it."""
        assert self.process
        pid = self.process.pid
        return int(Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0])

    def _make_volume(self, name: str, volume: Resource) -> None:
        folder = self.work / name
        folder.mkdir()
        for file, text in self.files.get(volume.get("configMap", {}).get("name"), {}).items():
            (folder / file).write_text(text)
        # Kubernetes gives a volume to the pod's group, and its files to it, too.
        os.chown(folder, 0, self.spec["securityContext"]["fsGroup"])
        folder.chmod(0o2775)

    def _end_container(self) -> None:
        if self.process is None:
            return
        if self.process.poll() is None:
            os.kill(self._first(), signal.SIGKILL)  # and with it all of its namespace
            self.process.wait()
        self.process = None
        if self.memory is not None:
            self.memory.remove()
            self.memory = None

    def _run(self, container: Resource) -> None:
        self._end_container()
        limits = container["resources"]["limits"]
        self.memory = Memory(Path(f"{self.net.name}-{self.name}"), in_bytes(limits["memory"]))
        script = self.work / f"{container['name']}.sh"
        script.write_text(self._script(container))
        command = ["nsenter", f"--net=/run/netns/{self.net.name}-{self.name}"]
        command += ["unshare", "--mount", "--pid", "--uts", "--fork"]
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [*command, "sh", script], stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )

    def _script(self, container: Resource) -> str:
        """What makes the container's root around its process, and becomes it."""
        assert self.memory
        assert container["securityContext"]["readOnlyRootFilesystem"] is True
        root, layers = self.work / "root", self.work / f"layers-{container['name']}"
        for folder in (root, layers / "upper", layers / "work"):
            folder.mkdir(parents=True, exist_ok=True)
        lines = [
            "set -e",
            f"echo 0 >{self.memory.path}/cgroup.procs",  # 0 is who writes
            f"hostname {self.name}",
            "mount --make-rprivate /",
            "mount -t overlay overlay -o "
            f"lowerdir=/,upperdir={layers}/upper,workdir={layers}/work {root}",
            f"chmod 755 {root}/root",  # an interpreter may lie below it
            f"mount -t proc proc {root}/proc",
            f"mount --rbind /dev {root}/dev",
            f"mount -t sysfs -o ro sysfs {root}/sys",
            f"mount -t tmpfs tmpfs {root}/sys/fs/cgroup",
            f"mkdir {root}/sys/fs/cgroup/memory",
            f"mount --bind {self.memory.path} {root}{self.memory.shown_at}",
            f"mount --bind {self.net.hosts} {root}/etc/hosts",
        ]
        shm = _DEFAULT_SHM_BYTES
        for mount in container["volumeMounts"]:
            volume, place = self._volumes[mount["name"]], f"{root}{mount['mountPath']}"
            if mount["mountPath"] == "/dev/shm":
                shm = in_bytes(volume["emptyDir"]["sizeLimit"])
                continue
            lines += [f"mkdir -p {place}", f"mount --bind {self.work / mount['name']} {place}"]
            if mount.get("readOnly") or "configMap" in volume:
                lines.append(f"mount -o remount,bind,ro {place}")
        lines += [
            f"mount -t tmpfs -o size={shm},mode=1777 tmpfs {root}/dev/shm",
            f"mount -o remount,ro {root}",
        ]
        words = self._as_user(container, (*container["command"], *container.get("args", [])))
        lines.append(f"exec chroot {root} {shlex.join(words)}")
        return "\n".join(lines) + "\n"

    def _as_user(self, container: Resource, words: Sequence[str]) -> list[str]:
        """The words that run a command as the pod's user, in the container's environment."""
        pod = self.spec["securityContext"]
        user, group = pod["runAsUser"], pod["runAsGroup"]
        drop = ["setpriv", f"--reuid={user}", f"--regid={group}", f"--groups={group}"]
        drop += ["--no-new-privs", "--bounding-set=-all", "--inh-caps=-all"]
        env = self._env(container)
        said = [f"{name}={value}" for name, value in env.items()]
        return ["env", "-i", "-C", "/", *said, *drop, *(self._expand(word, env) for word in words)]

    def _env(self, container: Resource) -> dict[str, str]:
        # The image's, and where Weft lies on this machine.
        env = {"PATH": f"{self.path}:/usr/bin:/bin", "PYTHONPATH": str(ROOT)}
        env |= {"PYTHONUNBUFFERED": "1", "PYTHONDONTWRITEBYTECODE": "1"}
        for variable in container.get("env", []):
            source = variable.get("valueFrom", {}).get("fieldRef", {}).get("fieldPath")
            known = {"metadata.name": self.name, "metadata.namespace": NAMESPACE}
            env[variable["name"]] = known[source] if source else variable["value"]
        return env

    @staticmethod
    def _expand(word: str, env: Mapping[str, str]) -> str:
        return re.sub(r"\$\((\w+)\)", lambda match: env.get(match[1], match[0]), word)
