"""Names of versions and aliases at an OpenAI server."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from rollout_side.engine import AliasRefusals
from rollout_side.vllm_engine.http.served_models import FIRST_LORA_ID, ServedModels
from weft_rl.contract.errors import (
    DigestMismatchError,
    InvalidNameError,
    NotFoundError,
    NotReadyError,
)
from weft_rl.contract.names import PolicyVersion
from weft_rl.contract.replica_report import AbsentPolicy


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
    assert retired is not None
    assert (retired.status, retired.reason) == (404, "VERSION_UNKNOWN")
    assert retired.message.endswith(
        "it was retired, or is not here yet; of math there are math@2, math@3"
    )
    known = "does not exist: ask for tiny, tiny-2, base, math; or push it first"
    for name in ("code", "code@1", "Math"):
        unknown = models.explain_unknown(name)
        assert (unknown.status, unknown.reason) == (404, "POLICY_UNKNOWN")
        assert unknown.message == f"The model `{name}` {known}"
    models.absent = {"code": AbsentPolicy("code", 3, "an operator forgot code")}
    for name, reason in (("code", "POLICY_UNKNOWN"), ("code@3", "VERSION_UNKNOWN")):
        gone = models.explain_unknown(name)
        assert gone is not None
        assert (gone.status, gone.reason) == (404, reason)
        assert gone.message == f"The model `{name}` does not exist: an operator forgot code"
    for name in ("code@4", "code@", f"code@{'9' * 99}", "other"):
        assert models.explain_unknown(name).message.endswith(known)
    models.refuse_aliases(AliasRefusals(every="out of contact", is_away=True))
    unheard = models.explain_unknown("code")
    assert unheard is not None
    assert (unheard.status, unheard.reason) == (503, "COORDINATOR_AWAY")
    for number in range(4, 20):
        version = PolicyVersion("math", number)
        models.add(version, _request(version), b"")
    many = models.explain_unknown("math@1")
    assert many is not None
    assert "18 versions, the newest math@10" in many.message
    assert len(many.message) < 300
    models.refuse_aliases(AliasRefusals())
    for number in range(20):
        version = PolicyVersion(f"policy-{number:02}", 1)
        models.add(version, _request(version), b"")
    other = models.explain_unknown("x" * 9999).message
    assert "ask for tiny, tiny-2, base, math, policy-00" in other
    assert other.endswith("policy-05, and 14 more (GET /v1/models lists all); or push it first")
    assert len(other) < 500


def test_names_that_are_taken() -> None:
    serving = _Serving()
    serving.lora_requests["disk"] = SimpleNamespace(lora_path="/adapters/disk")
    serving.lora_requests["math@1"] = _request(PolicyVersion("math", 1))
    models = ServedModels(serving)
    for name, text in (("tiny", "base model"), ("disk", "/adapters/disk")):
        with pytest.raises(InvalidNameError, match=text):
            models.check_new(PolicyVersion(name, 1))
    assert models.own_names == ("disk", "tiny", "tiny-2")
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


def test_a_dropped_alias_stands_for_nothing_and_its_version_can_go() -> None:
    serving = _Serving()
    models = ServedModels(serving)
    version = PolicyVersion("math", 1)
    models.add(version, _request(version), b"")
    for _ in range(2):
        models.drop_alias("math")
        assert set(serving.lora_requests) == {"math@1"}
    assert models.remove(version, 0) is not None
    assert not serving.lora_requests


def test_a_refused_alias_is_not_admitted_and_exact_versions_are() -> None:
    serving = _Serving()
    models = ServedModels(serving)
    for name in ("math@1", "code@1"):
        version = PolicyVersion.parse(name)
        models.add(version, _request(version), b"")
    models.refuse_aliases(AliasRefusals(named={"math": "the pool serves math@2"}))
    refused = models.refusal("math")
    assert refused is not None
    assert (refused.status, refused.reason) == (503, "REFUSING")
    assert refused.message == (
        "The model `math` is refused: the pool serves math@2; ask another replica, or for an "
        "exact version, math@1"
    )
    assert not any(map(models.refusal, ("math@1", "code", "code@1", "base", "base@0", "tiny", "")))
    models.refuse_aliases(AliasRefusals(every="the pool serves base@7"))
    for asked in ("math", "code", "base", "tiny", "tiny-2", ""):
        refused = models.refusal(asked)
        assert refused is not None, asked
        assert refused.status == 503
        assert "the pool serves base@7" in refused.message
    assert not any(map(models.refusal, ("math@1", "code@1", "base@0")))
    models.refuse_aliases(AliasRefusals())
    assert not any(map(models.refusal, ("math", "base", "tiny", "")))


def test_an_adapter_from_a_file_is_nothing_of_the_pools() -> None:
    serving = _Serving()
    serving.lora_requests["disk"] = SimpleNamespace(lora_path="/adapters/disk")
    models = ServedModels(serving)
    models.refuse_aliases(AliasRefusals(every="the pool serves base@7"))
    assert models.refusal("disk") is None


def test_the_base_has_a_name_and_a_version_beside_its_own_names() -> None:
    serving = _Serving()
    models = ServedModels(serving)

    def names() -> list[str]:
        return [path.name for path in serving.base_model_paths]

    assert names() == ["tiny", "tiny-2", "base", "base@0"]
    models.set_base(PolicyVersion("base", 3))
    assert names() == ["tiny", "tiny-2", "base", "base@3"]
    assert serving.base_model_paths[2].model_path == "base@3"
    for gone in (models.explain_unknown("base@0"), models.refusal("base@0")):
        assert gone is not None
        assert gone.status == 404
        assert gone.message.endswith("of base there are base@3")
    assert models.refusal("base@3") is None
    assert models.base_name == "tiny"
