"""A served model and the one that drafts for it take their tensors from one stream."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import pytest
import torch

from rollout_side.vllm_engine.loading.drafted_model import DraftedModel
from weft_rl.contract.tensors import DataType, Reference, TensorMeta

Named = tuple[str, torch.Tensor]


class Part(torch.nn.Module):
    """Notes what it is given, and reports it as loaded, or nothing."""

    def __init__(self, *names: str, reports: bool = True) -> None:
        super().__init__()
        self.given: list[str] = []
        self.reports = reports
        for name in names:
            setattr(self, name, torch.nn.Linear(1, 1, bias=False))

    def load_weights(self, weights: Iterable[Named]) -> set[str] | None:
        self.given += [name for name, _ in weights]
        return set(self.given) if self.reports else None


def meta(name: str) -> TensorMeta:
    return TensorMeta(name, DataType.FLOAT32, (1, 1))


REFERENCE = Reference("Tiny", (meta("embed.weight"), meta("up.weight")), draft_prefixes=("mtp.",))
DRAFT = (meta("draft_model.fc.weight"), meta("mtp.norm.weight"))


def given(*names: str, asked: list[str] | None = None) -> Iterator[Named]:
    for name in names:
        if asked is not None:
            asked.append(name)
        yield name, torch.zeros(1, 1)


@pytest.fixture
def model() -> DraftedModel:
    return DraftedModel(Part("embed", "up"), Part("fc"), REFERENCE, DRAFT)


@pytest.mark.parametrize(
    "names",
    [
        ("embed.weight", "up.weight", "mtp.norm.weight", "draft_model.fc.weight"),
        ("mtp.norm.weight", "embed.weight", "draft_model.fc.weight", "up.weight"),
    ],
)
def test_each_takes_its_own_whatever_the_order(model: DraftedModel, names: list[str]) -> None:
    loaded = model.load_weights(given(*names))
    assert model.target.given == ["embed.weight", "up.weight"]
    assert sorted(model.draft.given) == ["fc.weight", "mtp.norm.weight"]
    assert loaded == {"target.embed.weight", "target.up.weight", "draft.fc.weight",
                      "draft.mtp.norm.weight"}  # fmt: skip


def test_files_hold_more_than_is_loaded(model: DraftedModel) -> None:
    """The served model skips layers of its own checkpoint; a draft's table is nobody's."""
    names = ["mtp.other.weight", "embed.weight", "draft_model.t2d", "up.weight"]
    model.load_weights(given(*names, "draft_model.d2t", "draft_model.fc.weight"))
    assert model.target.given == ["mtp.other.weight", "embed.weight", "up.weight"]
    assert model.draft.given == ["fc.weight"]


def test_a_draft_that_comes_last_does_not_wait(model: DraftedModel) -> None:
    asked: list[str] = []
    weights = given("up.weight", "embed.weight", "mtp.norm.weight", asked=asked)
    model.target.load_weights = lambda w: {n for n, _ in w}  # type: ignore[assignment]
    model.draft.load_weights = lambda w: (asked.append("draft"), {n for n, _ in w})[1]  # type: ignore[assignment]
    model.load_weights(weights)
    assert asked == ["up.weight", "embed.weight", "draft", "mtp.norm.weight"]


def test_one_that_reports_nothing_has_loaded_all() -> None:
    model = DraftedModel(Part("up"), Part("fc", reports=False), REFERENCE, DRAFT)
    assert model.load_weights(given("up.weight")) == {"target.up.weight", "draft.fc.weight"}


def test_layers_that_both_have_are_there_once() -> None:
    target, draft = Part("embed", "up"), Part("fc")
    draft.embed = target.embed
    model = DraftedModel(target, draft, REFERENCE, DRAFT)
    assert model.shared_layers == {target.embed}
    assert [n for n, _ in model.named_parameters()] == [
        "target.embed.weight", "target.up.weight", "draft.fc.weight",
    ]  # fmt: skip
