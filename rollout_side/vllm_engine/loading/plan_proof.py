"""Proving a copy plan where no copy of the version stays: piece by piece, by digests.

The plan is made before vLLM's own reload begins. Each of its pieces is digested twice: as it
passes on the wire, and in the parameter once the reload is done. So a rank that holds only its
part of each tensor proves its own part, and no memory is needed but for one piece.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from rollout_side.vllm_engine.loading.copy_plan import CopyPlan, accepted, make_plan
from rollout_side.vllm_engine.loading.copy_trace import storage_of
from weft_rl.contract.layout.manifest import Manifest


class PlanProof:
    """Plan that is believed once the reload that is about to begin has proven it.

    Args:
        model: vLLM's model, as it serves before the reload.
        manifest: Layout of what is reloaded.
        rename: Maps the manifest's names to those that the model's ``load_weights`` knows.
    """

    def __init__(
        self, model: torch.nn.Module, manifest: Manifest, rename: Callable[[str], str]
    ) -> None:
        self._model, self._manifest = model, manifest
        # No memory stands for the wire: a host may have less of it than a GPU.
        stand_in = torch.empty(manifest.wire_bytes, dtype=torch.uint8, device="meta")
        self._plan, self._why = make_plan(model, manifest, stand_in, rename)
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
