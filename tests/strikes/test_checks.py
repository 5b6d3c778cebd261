"""What the checks of a struck pool find, and what a seed draws; runs are by `make strikes`."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.strikes.checks import read_acknowledged, wrong_replicas, wrong_versions
from tests.strikes.plan import KINDS, draw
from weft_rl.v1 import inspect_pb2 as pb
from weft_rl.v1 import types_pb2


def _version(number: int, state: pb.VersionState.ValueType, digest: str = "aa") -> pb.Version:
    return pb.Version(
        version=types_pb2.PolicyVersion(policy="math", version=number),
        state=state,
        content_digest_hex=digest,
    )


COMMITTED, RETIRED = pb.VERSION_STATE_COMMITTED, pb.VERSION_STATE_RETIRED


@pytest.mark.parametrize(
    ("own", "listed", "words"),
    [({3: "aa"}, [_version(3, COMMITTED)], ""),
     ({3: "aa", 4: "aa"}, [_version(3, RETIRED), _version(4, COMMITTED)], ""),
     ({1: "aa"}, [_version(3, COMMITTED)], ""),
     ({4: "aa"}, [_version(3, COMMITTED)], "math@4 was acknowledged and is not known"),
     ({3: "aa"}, [], "is not known"),
     ({3: "aa"}, [_version(3, pb.VERSION_STATE_ABORTED)], "is VERSION_STATE_ABORTED"),
     ({3: "aa"}, [_version(3, pb.VERSION_STATE_FAILED)], "is VERSION_STATE_FAILED"),
     ({3: "aa"}, [_version(3, COMMITTED, "bb")], "as aa, not bb")],
)  # fmt: skip
def test_what_was_acknowledged_must_be_known(
    own: dict[int, str], listed: list[pb.Version], words: str
) -> None:
    wrong = wrong_versions("math", own, listed)
    assert bool(wrong) is bool(words)
    assert words in "".join(wrong)


@pytest.mark.parametrize(
    ("base", "math", "state", "is_right"),
    [(2, [5], pb.REPLICA_STATE_READY, True), (3, [6], pb.REPLICA_STATE_READY, True),
     (1, [5], pb.REPLICA_STATE_READY, False), (2, [4], pb.REPLICA_STATE_READY, False),
     (2, [], pb.REPLICA_STATE_READY, False), (0, [], pb.REPLICA_STATE_PENDING_WEIGHTS, True)],
)  # fmt: skip
def test_a_ready_replica_serves_nothing_older(
    base: int, math: list[int], state: pb.ReplicaState.ValueType, is_right: bool
) -> None:
    adapters = [types_pb2.AdapterVersions(policy="math", versions=math)] if math else []
    vector = types_pb2.VersionVector(base=base, adapters=adapters)
    replica = pb.Replica(replica_id="replica-0", state=state, version_vector=vector)
    wrong = wrong_replicas({"base": {2: "aa"}, "math": {5: "bb"}}, pb.GetPoolResponse(
        replicas=[replica]))  # fmt: skip
    assert (not wrong) is is_right


def test_a_line_that_is_being_written_is_not_read_yet(tmp_path: Path) -> None:
    path = tmp_path / "acknowledged"
    assert read_acknowledged(path) == ({}, [])
    path.write_text("base 1 aa\nbase 1 aa\nmath 2 bb\nmath 3 c")
    assert read_acknowledged(path) == ({"base": {1: "aa"}, "math": {2: "bb"}}, [])
    path.write_text("base 1 aa\nbase 1 ab\n")
    assert read_acknowledged(path)[1] == ["base@1 was acknowledged with two contents"]


def test_a_seed_draws_the_same_strikes_of_every_kind() -> None:
    one, other = random.Random(7), random.Random(7)
    drawn = [draw(one) for _ in range(300)]
    assert drawn == [draw(other) for _ in range(300)]
    strikes = [strike for each in drawn for strike in each]
    assert {(strike.signal, strike.victim) for strike in strikes} == set(KINDS)
    assert {len(each) for each in drawn} == {1, 2}
    for first, second in (each for each in drawn if len(each) == 2):
        assert not set(first.names) & set(second.names)
