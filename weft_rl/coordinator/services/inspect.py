"""InspectService: the pool as it is now, read from the last durable state; decides nothing."""

# ruff: noqa: N802 (methods are named as in the proto)
from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, Final

import grpc
from google.protobuf.message import Message

from weft_rl.contract.errors import NotFoundError
from weft_rl.contract.names import BASE_POLICY, check_name
from weft_rl.coordinator.decisions.state.pool import PoolState, unknown_policy
from weft_rl.coordinator.decisions.state.transfer import Transfer
from weft_rl.coordinator.decisions.step import unknown_transfer
from weft_rl.coordinator.messages.pages import (
    PAGE_BYTES,
    EntryPage,
    SharedVectors,
    check_request,
    cut,
    each,
    entry_of,
    invalid_token,
    number_of,
)
from weft_rl.coordinator.messages.wire import (
    policy_to_proto,
    pool_to_proto,
    replica_to_proto,
    route_messages,
    transfer_from_record,
    transfer_to_proto,
    version_record_to_proto,
)
from weft_rl.coordinator.runtime.driver import Driver
from weft_rl.coordinator.runtime.watchers import Feed
from weft_rl.rpc.codec import POLICY_VERSION, vector_to_proto
from weft_rl.rpc.inbound import on_call_end
from weft_rl.rpc.security.credentials import UNUSED_FILES
from weft_rl.v1 import inspect_pb2, inspect_pb2_grpc, publish_pb2, types_pb2

Context = grpc.aio.ServicerContext[Any, Any]

_DEFAULT_PAGE: Final = 100
_MAX_PAGE: Final = 1000
_BETWEEN_LISTS_SECONDS: Final = 0.05
_NO_VERSION_ABOVE: Final = 2**62
# Bound of the policies, and of the transfers, in GetPool.
_PART_BYTES: Final = 128 * 1024
# Bound of each version vector in GetPool.
_MOST_ADAPTERS: Final = 1024
# Number of readers' revisions whose messages are kept.
_KEPT_LISTS: Final = 8


class PoolLists:
    """The pool's lists, in messages, from the last durable state; on any thread.

    Args:
        target: Returns HOST:PORT that the coordinator listens on.
    """

    def __init__(self, driver: Driver, feed: Feed, target: Callable[[], str]) -> None:
        self._driver, self._feed, self._target = driver, feed, target
        self.by_name: dict[str, Callable[[Any], Message]] = {
            "pool": self.get_pool,
            "replicas": self.list_replicas,
            "policies": self.list_policies,
            "transfers": self.list_transfers,
            "events": self.list_events,
        }
        """The methods, by what each lists."""

    def get_pool(self, request: inspect_pb2.GetPoolRequest) -> inspect_pb2.GetPoolResponse:
        """Answer GetPool."""
        check_request(request)
        state = self._driver.state
        last = next(reversed([*state.history.values()]), None)
        vectors = SharedVectors(_MOST_ADAPTERS) if request.share_version_vectors else None
        size = request.page_size
        replicas = self._replicas(state, sorted(state.replicas), size, vectors, _MOST_ADAPTERS)
        policies = self._policies(state, _policy_names(state), size, _PART_BYTES)
        under_way = self._transfers(state, [*state.transfers.values()], size, _PART_BYTES)
        known = inspect_pb2.GetPoolResponse(
            version_vector=(
                vector_to_proto(state.vector, _MOST_ADAPTERS) if state.fingerprint else None
            ),
            replicas=replicas.entries,
            policies=policies.entries,
            active_transfers=under_way.entries,
            last_transfer=self._shown(state, last) if last else None,
            version_vectors=vectors.messages if vectors else (),
            next_replica_page_token=replicas.last or "",
            next_policy_page_token=policies.last or "",
            next_transfer_page_token=under_way.last.transfer_id if under_way.last else "",
            num_policies=len(state.policies),
            listen=self._target(),
        )
        now, unwritten_reason = self._driver.now(), self._driver.unwritten_reason
        facts = pool_to_proto(state, now, time.time(), UNUSED_FILES.list(), unwritten_reason)
        known.MergeFrom(facts)
        return known

    def list_replicas(
        self, request: inspect_pb2.ListReplicasRequest
    ) -> inspect_pb2.ListReplicasResponse:
        """Answer ListReplicas."""
        check_request(request)
        state = self._driver.state
        names = sorted(state.replicas)
        if request.replica_ids:
            wanted = set(request.replica_ids)
            names = [name for name in names if name in wanted]
        vectors = SharedVectors() if request.share_version_vectors else None
        names = [name for name in names if name > request.page_token]
        page = self._replicas(state, names, request.page_size, vectors)
        return inspect_pb2.ListReplicasResponse(
            replicas=page.entries,
            next_page_token=page.last or "",
            version_vectors=vectors.messages if vectors else (),
        )

    def list_policies(
        self, request: inspect_pb2.ListPoliciesRequest
    ) -> inspect_pb2.ListPoliciesResponse:
        """Answer ListPolicies."""
        check_request(request)
        state = self._driver.state
        names = _policy_names(state)
        if request.page_token:
            names = [name for name in names if _place(name) > _place(request.page_token)]
        page = self._policies(state, names, request.page_size)
        return inspect_pb2.ListPoliciesResponse(
            policies=page.entries, next_page_token=page.last or ""
        )

    def list_transfers(
        self, request: inspect_pb2.ListTransfersRequest
    ) -> inspect_pb2.ListTransfersResponse:
        """Answer ListTransfers."""
        check_request(request)
        state = self._driver.state
        transfers = [*state.transfers.values(), *reversed([*state.history.values()])]
        if request.page_token:
            names = [transfer.transfer_id for transfer in transfers]
            if request.page_token not in names:
                raise invalid_token()
            transfers = transfers[names.index(request.page_token) + 1 :]
        page = self._transfers(state, transfers, request.page_size)
        return inspect_pb2.ListTransfersResponse(
            transfers=page.entries,
            next_page_token=page.last.transfer_id if page.last else "",
        )

    def list_events(self, request: inspect_pb2.ListEventsRequest) -> inspect_pb2.ListEventsResponse:
        """Answer ListEvents."""
        check_request(request)
        past = self._feed.past(number_of(request.page_token))
        page = cut(past, lambda kept: kept, page_size=request.page_size)
        return inspect_pb2.ListEventsResponse(
            events=page.entries,
            next_page_token=str(page.last.revision) if page.last else "",
            kept_since=self._feed.kept_since,
        )

    def transfer(self, state: PoolState, transfer: Transfer) -> publish_pb2.Transfer:
        """Return the message of one transfer."""
        verified = self._driver.groups.num_verified(transfer.group_id, transfer.transfer_id)
        return transfer_to_proto(transfer, state, self._driver.now(), verified)

    def _replicas(
        self,
        state: PoolState,
        names: Sequence[str],
        page_size: int,
        vectors: SharedVectors | None,
        most: int | None = None,
    ) -> EntryPage[str, inspect_pb2.Replica]:
        now = self._driver.now()

        def make(name: str) -> inspect_pb2.Replica:
            return entry_of(
                state.replicas[name],
                lambda replica: replica_to_proto(state, replica, now, vectors, most),
                lambda _, why: inspect_pb2.Replica(replica_id=name, state_reason=why),
            )

        return cut(names, make, page_size=page_size, vectors=vectors)

    def _policies(
        self, state: PoolState, names: Sequence[str], page_size: int, max_bytes: int = PAGE_BYTES
    ) -> EntryPage[str, inspect_pb2.Policy]:
        now = self._driver.now()

        def make(name: str) -> inspect_pb2.Policy:
            return entry_of(
                state.policies[name],
                lambda policy: policy_to_proto(state, policy, now),
                lambda _, why: inspect_pb2.Policy(policy=name),
            )

        return cut(names, make, page_size=page_size, max_bytes=max_bytes)

    def _transfers(
        self,
        state: PoolState,
        transfers: Sequence[Transfer],
        page_size: int,
        max_bytes: int = PAGE_BYTES,
    ) -> EntryPage[Transfer, publish_pb2.Transfer]:
        def make(transfer: Transfer) -> publish_pb2.Transfer:
            return self._shown(state, transfer)

        return cut(transfers, make, page_size=page_size, max_bytes=max_bytes)

    def _shown(self, state: PoolState, transfer: Transfer) -> publish_pb2.Transfer:
        return entry_of(
            transfer,
            lambda transfer: self.transfer(state, transfer),
            lambda transfer, why: publish_pb2.Transfer(
                transfer_id=transfer.transfer_id,
                failure=types_pb2.Failure(reason="INTERNAL", message=why),
            ),
        )


def _listed(make: Callable[[PoolLists, Any], Message]) -> Any:
    async def method(self: InspectServicer, request: Any, context: Context) -> Message:
        return make(self.lists, request)

    return method


class InspectServicer(inspect_pb2_grpc.InspectServiceServicer):
    """Read-only service about the pool.

    Args:
        target: Returns HOST:PORT that the coordinator listens on.
    """

    def __init__(self, driver: Driver, feed: Feed, target: Callable[[], str] = str) -> None:
        self.lists = PoolLists(driver, feed, target)
        self._driver = driver
        self._feed = feed
        self._restart_over_at = driver.state.restart_over_at
        self._routes: dict[tuple[int, int], list[inspect_pb2.WatchRoutesResponse]] = {}
        self._routes_of = -1

    GetPool = _listed(PoolLists.get_pool)
    ListReplicas = _listed(PoolLists.list_replicas)
    ListPolicies = _listed(PoolLists.list_policies)
    ListTransfers = _listed(PoolLists.list_transfers)
    ListEvents = _listed(PoolLists.list_events)

    async def ListVersions(
        self, request: inspect_pb2.ListVersionsRequest, context: Context
    ) -> inspect_pb2.ListVersionsResponse:
        state = self._driver.state
        if request.policy not in state.policies and request.policy not in state.forgotten:
            raise unknown_policy(state, request.policy)
        check_request(request)
        token = number_of(request.page_token)
        before = _NO_VERSION_ABOVE if token is None else min(_NO_VERSION_ABOVE, token)
        limit = min(request.page_size or _DEFAULT_PAGE, _MAX_PAGE)
        await self._driver.flush()
        records = await self._driver.read(
            lambda catalog: catalog.list_versions(request.policy, before, limit + 1)
        )
        state = self._driver.state
        more = len(records) > limit
        records = records[:limit]
        return inspect_pb2.ListVersionsResponse(
            versions=each(
                records,
                lambda record: version_record_to_proto(record, state),
                lambda record, _: inspect_pb2.Version(
                    version=POLICY_VERSION.encode(record.version)
                ),
            ),
            next_page_token=str(records[-1].version.version) if more else "",
        )

    async def GetTransfer(
        self, request: inspect_pb2.GetTransferRequest, context: Context
    ) -> inspect_pb2.GetTransferResponse:
        state = self._driver.state
        transfer = state.transfers.get(request.transfer_id) or state.history.get(
            request.transfer_id
        )
        if transfer is not None:
            return inspect_pb2.GetTransferResponse(transfer=self.lists.transfer(state, transfer))
        record = await self._driver.read(lambda catalog: catalog.find_transfer(request.transfer_id))
        if record is None:
            raise unknown_transfer(request.transfer_id)
        message = transfer_from_record(record, self._driver.state)
        return inspect_pb2.GetTransferResponse(transfer=message)

    async def WatchEvents(
        self, request: inspect_pb2.WatchEventsRequest, context: Context
    ) -> AsyncIterator[inspect_pb2.WatchEventsResponse]:
        watcher = self._feed.watch()
        on_call_end(context, lambda: self._feed.unwatch(watcher))
        # Headers now: a reader knows that it misses nothing from here.
        await context.send_initial_metadata(())
        while True:
            yield await watcher.next()

    async def WatchRoutes(
        self, request: inspect_pb2.WatchRoutesRequest, context: Context
    ) -> AsyncIterator[inspect_pb2.WatchRoutesResponse]:
        feed, revision = self._driver.routes, -1
        await feed.wait(self._restart_over_at - self._driver.now())
        while True:
            before, revision = revision, await feed.newer(revision)
            for message in self._route_messages(before, revision):
                yield message
            await feed.wait(_BETWEEN_LISTS_SECONDS)

    async def DigestTensors(
        self, request: inspect_pb2.DigestTensorsRequest, context: Context
    ) -> AsyncIterator[inspect_pb2.DigestTensorsResponse]:
        check_name(request.version.policy, "policy")
        replica = self._driver.state.replicas.get(request.replica_id)
        if replica is None:
            raise NotFoundError(
                f"no replica {request.replica_id[:80]!r} is in the pool", reason="REPLICA_UNKNOWN"
            )
        version = POLICY_VERSION.decode(request.version)
        chunks = self._driver.replicas.digests(request.replica_id, replica.address, version)
        async with contextlib.aclosing(chunks):
            async for chunk in chunks:
                yield inspect_pb2.DigestTensorsResponse(chunk=chunk)

    def _route_messages(self, before: int, revision: int) -> list[inspect_pb2.WatchRoutesResponse]:
        """Return the messages for readers who know ``before``; made once for all of them."""
        key = before, revision
        if key not in self._routes:
            if len(self._routes) >= _KEPT_LISTS or revision != self._routes_of:
                self._routes, self._routes_of = {}, revision
            changed = self._driver.routes.changed_since(before)
            self._routes[key] = route_messages(self._driver.state, changed, before, revision)
        return self._routes[key]


def _policy_names(state: PoolState) -> list[str]:
    return sorted(state.policies, key=_place)


def _place(policy: str) -> tuple[bool, str]:
    """Return the sort key of a policy: the base first, then by name."""
    return policy != BASE_POLICY, policy
