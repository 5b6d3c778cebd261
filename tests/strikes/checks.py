"""Checks of a struck pool against what its trainers wrote down when a push had returned."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path

import grpc

from weft_rl.rpc.channel import open_channel
from weft_rl.v1 import inspect_pb2 as pb
from weft_rl.v1.inspect_pb2_grpc import InspectServiceStub

#: Digests of the versions of each policy whose pushes have returned, by number.
Acknowledged = Mapping[str, Mapping[int, str]]
_CALL_SECONDS, _PAUSE_SECONDS = 3.0, 0.3
_SERVED = (pb.VERSION_STATE_COMMITTED, pb.VERSION_STATE_RETIRED)


def read_acknowledged(path: Path) -> tuple[Acknowledged, list[str]]:
    """Return what trainers have acknowledged, and what is wrong with it: a version twice."""
    found: dict[str, dict[int, str]] = defaultdict(dict)
    wrong = []
    text = path.read_text() if path.exists() else ""
    for line in text.splitlines(keepends=True):
        if not line.endswith("\n"):
            continue  # it is being written
        policy, number, digest = line.split()
        if found[policy].setdefault(int(number), digest) != digest:
            wrong.append(f"{policy}@{number} was acknowledged with two contents")
    return found, wrong


def wrong_versions(policy: str, own: Mapping[int, str], listed: Iterable[pb.Version]) -> list[str]:
    """Return what the coordinator's list of a policy's versions lacks of the acknowledged ones, or
    says otherwise. A version older than all of the list is not retained any more."""
    by_number = {each.version.version: each for each in listed}
    oldest, wrong = min(by_number, default=0), []
    for number, digest in own.items():
        name, known = f"{policy}@{number}", by_number.get(number)
        if known is None:
            if number >= oldest:
                wrong.append(f"{name} was acknowledged and is not known")
        elif known.state not in _SERVED:
            state = pb.VersionState.Name(known.state)
            wrong.append(f"{name} was acknowledged and is {state}: {known.failure.message}")
        elif known.content_digest_hex != digest:
            wrong.append(f"{name} was acknowledged as {digest}, not {known.content_digest_hex}")
    return wrong


def wrong_replicas(acknowledged: Acknowledged, pool: pb.GetPoolResponse) -> list[str]:
    """Return what ready replicas serve below the versions that were acknowledged before."""
    wrong = []
    for replica in pool.replicas:
        if replica.state != pb.REPLICA_STATE_READY:
            continue
        vector = replica.version_vector
        served = {adapter.policy: max(adapter.versions, default=0) for adapter in vector.adapters}
        served["base"] = vector.base
        wrong += [
            f"{replica.replica_id} is ready with {policy}@{served.get(policy, 0)}, and "
            f"{policy}@{max(own)} was acknowledged before"
            for policy, own in acknowledged.items()
            if served.get(policy, 0) < max(own)
        ]
    return wrong


def look(stub: InspectServiceStub, path: Path) -> list[str]:
    """Return what is wrong at this moment.

    Raises:
        grpc.RpcError: The coordinator does not answer.
    """
    acknowledged, wrong = read_acknowledged(path)
    wrong += wrong_replicas(acknowledged, stub.GetPool(pb.GetPoolRequest(), timeout=_CALL_SECONDS))
    for policy, own in acknowledged.items():
        request = pb.ListVersionsRequest(policy=policy, page_size=1000)
        listed = stub.ListVersions(request, timeout=_CALL_SECONDS).versions
        wrong += wrong_versions(policy, own, listed)
    return wrong


class Watch(threading.Thread):
    """Thread that looks at a pool again and again, whenever its coordinator answers.

    Args:
        target: Address of the coordinator.
        path: File that the trainers write what was acknowledged to.
    """

    def __init__(self, target: str, path: Path) -> None:
        super().__init__(name="watch", daemon=True)
        self._target, self._path = target, path
        self._stopping = threading.Event()
        self.wrong: list[str] = []
        """What was seen; it looks no more once there is something."""
        self.num_looks = 0

    def run(self) -> None:
        """Look until something is wrong, or ``stop``."""
        with open_channel(self._target) as channel:
            stub = InspectServiceStub(channel)
            while not self.wrong and not self._stopping.wait(_PAUSE_SECONDS):
                try:
                    self.wrong = look(stub, self._path)
                    self.num_looks += 1
                except grpc.RpcError:
                    continue

    def stop(self) -> None:
        """End the thread; blocks for the call under way."""
        self._stopping.set()
        self.join(4 * _CALL_SECONDS)
