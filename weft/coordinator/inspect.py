"""InspectService: what is known now. Reads the last durable state; decides nothing."""

# ruff: noqa: N802 (methods are named as in the proto)
from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from typing import Any, Final

import grpc

from weft import __version__
from weft.contract.errors import InvalidRequestError, NotFoundError
from weft.contract.names import BASE_POLICY
from weft.coordinator.catalog import Catalog
from weft.coordinator.driver import Driver
from weft.coordinator.feed import Feed
from weft.coordinator.listing import each
from weft.coordinator.routes import routes
from weft.coordinator.state import Policy
from weft.coordinator.step import unknown_transfer
from weft.coordinator.transfer import Transfer
from weft.coordinator.wire import (
    policy_to_proto,
    replica_to_proto,
    route_to_proto,
    transfer_from_record,
    transfer_to_proto,
    version_record_to_proto,
    withdrawals_to_proto,
)
from weft.rpc.codec import vector_to_proto, version_to_proto
from weft.rpc.interceptor import on_call_end
from weft.v1 import inspect_pb2, inspect_pb2_grpc, publish_pb2

Context = grpc.aio.ServicerContext[Any, Any]

_DEFAULT_PAGE: Final = 100
_MAX_PAGE: Final = 1000
_BETWEEN_LISTS_SECONDS: Final = 0.05
_NO_VERSION_ABOVE: Final = 2**62


class InspectServicer(inspect_pb2_grpc.InspectServiceServicer):
    """Read-only."""

    def __init__(self, driver: Driver, catalog: Catalog, feed: Feed) -> None:
        self._driver = driver
        self._catalog = catalog
        self._feed = feed
        self._settled_at = driver.state.settled_at
        self._routes = inspect_pb2.WatchRoutesResponse(revision=-1)

    async def GetPool(
        self, request: inspect_pb2.GetPoolRequest, context: Context
    ) -> inspect_pb2.GetPoolResponse:
        """Source: protos/weft/v1/inspect.proto."""
        state = self._driver.state
        last = next(reversed([*state.history.values()]), None)
        return inspect_pb2.GetPoolResponse(
            base_fingerprint=state.fingerprint,
            version_vector=vector_to_proto(state.vector),
            replicas=self._replicas(),
            policies=self._policies(),
            active_transfers=self._transfers(state.transfers.values()),
            last_transfer=next(iter(self._transfers([last] if last else [])), None),
            weft_version=__version__,
            coordinator_generation=state.generation,
            withdrawals=withdrawals_to_proto(state),
        )

    async def ListReplicas(
        self, request: inspect_pb2.ListReplicasRequest, context: Context
    ) -> inspect_pb2.ListReplicasResponse:
        """Source: protos/weft/v1/inspect.proto."""
        return inspect_pb2.ListReplicasResponse(replicas=self._replicas())

    async def ListPolicies(
        self, request: inspect_pb2.ListPoliciesRequest, context: Context
    ) -> inspect_pb2.ListPoliciesResponse:
        """Source: protos/weft/v1/inspect.proto."""
        return inspect_pb2.ListPoliciesResponse(policies=self._policies())

    async def ListVersions(
        self, request: inspect_pb2.ListVersionsRequest, context: Context
    ) -> inspect_pb2.ListVersionsResponse:
        """Source: protos/weft/v1/inspect.proto."""
        if request.policy not in self._driver.state.policies:
            raise NotFoundError(
                f"no policy {request.policy[:80]!r} is known", reason="POLICY_UNKNOWN"
            )
        before = _NO_VERSION_ABOVE
        if request.page_token:
            if not (request.page_token.isascii() and request.page_token.isdigit()):
                raise InvalidRequestError(
                    "page_token is not from a response", reason="INVALID_PAGE"
                )
            before = min(before, int(request.page_token))
        if request.page_size < 0:
            raise InvalidRequestError("page_size is negative", reason="INVALID_PAGE")
        limit = min(request.page_size or _DEFAULT_PAGE, _MAX_PAGE)
        await self._driver.flush()
        records = self._catalog.list_versions(request.policy, before, limit + 1)
        more = len(records) > limit
        records = records[:limit]
        return inspect_pb2.ListVersionsResponse(
            versions=each(
                records,
                version_record_to_proto,
                lambda record, _: inspect_pb2.Version(version=version_to_proto(record.version)),
            ),
            next_page_token=str(records[-1].version.version) if more else "",
        )

    async def ListTransfers(
        self, request: inspect_pb2.ListTransfersRequest, context: Context
    ) -> inspect_pb2.ListTransfersResponse:
        """Source: protos/weft/v1/inspect.proto."""
        state = self._driver.state
        transfers = [*state.transfers.values(), *reversed([*state.history.values()])]
        return inspect_pb2.ListTransfersResponse(transfers=self._transfers(transfers))

    async def GetTransfer(
        self, request: inspect_pb2.GetTransferRequest, context: Context
    ) -> inspect_pb2.GetTransferResponse:
        """Source: protos/weft/v1/inspect.proto."""
        state = self._driver.state
        transfer = state.transfers.get(request.transfer_id) or state.history.get(
            request.transfer_id
        )
        if transfer is not None:
            return inspect_pb2.GetTransferResponse(transfer=self._transfer(transfer))
        record = self._catalog.find_transfer(request.transfer_id)
        if record is None:
            raise unknown_transfer(request.transfer_id)
        return inspect_pb2.GetTransferResponse(transfer=transfer_from_record(record, state))

    async def WatchEvents(
        self, request: inspect_pb2.WatchEventsRequest, context: Context
    ) -> AsyncIterator[inspect_pb2.WatchEventsResponse]:
        """Source: protos/weft/v1/inspect.proto."""
        watcher = self._feed.watch()
        on_call_end(context, lambda: self._feed.unwatch(watcher))
        # Headers now: a reader knows that it misses nothing from here.
        await context.send_initial_metadata(())
        while True:
            yield await watcher.next()

    async def WatchRoutes(
        self, request: inspect_pb2.WatchRoutesRequest, context: Context
    ) -> AsyncIterator[inspect_pb2.WatchRoutesResponse]:
        """Source: protos/weft/v1/inspect.proto."""
        feed, revision = self._driver.routes, -1
        await feed.hold(self._settled_at - self._driver.now())
        while True:
            revision = await feed.newer(revision)
            yield self._route_list(revision)
            await feed.hold(_BETWEEN_LISTS_SECONDS)

    def _route_list(self, revision: int) -> inspect_pb2.WatchRoutesResponse:
        """The list of now, made once for all readers of a revision."""
        if self._routes.revision != revision:
            state = self._driver.state
            self._routes = inspect_pb2.WatchRoutesResponse(
                routes=each(routes(state), route_to_proto),
                coordinator_generation=state.generation,
                revision=revision,
            )
        return self._routes

    def _replicas(self) -> list[inspect_pb2.Replica]:
        state, now = self._driver.state, self._driver.now()
        replicas = [replica for _, replica in sorted(state.replicas.items())]
        return each(
            replicas,
            lambda replica: replica_to_proto(state, replica, now),
            lambda replica, why: inspect_pb2.Replica(
                replica_id=replica.replica_id, state_reason=why
            ),
        )

    def _policies(self) -> list[inspect_pb2.Policy]:
        def order(policy: Policy) -> tuple[bool, str]:
            return policy.name != BASE_POLICY, policy.name

        state, now = self._driver.state, self._driver.now()
        return each(
            sorted(state.policies.values(), key=order),
            lambda policy: policy_to_proto(state, policy, now),
            lambda policy, _: inspect_pb2.Policy(policy=policy.name),
        )

    def _transfers(self, transfers: Iterable[Transfer]) -> list[publish_pb2.Transfer]:
        return each(
            transfers,
            self._transfer,
            lambda transfer, why: publish_pb2.Transfer(
                transfer_id=transfer.transfer_id, failure_message=why
            ),
        )

    def _transfer(self, transfer: Transfer) -> publish_pb2.Transfer:
        driver = self._driver
        verified = driver.hub.num_verified(transfer.group_id, transfer.transfer_id)
        return transfer_to_proto(transfer, driver.state, driver.now(), verified)
