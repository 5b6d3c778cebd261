"""Wherever a mesh puts a model's parameters, each rank knows which elements it has to give.

Four real ranks over gloo; what they hold and what the sender is brought is compared with the
weights that the model was made of.
"""

import json
from contextlib import ExitStack

import pytest

from tests.trainers.launch import ENV
from weft_rl.cli.demo.processes import Process
from weft_rl.contract.manifest import Run, check_coverage, why_not
from weft_rl.contract.tensors import DataType, TensorMeta

SIZE = 4


@pytest.fixture(scope="module")
def ask(tmp_path_factory):
    work = tmp_path_factory.mktemp("ranks")
    with ExitStack() as stack:
        processes = []
        for rank in range(SIZE):
            args = ("-m", "tests.trainers.placements", str(rank), str(SIZE), str(work / "store"))
            process = Process(f"rank-{rank}", args, work, ENV)
            stack.callback(process.stop)
            processes.append(process)
        for process in processes:
            process.line(lambda text: text == "ready", 120)

        def of_all(case, *args, **options):
            for process in processes:
                process.tell(json.dumps({"case": case, "args": args, "options": options}))
            answers = [process.answer(60) for process in processes]
            for process, answer in zip(processes, answers, strict=True):
                assert "crash" not in answer, f"{process.name}: {answer['crash']}"
                assert answer["wrong"] == [], process.name
            places = answers[0]["places"]
            assert all(answer["places"] == places for answer in answers), "alike on all ranks"
            return answers[0]

        yield of_all


def check(answer):
    """Every element of every parameter once, as if of 8 bytes: slices begin anywhere."""
    for name, runs in answer["places"].items():
        meta = TensorMeta(name, DataType.INT64, tuple(answer["shapes"][name]))
        found = [Run(0, begin, numel, stride, times) for _, begin, times, numel, stride in runs]
        assert not any(why_not(run, meta) for run in found), name
        check_coverage([meta], found)


MODELS = {
    "FSDP2": ("fsdp2", (4,), {}),
    "HSDP": ("fsdp2", (2, 2), {}),
    "TP": ("tensor_parallel", (4,), {}),
    "TP in FSDP2": ("tensor_parallel", (2, 2), {}),
    "TP in FSDP2, uneven": ("tensor_parallel", (2, 2), {"width": 46}),
    "experts": ("experts", (), {}),
    "FSDP1": ("fsdp1", ("FULL_SHARD",), {}),
    "FSDP1, flat": ("fsdp1", ("FULL_SHARD",), {"flat": True}),
    "FSDP1, one unit": ("fsdp1", ("FULL_SHARD",), {"flat": True, "nested": False}),
    "FSDP1, of replicas": ("fsdp1", ("HYBRID_SHARD",), {}),
    "FSDP1, whole": ("fsdp1", ("NO_SHARD",), {}),
}


@pytest.mark.parametrize("model", MODELS)
def test_every_rank_has_what_its_runs_say_and_all_have_all(model, ask):
    case, args, options = MODELS[model]
    answer = ask(case, *args, **options)
    assert len(answer["places"]) > 1
    check(answer)


TABLES = {
    "columns": ([6, 8], [4], [1]),
    "columns, uneven": ([6, 7], [4], [1]),
    "fewer columns than ranks": ([6, 3], [4], [1]),
    "rows and columns": ([6, 8], [2, 2], [0, 1]),
    "columns and rows, uneven": ([7, 9], [2, 2], [1, 0]),
    "rows twice": ([9, 4], [2, 2], [0, 0]),
    "columns twice, uneven": ([5, 9], [2, 2], [1, 1]),
    "columns of replicas": ([6, 8], [2, 2], [None, 1]),
    "replicas": ([6, 8], [4], [None]),
    "inner dim": ([3, 5, 8], [4], [1]),
    "both inner dims": ([3, 6, 8], [2, 2], [1, 2]),
    "outer and last dim": ([4, 3, 8], [2, 2], [0, 2]),
    "no dims": ([], [4], [None]),
}


@pytest.mark.parametrize("table", TABLES)
def test_a_tensor_cut_in_any_way_lies_in_runs_that_cover_it(table, ask):
    check(ask("table", *TABLES[table]))


def test_replicas_share_what_there_is_to_give(ask):
    places = ask("fsdp2", 2, 2)["places"]
    given = dict.fromkeys(range(SIZE), 0)
    for runs in places.values():
        for rank, _, repeats, numel, _ in runs:
            given[rank] += repeats * numel
    largest = max(repeats * numel for runs in places.values() for _, _, repeats, numel, _ in runs)
    assert max(given.values()) - min(given.values()) <= largest
    assert min(given.values()) > 0


def test_sums_of_all_ranks_are_left_to_their_framework(ask):
    assert ask("partial_sums")["places"] == {"weight": None}


def test_so_is_what_lies_in_too_many_pieces(ask):
    assert ask("table", [2000, 4, 2], [2, 2], [1, 2])["places"] == {"weight": None}
    assert len(ask("table", [1000, 4, 2], [2, 2], [1, 2])["places"]["weight"]) == 4000
