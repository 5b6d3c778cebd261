"""Loading a base into a running model while it arrives, in a worker.

For a replica that has no room for a second copy of its model: each bucket is loaded
as soon as it was received and verified, and its memory is used again for the next.
The old weights are gone from the first bucket on, so whatever fails afterwards leaves
mixed ones (*dirty*).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch

from rollout_side.memory.versions import tensor_in
from rollout_side.vllm_engine.compat import bridges
from rollout_side.vllm_engine.loading.copy_plan import CopyPlan, wait_for_copies
from rollout_side.vllm_engine.loading.plan_proof import PlanProof
from rollout_side.vllm_engine.loading.reload import can_learn, mixing, reload_layers
from weft_rl.contract.errors import LoadFailedError
from weft_rl.contract.layout.manifest import Manifest
from weft_rl.contract.names import PolicyVersion
from weft_rl.contract.tensors import Reference, check_base

_Bucket = tuple[int, torch.Tensor]


class Arriving(Protocol):
    """Base that is being received, bucket by bucket."""

    @property
    def version(self) -> PolicyVersion:
        """Version of the base."""

    @property
    def manifest(self) -> Manifest:
        """Layout of the base; known before its first bucket."""

    def buckets(self) -> Iterator[_Bucket]:
        """Yield index and wire bytes of every bucket, in order, each once, verified.

        The bytes are uint8, the bucket's ``wire_bytes``, on the device that they were
        received on; their memory is reused once the next bucket is asked for. Blocks.

        Raises:
            WeftError: The transfer ended early.
        """

    def speak(self) -> None:
        """Report that the calling thread makes progress."""


def load_in_place(
    worker: Any, arriving: Arriving, reference: Reference, plan: CopyPlan | None = None
) -> CopyPlan | None:
    """Replace the model's weights by a base that arrives meanwhile. Call it while paused.

    May run on another thread than the engine's. On CUDA that thread's current device is
    the engine's, and its current stream waits for what the engine began before: all work
    is given to that stream, and is done when this returns. Blocks for the transfer.
    Adapters that were loaded come back at their next use.

    Args:
        plan: The copies that loading amounts to, of whatever layout, where they are known.

    Returns:
        The plan for the next one, if there is any.

    Raises:
        InvalidManifestError: It is not exactly what the model consists of; nothing
            changed, and no bucket was asked for.
        WeftError: From ``arriving.buckets()``, before the first bucket; nothing changed.
        LoadFailedError: If metadata ``dirty`` is "true", the weights are mixed, and the
            next base that loads repairs it; else nothing changed.
    """
    manifest = arriving.manifest
    check_base([slot.meta for slot in manifest.tensors], reference)
    plan = plan and plan.for_layout(manifest)
    arrived = _begun(arriving)
    # Set here, since it is the thread's own: another than the engine's has gradients on.
    with torch.no_grad():
        if plan is not None:
            with mixing(arriving.version):
                for index, wire in arrived:
                    plan.load_bucket(index, wire)
            return plan
        with bridges.vllm_config_context(worker.vllm_config):
            proof: PlanProof | None = None
            if can_learn(worker):
                model = worker.model_runner.get_model()
                proof = PlanProof(model, manifest, bridges.base_names(model))
                arrived = _passing(proof, arrived)
            tensors = _tensors(manifest, arrived, arriving.speak, worker.device)
            reload_layers(worker, arriving.version, tensors, len(manifest.tensors))
            return proof.plan() if proof is not None else None


def _passing(proof: PlanProof, arrived: Iterator[_Bucket]) -> Iterator[_Bucket]:
    for index, wire in arrived:
        proof.pass_bucket(index, wire)
        yield index, wire


def _begun(arriving: Arriving) -> Iterator[_Bucket]:
    """Wait for the first bucket, and return all; until then a failure costs nothing."""
    buckets = arriving.buckets()
    first = next(buckets, None)
    if first is None:
        raise LoadFailedError(f"no bucket of {arriving.version} came")
    return _checked(itertools.chain([first], buckets), len(arriving.manifest.buckets))


def _checked(buckets: Iterator[_Bucket], num_buckets: int) -> Iterator[_Bucket]:
    """Yield the buckets; fail where one is missing, since old weights would pass for new ones."""
    due = 0
    for index, wire in buckets:
        if index != due:
            raise LoadFailedError(f"bucket {index} came where {due} was due")
        yield index, wire
        due += 1
    if due != num_buckets:
        raise LoadFailedError(f"{due} of {num_buckets} buckets came")


def _tensors(
    manifest: Manifest,
    arrived: Iterator[_Bucket],
    speak: Callable[[], None],
    device: torch.device,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield name and copy of every tensor, by bucket; call ``speak`` once the model has taken each.

    They are copies since vLLM keeps what it is given until a layer is complete. A layer may
    continue in the next bucket, which comes into the memory of this one. Each copy is freed with
    its layer, so about one layer is held at a time. Copies lie on this rank's own accelerator, if
    the bucket lies on another's.
    """
    for index, wire in arrived:
        place = device if wire.is_cuda else wire.device
        for slot in (manifest.tensors[i] for i in manifest.tensors_by_bucket[index]):
            yield slot.meta.name, tensor_in(slot, wire).to(place, copy=True)
            speak()
        wait_for_copies(wire.device)
