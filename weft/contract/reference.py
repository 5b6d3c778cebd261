"""What the base model consists of, and whether a push of it is whole."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from weft.contract.errors import InvalidManifestError
from weft.contract.tensors import DataType, TensorMeta, shape_text


@dataclass(frozen=True)
class Reference:
    """Every tensor that a push of the base must hold, by checkpoint name.

    ``dtype`` of a tensor is what a sender casts it to.
    """

    architecture: str
    tensors: tuple[TensorMeta, ...]

    @cached_property
    def by_name(self) -> Mapping[str, TensorMeta]:
        """Tensors by checkpoint name."""
        return {meta.name: meta for meta in self.tensors}

    @cached_property
    def fingerprint(self) -> str:
        """Names the base model; see ``base_fingerprint``."""
        return base_fingerprint(self.architecture, self.tensors)


def base_fingerprint(architecture: str, tensors: Sequence[TensorMeta]) -> str:
    """SHA-256 (hex) over the architecture and every name and shape; not dtypes.

    Source: protos/weft/v1/types.proto, ReferenceChunk.fingerprint.
    """
    lines = sorted(f"{meta.name} {shape_text(meta.shape)}\n" for meta in tensors)
    return hashlib.sha256((architecture + "\n" + "".join(lines)).encode()).hexdigest()


def is_output_layer(module: str) -> bool:
    """Whether it is the layer whose weight may be tied to the embedding's; a reference
    does not list it then."""
    return module.rpartition(".")[2] == "lm_head"


def _why_unknown(name: str, reference: Reference) -> str:
    if is_output_layer(name.removesuffix(".weight")):
        return f"is tied to the embedding in the served {reference.architecture}: leave it out"
    return f"is not a tensor of {reference.architecture}"


def check_base(metas: Sequence[TensorMeta], reference: Reference) -> None:
    """Refuse a push of the base that is not exactly what the engine loads.

    Raises:
        InvalidManifestError: Names the first tensor (in order of the manifest,
            then of the reference) that is unknown, misshapen, of a dtype that
            cannot be served, or missing, and how many there are.
    """
    want = reference.by_name
    wrong: list[str] = []
    for meta in metas:
        ref = want.get(meta.name)
        if ref is None:
            wrong.append(f"{meta.name!r} {_why_unknown(meta.name, reference)}")
        elif ref.shape != meta.shape:
            wrong.append(
                f"{meta.name!r} has shape ({shape_text(meta.shape)}), the served model has "
                f"({shape_text(ref.shape)})"
            )
        elif not _dtype_fits(meta.dtype, ref.dtype):
            wrong.append(
                f"{meta.name!r} is {meta.dtype.torch_name}, the served model takes "
                f"{ref.dtype.torch_name}"
            )
    given = {meta.name for meta in metas}
    wrong += [
        f"{ref.name!r} is missing: the served model expects it"
        for ref in reference.tensors
        if ref.name not in given
    ]
    if wrong:
        more = f" (and {len(wrong) - 1} more)" if len(wrong) > 1 else ""
        raise InvalidManifestError(
            wrong[0] + more, metadata={"num_problems": str(len(wrong)), "first": wrong[0]}
        )


def _dtype_fits(given: DataType, served: DataType) -> bool:
    """Floats are cast by the engine's loader; anything else must be equal."""
    return given == served or (given.is_float and served.is_float)
