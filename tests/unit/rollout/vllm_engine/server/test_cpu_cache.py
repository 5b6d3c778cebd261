"""The KV cache that a replica on a CPU takes, unless its user says how large."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace

import pytest

from rollout_side.vllm_engine.server import cpu_cache
from weft_rl import host_memory

GIB = 2**30


def parsed(*words: str) -> Namespace:
    parser = ArgumentParser()
    parser.add_argument("--gpu-memory-utilization", type=float, default=0.92)
    parser.add_argument("--kv-cache-memory-bytes", type=int)
    parser.add_argument("--num-gpu-blocks-override", type=int)
    parser.add_argument("--tensor-parallel-size", type=int, default=1)
    cpu_cache.mark_default(parser)
    return parser.parse_args(words)


@pytest.mark.parametrize(
    ("available_gib", "num_ranks", "gib"),
    [(24, 1, 6), (24, 2, 3), (23.9, 1, 5), (4, 1, 1), (2, 1, 1), (0, 4, 1)],
)
def test_a_quarter_of_what_is_free_for_all_ranks(
    available_gib: float, num_ranks: int, gib: int
) -> None:
    assert cpu_cache.cache_gib(int(available_gib * GIB), num_ranks) == gib


@pytest.mark.parametrize("words", [(), ("--tensor-parallel-size", "2")])
def test_the_size_goes_to_vllm_and_is_said(
    words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(cpu_cache, "available_memory", lambda: (16 * GIB, "memory of this machine"))
    environ: dict[str, str] = {}
    with caplog.at_level("INFO", "rollout_side"):
        cpu_cache.size_cache(parsed(*words), environ)
    gib = "2" if words else "4"
    assert environ == {"VLLM_CPU_KVCACHE_SPACE": gib}
    (line,) = caplog.messages
    assert f"a KV cache of {gib} GiB a rank" in line
    assert "(16.0 GiB free: memory of this machine)" in line


@pytest.mark.parametrize(
    ("words", "environ"),
    [
        ((), {"VLLM_CPU_KVCACHE_SPACE": "7"}),
        (("--kv-cache-memory-bytes", "1000000"), {}),
        (("--num-gpu-blocks-override", "64"), {}),
        (("--gpu-memory-utilization", "0.5"), {}),
        (("--gpu-memory-utilization", "0.92"), {}),  # vLLM's default, said by the user
    ],
)
def test_a_size_that_the_user_gives_stands(
    words: tuple[str, ...], environ: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    found = dict(environ)
    with caplog.at_level("INFO", "rollout_side"):
        cpu_cache.size_cache(parsed(*words), found)
    assert found == environ
    assert not caplog.messages


def test_memory_of_a_container_counts_if_it_is_less(
    monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    group = tmp_path_factory.mktemp("cgroup")
    monkeypatch.setattr(host_memory, "_GROUP", group)
    machine, limit = host_memory.available_memory()
    assert machine > 0
    assert limit == "memory of this machine"
    (group / "memory.max").write_text("max\n")
    (group / "memory.current").write_text("5\n")
    assert host_memory.available_memory()[1] == "memory of this machine"
    (group / "memory.max").write_text("1005\n")
    assert host_memory.available_memory() == (1000, "memory of this container")
