"""Proofs of copy plans: that the copies do what vLLM's own loading has done.

- ``learn`` compares a staged copy with the parameters;
- ``PlanProof`` compares digests of what passes on the wire with digests of the parameters after the
  reload, so that no copy is needed and each rank proves its own part;
- ``learn_from_files`` compares the parameters with digests of the files that the engine was started
  with, so that even the first push needs no reload.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable
from typing import Any

import torch

from rollout_side.memory.versions import StagedVersion
from rollout_side.vllm_engine.compat import bridges
from rollout_side.vllm_engine.loading.copy_plan import (
    CopyPlan,
    can_learn,
    processed_modules,
    trace_copies,
)
from rollout_side.vllm_engine.loading.layerwise import facts_of
from rollout_side.vllm_engine.loading.processed_modules import storage_of
from weft_rl.contract.checkpoint import StoredTensor
from weft_rl.contract.manifest import Manifest, plan_buckets
from weft_rl.contract.tensors import DataType, Reference

_log = logging.getLogger(__name__)


def learn(
    model: torch.nn.Module, staged: StagedVersion, ignored: Collection[str] = ()
) -> CopyPlan | None:
    """Return the plan of a version that the model has just loaded; None if copies do not suffice.
    Nothing that the model computes with changes."""
    plan, why = make_plan(model, staged.manifest, staged.segment.data, ignored)
    try:
        if plan is not None and not plan.holds(staged.segment.data):
            why = "a parameter does not hold what was loaded into it"
    except Exception as error:  # noqa: BLE001 (as in make_plan)
        why = f"{type(error).__name__}: {error}"
    return accepted(plan, why)


def make_plan(
    model: torch.nn.Module,
    manifest: Manifest,
    segment: torch.Tensor,
    ignored: Collection[str] = (),
) -> tuple[CopyPlan | None, str]:
    """Make a plan that is not proven yet, or return the reason why there is none."""
    try:
        if computed := facts_of(model).computed:
            return None, f"loading computes {computed[0]!r}, which is no parameter"
        processed, unfilled = processed_modules(model)
        pieces = trace_copies(model, manifest, segment, processed, unfilled, ignored)
        return CopyPlan(manifest, pieces, processed), ""
    except ValueError as error:
        return None, str(error)
    except Exception as error:  # noqa: BLE001 (a faster way only; the safe one remains)
        return None, f"{type(error).__name__}: {error}"


def plan_for(model: torch.nn.Module, reference: Reference) -> tuple[CopyPlan | None, str]:
    """Make a plan as ``make_plan`` does, of tensors that have no values: a tensor a bucket."""
    manifest = plan_buckets(reference.tensors, 1)  # one layout is as good as any other
    stand_in = torch.empty(manifest.wire_bytes, dtype=torch.uint8, device="meta")
    return make_plan(model, manifest, stand_in)


def accepted(plan: CopyPlan | None, why: str) -> CopyPlan | None:
    """Return the plan, or None if there is a reason against it; log which."""
    if plan is None or why:
        _log.info("bases are loaded by vLLM's own reload, not by copies: %s", why)
        return None
    processed = f", and {plan.num_processed} layers processed" if plan.num_processed else ""
    _log.debug("bases are loaded by %d plain copies%s", plan.num_copies, processed)
    return plan


class PlanProof:
    """Plan that is believed once the reload that is about to begin has proven it."""

    def __init__(
        self, model: torch.nn.Module, manifest: Manifest, ignored: Collection[str] = ()
    ) -> None:
        self._model, self._manifest = model, manifest
        # No memory stands for the wire: a host may have less of it than a GPU.
        stand_in = torch.empty(manifest.wire_bytes, dtype=torch.uint8, device="meta")
        self._plan, self._why = make_plan(model, manifest, stand_in, ignored)
        self._places = _places(model)
        self._passed: list[list[int]] = []

    def pass_bucket(self, index: int, wire: torch.Tensor) -> None:
        """Digest the pieces of a bucket that the model is about to be given; never raises."""
        if self._plan is None or self._why:
            return
        try:
            self._passed.append(self._plan.source_digests(index, wire))
        except Exception as error:  # noqa: BLE001 (a faster way only; the safe one remains)
            self._why = f"{type(error).__name__}: {error}"

    def plan(self) -> CopyPlan | None:
        """Return the plan, after the reload; None if that did not prove it. Never raises."""
        if self._plan is not None and not self._why:
            try:
                self._why = self._unproven(self._plan)
            except Exception as error:  # noqa: BLE001 (as above)
                self._why = f"{type(error).__name__}: {error}"
        return accepted(self._plan, self._why)

    def _unproven(self, plan: CopyPlan) -> str:
        if _places(self._model) != self._places:
            return "the parameters lie elsewhere after a reload"
        if len(self._passed) != len(self._manifest.buckets):
            return f"{len(self._passed)} of {len(self._manifest.buckets)} buckets were digested"
        for index, digests in enumerate(self._passed):
            if plan.target_digests(index) != digests:
                return f"a parameter of bucket {index} does not hold what was loaded into it"
        return ""


def _places(model: torch.nn.Module) -> dict[str, int]:
    return {name: storage_of(p) for name, p in model.named_parameters(remove_duplicate=False)}


def learn_from(
    worker: Any, reference: Reference, stored: Iterable[StoredTensor]
) -> CopyPlan | None:
    """Call ``learn_from_files`` on a worker's model; return None where it holds weights packed. A
    CPU holds them so."""
    if not can_learn(worker):
        return None
    model = worker.model_runner.get_model()
    with bridges.vllm_config_context(worker.vllm_config):
        return learn_from_files(model, reference, stored)


def learn_from_files(
    model: torch.nn.Module,
    reference: Reference,
    stored: Iterable[StoredTensor],
) -> CopyPlan | None:
    """Return the plan of a model that holds what it was started with; None if that fails the proof.

    Logs the reason then. Never raises; nothing that the model computes with changes. Blocks for one
    reading of the parameters.

    Args:
        model: vLLM's model, as it serves.
        reference: Tensors that the model consists of.
        stored: The tensors of its files, those that it does not consist of included.
    """
    why: str
    try:
        digests, why = _served_as_stored(reference, stored)
        if not why:
            plan, why = plan_for(model, reference)
            if plan is not None and plan.num_processed:
                why = f"{plan.num_processed} layers hold what they make of the files"
            elif plan is not None:
                unlike = plan.first_unlike(digests)
                if not unlike:
                    return accepted(plan, "")
                why = f"{unlike!r} is held with other values than in the files"
    except Exception as error:  # noqa: BLE001 (a faster way only; the safe one remains)
        why = f"{type(error).__name__}: {error}"
    _log.info("the first base is loaded by vLLM's own reload, not by copies: %s", why)
    return None


def _served_as_stored(
    reference: Reference, stored: Iterable[StoredTensor]
) -> tuple[list[int], str]:
    """Return the digests of the reference's tensors; or why they are not known."""
    found = {tensor.name: tensor for tensor in stored}
    digests = []
    for meta in reference.tensors:
        tensor = found.get(meta.name)
        if tensor is None:
            return [], f"the files have no {meta.name!r}"
        if DataType.of_safetensors(tensor.dtype) is not meta.dtype or tensor.dims != meta.shape:
            return [], f"{meta.name!r} is {tensor.dtype} in the files, and served in another dtype"
        digests.append(tensor.digest)
    return digests, ""
