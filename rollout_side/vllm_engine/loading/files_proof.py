"""Proving a copy plan by the files that an engine was started with: nothing is loaded for it.

vLLM has put the tensors of these files where it computes with them. A plan is traced, and its
tensors are digested in the places that it names: where these are the digests of the files'
tensors, its copies amount to what vLLM's own loading did. So the first base that is pushed needs
no reload, whatever its layout.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import Any

import torch

from rollout_side.vllm_engine.compat import bridges
from rollout_side.vllm_engine.loading.copy_plan import CopyPlan, accepted, make_plan
from rollout_side.vllm_engine.loading.reload import can_learn
from weft_rl.contract.checkpoint import StoredTensor
from weft_rl.contract.layout.manifest import plan_buckets
from weft_rl.contract.tensors import DataType, Reference

_log = logging.getLogger(__name__)


def learn_from(
    worker: Any, reference: Reference, stored: Iterable[StoredTensor]
) -> CopyPlan | None:
    """Call ``learn_from_files`` on a worker's model; return None where it holds weights packed.

    A CPU holds them so.
    """
    if not can_learn(worker):
        return None
    model = worker.model_runner.get_model()
    with bridges.vllm_config_context(worker.vllm_config):
        return learn_from_files(model, reference, stored, bridges.base_names(model))


def learn_from_files(
    model: torch.nn.Module,
    reference: Reference,
    stored: Iterable[StoredTensor],
    rename: Callable[[str], str],
) -> CopyPlan | None:
    """Return the plan of a model that holds what it was started with; None if that fails the proof.

    Logs the reason then. Never raises; nothing that the model computes with changes. Blocks for one
    reading of the parameters.

    Args:
        model: vLLM's model, as it serves.
        reference: Tensors that the model consists of.
        stored: The tensors of its files, those that it does not consist of included.
        rename: Maps the reference's names to those that the model's ``load_weights`` knows.
    """
    why: str
    try:
        digests, why = _served_as_stored(reference, stored)
        if not why:
            # A tensor a bucket: one layout is as good as any other.
            manifest = plan_buckets(reference.tensors, 1)
            stand_in = torch.empty(manifest.wire_bytes, dtype=torch.uint8, device="meta")
            plan, why = make_plan(model, manifest, stand_in, rename)
            if plan is not None:
                unlike = plan.first_unlike(digests)
                if not unlike:
                    return accepted(plan, "")
                why = f"{unlike!r} is held otherwise than in the files"
    except Exception as error:  # noqa: BLE001 (a faster way only; the safe one remains)
        why = f"{type(error).__name__}: {error}"
    _log.info("the first base is loaded by vLLM's own reload: %s", why)
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
        if DataType.of_safetensors(tensor.dtype) is not meta.dtype or tensor.shape != meta.shape:
            return [], f"{meta.name!r} is {tensor.dtype} in the files, and served in another dtype"
        digests.append(tensor.digest)
    return digests, ""
