"""Output layers that are copies of the embedding, which a pool with tied weights has only once."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from weft_rl.contract.errors import InvalidManifestError
from weft_rl.contract.tensors import TensorMeta, output_layers

#: Function that tells whether tensors are all that the pool's base consists of.
IsBase = Callable[[Sequence[TensorMeta]], bool]
# Elements that are cast at a time.
_CHUNK_ELEMENTS = 2**22


def copied_heads(
    metas: Sequence[TensorMeta], is_base: IsBase | None, *, is_said: bool = False
) -> frozenset[str]:
    """Return the output layers that the pool does not have beside the other tensors.

    Args:
        is_base: None where the pool's base is not known.
        is_said: True if the model's config says that they are tied. That counts where the tensors
            are not the pool's in either way.
    """
    heads = frozenset(output_layers(meta.name for meta in metas))
    if not heads or (is_base is not None and is_base(metas)):
        return frozenset()
    others = [meta for meta in metas if meta.name not in heads]
    return heads if is_said or (is_base is not None and is_base(others)) else frozenset()


def are_equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two matrices of one shape are equal; a part of them is cast at a time."""
    if one.dtype == other.dtype:
        return torch.equal(one, other)  # stops at the first that differs
    wide = torch.promote_types(one.dtype, other.dtype)
    step = max(1, _CHUNK_ELEMENTS // max(1, one[:1].numel()))
    parts = (slice(first, first + step) for first in range(0, len(one), step))
    return all(torch.equal(one[rows].to(wide), other[rows].to(wide)) for rows in parts)


def no_copy(name: str, of: Sequence[str]) -> InvalidManifestError:
    """Return the error of an output layer that is no copy of what it is served as."""
    tied_to = " or ".join(map(repr, of)) or "any tensor of its shape"
    return InvalidManifestError(
        f"{name!r} is not a tensor of the served model, whose output layer is tied to the "
        f"embedding, and here it does not equal {tied_to}: tie the weights again, or serve a model "
        "whose config does not tie them (tie_word_embeddings)"
    )
