"""Element types, descriptions of tensors, and the tensors of a base model; without torch."""

from __future__ import annotations

import enum
import hashlib
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from weft_rl.contract.draft_layers import DRAFT_MODEL, is_draft, prefixes_beside
from weft_rl.contract.errors import InvalidManifestError


class DataType(enum.IntEnum):
    """Element type on the wire; numbers are those of ``weft.v1.DataType``."""

    FLOAT32 = 1, 4, "F32", True
    FLOAT16 = 2, 2, "F16", True
    BFLOAT16 = 3, 2, "BF16", True
    FLOAT64 = 4, 8, "F64", True
    FLOAT8_E4M3FN = 5, 1, "F8_E4M3"
    FLOAT8_E5M2 = 6, 1, "F8_E5M2"
    INT8 = 7, 1, "I8"
    INT16 = 8, 2, "I16"
    INT32 = 9, 4, "I32"
    INT64 = 10, 8, "I64"
    UINT8 = 11, 1, "U8"
    BOOL = 12, 1, "BOOL"

    itemsize_bytes: int
    """Bytes of one element."""
    safetensors_name: str
    """Name in the headers of safetensors files (``BF16``)."""
    is_float: bool
    """True if a sender may cast it to another float type."""

    def __new__(
        cls, number: int, itemsize_bytes: int = 0, name: str = "", is_float: bool = False
    ) -> DataType:
        member = int.__new__(cls, number)
        member._value_ = number
        member.itemsize_bytes, member.safetensors_name = itemsize_bytes, name
        member.is_float = is_float
        return member

    @property
    def torch_name(self) -> str:
        """Name in torch (``bfloat16``)."""
        return self.name.lower()

    @classmethod
    def of_safetensors(cls, name: str) -> DataType | None:
        """Return the type of that ``safetensors_name``; None for one that cannot be sent."""
        return _OF_SAFETENSORS.get(name)


_OF_SAFETENSORS = {dtype.safetensors_name: dtype for dtype in DataType}


@dataclass(frozen=True, slots=True)
class TensorMeta:
    """Name, element type and full (unsharded, row-major) shape of a tensor."""

    name: str
    dtype: DataType
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes of its elements, without padding."""
        return self.num_elements * self.dtype.itemsize_bytes

    @property
    def num_elements(self) -> int:
        """Number of its elements."""
        return math.prod(self.shape)


def shape_text(shape: tuple[int, ...]) -> str:
    """Format ``(4096, 32)`` as ``4096,32``; empty for a scalar."""
    return ",".join(map(str, shape))


_WEIGHT = ".weight"


@dataclass(frozen=True, slots=True)
class LinearModule:
    """Module of the served architecture whose weight is a matrix, however that is stored."""

    name: str
    """Checkpoint name."""
    shape: tuple[int, ...]
    """Full shape of its weight (out, in): neither sharded nor packed."""
    other_names: tuple[str, ...] = ()
    """Names that it has in a trainer's memory and in the engine."""

    @property
    def names(self) -> tuple[str, ...]:
        """Every name that an adapter may call it by."""
        return (self.name, *self.other_names)


@dataclass(frozen=True)
class Reference:
    """Every tensor that a push of the base must hold, by checkpoint name.

    ``dtype`` of a tensor is what a sender casts it to.
    """

    architecture: str
    tensors: tuple[TensorMeta, ...]
    untold_modules: tuple[LinearModule, ...] = ()
    """Linear modules that the tensors do not tell: with quantised weights, or with several names.
    Not in the fingerprint."""
    draft_prefixes: tuple[str, ...] = ()
    """Beginnings of the names of tensors that are for drafts, of which the engine loads those in
    ``draft`` alone. A sender leaves the others out. Not in the fingerprint."""
    draft: tuple[TensorMeta, ...] = ()
    """Tensors of the model that drafts tokens, which a push holds all of, or none. Not in the
    fingerprint."""

    @cached_property
    def by_name(self) -> Mapping[str, TensorMeta]:
        """Tensors by checkpoint name."""
        return {meta.name: meta for meta in self.tensors}

    @cached_property
    def draft_by_name(self) -> Mapping[str, TensorMeta]:
        """Tensors of the draft by their names in a base."""
        return {meta.name: meta for meta in self.draft}

    @cached_property
    def draft_fingerprint(self) -> str:
        """Digest that names the model that drafts tokens; empty if no push updates one."""
        return base_fingerprint("draft", self.draft) if self.draft else ""

    def passed_over(self, names: Collection[str]) -> frozenset[str]:
        """Return the names in a base of tensors for drafts that have no place in this engine.

        Its files do not count, only names and tensors: a coordinator finds the same as a replica.
        """
        known = self.by_name.keys() | self.draft_by_name.keys()
        unknown = [name for name in names if name not in known]
        if not unknown:
            return frozenset()
        prefixes = prefixes_beside(names, self.by_name)
        another = tuple(p for p in self.draft_prefixes if p.startswith(DRAFT_MODEL))
        prefixes += another if self.draft else (DRAFT_MODEL,)
        return frozenset(name for name in unknown if is_draft(name, prefixes))

    def sent_as_float32(self, names: Collection[str]) -> Reference:
        """Return the same reference with some tensors sent as float32, as the engine holds them."""
        return replace(
            self,
            tensors=tuple(_as_float32(meta, names) for meta in self.tensors),
            draft=tuple(_as_float32(meta, names) for meta in self.draft),
        )

    def dtype_exceptions(self, base_dtype: DataType) -> dict[str, DataType]:
        """Return the dtypes of the floats that are sent in another one than the base, by name."""
        return {
            meta.name: meta.dtype
            for meta in self.tensors
            if meta.dtype.is_float and meta.dtype != base_dtype
        }

    def ignores(self, name: str) -> bool:
        """Return whether a sender leaves a tensor out: it is for drafts, and not of this one."""
        if name in self.draft_by_name:
            return False
        is_another = not self.draft and name.startswith(DRAFT_MODEL)
        return is_another or is_draft(name, self.draft_prefixes)

    def brings_draft(self, metas: Iterable[TensorMeta]) -> bool:
        """Return whether all tensors of the draft are among those of a push, and fit."""
        want = self.draft_by_name
        fits = (
            meta.shape == want[meta.name].shape and _dtype_fits(meta.dtype, want[meta.name].dtype)
            for meta in metas
            if meta.name in want
        )
        return bool(want) and sum(fits) == len(want)

    @cached_property
    def modules(self) -> tuple[LinearModule, ...]:
        """Every linear module of the base, in order of the tensors."""
        untold = {module.name for module in self.untold_modules}
        told = (
            LinearModule(name, meta.shape)
            for meta in self.tensors
            if len(meta.shape) == 2
            and meta.name.endswith(_WEIGHT)
            and (name := meta.name.removesuffix(_WEIGHT)) not in untold
        )
        return (*told, *self.untold_modules)

    @cached_property
    def modules_by_name(self) -> Mapping[str, tuple[LinearModule, ...]]:
        """Linear modules by each of their names; several where a name fits several."""
        found: dict[str, tuple[LinearModule, ...]] = {}
        for module in self.modules:
            for name in module.names:
                found[name] = (*found.get(name, ()), module)
        return found

    @cached_property
    def modules_by_experts(self) -> Mapping[str, tuple[LinearModule, ...]]:
        """Linear modules of the experts of each layer, by what their names begin with:
        ``model.layers.0.mlp.experts``."""
        found: dict[str, list[LinearModule]] = {}
        for module in self.modules:
            layer, mark, _ = module.name.partition(".experts.")
            if mark:
                found.setdefault(f"{layer}.experts", []).append(module)
        return {experts: tuple(modules) for experts, modules in found.items()}

    @cached_property
    def quantised_modules(self) -> Mapping[str, tuple[str, ...]]:
        """Linear modules whose weights were quantised before serving, with the last components of
        the tensors that stand for a weight (``qweight``, ``qzeros``, ``scales``)."""
        parts: dict[str, tuple[str, ...]] = {
            module.name: ()
            for module in self.modules
            if (weight := self.by_name.get(module.name + _WEIGHT)) is None
            or not weight.dtype.is_float
        }
        for meta in self.tensors:
            module, _, last = meta.name.rpartition(".")
            if module in parts and last not in ("weight", "bias"):
                parts[module] = (*parts[module], last)
        return {module: found for module, found in parts.items() if found}

    @cached_property
    def fingerprint(self) -> str:
        """Digest that names the base model; see ``base_fingerprint``."""
        return base_fingerprint(self.architecture, self.tensors)

    @cached_property
    def details_digest(self) -> str:
        """Digest (SHA-256, hex) of the tensors with their dtypes, those of a draft, too, and of the
        modules that they do not tell.

        Source: protos/weft/v1/registry.proto, Capabilities.reference_digest.
        """
        metas = (*self.tensors, *self.draft)
        tensors = (f"{meta.name} {meta.dtype:d} {shape_text(meta.shape)}\n" for meta in metas)
        modules = (
            f"{module.name} {shape_text(module.shape)} {' '.join(module.other_names)}\n"
            for module in self.untold_modules
        )
        lines = [*sorted(tensors), *sorted(modules)]
        return hashlib.sha256("".join(lines).encode()).hexdigest()


def with_widest_floats(references: Sequence[Reference]) -> Reference:
    """Return the first of references of one base, each float in a dtype that holds those of all.

    An engine casts a float to its own dtype, and cannot bring back what a sender has rounded. All
    else, modules and what is no float, is the first one's.
    """
    first, *others = references
    drafts = [one.draft for one in others if one.draft_fingerprint == first.draft_fingerprint]
    return replace(
        first,
        tensors=_widest(first.tensors, [one.tensors for one in others]),
        draft=_widest(first.draft, drafts),
    )


def _widest(
    metas: tuple[TensorMeta, ...], others: Sequence[tuple[TensorMeta, ...]]
) -> tuple[TensorMeta, ...]:
    """Return tensors, each float in the wider dtype; of two of one size, neither of which holds the
    other, in float32."""
    for other in others:
        by_name = {meta.name: meta.dtype for meta in other}
        metas = tuple(replace(meta, dtype=_wider(meta.dtype, by_name[meta.name])) for meta in metas)
    return metas


def _wider(one: DataType, other: DataType) -> DataType:
    if one == other or not (one.is_float and other.is_float):
        return one
    if one.itemsize_bytes == other.itemsize_bytes:
        return DataType.FLOAT32
    return max(one, other, key=lambda each: each.itemsize_bytes)


def _as_float32(meta: TensorMeta, names: Collection[str]) -> TensorMeta:
    return replace(meta, dtype=DataType.FLOAT32) if meta.name in names else meta


#: Last components of what checkpoints call the scales of the KV cache and of attention.
_KV_SCALES = frozenset({"k_scale", "v_scale", "kv_scale", "q_scale", "prob_scale"})


def base_fingerprint(architecture: str, tensors: Sequence[TensorMeta]) -> str:
    """Compute the SHA-256 (hex) over the architecture and every name and shape; not dtypes.

    Source: protos/weft/v1/types.proto, ReferenceChunk.fingerprint.
    """
    lines = sorted(f"{meta.name} {shape_text(meta.shape)}\n" for meta in tensors)
    return hashlib.sha256((architecture + "\n" + "".join(lines)).encode()).hexdigest()


def is_output_layer(module: str) -> bool:
    """Return whether a module is the layer whose weight may be tied to the embedding's; a reference
    does not list it then."""
    return module.rpartition(".")[2] == "lm_head"


def _check_quantised(given: Collection[str], reference: Reference) -> None:
    """Refuse plain weights for modules that are served with quantised ones.

    Raises:
        InvalidManifestError: Says so in one sentence.
    """
    for module, parts in reference.quantised_modules.items():
        if module + _WEIGHT in given and not any(f"{module}.{part}" in given for part in parts):
            raise InvalidManifestError(
                f"the weights of the served {reference.architecture} are quantised ({module!r} has "
                f"{', '.join(parts)}), and these are not: push a base in the served format, or "
                "adapters, which are served over it",
                metadata={"first": module},
            )


def output_layers(names: Iterable[str]) -> list[str]:
    """Return the names that are weights of output layers; see ``is_output_layer``."""
    return [n for n in names if n.endswith(_WEIGHT) and is_output_layer(n.removesuffix(_WEIGHT))]


def _why_unknown(name: str, reference: Reference) -> str:
    within = name.removesuffix("lm_head.weight")
    if output_layers([name]) and any(known.startswith(within) for known in reference.by_name):
        return f"is tied to the embedding in the served {reference.architecture}: leave it out"
    if name.startswith(DRAFT_MODEL):
        return "is not a tensor of the model that drafts tokens here"
    return f"is not a tensor of {reference.architecture}"


def check_base(metas: Sequence[TensorMeta], reference: Reference) -> None:
    """Refuse a push of the base that is not exactly what the engine loads.

    Tensors for drafts that it has no place for are passed over; those of its own draft are there
    all or none.

    Raises:
        InvalidManifestError: A tensor is unknown, misshapen, missing, or of a dtype that cannot be
            served. Names the first in order of the manifest, then of the reference, and says how
            many there are.
    """
    want = {**reference.by_name, **reference.draft_by_name}
    given = {meta.name for meta in metas}
    over = reference.passed_over(given)
    wrong: list[str] = []
    for meta in metas:
        ref = want.get(meta.name)
        if meta.name in over:
            continue
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
    missing = [ref.name for ref in reference.tensors if ref.name not in given]
    if wrong or missing:
        _check_quantised(given, reference)
    if missing and not wrong:
        check_scales_missing(missing)
    wrong += [f"{name!r} is missing: the served model expects it" for name in missing]
    if not given.isdisjoint(reference.draft_by_name):
        wrong += [
            f"{ref.name!r} is missing: a push holds all tensors of the model that drafts tokens, "
            "or none"
            for ref in reference.draft
            if ref.name not in given
        ]
    if wrong:
        more = f" (and {len(wrong) - 1} more)" if len(wrong) > 1 else ""
        raise InvalidManifestError(
            wrong[0] + more, metadata={"num_problems": str(len(wrong)), "first": wrong[0]}
        )


def is_kv_scale(name: str) -> bool:
    """Return whether a tensor is a scale of the KV cache or of attention."""
    return name.rpartition(".")[2] in _KV_SCALES


def check_scales_missing(missing: Sequence[str]) -> None:
    """Refuse a base that lacks these tensors in words of their own, if all are scales of the KV
    cache: no trainer's model has them.

    Raises:
        InvalidManifestError: Says what to do.
    """
    if all(map(is_kv_scale, missing)):
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise InvalidManifestError(
            f"the base has no scales of the KV cache ({missing[0]!r}{more}), and the served model "
            "was started with some: push them with it by push_tensors (the checkpoint's, or "
            "new ones), or replicas that keep their own would answer differently",
            metadata={"num_problems": str(len(missing)), "first": missing[0]},
        )


def _dtype_fits(given: DataType, served: DataType) -> bool:
    """Return whether a dtype can be served: floats are cast by the engine's loader; anything else
    must be equal."""
    return given == served or (given.is_float and served.is_float)
