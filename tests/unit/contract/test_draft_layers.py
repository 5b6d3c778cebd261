"""Layers for multi-token prediction are told by their names, and only beside the model's own."""

from __future__ import annotations

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


def test_one_that_is_pushed_all_the_same_is_refused_as_what_it_is() -> None:
    own = TensorMeta("model.norm.weight", DataType.FLOAT32, (4,))
    reference = Reference("Tiny", (own,), draft_prefixes=("mtp.",))
    check_base([own], reference)
    more = TensorMeta("mtp.norm.weight", DataType.FLOAT32, (4,))
    with pytest.raises(InvalidManifestError, match=r"mtp\.norm\.weight' is of a layer for drafts"):
        check_base([own, more], reference)
    bare = Reference("Tiny", (own,))
    assert bare.fingerprint == reference.fingerprint
