"""RendezvousService: a group's store, its manifests, and a stream for each rank."""

# ruff: noqa: N802 (methods are named as in the proto)
from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from typing import Any, Final

import grpc

from weft_rl.contract.errors import InvalidRequestError, NotReadyError, WeftError
from weft_rl.coordinator.runtime.live_groups import LiveGroups, RankStream
from weft_rl.coordinator.runtime.manifests import LayoutCache
from weft_rl.rpc.bounds import check_revision
from weft_rl.rpc.codec import duration_from_proto
from weft_rl.rpc.inbound import on_call_end
from weft_rl.v1 import rendezvous_pb2, rendezvous_pb2_grpc

Context = grpc.aio.ServicerContext[Any, Any]

_log = logging.getLogger(__name__)

#: Longest wait for a key, whatever was asked.
MAX_WAIT_SECONDS: Final = 3_600.0
#: A stream must say hello in this time.
_HELLO_SECONDS: Final = 10.0


class RendezvousServicer(rendezvous_pb2_grpc.RendezvousServiceServicer):
    """Meeting point of the members of side groups, each authorised by its rank's token."""

    def __init__(self, groups: LiveGroups, manifests: LayoutCache) -> None:
        self._groups = groups
        self._manifests = manifests

    async def CallStore(
        self, request: rendezvous_pb2.CallStoreRequest, context: Context
    ) -> rendezvous_pb2.CallStoreResponse:
        store = self._groups.store(request.credential.group_id, request.credential.token)
        answer = rendezvous_pb2.CallStoreResponse
        match request.WhichOneof("operation"):
            case "set":
                store.set(request.set.keys, request.set.values)
                return answer()
            case "get":
                return answer(values=await store.get(request.get.keys, _timeout(request.get)))
            case "wait":
                await store.wait(request.wait.keys, _timeout(request.wait))
                return answer()
            case "add":
                return answer(number=store.add(request.add.key, request.add.amount))
            case "check":
                return answer(number=int(store.check(request.check.keys)))
            case "delete":
                return answer(number=store.delete(request.delete.keys))
            case "compare_set":
                wanted = request.compare_set
                value = store.compare_set(wanted.key, wanted.expected, wanted.desired)
                return answer(values=[value])
            case "append":
                if len(request.append.keys) != 1 or len(request.append.values) != 1:
                    raise InvalidRequestError("append takes one key, one value", reason="PROTOCOL")
                store.append(request.append.keys[0], request.append.values[0])
                return answer()
            case "count":
                return answer(number=len(store))
            case _:
                raise InvalidRequestError("no store operation is set", reason="PROTOCOL")

    async def GetManifest(
        self, request: rendezvous_pb2.GetManifestRequest, context: Context
    ) -> AsyncIterator[rendezvous_pb2.GetManifestResponse]:
        credential = request.credential
        layout = self._groups.layout(credential.group_id, credential.token, request.layout_digest)
        if layout is None:
            raise NotReadyError(
                f"no transfer of this group has the layout {request.layout_digest.hex()[:12]}",
                reason="MANIFEST_UNKNOWN",
            )
        for chunk in await self._manifests.chunks(layout):
            yield rendezvous_pb2.GetManifestResponse(chunk=chunk)

    async def Attend(
        self,
        request_iterator: AsyncIterator[rendezvous_pb2.AttendRequest],
        context: Context,
    ) -> AsyncIterator[rendezvous_pb2.AttendResponse]:
        hello = await _hello(request_iterator)
        credential = hello.credential
        check_revision(hello.protocol_revision, f"rank {hello.rank}")
        link = self._groups.attend(
            credential.group_id, credential.token, hello.rank, hello.num_buckets_in_flight
        )
        on_call_end(context, lambda: self._groups.leave(link, "its stream broke"))
        reader = asyncio.get_running_loop().create_task(self._read(link, request_iterator))
        on_call_end(context, reader.cancel)
        while (message := await link.next()) is not None:
            yield message

    async def _read(
        self, link: RankStream, requests: AsyncIterator[rendezvous_pb2.AttendRequest]
    ) -> None:
        """Handle a rank's messages until it ends its stream, breaks off or breaks the protocol."""
        try:
            async for message in requests:
                self._groups.receive(link, message)
        except WeftError as error:
            self._groups.leave(link, error.message)
            link.end(error)
        except Exception as error:  # noqa: BLE001 (a rank that nobody hears would only stall)
            # gRPC refuses to read a call that was ended from this side.
            if link.has_ended or isinstance(error, grpc.aio.AbortError):
                self._groups.leave(link, "its stream was ended")
                return
            _log.warning("rank %d sent a message that cannot be taken", link.rank, exc_info=error)
            self._groups.leave(link, f"its stream failed: {error!r}")
            link.end(WeftError("the coordinator failed on this stream; read its log"))
        else:
            self._groups.leave(link, "it closed its stream")
            link.end(None)


async def _hello(
    requests: AsyncIterator[rendezvous_pb2.AttendRequest],
) -> rendezvous_pb2.Hello:
    try:
        async with asyncio.timeout(_HELLO_SECONDS):
            first = await anext(requests)
    except (StopAsyncIteration, TimeoutError):
        raise InvalidRequestError("a stream begins with hello", reason="PROTOCOL") from None
    if first.WhichOneof("message") != "hello":
        raise InvalidRequestError("a stream begins with hello", reason="PROTOCOL")
    return first.hello


def _timeout(keys: rendezvous_pb2.StoreKeys) -> float:
    return min(duration_from_proto(keys.timeout), MAX_WAIT_SECONDS)
