"""Local files are read as they would be pushed, and compared with what is served."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from trainer_side.sources.file_source import CheckpointSource
from trainer_side.sources.source import CastRule
from weft_rl.cli.verify.tensors import (
    FINE,
    ComparedTensor,
    Verdict,
    base_dir_of,
    compare,
    counts,
    differing_settings,
    read_adapter,
    read_checkpoint,
)
from weft_rl.contract.checkpoint import StoredTensor
from weft_rl.contract.errors import InvalidRequestError
from weft_rl.contract.tensors import DataType
from weft_rl.progress import ShownProgress
from weft_rl.transport.digests.wsum64 import tensor_digest

PROGRESS = ShownProgress("verify")
TENSORS = {"a": torch.linspace(-3, 3, 77).view(7, 11), "lm_head.weight": torch.ones(2, 2)}
CONFIG = {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "target_modules": ["q_proj"]}
_Q = "base_model.model.model.layers.0.self_attn.q_proj"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def checkpoint(path: Path, **config: object) -> Path:
    path.mkdir()
    save_file(TENSORS, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps(config))
    return path


def adapter(path: Path, **config: object) -> Path:
    path.mkdir()
    save_file({f"{_Q}.lora_A.weight": torch.ones(8, 4)}, path / "adapter_model.safetensors")
    (path / "adapter_config.json").write_text(json.dumps({**CONFIG, **config}))
    return path


def test_its_reading_is_shown_by_bytes_also_of_what_is_known(tmp_path: Path) -> None:
    path, shares = checkpoint(tmp_path / "model"), list[float | None]()

    class Watched(ShownProgress):
        def done(self, num_bytes: float) -> None:
            super().done(num_bytes)
            shares.append(self.share)

    size = (path / "model.safetensors").stat().st_size
    for expected in ([308 / size, 324 / size, 1.0], [1.0]):  # the second time it is known
        shares.clear()
        progress = Watched("verify")
        read_checkpoint(path, progress)
        assert shares == expected
        assert progress.text().startswith("verify: reading model ")


def test_a_cast_is_that_of_a_push(tmp_path: Path) -> None:
    path = checkpoint(tmp_path / "model")
    local = read_checkpoint(path, PROGRESS)
    assert {t.name: (t.dtype, t.dims) for t in local.tensors} == {
        "a": ("F32", (7, 11)),
        "lm_head.weight": ("F32", (2, 2)),
    }
    source = CheckpointSource(path, CastRule(served=DataType.BFLOAT16))
    view = torch.empty(7, 11, dtype=torch.bfloat16)
    source.read(0, 1, [view])
    pushed = tensor_digest(view.view(-1).view(torch.uint8))
    assert local.cast_digest("a", DataType.BFLOAT16) == pushed
    assert local.cast_digest("a", DataType.FLOAT16) != pushed


@pytest.mark.parametrize("tied", [True, False])
def test_a_head_is_a_copy_where_the_config_says_so(tmp_path: Path, tied: bool) -> None:
    path = checkpoint(tmp_path / "model", tie_word_embeddings=tied)
    assert read_checkpoint(path, PROGRESS).optional([]) == ({"lm_head.weight"} if tied else set())


def test_layers_for_drafts_may_lack_on_either_side(tmp_path: Path) -> None:
    names = ["model.layers.0.up.weight", "model.layers.1.up.weight", "mtp.fc.weight"]
    path = checkpoint(tmp_path / "model", num_hidden_layers=1)
    save_file({name: torch.ones(2) for name in names}, path / "model.safetensors")
    optional = read_checkpoint(path, PROGRESS).optional([])
    assert optional == set(names[1:])
    drafts = [tensor(name, 1) for name in names[1:]]
    assert compare(drafts, [], no_cast, optional) == compare([], drafts, no_cast, optional) == []
    served = [tensor("draft_model.fc.weight", 1)]
    assert compare([], served, no_cast, read_checkpoint(path, PROGRESS).optional(served)) == []


def test_served_layers_above_the_configs_are_no_drafts(tmp_path: Path) -> None:
    local = read_checkpoint(checkpoint(tmp_path / "model", num_hidden_layers=1), PROGRESS)
    assert local.optional([tensor("model.layers.1.up.weight", 1)]) == set()
    assert local.optional([tensor("mtp.fc.weight", 1)]) == {"mtp.fc.weight"}


def test_a_single_file_is_a_checkpoint(tmp_path: Path) -> None:
    path = checkpoint(tmp_path / "model")
    assert (
        read_checkpoint(path / "model.safetensors", PROGRESS).tensors
        == read_checkpoint(path, PROGRESS).tensors
    )


def test_what_is_no_checkpoint_or_no_adapter_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequestError, match=r"holds no \*.safetensors"):
        read_checkpoint(tmp_path, PROGRESS)
    with pytest.raises(InvalidRequestError, match="is a PEFT adapter"):
        read_checkpoint(adapter(tmp_path / "adapter"), PROGRESS)
    with pytest.raises(InvalidRequestError, match="say --policy base"):
        read_adapter(checkpoint(tmp_path / "model"), PROGRESS)
    (tmp_path / "adapter" / "adapter_model.safetensors").unlink()
    with pytest.raises(InvalidRequestError, match="holds no adapter_model"):
        read_adapter(tmp_path / "adapter", PROGRESS)


def test_the_base_is_where_the_config_says(tmp_path: Path) -> None:
    base = checkpoint(tmp_path / "model")
    named = adapter(tmp_path / "named", base_model_name_or_path=str(base))
    assert base_dir_of(named) == (base, str(base))
    away = adapter(tmp_path / "away", base_model_name_or_path=str(tmp_path / "gone"))
    assert base_dir_of(away) == (None, str(tmp_path / "gone"))
    assert base_dir_of(adapter(tmp_path / "nameless")) == (None, "")


@pytest.mark.parametrize(
    ("served", "differs"),
    [
        ({}, []),
        ({"target_modules": ["v_proj"], "lora_dropout": 0.1, "use_rslora": False}, []),
        ({"lora_alpha": 32}, ["lora_alpha is 32, here 16"]),
        ({"use_rslora": True}, ["use_rslora is True, here None"]),
        ({"alpha_pattern": {"q_proj": 1}}, ["alpha_pattern is {'q_proj': 1}, here None"]),
    ],
)
def test_settings_that_change_what_the_tensors_mean(
    tmp_path: Path, served: dict[str, object], differs: list[str]
) -> None:
    local = read_adapter(adapter(tmp_path / "adapter"), PROGRESS)
    assert differing_settings(json.dumps({**CONFIG, **served}), local) == differs


# -- comparison ---------------------------------------------------------------------------------


def tensor(
    name: str, digest: int = 1, dtype: str = "BF16", shape: tuple[int, ...] = (2, 3)
) -> StoredTensor:
    return StoredTensor(name, dtype, shape, digest)


def no_cast(name: str, dtype: DataType) -> int:
    raise AssertionError(f"{name} was cast to {dtype}")


def verdicts(found: list[ComparedTensor]) -> dict[str, Verdict]:
    return {compared.name: compared.verdict for compared in found}


def test_each_tensor_of_either_side_is_told_of() -> None:
    served = [tensor("a"), tensor("b"), tensor("c"), tensor("d"), tensor("only served")]
    local = [
        tensor("a"),
        tensor("b", 2),
        tensor("c", shape=(3, 2)),
        tensor("d", dtype="I8"),
        tensor("only here"),
    ]
    found = compare(served, local, no_cast)
    assert verdicts(found) == {
        "a": Verdict.EQUAL,
        "b": Verdict.DIFFERENT,
        "c": Verdict.DIFFERENT,
        "d": Verdict.DIFFERENT,
        "only served": Verdict.EXTRA,
        "only here": Verdict.MISSING,
    }
    says = {compared.name: compared.says for compared in found}
    assert says["b"] == "BF16 (2,3) of other values: 0000000000000001, here 0000000000000002"
    assert says["c"] == "served BF16 (2,3), here BF16 (3,2)"
    assert counts(found) == {"equal": 1, "different": 3, "missing": 1, "extra": 1}


def test_floats_of_another_type_are_cast_as_a_push_casts_them() -> None:
    asked = []

    def cast(name: str, dtype: DataType) -> int:
        asked.append((name, dtype))
        return 7

    served = [tensor("same", 7), tensor("other", 8)]
    local = [tensor("same", 1, "F32"), tensor("other", 1, "F32")]
    found = verdicts(compare(served, local, cast))
    assert found == {"same": Verdict.EQUAL_AFTER_CAST, "other": Verdict.DIFFERENT}
    assert asked == [("other", DataType.BFLOAT16), ("same", DataType.BFLOAT16)]


def test_a_type_that_cannot_travel_is_another() -> None:
    found = compare([tensor("a", dtype="BF16")], [tensor("a", dtype="F8_E8M0")], no_cast)
    assert verdicts(found) == {"a": Verdict.DIFFERENT}


def test_a_copy_of_another_tensor_may_be_missing_and_not_be_another() -> None:
    tied = frozenset({"lm_head.weight"})
    head = [tensor("lm_head.weight")]
    assert compare(head, [], no_cast, tied) == compare([], head, no_cast, tied) == []
    other = compare(head, [tensor("lm_head.weight", 9)], no_cast, tied)
    assert verdicts(other) == {"lm_head.weight": Verdict.DIFFERENT}


_TENSORS = st.lists(
    st.builds(
        tensor,
        st.sampled_from("abcdef"),
        st.integers(0, 2),
        st.sampled_from(["I8", "U8"]),
        st.sampled_from([(2,), (3,)]),
    ),
    unique_by=lambda tensor: tensor.name,
)


@given(_TENSORS, _TENSORS)
def test_all_is_fine_only_where_both_sides_are_the_same(
    served: list[StoredTensor], local: list[StoredTensor]
) -> None:
    found = compare(served, local, no_cast)
    assert all(c.verdict in FINE for c in found) == (
        {t.name: t for t in served} == {t.name: t for t in local}
    )
    assert {c.name for c in found} == {t.name for t in [*served, *local]}
