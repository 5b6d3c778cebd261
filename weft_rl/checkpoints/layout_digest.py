"""A checkpoint beside a push: the digest that its tensors have in the layout of that push."""

from __future__ import annotations

from collections.abc import Iterable

from weft_rl.contract.checkpoint import StoredTensor
from weft_rl.contract.layout.manifest import Manifest
from weft_rl.contract.tensors import DataType
from weft_rl.transport.digests.wsum64 import content_digest


def digest_in_layout(manifest: Manifest, stored: Iterable[StoredTensor]) -> bytes | None:
    """Return the ``ContentDigest.value`` that a push of these tensors would have, without
    reading them; what the layout does not name is left out.

    Args:
        manifest: The layout.
        stored: Tensors of files, by the names of the layout.

    Returns:
        None where a tensor of the layout is not among them, or is of another type or shape.
    """
    by_name = {tensor.name: tensor for tensor in stored}
    digests = []
    for slot in manifest.tensors:
        found = by_name.get(slot.meta.name)
        if found is None or found.shape != slot.meta.shape:
            return None
        if DataType.of_safetensors(found.dtype) is not slot.meta.dtype:
            return None
        digests.append(found.digest)
    return content_digest(digests)
