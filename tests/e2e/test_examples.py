"""The examples, run by their own commands against a coordinator and a real vLLM replica."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
import yaml
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from rollout_side.vllm_engine.server import cpu_cache
from tests.downloads import put_into_cache
from tests.e2e.logprobs import MAX_ERROR
from tests.e2e.replicas import (
    LORA_ARGS,
    MODEL_NAME,
    running_coordinator,
    running_replicas,
    served_versions,
)
from tests.unit.docs.pages import page
from trainer_side import Publisher, RolloutClient
from weft_rl.cli.console.options import DEFAULT_COORDINATOR as DEFAULT
from weft_rl.cli.demo.main import complete

EXAMPLES = Path(__file__).parents[2] / "examples"
HELM = EXAMPLES.parent / "helm"
PROMPT = [5, 17, 99, 200, 33]
_PYTHON = (sys.executable,)
_TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
_SECONDS = 120.0
_ENV = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "HF_HUB_OFFLINE": "1"}


def run(work: Path, *command: str | Path) -> list[str]:
    """What a command that must succeed prints."""
    log = work / "example.log"
    with (
        log.open("w") as errors,
        subprocess.Popen(
            command, cwd=work, env={**os.environ, **_ENV}, text=True,
            stdout=subprocess.PIPE, stderr=errors,
        ) as process,
    ):  # fmt: skip
        try:
            said, _ = process.communicate(timeout=_SECONDS)
        except subprocess.TimeoutExpired as error:
            process.terminate()  # torchrun ends its ranks
            said, _ = process.communicate()
            raise AssertionError(f"it did not end:\n{said}\n{log.read_text()}") from error
    assert process.returncode == 0, said + log.read_text()
    return said.splitlines()


@dataclass(frozen=True)
class Pool:
    """What the examples are told, and how they are run."""

    work: Path
    target: str
    url: str

    def run(self, launcher: tuple[str, ...], name: str, *args: str) -> list[str]:
        """An example in the folder of the model that it names by default."""
        return run(self.work, *launcher, EXAMPLES / name, "--coordinator", self.target, *args)

    def check_served(self, said: list[str], policy: str, pushes: int) -> str:
        """The pushes that an example tells of follow each other, and the last is served."""
        numbers = [int(n) for line in said for n in re.findall(rf"pushed {policy}@(\d+)$", line)]
        assert len(numbers) == pushes, said
        assert numbers == list(range(numbers[0], numbers[0] + pushes))
        assert self.served[policy] == numbers[-1]
        return f"{policy}@{numbers[-1]}"

    @property
    def served(self) -> dict[str, int]:
        """What the pool serves of each policy."""
        return served_versions(self.target)

    def check_adapter(self, said: list[str], pushes: int) -> str:
        """Moreover, an answer to its bare name names it."""
        newest = self.check_served(said, "math", pushes)
        assert complete(self.url, "math", PROMPT).model == newest
        return newest


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    work = tmp_path_factory.mktemp("examples")
    assert "made tiny" in run(work, *_PYTHON, EXAMPLES / "tiny_model.py", "tiny")
    with (
        running_coordinator(work) as coordinator,
        running_replicas(
            work, coordinator.target, [work / "tiny"], *LORA_ARGS, env={cpu_cache.VARIABLE: ""}
        ) as urls,
    ):
        yield Pool(work, coordinator.target, urls[0])


def test_a_replica_on_a_cpu_sizes_its_kv_cache(pool):
    """By vLLM's own choice it would be 92 % of the machine's memory."""
    (said,) = re.findall(r"a KV cache of (\d+) GiB", (pool.work / "replica-0.log").read_text())
    metrics = httpx.get(f"{pool.url}/metrics").text
    (served,) = re.findall(r'cache_config_info{.*kv_cache_memory_bytes="(\d+)"', metrics)
    assert int(served) == int(said) * 2**30


def _block(name: str, number: int, pool: Pool) -> str:
    """A block of Python of a page, for this pool; what it repeats is done twice."""
    blocks = [block.text for block in page(name).blocks if block.language == "python"]
    return re.sub(r"range\(\d+\)", "range(2)", blocks[number].replace(DEFAULT, pool.target))


def test_the_trainer_of_the_readme(pool, monkeypatch):
    put_into_cache(pool.work / "tiny", pool.work / "huggingface", "Qwen/Qwen3-8B")
    monkeypatch.setenv("HF_HOME", str(pool.work / "huggingface"))
    before = pool.served.get("math", 0)
    (pool.work / "readme.py").write_text(_block("README.md", 0, pool))
    run(pool.work, *_PYTHON, "readme.py")
    assert pool.served["math"] == before + 2


@pytest.mark.parametrize(
    ("name", "number", "pushed"),
    [
        ("docs/trainers.md", 0, "math"),
        ("docs/rollouts.md", 0, "math"),
        ("docs/operations.md", 0, ""),
        ("docs/gpu-and-staging.md", 0, "base"),
    ],
)
def test_a_block_of_the_manual(pool, monkeypatch, name, number, pushed):
    monkeypatch.chdir(pool.work)
    base = AutoModelForCausalLM.from_pretrained(pool.work / "tiny", dtype="float32")
    adapter = get_peft_model(
        AutoModelForCausalLM.from_pretrained(pool.work / "tiny", dtype="float32"),
        LoraConfig(r=8, target_modules="all-linear"),
    )
    adapter.save_pretrained("adapter_dir")
    before = pool.served.get(pushed, 0)
    known = {"model": base, "peft_model": adapter}
    exec(compile(_block(name, number, pool), name, "exec"), known)
    assert pool.served.get(pushed, 0) == before + bool(pushed)
    if "groups" in known:
        assert known["batch"].completion_ids.shape[0] == 2 * 8
        assert known["sample"].adapter == known["version"]


def test_the_stream_of_the_manual(pool):
    known = {}
    exec(compile(_block("docs/rollouts.md", 1, pool), "stream", "exec"), known)
    base = AutoModelForCausalLM.from_pretrained(pool.work / "tiny", dtype="float32")
    learnt = []
    with (
        Publisher(pool.target, trainer_id="stream") as publisher,
        RolloutClient(pool.target) as rollouts,
    ):
        args = (publisher, rollouts, [[5, 6], [7, 8, 9]], base)
        known["train"](*args, learn=lambda _, batch: learnt.append(batch))
    assert [len(batch) for batch in learnt] == [8, 8]


def test_the_charts_test_pushes_an_adapter_and_asks_for_it(pool, monkeypatch):
    monkeypatch.setenv("WEFT_COORDINATOR", pool.target)
    program = HELM / "weft/files/push_and_ask.py"
    args = (f"--model={pool.work / 'tiny'}", f"--openai={pool.url}", "--timeout=60")
    said = run(pool.work, *_PYTHON, program, *args)
    assert "asked for helm-test@1, and it answered" in said
    again = run(pool.work, *_PYTHON, program, *args)
    assert "asked for helm-test@2, and it answered" in again
    assert "helm-test" not in pool.served, "it leaves nothing behind"
    base = run(pool.work, *_PYTHON, program, *args, "--without-adapter")
    assert base[-1] == f"asked for {MODEL_NAME}, and it answered"


@pytest.mark.matrix
def test_the_charts_trainer(pool, monkeypatch):
    monkeypatch.setenv("WEFT_COORDINATOR", pool.target)
    monkeypatch.setenv("MODEL", "tiny")
    documents = yaml.safe_load_all((HELM / "examples/trainer-job.yaml").read_text())
    (script,) = (d["data"]["train.py"] for d in documents if d["kind"] == "ConfigMap")
    (pool.work / "train.py").write_text(script)
    pool.check_served(run(pool.work, *_PYTHON, "train.py"), "base", 3)


def test_lora(pool):
    said = pool.run(_PYTHON, "lora.py", "--url", pool.url)
    newest = pool.check_adapter(said, 3)
    asked = [re.match(r"asked for (\S+): (\S+) says (.+)", line) for line in said]
    *exact, bare = [match.groups() for match in asked if match]
    assert len(exact) == 3
    assert all(wanted == named for wanted, named, _ in exact)
    assert bare == ("math", newest, exact[-1][2])


@pytest.mark.matrix
def test_fsdp2(pool):
    said = pool.run(_TORCHRUN, "fsdp2.py")
    pool.check_served(said, "base", 3)
    # A step was trained between each push's begin and its end.
    told = [line.split()[0] for line in said if line.startswith(("step", "pushed"))]
    assert told == ["step", *["pushed", "step"] * 2, "pushed"]


@pytest.mark.matrix
def test_zero3(pool):
    pool.check_adapter(pool.run(_TORCHRUN, "zero3.py", "--steps", "2"), 2)


@pytest.mark.matrix
def test_zero3_merged(pool):
    pool.check_served(pool.run(_TORCHRUN, "zero3.py", "--merged", "--steps", "2"), "base", 2)


def test_qlora(pool):
    said = pool.run(_PYTHON, "qlora.py", "--url", pool.url, "--steps", "2")
    newest = pool.check_adapter(said, 2)
    assert any(line.startswith("remark: ") and "quantised to 4 bits" in line for line in said)
    assert said[-1].startswith(f"asked for {newest}: {newest} says ")


@pytest.mark.matrix
def test_qlora_merged(pool):
    said = pool.run(_PYTHON, "qlora.py", "--url", pool.url, "--merged", "--steps", "2")
    pool.check_served(said, "base", 2)
    assert said[-1].startswith(f"asked for {MODEL_NAME}: {MODEL_NAME} says ")


@pytest.mark.matrix
def test_callback(pool):
    said = pool.run(_PYTHON, "callback.py")
    pool.check_adapter(said, 2)
    assert [line.split(",")[0] for line in said if "pushed" in line] == ["step 2", "step 4"]


@pytest.mark.matrix
def test_external_pool(pool):
    said = pool.run(_PYTHON, "external_pool.py", "--steps", "2")
    pool.check_adapter(said, 3)
    pushed = [line.rsplit(maxsplit=1)[-1] for line in said if "pushed" in line]
    makers = [made_by for line in said for made_by in re.findall(r"samples by (\S+) from 1 ", line)]
    assert makers == pushed[:-1]  # each batch is the version's before its push


@pytest.mark.matrix
def test_colocated_grpo(pool):
    """On a CPU no replica shares a GPU, and none sleeps."""
    said = pool.run(_PYTHON, "colocated_grpo.py", "--steps", "2")
    told = re.compile(r"samples by (\S+), loss .* meanwhile: none; pushed (\S+) ")
    (first, pushed), (second, _) = [found.groups() for line in said if (found := told.search(line))]
    assert second == pushed != first


@pytest.mark.matrix
def test_asynchronous(pool):
    said = pool.run(_PYTHON, "asynchronous.py", "--steps", "5")
    seen = [
        re.search(r"^(.+): 5 steps .* staleness (\S+) on average, (\d+) at most", line)
        for line in said
    ]
    (turns, *none), (name, mean, most) = [match.groups() for match in seen if match]
    assert (turns, none) == ("in turns", ["0.00", "0"])
    assert (name, most) == ("asynchronous", "1")
    assert 0 < float(mean) < 1  # the first batch is as new as the weights


def _check_generated_as_trained(said: list[str], steps: int) -> None:
    """TRL's own comparison of the replica's log-probabilities with its own forward pass."""
    found = [re.match(r"log-probabilities differ by at most (\S+)$", line) for line in said]
    differences = [float(match[1]) for match in found if match]
    assert len(differences) == steps, said
    assert max(differences) <= MAX_ERROR


def test_trl_grpo(pool):
    with Publisher(pool.target, trainer_id="restores") as publisher:
        publisher.push_base(pool.work / "tiny")  # what the example trains on
    said = pool.run(_PYTHON, "trl_grpo.py")
    _check_generated_as_trained(said, 2)
    pool.check_adapter(said, 1)


@pytest.mark.matrix
def test_trl_grpo_full(pool):
    said = pool.run(_TORCHRUN, "trl_grpo.py", "--full")
    _check_generated_as_trained(said, 2)
    pool.check_served(said, "base", 1)
