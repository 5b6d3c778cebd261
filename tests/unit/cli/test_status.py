"""What ``weft status`` shows, of pools of all sizes."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.duration_pb2 import Duration
from rich.console import Console

from weft_rl.cli import status
from weft_rl.cli.status import hop_text, render, sent_text, stale_draft, vector_text
from weft_rl.coordinator.decisions.state.values import ReplicaState
from weft_rl.v1 import inspect_pb2 as pb
from weft_rl.v1 import publish_pb2, registry_pb2, types_pb2


def vector(base: int, **adapters: int) -> types_pb2.VersionVector:
    return types_pb2.VersionVector(
        base=base,
        adapters=[
            types_pb2.AdapterVersions(policy=name, alias=v, versions=[v])
            for name, v in adapters.items()
        ],
    )


def replica(
    number: int, serves: types_pb2.VersionVector, model: str = "tiny", **differs: int
) -> pb.Replica:
    return pb.Replica(
        replica_id=f"replica-{number}",
        state=pb.REPLICA_STATE_READY,
        version_vector=serves,
        model_name=model,
        http_url=f"http://127.0.0.1:{40000 + number}",
        differences=[pb.VersionDifference(policy=p, version=v) for p, v in differs.items()],
    )


def shown(pool: pb.GetPoolResponse, width: int = 80) -> str:
    out = io.StringIO()
    Console(file=out, width=width).print(render(pool))
    return out.getvalue()


def test_a_usual_pool_fits_80_columns_without_breaking_a_word() -> None:
    served = vector(1, math=2)
    pool = pb.GetPoolResponse(
        version_vector=served,
        replicas=[replica(0, served), replica(1, vector(0), base=0, math=1)],
        policies=[pb.Policy(policy="math", served_version=2, last_version=2)],
    )
    text = shown(pool)
    assert max(map(len, text.splitlines())) <= 80
    assert "pool of tiny serves base@1  math@2 (2)" in text
    row = next(line for line in text.splitlines() if "replica-0" in line)
    assert "as the pool" in row
    assert "http://127.0.0.1:40000" in row
    other = next(line for line in text.splitlines() if "replica-1" in line)
    assert "base@0  math@1" in other


def test_what_replicas_run_is_shown_where_they_differ() -> None:
    pool = pb.GetPoolResponse(replicas=[replica(n, vector(0)) for n in range(2)])
    for each in pool.replicas:
        each.capabilities.weft_version, each.capabilities.engine_version = "0.1.0", "0.26.0"
    assert "Weft 0.1.0" not in shown(pool, 160)
    pool.replicas[1].capabilities.engine_version = "0.32.0"
    text = shown(pool, 160)
    assert "Weft 0.1.0, vLLM 0.26.0" in text
    assert "Weft 0.1.0, vLLM 0.32.0" in text
    assert "tiny" not in text.partition("replica-0")[2]


def test_an_empty_pool_says_what_starts_a_replica() -> None:
    for served in (None, vector(0)):  # bound to no base model yet, and once its replicas have left
        assert shown(pb.GetPoolResponse(version_vector=served, num_policies=1,
                                        policies=[pb.Policy(policy="base")])).splitlines() == [
            "pool serves nothing   0 of 0 replicas ready",
            "no replicas: `weft rollout -- MODEL` starts one",
        ]  # fmt: skip
    left = shown(pb.GetPoolResponse(version_vector=vector(3, math=2)), width=120)
    assert left.startswith("pool serves nothing   0 of 0 replicas ready; replicas that come serve ")
    assert "base@3  math@2" in left


@pytest.mark.parametrize(
    ("name", "fingerprint", "served"),
    [("nan", "f", "nothing yet"), ("base", "", "nothing yet"), ("base", "f", "base@0")],
)
def test_a_policy_whose_pushes_all_failed_serves_nothing(
    name: str, fingerprint: str, served: str
) -> None:
    """But for the base, of which replicas bring base@0."""
    kind = types_pb2.POLICY_KIND_BASE if name == "base" else types_pb2.POLICY_KIND_ADAPTER
    policy = pb.Policy(policy=name, kind=kind, last_version=1)
    text = shown(pb.GetPoolResponse(base_fingerprint=fingerprint, policies=[policy]))
    assert served in next(line for line in text.splitlines() if f"│ {name}" in line)
    assert ("@0" in text) is ("@0" in served)


def test_states_have_one_word_each_wherever_they_are_told() -> None:
    replicas = [replica(state, vector(0)) for state in ReplicaState]
    for one, state in zip(replicas, ReplicaState, strict=True):
        one.state = pb.ReplicaState.ValueType(state)
    text = shown(pb.GetPoolResponse(version_vector=vector(0), replicas=replicas), width=120)
    for name, number in pb.ReplicaState.items():
        if number:
            word = name.removeprefix("REPLICA_STATE_").replace("_", " ").lower()
            assert ReplicaState(number).word == word
            assert word in text
    page = Path(status.__file__).parents[1] / "coordinator/page/static/braid.js"
    assert 'stateWord = (state) => state.replaceAll("_", " ")' in page.read_text()


def test_a_replica_that_lacks_an_adapter_says_so() -> None:
    lacking = replica(0, vector(1), **dict.fromkeys("abcd", 0))
    lacking.num_more_differences = 5
    text = shown(pb.GetPoolResponse(version_vector=vector(1), replicas=[lacking]), 120)
    assert "no a  no b  no c  and 6 more" in text


def test_a_draft_that_no_push_updates_is_said_after_a_push() -> None:
    for base, is_said in ((0, False), (1, True)):
        drafts = replica(0, vector(base))
        drafts.capabilities.draft_method = "eagle3"
        drafts.report.engine.SetInParent()
        pool = pb.GetPoolResponse(version_vector=vector(base), replicas=[drafts])
        assert ("eagle3" in shown(pool)) is is_said


@pytest.mark.parametrize(
    ("version", "base", "said"),
    [(0, 0, ""), (3, 3, ""), (2, 3, "by mtp of base@2"), (0, 3, "of base@0"), (-1, 3, "no base")],
)
def test_a_draft_of_another_base_is_said(version: int, base: int, said: str) -> None:
    drafts = replica(0, vector(base))
    drafts.capabilities.draft_method, drafts.capabilities.draft_fingerprint = "mtp", "f" * 64
    drafts.report.engine.CopyFrom(registry_pb2.EngineReport(draft_version=version))
    text = stale_draft(drafts)
    assert bool(text) is bool(said)
    assert said in text


def test_replicas_of_several_names_show_them() -> None:
    pool = pb.GetPoolResponse(
        version_vector=vector(0),
        replicas=[replica(0, vector(0), "tiny"), replica(1, vector(0), "other")],
    )
    assert "other" in shown(pool)
    assert "pool serves" in shown(pool)


@pytest.mark.parametrize("width", [80, 120])
def test_many_policies_are_folded(width: int) -> None:
    names = [f"adapter-{i:03}" for i in range(300)]
    served = vector(4, **dict.fromkeys(names, 1))
    policies = [pb.Policy(policy=name, served_version=1, last_version=1) for name in names]
    policies[250].publish_again_version = 1
    policies.append(pb.Policy(policy="mistyped"))  # a lease was taken, nothing came
    pool = pb.GetPoolResponse(
        version_vector=served, replicas=[replica(0, served)], policies=policies
    )
    text = shown(pool, width)
    assert len(text.splitlines()) < 50
    assert "and 297 more" in text
    assert "and 280 more: --json lists all" in text
    assert "adapter-250" in text
    assert "mistyped" not in text


def test_a_vector_is_whole_where_no_bound_is_given() -> None:
    assert vector_text(vector(3, a=1, b=2)) == "base@3  a@1 (1)  b@2 (2)"
    assert vector_text(vector(3, a=1, b=2), most=1) == "base@3  a@1 (1)  and 1 more"
    assert vector_text(vector(3)) == "base@3"


def test_of_very_many_replicas_those_that_are_not_ready_come_first() -> None:
    served = vector(1)
    pool = pb.GetPoolResponse(
        version_vector=served, replicas=[replica(i, served) for i in range(300)]
    )
    pool.replicas[299].state = pb.REPLICA_STATE_PENDING_WEIGHTS
    text = shown(pool)
    assert "299 of 300 replicas ready" in text
    assert "replica-299" in text
    assert "replica-298" not in text
    assert "and 100 more: --json lists all" in text


def test_of_what_was_not_listed_in_time_the_number_is_shown() -> None:
    served = vector(1, a=1, b=1)
    served.num_more_adapters = 9998
    pool = pb.GetPoolResponse(
        version_vector=served,
        replicas=[replica(0, served)],
        replica_counts=[
            pb.ReplicaCount(state=pb.REPLICA_STATE_READY, num_replicas=700),
            pb.ReplicaCount(state=pb.REPLICA_STATE_LOST, num_replicas=300),
        ],
        policies=[pb.Policy(policy="a", served_version=1, last_version=1)],
        num_policies=10_001,
        next_policy_page_token="a",
    )
    text = shown(pool, 120)
    assert "and 9998 more   700 of 1000 replicas ready" in text
    assert "and 999 more: --json lists all" in text
    assert "and 10000 more: --json lists all" in text


def test_what_is_wrong_is_said_first_and_once() -> None:
    why = "lacks math@3, which no replica in contact holds"
    pool = pb.GetPoolResponse(version_vector=vector(7), num_more_problems=4)
    pool.problems.add(
        severity=pb.PROBLEM_SEVERITY_ERROR, replica_id="replica-1", message=f"r: {why}"
    )
    pool.problems.add(policy="math", message="math@3 is lost: push it again")
    for number in range(2):
        one = pool.replicas.add()
        one.CopyFrom(replica(number, vector(7)))
        one.state, one.state_reason = pb.REPLICA_STATE_PENDING_WEIGHTS, why
    pool.policies.add(policy="math", served_version=3, last_version=3, lost=True)
    lines = shown(pool, 200).splitlines()
    assert lines[1:4] == [f"r: {why}", "math@3 is lost: push it again", "and 4 more problems"]
    assert len([line for line in lines if why in line]) == 2, "and in the row of replica-0"
    assert len([line for line in lines if "is lost" in line]) == 1


def test_a_reason_that_was_cut_off_stays_in_its_row() -> None:
    pool = pb.GetPoolResponse(version_vector=vector(7))
    pool.replicas.add(replica_id="r0", state=pb.REPLICA_STATE_LOST, state_reason="long enough")
    pool.problems.add(subject="r0", replica_id="r0", message="r0 is lost: long…")
    assert "long enough" in shown(pool)


def test_a_replica_and_a_policy_of_one_name_are_told_apart() -> None:
    pool = pb.GetPoolResponse(version_vector=vector(7))
    pool.replicas.add(replica_id="math", state=pb.REPLICA_STATE_LOST, state_reason="no heartbeat")
    pool.problems.add(subject="math", policy="math", message="math has no heartbeat")
    assert shown(pool, 200).count("no heartbeat") == 2, "in the row of the replica, too"


@pytest.mark.parametrize(
    ("num_errors", "said"), [(51, "1 of them errors"), (50, "9 more problems\n"), (0, "problems\n")]
)
def test_of_the_problems_that_are_not_told_the_errors_are_counted(
    num_errors: int, said: str
) -> None:
    pool = pb.GetPoolResponse(num_more_problems=9, num_errors=num_errors)
    for number in range(50):
        pool.problems.add(severity=pb.PROBLEM_SEVERITY_ERROR, message=f"problem {number}")
    assert said in "\n".join(map(str.rstrip, shown(pool).splitlines()))


def test_mixed_weights_are_no_version() -> None:
    pool = pb.GetPoolResponse(version_vector=vector(7), replicas=[replica(0, vector(7))])
    pool.replicas[0].report.dirty_reason = "a load failed"
    text = shown(pool)
    assert "mixed weights" in text
    assert "as the pool" not in text


def test_an_adapter_over_another_base_says_so_in_its_row() -> None:
    pool = pb.GetPoolResponse(version_vector=vector(7))
    for number in range(2):
        pool.policies.add(
            policy=f"math-{number}", kind=types_pb2.POLICY_KIND_ADAPTER, served_version=2,
            last_version=2, trained_on_base_version=0, over_another_base=number != 1,
        )  # fmt: skip
    lines = shown(pool, 200).splitlines()
    said = "math-0@2 (trained on base@0, served over base@7)"
    assert [line for line in lines if said in line]
    # The same bytes under another number are no other base.
    assert [line for line in lines if "math-1@2" in line and "served over" not in line]


@pytest.mark.parametrize(
    ("delta_from", "sent_bytes", "total_bytes", "said"),
    [
        (b"", 0, 95_500_000, "95,500,000 bytes"),  # of one that only the catalog knows
        (b"", 95_500_000, 95_500_000, "95,500,000 bytes"),
        (b"\1" * 8, 1_200_000, 95_500_000, "delta 1.20 MB of 95.5 MB"),
        (b"\1" * 8, 0, 95_500_000, "delta 0 B of 95.5 MB"),
    ],
)
def test_a_delta_says_how_much_was_sent_of_how_much(
    delta_from: bytes, sent_bytes: int, total_bytes: int, said: str
) -> None:
    last = publish_pb2.Transfer(
        version=types_pb2.PolicyVersion(policy="base", version=2),
        delta_from=delta_from,
        sent_bytes=sent_bytes,
        total_bytes=total_bytes,
    )
    assert sent_text(last, " bytes") == said
    assert f", {said} to" in shown(pb.GetPoolResponse(last_transfer=last), 200)
    last.whole_replica_ids.extend(["replica-1", "replica-2"])
    assert sent_text(last, " bytes") == (f"{said}, whole to 2" if delta_from else said)


def test_the_slowest_link_is_named_and_whether_bytes_are_encrypted() -> None:
    def hop(source: str, target: str, seconds: int, **facts: Any) -> publish_pb2.Hop:
        return publish_pb2.Hop(
            source=source,
            target=target,
            usage=publish_pb2.LinkUsage(
                num_bytes=12_000_000, busy=Duration(seconds=seconds), **facts
            ),
        )

    last = publish_pb2.Transfer(
        version=types_pb2.PolicyVersion(policy="base", version=2),
        backend="stream",
        backend_reason="chosen by the trainer",
        hops=[
            hop("a", "b", 10, num_waiting=3_100_000, between_sites=True, encrypted=True),
            hop("trainer", "a", 1, encrypted=True),
        ],
    )
    text = shown(pb.GetPoolResponse(last_transfer=last), 200)
    assert "over stream, encrypted: chosen by the trainer" in text
    assert "slowest link: a to b: 1.20 MB/s, between sites (3.10 MB wait)" in text
    assert hop_text(hop("a", "b", 0)) == "a to b: too short to measure"
    last.hops[0].usage.encrypted = False
    assert "over stream, partly in plaintext: " in shown(
        pb.GetPoolResponse(last_transfer=last), 200
    )
    last.hops[1].usage.encrypted = False
    assert "over stream, in plaintext: " in shown(pb.GetPoolResponse(last_transfer=last), 200)
    del last.hops[:]
    for backend, said in (("gloo", ", in plaintext"), ("nccl", ", in plaintext"), ("stream", "")):
        last.backend = backend
        assert f"over {backend}{said}: " in shown(pb.GetPoolResponse(last_transfer=last), 200)
