"""A base and its draft are one source, whoever has to take part in reading either."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from trainer_side.params.elements import Elements
from trainer_side.pushes.content import base_content
from trainer_side.ranks.ranks import OneRank
from trainer_side.sources.drafted_source import DraftedSource
from trainer_side.sources.source import Source
from weft_rl.contract.errors import InvalidManifestError, UnsupportedError
from weft_rl.contract.tensors import DataType, TensorMeta
from weft_rl.rpc.manifest_codec import reference_tensor_to_proto
from weft_rl.v1 import publish_pb2 as pb
from weft_rl.v1 import types_pb2


class Fake(Source):
    """Notes what is read of it; its values are those of ``first``, ``first + 1``, ..."""

    def __init__(self, first: int, *names: str, is_collective: bool) -> None:
        self.first, self.is_collective = first, is_collective
        self.description = " ".join(names)
        self.metas = tuple(TensorMeta(name, DataType.FLOAT32, (2,)) for name in names)
        self.reads: list[tuple[int, int, bool]] = []
        self.ended = 0

    def read(self, first: int, count: int, views: Sequence[torch.Tensor] | None) -> None:
        self.reads.append((first, count, views is not None))
        for i, view in enumerate(views or ()):
            view.fill_(self.first + first + i)

    def end_reading(self) -> None:
        self.ended += 1


class Held(Fake):
    """Knows where its elements lie."""

    elements_of_all: Any = object()

    def elements(self, index: int) -> Elements | None:
        return self.elements_of_all  # type: ignore[no-any-return]

    def why_gathered(self, index: int) -> str:
        return f"of {index}"

    def prepare(self) -> None:
        self.reads.append((-1, 0, True))

    def release(self) -> None:
        self.reads.append((-2, 0, True))


DRAFT = ("draft_model.fc", "draft_model.norm", "mtp.fc")


def target(*names: str) -> pb.DescribeTargetResponse:
    metas = (TensorMeta(name, DataType.FLOAT32, (2,)) for name in names)
    tensors = map(reference_tensor_to_proto, metas)
    return pb.DescribeTargetResponse(draft_tensors=tensors, draft_prefixes=["draft_model.t2d"])


@pytest.fixture
def parts() -> tuple[Held, Fake]:
    base = Held(0, "a", "b", "c", is_collective=True)
    return base, Fake(10, "fc", "t2d", "norm", is_collective=False)


def test_the_draft_follows_by_its_names_in_a_base(parts: tuple[Held, Fake]) -> None:
    source = DraftedSource(*parts, target(*DRAFT))
    names = [meta.name for meta in source.metas]
    assert names == ["a", "b", "c", "draft_model.fc", "draft_model.norm"]
    views = [torch.zeros(2) for _ in range(4)]
    source.read(1, 4, views)
    assert [int(view[0]) for view in views] == [1, 2, 10, 12]
    source.end_reading()
    assert [part.ended for part in parts] == [1, 1]


def test_a_rank_that_gives_reads_what_all_read_and_no_more(parts: tuple[Held, Fake]) -> None:
    base, draft = parts
    source = DraftedSource(base, draft, target(*DRAFT))
    assert source.is_collective
    source.read(2, 2, None)
    assert base.reads == [(2, 1, False)]
    assert draft.reads == []


def test_what_the_ranks_hold_is_sent_by_them(parts: tuple[Held, Fake]) -> None:
    base, draft = parts
    source: Any = DraftedSource(base, draft, target(*DRAFT))
    assert source.elements(1) is base.elements_of_all
    assert source.elements(3) is None, "rank 0 reads its files"
    assert (source.why_gathered(2), source.why_gathered(4)) == ("of 2", "it lies in a file")
    whole = Held(10, "fc", "norm", is_collective=False)
    assert DraftedSource(base, whole, target(*DRAFT)).elements(3) is whole.elements_of_all
    source.prepare()
    source.release()
    assert base.reads == [(-1, 0, True), (-2, 0, True)]


def test_layers_of_the_checkpoint_keep_their_names() -> None:
    base, draft = (Fake(0, "a", is_collective=False), Fake(5, "mtp.fc", is_collective=False))
    source = DraftedSource(base, draft, target("mtp.fc"))
    assert [meta.name for meta in source.metas] == ["a", "mtp.fc"]
    assert not source.is_collective
    with pytest.raises(InvalidManifestError, match=r"'mtp\.fc' is in the model and in draft="):
        DraftedSource(Fake(0, "mtp.fc", is_collective=False), draft, target("mtp.fc"))


LAYERS = ("model.layers.0.up", "model.layers.1.eh_proj", "model.layers.1.up", "model.norm.weight")


@pytest.mark.parametrize("kind", ["module", "files"])
def test_layers_for_drafts_are_sent_last(kind: str, tmp_path: Path) -> None:
    """A replica that loads in place would hold them until the model is complete."""
    model: Any = torch.nn.Module()
    model.model = torch.nn.Module()
    model.model.layers = torch.nn.ModuleList(torch.nn.Module() for _ in range(2))
    model.model.norm = torch.nn.Module()
    for name in LAYERS:
        layer, _, last = name.rpartition(".")
        model.get_submodule(layer).register_parameter(last, torch.nn.Parameter(torch.rand(2)))
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text('{"num_hidden_layers": 1}')
    content: Any = base_content(tmp_path if kind == "files" else model, OneRank(), True)

    def order(*drafts: str) -> list[str]:
        described = target(*drafts)
        described.base_dtype = types_pb2.DATA_TYPE_FLOAT32
        described.draft_prefixes[:] = ["model.layers.1."]
        source, _ = content.source(described)
        views = [torch.zeros(2) for _ in source.metas]
        source.read(0, len(views), views)
        for meta, view in zip(source.metas, views, strict=True):
            assert torch.equal(view, model.state_dict()[meta.name])
        return [meta.name for meta in source.metas]

    assert order() == [LAYERS[0], LAYERS[3]]
    assert order(*LAYERS[1:3]) == [LAYERS[0], LAYERS[3], *LAYERS[1:3]]


def test_what_the_pool_does_not_take_is_refused(parts: tuple[Held, Fake]) -> None:
    with pytest.raises(
        InvalidManifestError, match=r"'norm' of draft= is not a tensor of the model"
    ):
        DraftedSource(*parts, target("draft_model.fc"))
    with pytest.raises(UnsupportedError, match="no replica of the pool takes a model"):
        DraftedSource(*parts, target())
