"""What is listed of a large pool: no message of a MiB, nothing left out."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import pytest

from tests.unit.coordinator.messages.large_pool import large_pool
from weft_rl.contract.names import PolicyVersion, VersionVector
from weft_rl.contract.replica_report import OutOfService
from weft_rl.coordinator.decisions.state.pool import PoolState
from weft_rl.coordinator.messages.pages import PAGE_BYTES, SharedVectors, cut
from weft_rl.coordinator.messages.wire import route_messages
from weft_rl.coordinator.runtime.driver import Driver
from weft_rl.coordinator.runtime.live_groups import LiveGroups
from weft_rl.coordinator.runtime.watchers import Feed, RouteFeed
from weft_rl.coordinator.services.inspect import InspectServicer
from weft_rl.rpc.codec import vector_from_proto
from weft_rl.rpc.pool_listing import RouteList, get_pool
from weft_rl.v1 import inspect_pb2 as pb

MIB = 2**20


class _Coordinator:
    """Of a driver, what listings ask for; of a stub, the calls."""

    unwritten_reason = ""

    def __init__(self, state: PoolState) -> None:
        self.state, self.routes, self.groups = state, RouteFeed(), LiveGroups(lambda event: None)
        self._inspect = InspectServicer(cast(Driver, self), Feed())
        self.largest = 0

    def now(self) -> float:
        return 101.0

    def __getattr__(self, method: str) -> Any:
        def call(request: Any, timeout: float) -> Any:
            answering = getattr(self._inspect, method)(request, None)
            with pytest.raises(StopIteration) as returned:
                answering.send(None)
            self.largest = max(self.largest, returned.value.value.ByteSize())
            return returned.value.value

        return call


def _unlike(state: PoolState) -> PoolState:
    """No two replicas serve the same."""
    replicas = {
        name: replace(r, vector=r.vector.with_adapter(PolicyVersion("adapter-0000", 2000 + i)))
        for i, (name, r) in enumerate(state.replicas.items())
    }
    return replace(state, replicas=replicas)


@pytest.mark.parametrize("unlike", [False, True])
def test_the_whole_pool_is_listed_in_messages_below_a_mib(unlike: bool) -> None:
    state = large_pool(1000, 100)
    state = _unlike(state) if unlike else state
    order = OutOfService("r" * 1000)
    state = replace(state, out_of_service={f"elsewhere-{i:04d}": order for i in range(2000)})
    coordinator = _Coordinator(state)
    pool = get_pool(cast(Any, coordinator), 60)
    assert [r.replica_id for r in pool.replicas] == sorted(state.replicas)
    for replica in pool.replicas[::100]:
        expected = state.replicas[replica.replica_id].vector
        assert vector_from_proto(replica.version_vector) == expected
    assert {policy.policy for policy in pool.policies} == set(state.policies)
    assert pool.policies[0].policy == "base"
    assert [(c.state, c.num_replicas) for c in pool.replica_counts] == [
        (pb.REPLICA_STATE_READY, 1000)
    ]
    (orders,) = pool.problems
    assert orders.message.startswith("elsewhere-0000, elsewhere-0001, elsewhere-0002 and 1997 more")
    assert coordinator.largest < MIB


def test_who_does_not_share_vectors_gets_less_in_a_message_and_the_rest_after_it() -> None:
    coordinator = _Coordinator(large_pool(400, 100))
    first = coordinator.GetPool(pb.GetPoolRequest(), 1.0)
    names, token = [r.replica_id for r in first.replicas], first.next_replica_page_token
    assert token
    while token:
        page = coordinator.ListReplicas(pb.ListReplicasRequest(page_token=token), 1.0)
        names += [r.replica_id for r in page.replicas]
        assert all(r.version_vector.base == 3 for r in page.replicas)
        token = page.next_page_token
    assert names == sorted(coordinator.state.replicas)
    assert coordinator.largest < MIB


def test_a_page_has_an_entry_however_large() -> None:
    def make(size: int) -> pb.Replica:
        return pb.Replica(state_reason="x" * size)

    assert len(cut([PAGE_BYTES * 2, 1], make).entries) == 1
    assert len(cut([1, 1, 1], make, page_size=2).entries) == 2
    assert cut([1, 1], make, page_size=2).last is None
    assert cut(list[int](), make).entries == []


def test_equal_vectors_are_one() -> None:
    vectors = SharedVectors()
    one = VersionVector(1).with_adapter(PolicyVersion("a", 1)).with_adapter(PolicyVersion("b", 1))
    two = VersionVector(1).with_adapter(PolicyVersion("b", 1)).with_adapter(PolicyVersion("a", 1))
    assert [vectors.index(v) for v in (one, two, VersionVector(1), one)] == [0, 0, 1, 0]
    assert len(vectors.messages) == 2


def _follow(known: RouteList, messages: list[pb.WatchRoutesResponse]) -> pb.WatchRoutesResponse:
    lists = [known.follow(pb.WatchRoutesResponse.FromString(m.SerializeToString()))
             for m in messages]  # fmt: skip
    assert [routes is None for routes in lists] == [m.more for m in messages]
    assert max(m.ByteSize() for m in messages) < MIB
    last = lists[-1]
    assert last is not None
    return last


@pytest.mark.parametrize("unlike", [False, True])
def test_routes_are_told_whole_at_first_and_then_as_changes(unlike: bool) -> None:
    state = large_pool(1000, 100)
    state = _unlike(state) if unlike else state
    known = RouteList()
    whole = route_messages(state, None, -1, 7)
    assert whole[0].whole
    assert (len(whole) > 1) is unlike
    first = _follow(known, whole)
    assert [r.replica_id for r in first.routes] == sorted(state.replicas)
    gone, changed = "replica-0001", "replica-0002"
    vector = VersionVector(4)
    replicas = {name: r for name, r in state.replicas.items() if name != gone}
    replicas[changed] = replace(replicas[changed], vector=vector)
    state = replace(state, replicas=replicas)
    (change,) = route_messages(state, [changed, gone], 7, 9)
    assert ([r.replica_id for r in change.routes], list(change.removed_replica_ids)) == (
        [changed],
        [gone],
    )
    assert (change.previous_revision, change.revision, change.whole) == (7, 9, False)
    assert change.ByteSize() < 1000
    second = _follow(known, [change])
    assert second.revision == 9
    assert [r.replica_id for r in second.routes] == sorted(replicas)
    served = {r.replica_id: vector_from_proto(r.version_vector) for r in second.routes}
    assert served[changed] == vector
    assert served["replica-0003"] == state.replicas["replica-0003"].vector


def test_many_that_go_at_once_are_told_in_parts() -> None:
    state = large_pool(0, 0)
    names = [f"replica-{i:050d}" for i in range(9000)]
    parts = route_messages(state, names, 1, 2)
    assert sum(len(part.removed_replica_ids) for part in parts) == 9000
    assert [part.more for part in parts] == [True, True, False]
    assert not _follow(RouteList(), parts).routes


def test_many_adapters_make_no_larger_message_and_are_listed_whole_all_the_same() -> None:
    coordinator = _Coordinator(_unlike(large_pool(3, 5000)))
    first = coordinator.GetPool(pb.GetPoolRequest(share_version_vectors=True), 1.0)
    assert len(first.version_vector.adapters) == 1024
    assert first.version_vector.num_more_adapters == 5000 - 1024
    assert first.num_policies == 5001
    assert first.ByteSize() < MIB // 2
    glance = get_pool(cast(Any, coordinator), 60, patience_seconds=0.0)
    assert glance.next_policy_page_token, "what has come by then"
    assert {len(r.version_vector.adapters) for r in glance.replicas} == {1024}
    whole = get_pool(cast(Any, coordinator), 60)
    assert vector_from_proto(whole.version_vector) == coordinator.state.vector
    assert not whole.version_vector.num_more_adapters
    for replica in whole.replicas:
        expected = coordinator.state.replicas[replica.replica_id].vector
        assert vector_from_proto(replica.version_vector) == expected
    assert len(whole.policies) == 5001
