"""Pushes between GPUs: what is served equals what a fresh engine serves, bit for bit.

The trainer is this process, on GPU 0, which also has the fresh engines; the replicas that
are pushed to have the other GPUs, those of two ranks GPU 0, too, where there are only two.
Where there is one, all share it, and what needs two is skipped. Everything is bfloat16, as it
is used.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from peft import PeftModel

from benchmarks.gpu_pool import GpuPool
from tests.gpu.conftest import Note
from tests.models import draw_adapter, draw_base, make_tokenizer
from tests.trainers.launch import running_ranks
from trainer_side import Publisher
from weft_rl.cli.orders import rollback
from weft_rl.contract.errors import NotReadyError

NUM_GPUS = torch.cuda.device_count()
DRY = "WEFT_GPU_DRY_RUN" in os.environ  # the same on CPUs over gloo: for writing this file
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not NUM_GPUS and not DRY, reason="needs an NVIDIA GPU"),
    pytest.mark.timeout(600),
]
#: vLLM's defaults, torch.compile and CUDA graphs among them. With a cache of a size that is given,
#: engines may start beside one another on a GPU.
VLLM = ("--max-model-len", "512", "--kv-cache-memory-bytes", "500000000",
        "--gpu-memory-utilization", "0.1", "--max-num-seqs", "16")  # fmt: skip
LORA = ("--enable-lora", "--max-lora-rank", "16", "--max-loras", "2", "--max-cpu-loras", "4")
PROMPTS = [[5, 9, 17, 33], [7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18]]
DEVICE = "cuda:0" if NUM_GPUS else "cpu"
#: Models whose compiled kernels Inductor chooses by timing them, in each process anew, so that two
#: fresh engines of the same files answer alike but not bit by bit (tests/README.md has how often).
TIMED_KERNELS = ("fp8", "moe", "experts")
#: Of these, those in which an activation rounded otherwise chooses another expert: no bound holds
#: from there on. One prompt's answer that begins bit by bit alike shows that the weights are alike.
ROUTED_BY_ROUNDING = ("fp8_experts",)
_BEGINNING = 4

Answers = list[tuple[list[str], list[float]]]


#: A small model of real proportions.
COMMON: dict[str, Any] = {
    "vocab_size": 4096,
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
}


def config_of(kind: str) -> Any:
    """Configuration of one kind."""
    import transformers

    if kind == "odd":
        return transformers.LlamaConfig(
            vocab_size=1003,
            hidden_size=576,
            intermediate_size=1536,
            num_hidden_layers=3,
            num_attention_heads=9,
            num_key_value_heads=3,
            max_position_embeddings=512,
            tie_word_embeddings=True,
        )
    if kind == "moe":
        return transformers.Qwen3MoeConfig(
            **COMMON,
            moe_intermediate_size=256,
            num_experts=8,
            num_experts_per_tok=2,
            decoder_sparse_step=1,
            norm_topk_prob=True,
        )
    return transformers.Qwen3Config(**COMMON)


def make_model(kind: str, seed: int) -> Any:
    """On the trainer's GPU."""
    from transformers import AutoModelForCausalLM

    config = config_of(kind)
    config.architectures = None
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    draw_base(model, seed)
    return model.to(DEVICE)


def save(model: Any, path: Path) -> Path:
    """A directory that an engine can start from."""
    model.save_pretrained(path)
    make_tokenizer(path)
    return path


def answers(url: str, model: str) -> Answers:
    """Greedy tokens and their log-probabilities, one prompt at a time."""
    found = []
    for prompt in PROMPTS:
        body = {"model": model, "prompt": prompt, "max_tokens": 24, "temperature": 0.0,
                "logprobs": 1, "ignore_eos": True}  # fmt: skip
        answer = httpx.post(f"{url}/v1/completions", json=body, timeout=60)
        assert answer.status_code == 200, answer.text
        logprobs = answer.json()["choices"][0]["logprobs"]
        found.append((logprobs["tokens"], logprobs["token_logprobs"]))
    return found


def answers_alike(kind: str, found: Answers, wanted: Answers) -> bool:
    """Return whether engines of two processes answer alike: bit by bit, unless kernels were chosen
    by timing. Then log-probabilities differ by little until a token does, never the first."""
    if not kind.startswith(TIMED_KERNELS):
        return found == wanted
    if kind in ROUTED_BY_ROUNDING:
        return any(
            tokens[:_BEGINNING] == others[:_BEGINNING]
            and values[:_BEGINNING] == other_values[:_BEGINNING]
            for (tokens, values), (others, other_values) in zip(found, wanted, strict=True)
        )
    for one, other in zip(found, wanted, strict=True):
        pairs = zip(zip(*one, strict=True), zip(*other, strict=True), strict=True)
        common = list(takewhile(lambda pair: pair[0][0] == pair[1][0], pairs))
        if not common or any(abs(a - b) > 0.5 for (_, a), (_, b) in common):
            return False
    return True


@dataclass
class Place:
    """One kind of model: replicas that are pushed to, a fresh engine, and its weights."""

    kind: str
    pushed: Pushed
    in_place: Pushed
    """Beside it on the same GPU, in a pool of its own: it loads bases as they come."""
    late: str
    """Another one of that pool, kept apart till it is to catch up; empty if there is none."""
    fresh: str
    model: Any
    weights: Path
    """The same, saved."""
    adapter: Path | None


@dataclass
class Pushed:
    """A pool of one replica that began with other weights."""

    pool: GpuPool
    url: str

    def publisher(self, **settings: Any) -> Publisher:
        """The trainer, which is this process."""
        return Publisher(
            self.pool.target, trainer_id="test", progress=None, timeout_seconds=90, **settings
        )

    def log(self) -> str:
        """Of the replica."""
        return self.pool.replicas["pushed"].log_path.read_text()

    def how(self) -> str:
        """How bases were loaded last, as its log says."""
        found = re.findall(r"bases are loaded by (.*)", self.log())
        return str(found[-1]) if found else "vLLM's own reload"


def _place(kind: str, tp: int, work: Path) -> Iterator[Place]:
    """Pools of one replica that began with other weights; beside them a fresh engine."""
    model = make_model(kind, 1)
    path = save(model, work / "weights")
    began_with = save(make_model(kind, 0), work / "other")
    lora = LORA if kind in ("dense", "odd") else ()
    adapter, fresh_lora = None, []
    if lora:
        from peft import LoraConfig, get_peft_model

        settings = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear",
                              exclude_modules=["lm_head"], task_type="CAUSAL_LM")  # fmt: skip
        wrapped = get_peft_model(make_model(kind, 1).cpu(), settings)
        draw_adapter(wrapped, 3)
        adapter = work / "adapter"
        wrapped.to(torch.bfloat16).save_pretrained(adapter)
        fresh_lora = ["--lora-modules", f"math={adapter}"]
    # A replica sees the trainer's, and reads its memory.
    gpus, own = ("1,0", "0") if NUM_GPUS > 1 or DRY else ("0", "0")
    if tp == 2:
        # With two GPUs the first rank, which receives, has another one than the trainer.
        gpus, own = ("1,2", "2,3") if NUM_GPUS >= 4 else ("1,0", "1,0")
    args = [*VLLM, *lora, "--tensor-parallel-size", str(tp),
            *(["--quantization", "fp8"] if kind == "fp8" else [])]  # fmt: skip
    pools = [GpuPool(work / name) for name in ("pool", "beside", "in-place")]
    try:
        for each in pools:
            each.work.mkdir()
            each.start()
        verbose = ("--log-level", "debug")  # what they have done is read in their logs
        pools[0].launch("pushed", gpus, began_with, *args, options=verbose)
        pools[1].launch("fresh", own, path, *args, *fresh_lora)
        options = ("--staging", "in-place", *verbose)
        # Without files to learn from, the first base goes through vLLM's own reload.
        args += [] if kind == "fp8" else ["--load-format", "dummy"]
        pools[2].launch("pushed", gpus, began_with, *args, options=options)
        has_late = kind == "dense" and tp == 1 and not DRY
        if has_late:
            pools[2].launch("late", "0", began_with, *args, options=options)
        staged, in_place = (Pushed(pools[i], pools[i].url("pushed")) for i in (0, 2))
        fresh = pools[1].url("fresh")
        for each in pools[:2]:  # before that a bare name is refused
            each.wait_registered(1, 60)
        late = pools[2].url("late") if has_late else ""
        if late:
            pools[2].set_apart("late")
        yield Place(kind, staged, in_place, late, fresh, model, path, adapter)
    finally:
        for each in pools:
            each.stop()


@pytest.fixture(scope="module", params=["dense", "odd", "moe", "fp8"])
def place(request: pytest.FixtureRequest, tmp_path_factory: Any) -> Iterator[Place]:
    """Of one GPU each."""
    yield from _place(request.param, 1, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def wide(tmp_path_factory: Any) -> Iterator[Place]:
    """Of two GPUs each."""
    if NUM_GPUS < 2 and not DRY:
        pytest.skip("needs two NVIDIA GPUs")
    yield from _place("dense", 2, tmp_path_factory.mktemp("wide"))


def check_base(place: Place, pushed: Pushed, **settings: Any) -> str:
    """First by vLLM's own reload, then by copies; there and back again."""
    other = make_model(place.kind, 2)
    expected = answers(place.fresh, "base-model")
    found: list[Answers] = []
    with pushed.publisher(**settings) as publisher:
        for number in range(3):
            publisher.push_base(place.model)
            found.append(answers(pushed.url, "base-model"))
            assert answers_alike(place.kind, found[-1], expected), f"push {number}"
            assert found[-1] == found[0], f"push {number}"
            if number < 2:
                publisher.push_base(other)
                wrong = answers(pushed.url, "base-model")
                assert not answers_alike(place.kind, wrong, expected), f"push {number}"
    tokens = sum(len(found) for found, _ in expected)
    how = "bitwise" if found[0] == expected else "within its kernels' rounding"
    return f"{tokens} tokens and log-probabilities {how} a fresh engine's; {pushed.how()}"


def test_a_fresh_engine_repeats_itself(place: Place, note: Note) -> None:
    """What is compared below can be: who is asked the same thing again answers the same."""
    names = ["base-model", *(["math"] if place.adapter else [])]
    for name in names:
        first = answers(place.fresh, name)
        others = [answers(place.fresh, name) for _ in range(5)]
        same = sum(other == first for other in others)
        note(place.kind, f"nothing; {name} asked 6 times", f"{same + 1} answers are the same")
        assert same == len(others), name


def test_copies_are_learnt_from_files_before_the_first_push(place: Place, note: Note) -> None:
    if place.kind == "fp8" or DRY:
        pytest.skip("its weights are made anew from the files'")
    place.pushed.pool.wait_logged("pushed", "plain copies", 60)
    assert "staged base@" not in place.pushed.log()
    note(place.kind, "nothing, to one that has files", f"{place.pushed.how()} learnt from them")


def test_a_reload_repeats_the_start(place: Place, note: Note) -> None:
    """Compared before a replica was ready, since nothing was known of these files; once, if both
    start from them."""
    logs = place.pushed.log() + place.in_place.log()
    compared = re.search(r"compared a reload in ([\d.]+) s: (.*)", logs)
    assert compared is not None
    assert compared[2] == "''"
    assert float(compared[1]) <= 1
    note(place.kind, "nothing", f"a reload was found to repeat the start in {compared[1]} s")


def check_how(place: Place, pushed: Pushed) -> None:
    """What is loaded as it is held was loaded by copies."""
    if not DRY:
        assert "plain copies" in pushed.how()
        assert ("layers processed" in pushed.how()) == (place.kind == "fp8")


def test_a_pushed_base_answers_as_a_fresh_engine(place: Place, note: Note) -> None:
    note(place.kind, "5 bases, staged on the GPU", check_base(place, place.pushed))
    check_how(place, place.pushed)


def test_a_base_loaded_in_place_answers_as_a_fresh_engine(place: Place, note: Note) -> None:
    found = check_base(place, place.in_place, bucket_bytes=4 * 2**20)  # several a push
    note(place.kind, "5 bases, in place", found)
    check_how(place, place.in_place)


@pytest.mark.parametrize("where", ["pushed", "in_place"])
def test_a_delta_answers_as_a_fresh_engine(place: Place, where: str, note: Note) -> None:
    """And where it was written to the weights that are served, they go back from it."""
    pushed = getattr(place, where)
    expected = answers(place.fresh, "base-model")
    other = make_model(place.kind, 1)
    with torch.no_grad():
        for parameter in other.parameters():
            changed = torch.rand_like(parameter, dtype=torch.float32) < 0.02
            parameter[changed] *= -1.5
    with pushed.publisher(delta="always", bucket_bytes=4 * 2**20) as publisher:
        version = publisher.push_base(other).version
        before = answers(pushed.url, "base-model")
        assert not answers_alike(place.kind, before, expected)
        report = publisher.push_base(place.model).report
        found = answers(pushed.url, "base-model")
        assert answers_alike(place.kind, found, expected)
        # Without room for a copy, weights that are processed once they are loaded take none.
        takes = where == "pushed" or place.kind != "fp8"
        assert report.delta.is_delta is takes, report.delta
        said = f"{report.sent_bytes} of {report.total_bytes} bytes"
        if place.kind != "fp8":  # it was written where it is served
            rollback("base", version.version, coordinator=pushed.pool.target, timeout=60)
            assert answers(pushed.url, "base-model") == before
            said += ", gone back from by its old elements"
        elif takes and not DRY:  # compared while the former base was served
            written = re.findall(r"(\d+ of \d+) bytes were written", pushed.log())
            assert written, pushed.log()[-2000:]
            said += f", {written[-1]} bytes written while paused"
    note(place.kind, f"a delta, {where.replace('_', ' ')}", said if takes else "sent whole")


@pytest.mark.parametrize("where", ["pushed", "in_place"])
def test_an_adapter_answers_as_one_from_disk(place: Place, where: str, note: Note) -> None:
    if place.adapter is None:
        pytest.skip("this model takes no adapters here")
    found = check_adapter(place, getattr(place, where))
    note(place.kind, f"2 adapters beside bases, {where.replace('_', ' ')}", found)


def check_adapter(place: Place, pushed: Pushed) -> str:
    """Beside bases."""
    expected = answers(place.fresh, "math")
    assert expected != answers(place.fresh, "base-model")
    with pushed.publisher() as publisher:
        publisher.push_base(place.model)
        for _ in range(2):
            version = publisher.push_adapter(place.adapter, "math").version
            assert answers(pushed.url, str(version)) == expected
        publisher.push_base(place.model)  # by copies: adapters stay served
        assert answers(pushed.url, str(version)) == expected
    return "bitwise vLLM's own from a directory, before and after a base"


@pytest.mark.parametrize("where", ["pushed", "in_place"])
def test_what_two_ranks_hold_answers_as_a_fresh_engine(
    place: Place, where: str, tmp_path: Path, note: Note
) -> None:
    """FSDP2, the replica beside one of the ranks, whose memory is torch's in segments that have no
    handles; the merge may round otherwise than a whole one's (test_merged.py)."""
    if place.adapter is None or place.kind != "dense":
        pytest.skip("one kind is enough")
    pushed: Pushed = getattr(place, where)
    given = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    on = "" if DRY else "cuda:{}" if NUM_GPUS > 1 else "cuda:0"
    env = {n: {**given, "WEFT_TEST_DEVICE": on.format(n)} for n in range(2) if on}
    with running_ranks(tmp_path, pushed.pool.target, 2, env) as trainer:
        trainer.do("open", bucket_bytes=4 * 2**20)
        trainer.do("make", kind="fsdp2", model=str(place.weights))
        (report, _) = trainer.do("push", what="base")
        assert answers(pushed.url, "base-model") == answers(place.fresh, "base-model"), report
        assert DRY or report["backend"] == "one-sided", report
        trainer.do("make", kind="fsdp2", model=str(place.weights), adapter=str(place.adapter))
        version = trainer.push("adapter", policy="sharded")
        assert answers(pushed.url, f"sharded@{version}") == answers(place.fresh, "math")
        trainer.push("merged")
        by_ranks = answers(pushed.url, "base-model")
        trainer.do("close")  # gives its leases back
    with pushed.publisher() as publisher:
        whole = PeftModel.from_pretrained(
            make_model(place.kind, 1), str(place.adapter), autocast_adapter_dtype=False
        )
        publisher.push_merged(whole)
        at_once = answers(pushed.url, "base-model")
        publisher.push_base(place.model)
    assert by_ranks != answers(pushed.url, "base-model")
    for (_, found), (_, wanted) in zip(by_ranks, at_once, strict=True):
        assert abs(found[0] - wanted[0]) < 0.05  # the first token has no history of others
    how = f"{where.replace('_', ' ')}, over {report['backend']}"
    note("dense, FSDP2 over 2", f"a base and an adapter, {how}", "bitwise a fresh engine's")
    merged = "bitwise a whole one's" if by_ranks == at_once else "a whole one's within its rounding"
    note("dense, FSDP2 over 2", f"merged by the ranks, {how}", merged)


def test_a_late_one_clones_what_another_serves_and_keeps_no_copy_of(
    place: Place, note: Note
) -> None:
    if not place.late:
        pytest.skip("no such replica here")
    with place.in_place.publisher() as publisher:
        publisher.push_base(place.model)
    place.in_place.pool.bring_back("late")
    seconds = place.in_place.pool.wait_ready(2, 60)
    assert answers(place.late, "base-model") == answers(place.fresh, "base-model")
    note(place.kind, f"a base cloned in place, {seconds:.1f} s", "bitwise a fresh engine's")
    place.in_place.pool.set_apart("late")  # the trainer has its GPU


def test_bytes_move_over_what_is_chosen(place: Place, note: Note) -> None:
    if DRY:
        pytest.skip("no GPU")
    assert re.search(r"staged base@\d+", place.pushed.log())
    shares = NUM_GPUS == 1
    if shares:
        refused = pytest.raises(NotReadyError, match="two members share a GPU")
        with place.pushed.publisher(backend="nccl") as publisher, refused:
            publisher.push_base(place.model)
    chosen = []
    for backend in ("auto", *([] if shares else ["nccl"]), "stream", "gloo"):
        with place.pushed.publisher(backend=backend) as publisher:
            report = publisher.push_base(place.model).report
            chosen.append(report.backend)
        found = answers(place.pushed.url, "base-model")
        assert answers_alike(place.kind, found, answers(place.fresh, "base-model"))
    assert chosen == ["one-sided", *([] if shares else ["nccl"]), "stream", "gloo"]
    note(place.kind, f"a base over {', '.join(chosen)}", "bitwise a fresh engine's")


@pytest.mark.parametrize("where", ["pushed", "in_place"])
def test_a_base_over_streams_answers_as_a_fresh_engine(
    place: Place, where: str, note: Note
) -> None:
    """By way of the host's memory at both ends, in buffers that are used again and again; then as a
    delta, which is compared on the trainer's GPU."""
    pushed: Pushed = getattr(place, where)
    settings = {"backend": "stream", "bucket_bytes": 4 * 2**20}
    found = check_base(place, pushed, **settings)
    expected = answers(place.fresh, "base-model")
    with pushed.publisher(delta="always", **settings) as publisher:
        publisher.push_base(make_model(place.kind, 1))
        other = make_model(place.kind, 1)
        with torch.no_grad():
            next(other.parameters())[1] *= -1.5
        publisher.push_base(other)
        report = publisher.push_base(place.model).report
    assert report.backend == "stream"
    assert report.delta.is_delta is (where == "pushed" or place.kind != "fp8"), report.delta
    assert answers_alike(place.kind, answers(pushed.url, "base-model"), expected)
    note(place.kind, f"5 bases and a delta over streams, {where.replace('_', ' ')}", found)


def test_both_ranks_get_what_one_received(wide: Place, note: Note) -> None:
    note("dense, TP 2", "5 bases, staged on the GPU", check_base(wide, wide.pushed))
    check_how(wide, wide.pushed)


def test_both_ranks_load_in_place_what_one_receives(wide: Place, note: Note) -> None:
    found = check_base(wide, wide.in_place, bucket_bytes=4 * 2**20)  # several a push
    check_how(wide, wide.in_place)
    with wide.in_place.publisher() as publisher:
        report = publisher.push_base(wide.model).report
        backend = report.backend
    if NUM_GPUS == 2:
        assert backend == "one-sided"
    note("dense, TP 2", f"5 bases, in place, over {backend}", found)
    note("dense, TP 2", "2 adapters beside bases, in place", check_adapter(wide, wide.in_place))
