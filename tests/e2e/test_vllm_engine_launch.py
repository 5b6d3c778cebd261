"""What is refused before an engine is started."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest

from rollout_side.config import AgentConfig, RolloutConfig
from rollout_side.vllm_engine import launch
from rollout_side.vllm_engine.compat import bridges
from rollout_side.vllm_engine.launch import open_engine
from rollout_side.vllm_engine.server import cpu_cache, refusals
from tests.models import save_config
from weft_rl.contract.errors import InvalidRequestError, UnsupportedError

# vLLM's and torch's own, at import
pytestmark = pytest.mark.filterwarnings("ignore")


async def start(*args: str, port: int = 0) -> None:
    """Would block for an engine that is never reached."""
    agent = AgentConfig(coordinator="127.0.0.1:1")
    await open_engine(RolloutConfig(agent=agent, vllm_args=args, http_port=port))


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "ERROR")


@pytest.mark.parametrize(
    ("args", "text"),
    [
        (("--model", "m", "-dp", "2"), "more replicas"),
        (("m", "--decode-context-parallel-size", "2"), "on a CPU: vLLM has no attention there"),
        (("m", "--enable-expert-parallel", "--enable-eplb"), "--enable-eplb: vLLM .* adapters"),
        (("m", "-n2"), "--nnodes 2: a replica is one host"),
        (("m", "--master_addr=10.0.0.1"), "--master-addr 10.0.0.1: a replica is one host"),
        (("m", "--distributed-executor-backend", "a.Executor"), "backend a.Executor: the ranks"),
        (("m", "--worker-extension-cls", "a.B"), "a.B"),
        (("m", "--api-server-count", "2"), "one API"),
        (("m", "--headless"), "--headless"),
    ],
)
async def test_arguments_that_would_make_a_replica_wrong(args: tuple[str, ...], text: str) -> None:
    with pytest.raises(UnsupportedError, match=text):
        await start(*args)


def test_arguments_of_a_file_are_refused_like_the_others(tmp_path: Path) -> None:
    file = tmp_path / "vllm.yaml"
    file.write_text("node_rank: 1\n")
    with pytest.raises(UnsupportedError, match="--node-rank 1: a replica is one host"):
        launch.parse_args(["m", "--config", str(file)], bridges.server_parts(), {})


def test_arguments_that_leave_an_engine_what_it_is_are_taken() -> None:
    words = [
        f"{name}={value}"
        for name, refused in refusals.REFUSED_OPTIONS.items()
        for value in refused.taken
    ]
    launch.parse_args(["m", *words, "--no-data-parallel-hybrid-lb"], bridges.server_parts(), {})


def test_refused_arguments_are_vllms_with_its_names_in_short_and_its_defaults() -> None:
    """The chart reads words, not what a parser makes of them."""
    parts = bridges.server_parts()
    parser = parts.make_arg_parser(parts.argument_parser())
    actions = {name: action for action in parser._actions for name in action.option_strings}
    known = refusals.REFUSED_OPTIONS.keys() & actions.keys()
    assert {"--nnodes", "--headless", "--data-parallel-size"} <= known
    for name in known:
        action, refused = actions[name], refusals.REFUSED_OPTIONS[name]
        assert action.dest == name.removeprefix("--").replace("-", "_")  # as it is looked for
        short = {word for word in action.option_strings if not word.startswith("--")}
        assert short == {refused.short} - {""}, name
        assert action.default in (None, False) or str(action.default) in refused.taken, name


def connector(name: str, **extra: object) -> str:
    config = {"kv_connector": name, "kv_role": "kv_both", "kv_connector_extra_config": extra}
    return json.dumps(config)


@pytest.mark.parametrize(
    ("args", "text"),
    [
        (
            ("--kv-transfer-config", connector("ExampleConnector")),
            "ExampleConnector: a switch",
        ),
        (("--kv-transfer-config", connector("MooncakeStoreConnector")), "other replicas included"),
        (("--kv-transfer-config", connector("NixlConnector")), "--kv-offloading-size GIB"),
        (
            (
                "--kv-transfer-config",
                connector("OffloadingConnector", spec_name="TieringOffloadingSpec"),
            ),
            "TieringOffloadingSpec keeps",
        ),
        (
            ("--kv-offloading-size", "1", "--kv-offloading-backend", "lmcache"),
            "LMCacheMPConnector",
        ),
        (
            (
                "--ec-transfer-config",
                '{"ec_connector": "ECExampleConnector", "ec_role": "ec_both"}',
            ),
            "--ec-transfer-config",
        ),
    ],
)
async def test_caches_that_no_switch_empties(args: tuple[str, ...], text: str) -> None:
    with pytest.raises(UnsupportedError, match=text):
        await start("m", *args)


def test_blocks_in_the_memory_of_the_host_are_emptied_at_a_switch() -> None:
    parts = bridges.server_parts()
    for words in (
        ["--kv-offloading-size", "1"],
        ["--kv-transfer-config", connector("OffloadingConnector", cpu_bytes_to_use=1e9)],
    ):
        refusals.refuse_caches_beyond_reach(launch.parse_args(["m", *words], parts, {}), {})


async def test_arguments_that_vllm_refuses(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(InvalidRequestError, match=r"\(--api-key --no-such-flag\); its message is"):
        await start("m", "--api-key=hidden", "--no-such-flag")
    assert "--no-such-flag" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--config", "/no/such.yaml"], r"arguments \(--config\): .*No such file"),
        (["--config"], r"arguments \(--config\): No config file"),
        (["--config=FILE"], "while parsing a flow node"),
        (["--config=FILE", "--config=FILE"], "More than one config file"),
        (["--enable-auto-tool-choice"], r"\(--enable-auto-tool-choice\): .* --tool-call-parser"),
    ],
)
def test_what_vllm_raises_of_its_arguments_is_a_sentence(
    words: list[str], text: str, tmp_path: Path
) -> None:
    file = tmp_path / "vllm.yaml"
    file.write_text("a: [")
    words = [word.replace("FILE", str(file)) for word in words]
    with pytest.raises(InvalidRequestError, match=text):
        launch.parse_args(["m", *words], bridges.server_parts(), {})


@pytest.mark.parametrize(
    ("given", "defaults", "is_so"),
    [
        ([], launch.RL_DEFAULTS, ("processed_logprobs", "vllm")),
        ([], {}, ("raw_logprobs", "auto")),
        (["--logprobs-mode", "raw_logprobs"], launch.RL_DEFAULTS, ("raw_logprobs", "vllm")),
        (["--generation-config=auto"], launch.RL_DEFAULTS, ("processed_logprobs", "auto")),
        (["--config", "FILE"], launch.RL_DEFAULTS, ("raw_logits", "vllm")),
        (["--config=FILE"], launch.RL_DEFAULTS, ("raw_logits", "vllm")),
    ],
)
def test_defaults_for_rl_unless_the_user_says_otherwise(
    given: list[str],
    defaults: dict[str, str],
    is_so: tuple[str, str],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    file = tmp_path / "vllm.yaml"
    file.write_text("logprobs-mode: raw_logits\n")
    words = ["m", *(word.replace("FILE", str(file)) for word in given)]
    with caplog.at_level("INFO", "rollout_side"):
        args = launch.parse_args(words, bridges.server_parts(), defaults)
    assert (args.logprobs_mode, args.generation_config) == is_so
    assert ("--generation-config vllm" in caplog.text) == (is_so[1] == "vllm")
    assert ("--logprobs-mode processed_logprobs" in caplog.text) == (
        is_so[0] == "processed_logprobs"
    )


@pytest.mark.parametrize(
    ("given", "is_sized"),
    [
        ([], False),
        (["--gpu-memory-utilization", "0.92"], True),
        (["--kv-cache-memory-bytes", "1G"], True),
        (["--num-gpu-blocks-override", "64"], True),
        (["--config", "FILE"], True),
    ],
)
def test_the_kv_cache_of_a_cpu_is_sized_unless_the_user_does(
    given: list[str], is_sized: bool, tmp_path: Path
) -> None:
    file = tmp_path / "vllm.yaml"
    file.write_text("gpu-memory-utilization: 0.5\n")
    words = ["m", *(str(file) if word == "FILE" else word for word in given)]
    args = launch.parse_args(words, bridges.server_parts(), launch.RL_DEFAULTS)
    environ: dict[str, str] = {}
    cpu_cache.size_cache(args, environ)
    assert (cpu_cache.VARIABLE in environ) is not is_sized


@pytest.mark.parametrize("name", ["VLLM_ALLOW_RUNTIME_LORA_UPDATING", "VLLM_SERVER_DEV_MODE"])
async def test_an_environment_that_changes_weights_behind_weft(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv(name, "1")
    with pytest.raises(UnsupportedError, match="--allow-unversioned-changes"):
        await start("m")


async def test_adapters_of_experts_on_a_cpu(tmp_path: Path) -> None:
    """vLLM's engine would load the model first, and then fail."""
    save_config("qwen3_moe", tmp_path)
    with pytest.raises(UnsupportedError, match="4 experts, on a CPU"):
        await start(str(tmp_path), "--enable-lora")


async def test_experts_on_ranks_of_a_cpu(tmp_path: Path) -> None:
    """vLLM's engine would end at the first request: its kernel knows no expert map."""
    save_config("qwen3_moe", tmp_path)
    args = ("--enable-expert-parallel", "--tensor-parallel-size", "2")
    with pytest.raises(UnsupportedError, match="4 experts, on 2 ranks of a CPU"):
        await start(str(tmp_path), *args)


async def test_an_address_that_is_taken(tmp_path: Path) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        with pytest.raises(InvalidRequestError, match="cannot listen"):
            await start(str(tmp_path), port=other.getsockname()[1])


@pytest.mark.parametrize("model", ["nope", "nope/nope"])
async def test_a_model_that_nobody_knows(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(InvalidRequestError, match=f"the model '{model}' cannot be found"):
        await start(model)
