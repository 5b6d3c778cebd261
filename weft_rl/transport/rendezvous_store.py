"""The rendezvous store of a side group, spoken over gRPC.

``torch.distributed`` asks for a key-value store to form a group. A TCPStore would
open a further port on every interface, without authentication; this one is the
coordinator's RendezvousService, authorised by the group's token. When the
coordinator drops the group, blocked calls end at once with EPOCH_FENCED.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import grpc
import torch.distributed as dist
from google.protobuf.duration_pb2 import Duration

from weft_rl.rpc.status import error_from_rpc
from weft_rl.v1 import rendezvous_pb2 as pb
from weft_rl.v1.rendezvous_pb2_grpc import RendezvousServiceStub

# A call may outlast the wait it carries by this much, for the wire.
_SLACK_SECONDS = 5.0


class RendezvousStore(dist.Store):  # type: ignore[name-defined, misc]
    """``torch.distributed.Store`` of one group, or of the keys under one ``prefix`` in it.

    Keep a reference to this object as long as the group: torch holds only its C++
    half, and calls into a collected Python half crash. Every method blocks for one
    round trip; ``get`` and ``wait`` until the key is set, at most
    ``timeout_seconds``. Failures raise ``torch.distributed.DistStoreError``, which
    is what torch expects, with the Weft error as its cause.
    """

    def __init__(
        self,
        stub: RendezvousServiceStub,
        credential: pb.GroupCredential,
        timeout_seconds: float,
        prefix: str = "",
    ) -> None:
        super().__init__()
        self._prefix = prefix
        self._stub = stub
        self._credential = credential
        self._timeout_seconds = timeout_seconds

    def set(self, key: str, value: bytes | str) -> None:
        self._call(set=pb.StoreSet(keys=self._keys([key]), values=[_bytes(value)]))

    def get(self, key: str) -> bytes:
        keys = pb.StoreKeys(keys=self._keys([key]), timeout=_duration(self._timeout_seconds))
        return self._call(wait_seconds=self._timeout_seconds, get=keys).values[0]

    def add(self, key: str, value: int) -> int:
        return self._call(add=pb.StoreAdd(key=self._prefix + key, amount=value)).number

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        seconds = self._timeout_seconds if timeout is None else timeout.total_seconds()
        request = pb.StoreKeys(keys=self._keys(keys), timeout=_duration(seconds))
        self._call(wait_seconds=seconds, wait=request)

    def check(self, keys: list[str]) -> bool:
        return self._call(check=pb.StoreKeys(keys=self._keys(keys))).number == 1

    def delete_key(self, key: str) -> bool:
        return self._call(delete=pb.StoreKeys(keys=self._keys([key]))).number > 0

    def compare_set(self, key: str, expected: bytes | str, desired: bytes | str) -> bytes:
        request = pb.StoreCompareSet(
            key=self._prefix + key, expected=_bytes(expected), desired=_bytes(desired)
        )
        return self._call(compare_set=request).values[0]

    def append(self, key: str, value: bytes | str) -> None:
        self._call(append=pb.StoreSet(keys=self._keys([key]), values=[_bytes(value)]))

    def multi_get(self, keys: list[str]) -> list[bytes]:
        request = pb.StoreKeys(keys=self._keys(keys), timeout=_duration(self._timeout_seconds))
        return list(self._call(wait_seconds=self._timeout_seconds, get=request).values)

    def multi_set(self, keys: list[str], values: list[bytes | str]) -> None:
        self._call(set=pb.StoreSet(keys=self._keys(keys), values=[_bytes(v) for v in values]))

    def has_extended_api(self) -> bool:
        return True

    def num_keys(self) -> int:
        """Return the number of keys of the whole group, whatever the prefix."""
        return self._call(count=pb.StoreCount()).number

    def set_timeout(self, timeout: timedelta) -> None:
        self._timeout_seconds = timeout.total_seconds()

    @property
    def timeout(self) -> timedelta:
        return timedelta(seconds=self._timeout_seconds)

    def clone(self) -> RendezvousStore:
        return self

    def _keys(self, keys: list[str]) -> list[str]:
        return [self._prefix + key for key in keys]

    def _call(self, *, wait_seconds: float = 0.0, **operation: Any) -> pb.CallStoreResponse:
        request = pb.CallStoreRequest(credential=self._credential, **operation)
        try:
            return self._stub.CallStore(request, timeout=wait_seconds + _SLACK_SECONDS)
        except grpc.RpcError as error:
            typed = error_from_rpc(error)
            raise dist.DistStoreError(f"rendezvous store: {typed}") from typed


def _bytes(value: bytes | str) -> bytes:
    return value if isinstance(value, bytes) else value.encode("latin-1")


def _duration(seconds: float) -> Duration:
    duration = Duration()
    duration.FromTimedelta(timedelta(seconds=seconds))
    return duration
