"""What a replica refuses before its engine starts, without vLLM."""

from __future__ import annotations

import logging
import re
import sys
from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rollout_side.vllm_engine.server import refusals
from rollout_side.vllm_engine.server.refusals import (
    REFUSED_OPTIONS,
    close_endpoints,
    num_experts,
    plain_argument_errors,
    plain_errors,
    refuse_caches_beyond_reach,
    refuse_environment,
    refuse_keep,
    refuse_missing_model,
    refuse_sleep_without_gpu,
    refuse_unsupported,
)
from weft_rl.contract.errors import InvalidRequestError, UnsupportedError
from weft_rl.transport import backends


@pytest.mark.parametrize("name", ["VLLM_ALLOW_RUNTIME_LORA_UPDATING", "VLLM_SERVER_DEV_MODE"])
@pytest.mark.parametrize("value", ["1", "true", " True "])
def test_an_environment_that_opens_other_ways_to_weights(name: str, value: str) -> None:
    with pytest.raises(UnsupportedError, match="--allow-unversioned-changes") as refused:
        refuse_environment({name: value}, allow=False)
    assert f"unset {name}," in refused.value.message


@pytest.mark.parametrize(("name", "taken"), [("VLLM_DP_SIZE", "1"), ("VLLM_DP_RANK", "0")])
def test_an_environment_of_one_of_several_engines(name: str, taken: str) -> None:
    refuse_environment({name: taken}, allow=False)
    with pytest.raises(UnsupportedError, match=rf"{name}=2 is for one of .* unset {name}, and"):
        refuse_environment({name: "2"}, allow=True)


_REFUSED = """
    --data-parallel-size --data-parallel-size-local --data-parallel-rank
    --data-parallel-start-rank --data-parallel-address --data-parallel-rpc-port
    --data-parallel-backend --data-parallel-hybrid-lb --data-parallel-external-lb
    --data-parallel-multi-port-external-lb --pipeline-parallel-size
    --prefill-context-parallel-size --api-server-count --nnodes --node-rank --master-addr
    --master-port --distributed-executor-backend --headless --grpc --uds --enable-eplb
    --enable-elastic-ep --enable-mixed-moe-lora-format --enable-moe-shared-loras
    --offload-group-size
"""


def test_no_option_that_makes_a_replica_wrong_is_forgotten() -> None:
    assert [*REFUSED_OPTIONS] == _REFUSED.split()


@pytest.mark.parametrize("name", REFUSED_OPTIONS)
def test_arguments_are_refused_by_a_sentence_unless_they_change_nothing(name: str) -> None:
    dest, refused = name.removeprefix("--").replace("-", "_"), REFUSED_OPTIONS[name]
    for nothing in (None, False, "", *refused.taken):
        refuse_unsupported(Namespace(**{dest: nothing}))
    for given, said in ((True, name), ("x", f"{name} x"), (7, f"{name} 7")):
        with pytest.raises(UnsupportedError) as caught:
            refuse_unsupported(Namespace(**{dest: given}))
        assert caught.value.message == f"{said}: {refused.why}"
    assert re.search(r"; (leave it out|start more replicas|use --)", refused.why)
    assert refused.why.count("leave it out") <= 1


@pytest.mark.parametrize("words", [["--api-key=-sk1"], ["--api-key", "-sk1", "--seed", "-sk1x"]])
def test_no_secret_is_quoted_from_what_vllm_says(words: list[str]) -> None:
    with pytest.raises(InvalidRequestError) as refused, plain_argument_errors(["--x", *words]):
        raise ValueError("unrecognized --api-key=-sk1")
    assert "-sk1" not in refused.value.message
    assert "(--x --api-key" in refused.value.message
    assert refused.value.message.endswith("unrecognized --api-key=…")


def test_both_variables_are_named_at_once() -> None:
    environ = {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1", "VLLM_SERVER_DEV_MODE": "1"}
    with pytest.raises(UnsupportedError) as refused:
        refuse_environment(environ, allow=False)
    assert all(name in refused.value.message for name in environ)


@pytest.mark.parametrize("name", ["scheduler_cls", "kv_transfer_config", "kv_offloading_size"])
def test_running_requests_are_not_kept_in_another_cache(name: str) -> None:
    refuse_keep(Namespace(scheduler_cls=None, kv_transfer_config=None))
    with pytest.raises(UnsupportedError, match=f"--{name.replace('_', '-')} with"):
        refuse_keep(Namespace(**{name: "something"}))


def _transfer(name: str | None, module: str | None = None, **extra: object) -> SimpleNamespace:
    return SimpleNamespace(
        kv_connector=name, kv_connector_module_path=module, kv_connector_extra_config=extra
    )


@pytest.mark.parametrize(
    ("fields", "environ", "text"),
    [
        (
            {"kv_transfer_config": _transfer("ExampleConnector")},
            {},
            "ExampleConnector: a switch",
        ),
        ({"kv_transfer_config": _transfer("MultiConnector")}, {}, "MultiConnector"),
        (
            {"kv_transfer_config": _transfer("OffloadingConnector", "theirs")},
            {},
            "not vLLM's own",
        ),
        (
            {
                "kv_transfer_config": _transfer(None, spec_name="TieringOffloadingSpec"),
                "kv_offloading_size": 1.0,
            },
            {},
            "--kv-offloading-size OffloadingConnector: its TieringOffloadingSpec",
        ),
        (
            {"kv_offloading_size": 1.0},
            {"VLLM_USE_SIMPLE_KV_OFFLOAD": "1"},
            "VLLM_USE_SIMPLE_KV_OFFLOAD SimpleCPUOffloadConnector",
        ),
        (
            {"kv_offloading_size": 1.0, "kv_offloading_backend": "lmcache"},
            {},
            "--kv-offloading-backend LMCacheMPConnector",
        ),
        ({"ec_transfer_config": object()}, {}, "--ec-transfer-config"),
        ({"calculate_kv_scales": True}, {}, "--calculate-kv-scales"),
    ],
)
def test_caches_that_no_switch_empties(
    fields: dict[str, object], environ: dict[str, str], text: str
) -> None:
    with pytest.raises(UnsupportedError, match=text):
        refuse_caches_beyond_reach(Namespace(**fields), environ)


@pytest.mark.parametrize("resets", [False, True])
def test_a_connector_is_taken_where_its_version_resets_it(
    monkeypatch: pytest.MonkeyPatch, resets: bool
) -> None:
    class Base:
        def reset_cache(self) -> None:
            """As vLLM's: it does nothing, which vLLM takes for success."""

    class Connector(Base):
        if resets:

            def reset_cache(self) -> None:
                """Of its own."""

    v1 = "vllm.distributed.kv_transfer.kv_connector.v1"
    modules = {
        f"{v1}.base": SimpleNamespace(KVConnectorBase_V1=Base),
        f"{v1}.offloading_connector": SimpleNamespace(OffloadingConnector=Connector),
    }
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    args = Namespace(kv_offloading_size=1.0, kv_transfer_config=None)
    if resets:
        refuse_caches_beyond_reach(args, {})
    else:
        with pytest.raises(UnsupportedError, match="this version of vLLM"):
            refuse_caches_beyond_reach(args, {})


def test_nothing_is_refused_of_an_engine_with_its_own_caches_alone() -> None:
    refuse_caches_beyond_reach(Namespace(kv_transfer_config=None, kv_offloading_size=None), {})


@pytest.mark.parametrize("value", ["", "0", "false", "False"])
def test_variables_that_open_nothing(value: str) -> None:
    refuse_environment({"VLLM_SERVER_DEV_MODE": value, "PATH": "/bin"}, allow=False)


def test_who_allows_it_is_warned(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        refuse_environment({"VLLM_SERVER_DEV_MODE": "1"}, allow=True)
    assert "VLLM_SERVER_DEV_MODE" in caplog.text


@pytest.mark.parametrize(
    ("fields", "experts"),
    [
        ({}, 0),
        ({"num_experts": None}, 0),
        ({"num_experts": 4}, 4),
        ({"num_local_experts": 8}, 8),
        ({"n_routed_experts": 64, "num_experts_per_tok": 2}, 64),
        ({"moe_num_experts": [16, 32]}, 32),
    ],
)
def test_experts_are_found_where_vllm_finds_them(fields: dict[str, Any], experts: int) -> None:
    text = SimpleNamespace(**fields)
    assert num_experts(SimpleNamespace(get_text_config=lambda: text)) == experts
    assert num_experts(None) == 0


def test_scaling_is_taken_from_the_server() -> None:
    paths = ["/v1/completions", "/scale_elastic_ep", "/health"]
    routes = [SimpleNamespace(path=path) for path in paths]
    app = SimpleNamespace(router=SimpleNamespace(routes=[*routes, object()]))
    close_endpoints(app)
    left = [getattr(route, "path", None) for route in app.router.routes]
    assert left == ["/v1/completions", "/health", None]


@pytest.mark.parametrize("available", [True, False])
def test_sleep_is_refused_where_the_machine_has_none(
    monkeypatch: pytest.MonkeyPatch, available: bool
) -> None:
    platform = SimpleNamespace(is_sleep_mode_available=lambda: available)
    for name in ("vllm", "vllm.platforms"):
        monkeypatch.setitem(sys.modules, name, SimpleNamespace(current_platform=platform))
    if available:
        refuse_sleep_without_gpu()
        return
    with pytest.raises(UnsupportedError, match="--enable-sleep: vLLM has no sleep mode"):
        refuse_sleep_without_gpu()


@pytest.mark.parametrize("is_cuda", [True, False])
def test_a_backend_that_the_machine_cannot_use_is_refused(
    monkeypatch: pytest.MonkeyPatch, is_cuda: bool
) -> None:
    platform = SimpleNamespace(is_cuda=lambda: is_cuda)
    for name in ("vllm", "vllm.platforms"):
        monkeypatch.setitem(sys.modules, name, SimpleNamespace(current_platform=platform))
    missing = {"one-sided": "no directory for sockets"}
    why = {True: lambda name, _: missing.get(name, ""), False: backends.why_unavailable}
    monkeypatch.setattr(backends, "why_unavailable", why[is_cuda])
    if not is_cuda:
        monkeypatch.setenv("WEFT_ONE_SIDED_DIR", "no directory for sockets")
    for always in ("auto", "gloo"):
        refusals.refuse_backend(always)
    with pytest.raises(UnsupportedError, match=r"one-sided cannot be used: .*no directory"):
        refusals.refuse_backend("one-sided")
    missing.clear()
    monkeypatch.delenv("WEFT_ONE_SIDED_DIR", raising=False)
    refusals.refuse_backend("one-sided")
    if is_cuda:
        refusals.refuse_backend("nccl")
        return
    with pytest.raises(UnsupportedError, match=r"--backend nccl .* has none; leave it out"):
        refusals.refuse_backend("nccl")


def test_a_path_where_no_model_is(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for path in (tmp_path / "nope", tmp_path / "empty"):
        with pytest.raises(InvalidRequestError, match=f"there is no model at {path}"):
            refuse_missing_model(str(path))
    with pytest.raises(InvalidRequestError, match="no model"):
        refuse_missing_model("./nope-at-all")
    (tmp_path / "model").mkdir()
    for name in ("config.json", "params.json", "tiny.gguf"):
        (tmp_path / "model" / name).touch()
    for model in (tmp_path / "model", tmp_path / "model" / "tiny.gguf"):
        refuse_missing_model(str(model))
    for model in ("org/name", "name", "s3://bucket/model"):  # vLLM finds these, or says why not
        refuse_missing_model(model)


class _HubError(Exception):
    """Of huggingface_hub."""


_HubError.__module__ = "huggingface_hub.errors"


class _Invalid(ValueError):
    """As pydantic's, which has several lines."""

    def errors(self) -> list[dict[str, str]]:
        return [{"msg": "Value error, bad value\nof it"}]


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (_HubError("not in the cache"), "'org/m' cannot be found: .* not in the cache"),
        (OSError("x is no valid model identifier\nIf this"), "cannot be found: .* identifier$"),
        (
            _Invalid("1 validation error"),
            "vLLM refuses 'org/m', or its arguments: Value error, bad",
        ),
        (ValueError("max_model_len\n more"), "its arguments: max_model_len$"),
    ],
)
def test_what_vllm_raises_before_its_engine_starts_is_a_sentence(
    error: Exception, said: str
) -> None:
    with pytest.raises(InvalidRequestError) as caught, plain_errors("org/m"):
        raise error
    assert re.search(said, caught.value.message), caught.value.message
    assert "\n" not in caught.value.message


def test_what_is_behind_an_error_of_vllm_is_told() -> None:
    with pytest.raises(InvalidRequestError, match=r"cannot be found: .* cache"), plain_errors("m"):
        raise RuntimeError("no config") from _HubError("not in the cache")


def test_an_engine_that_does_not_start_is_a_sentence() -> None:
    said = "Engine core initialization failed. See root cause above. Failed core proc(s): {}"
    with (
        pytest.raises(UnsupportedError, match="'org/m': its processes ended"),
        plain_errors("org/m"),
    ):
        raise RuntimeError(said)


@pytest.mark.parametrize(
    "error", [RuntimeError("Engine core"), OSError("disk full"), UnsupportedError("x")]
)
def test_other_failures_stay_what_they_are(error: Exception) -> None:
    with pytest.raises(type(error)) as caught, plain_errors("org/m"):
        raise error
    assert caught.value is error
