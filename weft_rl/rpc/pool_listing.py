"""Whole listings, put together from the messages that they come in."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

from weft_rl.contract.errors import TransferTimeoutError
from weft_rl.v1 import inspect_pb2 as pb
from weft_rl.v1 import types_pb2

if TYPE_CHECKING:
    from weft_rl.v1.inspect_pb2_grpc import InspectServiceStub


def get_pool(
    stub: InspectServiceStub, timeout_seconds: float, patience_seconds: float | None = None
) -> pb.GetPoolResponse:
    """Return the pool with all its replicas and policies, and its first transfers.

    Of a large pool it is not the state of one moment. Each replica has its version vector.

    Args:
        patience_seconds: Time after which no further page is asked for. Then the tokens of what
            is missing stay in the message, and vectors may list some adapters only. None asks
            for all.

    Raises:
        TransferTimeoutError: There was no time for all of it.
        grpc.RpcError: The coordinator does not answer.
    """
    began = time.monotonic()

    def left() -> float:
        seconds = began + timeout_seconds - time.monotonic()
        if seconds <= 0:
            raise TransferTimeoutError(
                f"the coordinator did not list the whole pool in {timeout_seconds:.0f} s"
            )
        return seconds

    def goes_on() -> bool:
        return patience_seconds is None or time.monotonic() - began < patience_seconds

    pool = stub.GetPool(pb.GetPoolRequest(share_version_vectors=True), timeout=left())
    is_cut = pool.version_vector.num_more_adapters > 0 or any(
        vector.num_more_adapters for vector in pool.version_vectors
    )
    has_all = True
    if is_cut and patience_seconds is None:  # told again, whole
        pool.ClearField("replicas")
        pool.ClearField("version_vectors")
        has_all = False
    _put_vectors(pool)
    while (pool.next_replica_page_token or not has_all) and goes_on():
        has_all = True
        replicas = stub.ListReplicas(
            pb.ListReplicasRequest(
                page_token=pool.next_replica_page_token if pool.replicas else "",
                share_version_vectors=True,
            ),
            timeout=left(),
        )
        _put_vectors(replicas)
        pool.replicas.extend(replicas.replicas)
        pool.next_replica_page_token = replicas.next_page_token
    while pool.next_policy_page_token and goes_on():
        policies = stub.ListPolicies(
            pb.ListPoliciesRequest(page_token=pool.next_policy_page_token), timeout=left()
        )
        pool.policies.extend(policies.policies)
        pool.next_policy_page_token = policies.next_page_token
    if pool.version_vector.num_more_adapters and not pool.next_policy_page_token:
        _complete(pool)
    return pool


def _complete(pool: pb.GetPoolResponse) -> None:
    """Complete the pool's vector with every adapter, from the policies, which are all there."""
    served = [
        types_pb2.AdapterVersions(
            policy=policy.policy, versions=policy.versions, alias=policy.served_version
        )
        for policy in pool.policies
        if policy.kind == types_pb2.POLICY_KIND_ADAPTER and policy.served_version
    ]
    pool.version_vector.ClearField("adapters")
    pool.version_vector.adapters.extend(served)
    pool.version_vector.num_more_adapters = 0


def list_policies(stub: InspectServiceStub, timeout_seconds: float) -> Iterator[pb.Policy]:
    """Yield every policy, "base" first.

    Args:
        timeout_seconds: For each page.

    Raises:
        grpc.RpcError: The coordinator does not answer.
    """
    token = ""
    while True:
        page = stub.ListPolicies(pb.ListPoliciesRequest(page_token=token), timeout=timeout_seconds)
        yield from page.policies
        token = page.next_page_token
        if not token:
            return


def _put_vectors(message: pb.GetPoolResponse | pb.ListReplicasResponse) -> None:
    for replica in message.replicas:
        replica.version_vector.CopyFrom(message.version_vectors[replica.version_vector_index])
        replica.ClearField("version_vector_index")
    message.ClearField("version_vectors")


class RouteList:
    """Whole list of routes, kept up to date by the messages of WatchRoutes."""

    def __init__(self) -> None:
        self._routes: dict[str, pb.Route] = {}

    def follow(self, message: pb.WatchRoutesResponse) -> pb.WatchRoutesResponse | None:
        """Apply a message; return the list, or None while there is more to come.

        Each route of the list has its version vector.
        """
        if message.whole:
            self._routes.clear()
        for name in message.removed_replica_ids:
            self._routes.pop(name, None)
        for route in message.routes:
            route.version_vector.CopyFrom(message.version_vectors[route.version_vector_index])
            route.ClearField("version_vector_index")
            self._routes[route.replica_id] = route
        if message.more:
            return None
        return pb.WatchRoutesResponse(
            routes=[route for _, route in sorted(self._routes.items())],
            coordinator_generation=message.coordinator_generation,
            revision=message.revision,
            over_another_base=message.over_another_base,
        )
