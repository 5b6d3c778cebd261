"""Parts of the vLLM engine that need no vLLM: answers, tracker, registry, reference."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from rollout_side.vllm_engine.loading.reload import quiet_about_idle_layers
from rollout_side.vllm_engine.server.capabilities import lora_modules
from rollout_side.vllm_engine.server.model_reference import build_reference, served_dtypes
from rollout_side.vllm_engine.server.request_tracker import RequestTracker
from rollout_side.vllm_engine.server.served_models import FIRST_LORA_ID, ServedModels, own_names
from rollout_side.vllm_engine.server.unknown_models import explain_unknown_models
from rollout_side.vllm_engine.worker.answers import Answer, check_answers, guarded
from weft.contract.errors import (
    CapacityError,
    DigestMismatchError,
    InvalidNameError,
    LoadFailedError,
    NotFoundError,
    NotReadyError,
)
from weft.contract.names import PolicyVersion
from weft.contract.tensors import DataType, TensorMeta


class _Worker:
    def __init__(self, rank: int, error: BaseException | None = None) -> None:
        self.rank, self.error = rank, error

    @guarded
    def work(self, value: int) -> dict[str, Any]:
        if self.error is not None:
            raise self.error
        return {"value": value}


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(1), AssertionError()])
def test_no_kind_of_failure_passes_the_guard(error: BaseException) -> None:
    answer = _Worker(1, error).work(2)
    assert (answer["ok"], answer["rank"]) == (False, 1)
    assert type(error).__name__ in answer["error_message"]
    with pytest.raises(LoadFailedError, match=type(error).__name__):
        check_answers([answer])


def test_a_typed_error_keeps_its_type_and_metadata() -> None:
    error = CapacityError("full", metadata={"holder": "math@1"})
    answers = [_Worker(0).work(1), _Worker(1, error).work(1)]
    with pytest.raises(CapacityError, match="rank 1 of 2: full") as raised:
        check_answers(answers)
    assert raised.value.metadata["holder"] == "math@1"
    assert "dirty" not in raised.value.metadata
    assert check_answers([_Worker(0).work(1)]) == [{"value": 1}]


def test_mixed_answers_are_dirty_where_they_leave_mixed_weights() -> None:
    answers: list[Answer] = [_Worker(0).work(1), _Worker(1, NotReadyError("no")).work(1)]
    with pytest.raises(NotReadyError) as raised:
        check_answers(answers, mixed_is_dirty=True)
    assert raised.value.metadata["dirty"] == "true"
    with pytest.raises(NotReadyError) as raised:
        check_answers(answers[1:], mixed_is_dirty=True)
    assert "dirty" not in raised.value.metadata


def test_a_mark_is_passed_once_the_requests_before_it_have_ended() -> None:
    tracker = RequestTracker()
    with tracker.running():
        mark = tracker.mark()
        assert not tracker.passed(mark)
        with tracker.running():
            assert tracker.num_running == 2
    with tracker.running():
        assert tracker.passed(mark)
    assert tracker.num_running == 0


async def test_refused_requests_get_an_openai_error() -> None:
    tracker, reached, sent = RequestTracker(), [], []

    async def app(scope: Any, _receive: Any, _send: Any) -> None:
        reached.append(scope["path"])

    async def receive() -> dict[str, Any]:
        return {}

    async def send(message: Any) -> None:
        sent.append(message)

    tracked = tracker.wrap(app)
    tracker.refuse_reason = "weights are mixed"
    await tracked({"type": "http", "path": "/v1/completions"}, receive, send)
    await tracked({"type": "http", "path": "/health"}, receive, send)
    assert reached == ["/health"]
    assert sent[0]["status"] == 503
    assert json.loads(sent[1]["body"])["error"]["message"] == "weights are mixed"


class _Serving:
    def __init__(self) -> None:
        self.lora_requests: dict[str, Any] = {}
        self.base_model_paths = [SimpleNamespace(name=name) for name in ("tiny", "tiny-2")]

    def is_base_model(self, name: str) -> bool:
        return name == "tiny"


def _request(version: PolicyVersion) -> Any:
    return SimpleNamespace(lora_name=str(version), lora_path=f"weft://{version}", lora_int_id=1)


def test_an_alias_stands_for_what_it_is_told_to() -> None:
    serving = _Serving()
    models = ServedModels(serving)
    versions = [PolicyVersion("math", v) for v in (1, 3, 2)]
    models.add(versions[0], _request(versions[0]), b"", alias=3)  # not here yet
    assert serving.lora_requests["math"].lora_name == "math@1"
    models.add(versions[1], _request(versions[1]), b"")
    models.add(versions[2], _request(versions[2]), b"", alias=3)
    assert serving.lora_requests["math"].lora_name == "math@3"
    models.set_alias(versions[0])
    assert serving.lora_requests["math"].lora_name == "math@1"
    with pytest.raises(NotFoundError):
        models.set_alias(PolicyVersion("math", 9))
    models.set_alias(versions[1])
    assert set(serving.lora_requests) == {"math", "math@1", "math@2", "math@3"}
    with pytest.raises(NotReadyError, match="stands for"):
        models.remove(PolicyVersion("math", 3), 0)
    first = models.remove(PolicyVersion("math", 1), 7)
    assert first is not None
    assert first.removed_at == 7
    assert models.remove(PolicyVersion("math", 1), 9) is first
    assert first.removed_at == 7
    assert "math@1" not in serving.lora_requests
    with pytest.raises(NotReadyError, match="being retired"):
        models.is_served(PolicyVersion("math", 1), b"")
    models.forget(PolicyVersion("math", 1))
    assert models.remove(PolicyVersion("math", 1), 0) is None


def test_what_can_be_asked_for_instead_of_an_unknown_name() -> None:
    models = ServedModels(_Serving())
    for number in (1, 2, 3):
        version = PolicyVersion("math", number)
        models.add(version, _request(version), b"")
    models.remove(PolicyVersion("math", 1), 0)
    retired = models.explain_unknown("math@1")
    assert retired == "it was retired, or is not here yet; of math there are math@2, math@3"
    assert models.explain_unknown("code@1") == ""
    models.hide_aliases(True)
    assert "out of contact" in models.explain_unknown("math")
    for number in range(4, 20):
        version = PolicyVersion("math", number)
        models.add(version, _request(version), b"")
    many = models.explain_unknown("math@1")
    assert "18 versions, the newest math@10" in many
    assert len(many) < 250


async def _ask(status: int, bodies: list[bytes]) -> tuple[dict[str, str], bytes]:
    """The headers and the body of an answer that goes through ``explain_unknown_models``."""
    sent: list[Any] = []

    async def app(_scope: Any, _receive: Any, send: Any) -> None:
        headers = [(b"content-type", b"application/json"), (b"Content-Length", b"1")]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        for body in bodies:
            more = body is not bodies[-1]
            await send({"type": "http.response.body", "body": body, "more_body": more})

    async def send(message: Any) -> None:
        sent.append(message)

    asked = explain_unknown_models(app, lambda name: f"ask for {name}2" if name == "m" else "")
    await asked({"type": "http", "path": "/v1/completions"}, None, send)  # type: ignore[arg-type]
    assert sent[0]["status"] == status
    headers = {k.decode().lower(): v.decode() for k, v in sent[0]["headers"]}
    assert not sent[-1].get("more_body")
    return headers, b"".join(message["body"] for message in sent[1:])


async def test_an_unknown_model_is_explained_and_nothing_else_is_touched() -> None:
    error = {"message": "The model `m` does not exist. Valid aliases: tiny.", "code": 404}
    body = json.dumps({"error": error}).encode()
    for bodies in ([body], [body[:9], body[9:], b""]):
        headers, answer = await _ask(404, bodies)
        assert json.loads(answer)["error"]["message"] == "The model `m` does not exist: ask for m2"
        assert headers["content-length"] == str(len(answer))
    for status, other in (
        (200, body),
        (404, b"no json"),
        (404, b"[]"),
        (404, body.replace(b"`m`", b"`n`")),
        (404, b"x" * 100_000),
    ):
        headers, answer = await _ask(status, [other[:5], other[5:], b""])
        assert (headers["content-length"], answer) == ("1", other)


def test_names_that_are_taken() -> None:
    serving = _Serving()
    serving.lora_requests["disk"] = SimpleNamespace(lora_path="/adapters/disk")
    models = ServedModels(serving)
    for name, text in (("tiny", "base model"), ("disk", "/adapters/disk")):
        with pytest.raises(InvalidNameError, match=text):
            models.check_new(PolicyVersion(name, 1))
    serving.lora_requests["math@1"] = _request(PolicyVersion("math", 1))
    assert own_names(serving) == ("disk", "tiny", "tiny-2")
    del serving.lora_requests["math@1"]
    version = PolicyVersion("math", 1)
    models.check_new(version)
    assert not models.is_served(version, b"a")
    models.add(version, _request(version), b"a")
    assert models.is_served(version, b"a")
    with pytest.raises(DigestMismatchError):
        models.is_served(version, b"b")
    assert models.next_id() == FIRST_LORA_ID
    assert models.next_id() == FIRST_LORA_ID + 1


def test_experts_are_not_named_as_modules() -> None:
    assert lora_modules(["q_proj", "experts", "experts.0.up_proj", "k_proj"]) == (
        "k_proj",
        "q_proj",
    )


def _config(**settings: Any) -> Any:
    config = SimpleNamespace(architectures=["TinyForCausalLM"], **settings)
    config.get_text_config = lambda: config
    return config


def test_the_reference_is_read_from_headers(tmp_path: Path) -> None:
    save_file(
        {
            "b.weight": torch.zeros(2, 3, dtype=torch.bfloat16),
            "a.weight": torch.zeros(4, dtype=torch.bfloat16),
            "router.bias": torch.zeros(4, dtype=torch.float32),
            "packed": torch.zeros(4, dtype=torch.int32),
            "lm_head.weight": torch.zeros(2, 3, dtype=torch.bfloat16),
            "model.rotary_emb.inv_freq": torch.zeros(4),
        },
        tmp_path / "model.safetensors",
    )
    save_file({"other": torch.zeros(1)}, tmp_path / "adapter_model.safetensors")
    reference = build_reference(tmp_path, _config(tie_word_embeddings=True), DataType.FLOAT16)
    assert reference.architecture == "TinyForCausalLM"
    assert {m.name: (m.dtype, m.shape) for m in reference.tensors} == {
        "a.weight": (DataType.FLOAT16, (4,)),
        "b.weight": (DataType.FLOAT16, (2, 3)),
        "packed": (DataType.INT32, (4,)),
        "router.bias": (DataType.FLOAT32, (4,)),
    }
    untied = build_reference(tmp_path, _config(tie_word_embeddings=False), DataType.FLOAT16)
    assert "lm_head.weight" in untied.by_name


def test_only_the_files_of_an_index_count(tmp_path: Path) -> None:
    for name in ("x", "y"):
        save_file({f"{name}.weight": torch.zeros(1)}, tmp_path / f"{name}.safetensors")
    index = {"weight_map": {"x.weight": "x.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    reference = build_reference(tmp_path, _config(), DataType.FLOAT32)
    assert [meta.name for meta in reference.tensors] == ["x.weight"]


def test_without_files_the_names_are_those_transformers_saves() -> None:
    from transformers import MixtralConfig

    config = MixtralConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        num_local_experts=2,
        architectures=["MixtralForCausalLM"],
    )
    reference = build_reference(None, config, DataType.BFLOAT16)
    expert = reference.by_name["model.layers.0.block_sparse_moe.experts.1.w1.weight"]
    assert expert == TensorMeta(expert.name, DataType.BFLOAT16, (8, 16))


def test_layers_that_have_no_weights_are_no_warning(caplog: pytest.LogCaptureFixture) -> None:
    logger = logging.getLogger("vllm.model_executor.model_loader.reload.layerwise")
    with quiet_about_idle_layers():
        logger.warning("%s: Failed to load weights", "Attention")
        logger.warning("something else")
    assert [record.getMessage() for record in caplog.records] == ["something else"]
    logger.warning("%s: Failed to load weights", "Attention")
    assert len(caplog.records) == 2


def test_floats_wider_than_most_keep_their_width() -> None:
    metas = [
        TensorMeta(n, d, (1,))
        for n, d in (
            ("a", DataType.FLOAT32),
            ("b", DataType.FLOAT32),
            ("c", DataType.BFLOAT16),
            ("d", DataType.FLOAT8_E4M3FN),
            ("e", DataType.FLOAT64),
        )
    ]
    dtypes = [meta.dtype for meta in served_dtypes(metas, DataType.BFLOAT16)]
    assert dtypes == [
        DataType.BFLOAT16,
        DataType.BFLOAT16,
        DataType.BFLOAT16,
        DataType.FLOAT8_E4M3FN,
        DataType.FLOAT64,
    ]


def test_a_dropped_alias_stands_for_nothing_and_its_version_can_go() -> None:
    serving = _Serving()
    models = ServedModels(serving)
    version = PolicyVersion("math", 1)
    models.add(version, _request(version), b"")
    for _ in range(2):
        models.drop_alias("math")
        assert set(serving.lora_requests) == {"math@1"}
    models.hide_aliases(True)
    models.hide_aliases(False)
    assert models.remove(version, 0) is not None
    assert not serving.lora_requests


def test_hidden_aliases_come_back_as_they_should_be_by_then() -> None:
    serving = _Serving()
    models = ServedModels(serving)
    first, second = PolicyVersion("math", 1), PolicyVersion("math", 2)
    models.add(first, _request(first), b"")
    models.hide_aliases(True)
    assert set(serving.lora_requests) == {"math@1"}
    models.add(second, _request(second), b"")
    assert set(serving.lora_requests) == {"math@1", "math@2"}
    models.hide_aliases(False)
    assert serving.lora_requests["math"].lora_name == "math@2"
