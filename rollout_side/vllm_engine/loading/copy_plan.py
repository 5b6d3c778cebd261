"""Loading a base by plain copies, where the engine holds weights as they travel.

vLLM's layerwise reload costs Python and launches for every parameter, on every push.
What it does for unquantised weights are copies: from a tensor, or a slice of it, to a
slice of a parameter. So they are learnt once, by watching the model's own ``load_weights``
with every copy held back. From then on they are repeated, whatever layout a base comes in: over a
whole segment, or bucket by bucket as they arrive.

A plan is believed only when it is proven: a base was loaded by vLLM itself, the copies cover every
parameter once, and each destination holds its source's bits (seen side by side here; by digests
where the source has gone: ``plan_proof``; of base@0 by those of its files: ``files_proof``). No
plan is made for a model whose layers post-process their weights after loading.
"""

from __future__ import annotations

import logging
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property

import torch

from rollout_side.memory.versions import StagedVersion, bucket_starts
from rollout_side.vllm_engine.loading.copy_trace import Piece, bits, watch
from weft_rl.contract.layout.manifest import Manifest, TensorSlot
from weft_rl.transport.digests.wsum64 import digests_of, tensor_digest

_log = logging.getLogger(__name__)

#: Ways of holding weights that keep them as they were loaded.
_PLAIN_METHODS = frozenset(
    {"UnquantizedLinearMethod", "UnquantizedEmbeddingMethod", "UnquantizedFusedMoEMethod"}
)
_LARGE_BYTES = 2**20
#: A parameter, or a part of it, and the view of the wire that belongs to it.
_Pair = tuple[torch.Tensor, torch.Tensor]


class CopyPlan:
    """Copies that load one layout into one model, or one rank's part of it.

    Proven by ``learn``, a ``PlanProof`` or ``learn_from_files``.

    Args:
        manifest: The layout.
        pieces: Copies of each bucket.
    """

    def __init__(self, manifest: Manifest, pieces: Sequence[Sequence[Piece]]) -> None:
        self.layout_digest = manifest.layout_digest
        self._manifest = manifest
        self.num_copies = sum(map(len, pieces))
        self.is_readable = _is_whole(manifest, pieces)
        """True if ``read_bucket`` can be called: every element has a place of its own here."""
        self._pieces = pieces
        self._starts = bucket_starts(manifest)
        self.device = next(piece.target.device for part in pieces for piece in part)

    def for_layout(self, manifest: Manifest) -> CopyPlan | None:
        """Return the same copies for another layout of the tensors; None if a dtype differs.

        Another dtype takes more than a copy.

        Args:
            manifest: Layout of the same tensors.
        """
        if manifest.layout_digest == self.layout_digest:
            return self
        by_name = {slot.meta.name: (slot.meta, own) for slot, own in self._by_tensor()}
        pieces: list[list[Piece]] = [[] for _ in manifest.buckets]
        for slot in manifest.tensors:
            meta, own = by_name[slot.meta.name]
            if slot.meta != meta:
                return None
            first = slot.offset_bytes // meta.dtype.itemsize_bytes
            pieces[slot.bucket] += [replace(piece, offset=first + piece.offset) for piece in own]
        return CopyPlan(manifest, pieces)

    def load(self, data: torch.Tensor, speak: Callable[[], None] = lambda: None) -> None:
        """Copy a segment of this layout into the model's parameters; returns when done.

        Args:
            data: uint8, the segment; on this device, or on one that it can read.
            speak: Called at each bucket.
        """
        with torch.no_grad():
            _launch(self._segment_pairs(data, speak))
        wait_for_copies(self.device)

    def load_bucket(self, index: int, wire: torch.Tensor) -> None:
        """Copy one bucket into the model's parameters.

        Returns when it is done (on CUDA it waits for the calling thread's current stream
        alone), so the bucket's memory may be reused at once.

        Args:
            wire: uint8, at least the bucket's ``wire_bytes``; on any device. Begins on a multiple
                of the largest element's size.
        """
        with torch.no_grad():
            _launch(self._pairs(index, self._payload(index, wire)))
        wait_for_copies(self.device)

    def read_bucket(self, index: int, out: torch.Tensor) -> torch.Tensor:
        """Fill a buffer with one bucket's payload, from the model's parameters.

        Bytes that no parameter came from are zero, as gaps between tensors are on the wire. On CUDA
        the copies run on the calling thread's current stream and are not waited for.

        Args:
            out: uint8, at least the bucket's ``payload_bytes``; overwritten.

        Returns:
            The view of ``out`` that is the payload.

        Raises:
            ValueError: Not ``is_readable``.
        """
        if not self.is_readable:
            raise ValueError("what is held in part, or was expanded, cannot be read back")
        payload = self._payload(index, out)
        with torch.no_grad():
            payload.zero_()
            for target, source in self._pairs(index, payload):
                source.copy_(target, non_blocking=True)
        return payload

    def holds(self, data: torch.Tensor) -> bool:
        """Return whether the model's parameters are, bit for bit, what ``load`` would make them."""
        return self._equal(self._segment_pairs(data))

    def source_digests(self, index: int, wire: torch.Tensor) -> list[int]:
        """Return the digests of what ``load_bucket`` would copy, by piece; blocks for them."""
        pairs = self._pairs(index, self._payload(index, wire))
        return [self._digest(source) for _, source in pairs]

    def target_digests(self, index: int) -> list[int]:
        """Return the digests of what the parameters hold where ``load_bucket`` writes."""
        return [self._digest(piece.target) for piece in self._pieces[index]]

    def first_unlike(self, digests: Sequence[int]) -> str:
        """Return the name of a tensor that the parameters do not hold as digested; empty if none.

        Every place that a tensor is copied to is compared. Blocks.

        Args:
            digests: Expected digests of the layout's tensors, in the manifest's order.
        """
        lying: list[torch.Tensor] = []
        expected: list[tuple[str, int]] = []
        for (slot, pieces), digest in zip(self._by_tensor(), digests, strict=True):
            meta = slot.meta
            if all(piece.is_all_of(meta.shape) for piece in pieces):
                lying += [piece.target.contiguous() for piece in pieces]
                expected += [(meta.name, digest)] * len(pieces)
            elif sum(p.target.nbytes for p in pieces) != meta.num_bytes or (
                self._read_digest(slot, pieces) != digest
            ):
                return meta.name
        found = zip(digests_of(lying), expected, strict=True)
        return next((name for own, (name, digest) in found if own != digest), "")

    def _read_digest(self, slot: TensorSlot, pieces: Sequence[Piece]) -> int:
        """Return the digest of a tensor that lies in pieces here, put together for it."""
        out = torch.empty(slot.meta.num_bytes, dtype=torch.uint8, device=self.device)
        for piece in pieces:
            piece.source(out).copy_(piece.target)
        return tensor_digest(out)

    def _by_tensor(self) -> Iterator[tuple[TensorSlot, list[Piece]]]:
        """Yield each tensor, in the manifest's order, and its pieces, offset from its start."""
        for index, slot in enumerate(self._manifest.tensors):
            first = slot.offset_bytes // slot.meta.dtype.itemsize_bytes
            yield slot, [replace(p, offset=p.offset - first) for p in self._of_tensor[index]]

    @cached_property
    def _of_tensor(self) -> list[list[Piece]]:
        found: list[list[Piece]] = [[] for _ in self._manifest.tensors]
        for tensors, pieces in zip(self._manifest.tensors_by_bucket, self._pieces, strict=True):
            begins = [self._manifest.tensors[tensor].offset_bytes for tensor in tensors]
            for piece in pieces:
                at = bisect_right(begins, piece.offset * piece.target.element_size()) - 1
                found[tensors[at]].append(piece)
        return found

    def _digest(self, values: torch.Tensor) -> int:
        flat = values.to(self.device).reshape(-1).contiguous()
        return tensor_digest(flat.view(torch.uint8))

    def _payload(self, index: int, wire: torch.Tensor) -> torch.Tensor:
        num_bytes = self._manifest.buckets[index].payload_bytes
        if wire.numel() < num_bytes:
            raise ValueError(f"bucket {index} is {num_bytes} bytes long, not {wire.numel()}")
        return wire[:num_bytes]

    def _pairs(self, index: int, wire: torch.Tensor) -> Iterator[_Pair]:
        return ((piece.target, piece.source(wire)) for piece in self._pieces[index])

    def _segment_pairs(
        self, data: torch.Tensor, speak: Callable[[], None] = lambda: None
    ) -> Iterator[_Pair]:
        for index, start in enumerate(self._starts):
            speak()
            yield from self._pairs(index, self._payload(index, data[start:]))

    def _equal(self, pairs: Iterable[_Pair]) -> bool:
        differs = torch.zeros((), dtype=torch.bool, device=self.device)
        for target, source in pairs:
            differs |= (bits(target) != bits(source.to(self.device))).any()
        return not bool(differs)


def _is_whole(manifest: Manifest, pieces: Sequence[Sequence[Piece]]) -> bool:
    """Return whether every byte of every tensor goes to a place of its own."""
    for index, part in enumerate(pieces):
        if any(piece.is_expanded for piece in part):
            return False
        # What goes to two parameters is one source.
        sources = {(p.offset, p.shape, p.stride): p.target.nbytes for p in part}
        slots = (manifest.tensors[i] for i in manifest.tensors_by_bucket[index])
        if sum(sources.values()) != sum(slot.meta.num_bytes for slot in slots):
            return False
    return True


def _launch(pairs: Iterable[_Pair]) -> None:
    """Launch the copies: large ones one by one, all others in one go."""
    targets: list[torch.Tensor] = []
    sources: list[torch.Tensor] = []
    for target, source in pairs:
        if target.numel() * target.element_size() < _LARGE_BYTES:
            targets.append(target)
            sources.append(source)
        else:
            target.copy_(source, non_blocking=True)
    if targets:
        torch._foreach_copy_(targets, sources)


def wait_for_copies(device: torch.device) -> None:
    """Block until the work on the calling thread's current CUDA stream is done."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


def learn(
    model: torch.nn.Module, staged: StagedVersion, rename: Callable[[str], str]
) -> CopyPlan | None:
    """Return the plan of a version that the model has just loaded; None if copies do not suffice.

    Nothing that the model computes with changes.

    Args:
        model: vLLM's model, as it serves.
        staged: Copy of the base that the model serves now.
        rename: Maps the manifest's names to those that the model's ``load_weights`` knows.
    """
    plan, why = make_plan(model, staged.manifest, staged.segment.data, rename)
    if plan is not None and not plan.holds(staged.segment.data):
        why = "a parameter does not hold what was loaded into it"
    return accepted(plan, why)


def make_plan(
    model: torch.nn.Module,
    manifest: Manifest,
    segment: torch.Tensor,
    rename: Callable[[str], str],
) -> tuple[CopyPlan | None, str]:
    """Make a plan that is not proven yet; or say why there is none.

    Args:
        segment: Stands for the wire; see ``watch``.
    """
    if why := why_not_plain(model):
        return None, why
    try:
        return CopyPlan(manifest, watch(model, manifest, segment, rename)), ""
    except Exception as error:  # noqa: BLE001 (a faster way only; the safe one remains)
        return None, f"{type(error).__name__}: {error}"


def accepted(plan: CopyPlan | None, why: str) -> CopyPlan | None:
    """Return the plan, or None if there is a reason against it; log which."""
    if plan is None or why:
        _log.info("bases are loaded layer by layer: %s", why)
        return None
    _log.debug("bases are loaded by %d plain copies", plan.num_copies)
    return plan


def why_not_plain(model: torch.nn.Module) -> str:
    """Return why a layer does not keep its weights as they were loaded; empty if all do."""
    for name, layer in model.named_modules():
        method = getattr(layer, "quant_method", None)
        if method is not None and type(method).__name__ not in _PLAIN_METHODS:
            return f"{name} is held by {type(method).__name__}"
        if "MLA" in type(layer).__name__:
            return f"{name} derives matrices from its weights"
    return ""
