"""Layers for multi-token prediction are told by their names, and only beside the model's own."""

from __future__ import annotations

from dataclasses import replace

import pytest

from weft_rl.contract.draft_layers import draft_prefixes, is_draft
from weft_rl.contract.errors import InvalidManifestError
from weft_rl.contract.tensors import DataType, Reference, TensorMeta, check_base


@pytest.mark.parametrize(
    ("name", "prefix"),
    [
        ("model.layers.2.eh_proj.weight", "model.layers.2."),
        ("model.language_model.layers.3.mlp.up_proj.weight", "model.language_model.layers.3."),
        ("language_model.model.layers.2.x", "language_model.model.layers.2."),
        ("mtp.layers.0.mlp.up_proj.weight", "mtp."),
        ("model.mtp_block.0.x", "model.mtp_block."),
        ("mtp_layers.0.x", "mtp_layers."),
        ("model.layers.1.mlp.up_proj.weight", ""),
        ("vision_tower.encoder.layers.9.x", ""),
        ("model.visual.layers.9.x", ""),
        ("model.embed_tokens.weight", ""),
    ],
)
def test_names_tell_them_from_the_model(name: str, prefix: str) -> None:
    found = draft_prefixes([name, "model.norm.weight"], 2)
    assert found == ((prefix,) if prefix else ())
    assert is_draft(name, found) is bool(prefix)
    assert not is_draft("model.norm.weight", found)


def test_without_a_number_of_layers_none_is_too_high() -> None:
    assert draft_prefixes(["model.layers.99.x"], 0) == ()


OWN = TensorMeta("model.norm.weight", DataType.FLOAT32, (4,))
MTP = tuple(TensorMeta(f"mtp.{name}", DataType.FLOAT32, (4, 2)) for name in ("fc", "norm"))
DRAFTS = Reference("Tiny", (OWN,), draft_prefixes=("mtp.",), draft=MTP)


@pytest.mark.parametrize("name", ["mtp.norm.weight", "draft_model.fc.weight"])
def test_those_of_a_draft_are_passed_over_where_there_is_none(name: str) -> None:
    reference = Reference("Tiny", (OWN,), draft_prefixes=("mtp.",))
    check_base([OWN, TensorMeta(name, DataType.FLOAT32, (4,))], reference)
    assert reference.ignores(name)
    assert not reference.ignores(OWN.name)
    bare = Reference("Tiny", (OWN,))
    assert bare.fingerprint == reference.fingerprint == DRAFTS.fingerprint
    with pytest.raises(InvalidManifestError, match=r"is not a tensor of Tiny"):
        check_base([OWN, TensorMeta("other.weight", DataType.FLOAT32, (4,))], reference)


def test_a_push_holds_a_draft_or_none() -> None:
    for metas, brings in (((OWN,), False), ((OWN, *MTP), True)):
        check_base(metas, DRAFTS)
        assert DRAFTS.brings_draft(metas) is brings
    with pytest.raises(InvalidManifestError, match=r"'mtp\.norm' is missing: a push holds all"):
        check_base([OWN, MTP[0]], DRAFTS)
    assert not DRAFTS.brings_draft([OWN, MTP[0]])


def test_a_draft_of_another_shape_is_refused() -> None:
    wrong = [replace(MTP[0], shape=(2, 4)), MTP[1]]
    with pytest.raises(InvalidManifestError, match=r"'mtp\.fc' has shape \(2,4\)"):
        check_base([OWN, *wrong], DRAFTS)
    assert not DRAFTS.brings_draft([OWN, *wrong])


def test_another_model_than_the_one_that_drafts_here_is_refused() -> None:
    own = replace(MTP[0], name="draft_model.fc")
    reference = Reference("Tiny", (OWN,), draft_prefixes=("draft_model.t2d",), draft=(own,))
    check_base([OWN, own, replace(own, name="draft_model.t2d")], reference)
    with pytest.raises(
        InvalidManifestError, match=r"draft_model\.norm' is not a tensor of the mod"
    ):
        check_base([OWN, own, replace(own, name="draft_model.norm")], reference)


def test_drafts_have_fingerprints_of_their_own() -> None:
    assert Reference("Tiny", (OWN,)).draft_fingerprint == ""
    other = replace(DRAFTS, draft=MTP[:1])
    assert len({DRAFTS.draft_fingerprint, other.draft_fingerprint, ""}) == 3


LAYERS = tuple(replace(OWN, name=f"model.layers.{i}.up.weight") for i in range(2))
EH_PROJ = replace(OWN, name="model.layers.2.eh_proj.weight")


@pytest.mark.parametrize("prefixes", [(), ("model.layers.2.",)])
def test_names_tell_what_is_passed_over_not_the_files_of_a_replica(
    prefixes: tuple[str, ...],
) -> None:
    reference = Reference("Tiny", LAYERS, draft_prefixes=prefixes)
    beside = [EH_PROJ, replace(OWN, name="model.layers.2.up.weight"), MTP[0]]
    check_base([*LAYERS, *beside], reference)
    names = [meta.name for meta in (*LAYERS, *beside)]
    assert reference.passed_over(names) == {meta.name for meta in beside}
    assert reference.passed_over(names[:2]) == frozenset()


@pytest.mark.parametrize("name", ["model.layers.2.up.weight", "layers.2.eh_proj.weight"])
def test_a_deeper_model_is_another_model(name: str) -> None:
    reference = Reference("Tiny", LAYERS, draft_prefixes=("model.layers.2.",))
    with pytest.raises(InvalidManifestError, match=r"layers\.2\..* is not a tensor of Tiny"):
        check_base([*LAYERS, replace(OWN, name=name)], reference)
