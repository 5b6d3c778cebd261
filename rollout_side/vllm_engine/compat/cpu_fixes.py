"""Corrections of vLLM's CPU backend, each for a fault that was measured.

They do nothing on a GPU, and nothing where vLLM has the correction itself.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterable
from typing import Any

import torch

_MARK = "_weft_row_mask"


def install_row_mask() -> bool:
    """Keep base-model rows of a mixed batch free of any adapter.

    In vLLM's CPU kernels a row without adapter has index -1, which selects the
    *last* adapter slot (0.26 to 0.32: 2.6 to 5.4 nats off). The shrunk row is set to
    zero here, so that its expansion adds nothing. Idempotent.
    """
    kernels: Any = importlib.import_module("vllm.lora.ops.torch_ops.lora_ops")
    wrapper: Any = importlib.import_module("vllm.lora.punica_wrapper.punica_cpu")
    if "no_lora_mask" in inspect.getsource(kernels.bgmv_shrink):
        return False  # corrected upstream
    if hasattr(wrapper.bgmv_shrink, _MARK):
        return True
    native = wrapper.bgmv_shrink

    def bgmv_shrink(
        inputs: torch.Tensor,
        weights: torch.Tensor,
        output: torch.Tensor,
        indices: torch.Tensor,
        scaling: float = 1.0,
    ) -> None:
        native(inputs, weights, output, indices, scaling)
        output[: indices.shape[0]].masked_fill_((indices < 0).unsqueeze(-1), 0)

    def sgmv_shrink(
        inputs: torch.Tensor,
        weights: torch.Tensor,
        output: torch.Tensor,
        _starts: torch.Tensor,
        lengths: torch.Tensor,
        indices: torch.Tensor,
        _batches: int,
        _longest: int,
        _num_tokens: int,
        scaling: float,
    ) -> None:
        rows = torch.repeat_interleave(indices, lengths)
        bgmv_shrink(inputs, weights, output, rows, scaling)

    setattr(bgmv_shrink, _MARK, True)
    wrapper.bgmv_shrink = bgmv_shrink
    wrapper.sgmv_shrink = sgmv_shrink
    return True


def install_prompt_rows() -> bool:
    """Give the log-probabilities of a prompt's tokens the adapter of their own request.

    vLLM computes the logits of a prompt's rows by the adapters of the batch's requests, in their
    order (0.26 to 0.33). With several requests the numbers of both differ, which ends the engine
    (``echo`` with ``logprobs``, ``prompt_logprobs``); where they are equal, a LoRA of the head is
    another request's. Idempotent.
    """
    if not importlib.import_module("vllm.platforms").current_platform.is_cpu():
        return False
    wrapper: Any = importlib.import_module("vllm.lora.punica_wrapper.punica_cpu").PunicaWrapperCPU
    runner: Any = importlib.import_module("vllm.v1.worker.gpu_model_runner").GPUModelRunner
    if hasattr(wrapper.add_lora_logits, _MARK):
        return True
    add_native, prompts_native = wrapper.add_lora_logits, runner._get_prompt_logprobs_dict
    #: Slot of the adapter of the request whose prompt is looked at, -1 for none; empty otherwise.
    slots: list[int] = []

    def add_lora_logits(
        self: Any,
        y: torch.Tensor,
        x: torch.Tensor,
        lora_a: torch.Tensor,
        lora_b: torch.Tensor,
        scale: float,
        **more: Any,
    ) -> Any:
        if not slots:
            return add_native(self, y, x, lora_a, lora_b, scale, **more)
        if slots[0] >= 0:
            a, b = lora_a[slots[0]].squeeze(0), lora_b[slots[0]].squeeze(0)
            shrunk = (x.float() @ a.float().T * scale).to(y.dtype)
            width = min(y.shape[-1], b.shape[0])
            y[..., :width] += (shrunk @ b.to(y.dtype).T)[..., :width]
        return None

    def get_prompt_logprobs(self: Any, hidden: torch.Tensor, num_scheduled: Any) -> dict[str, Any]:
        manager = getattr(self, "lora_manager", None)
        if manager is None or not self.num_prompt_logprobs:
            return prompts_native(self, hidden, num_scheduled)  # type: ignore[no-any-return]
        asked, found = self.num_prompt_logprobs, dict[str, Any]()
        try:
            for request_id in [name for name in asked if name in num_scheduled]:
                # vLLM takes the request out of these once its prompt has been looked at.
                self.num_prompt_logprobs = one = {request_id: asked[request_id]}
                slots[:] = [_slot_of(self, manager, request_id)]
                found.update(prompts_native(self, hidden, num_scheduled))
                if not one:
                    del asked[request_id]
        finally:
            slots.clear()
            self.num_prompt_logprobs = asked
        return found

    setattr(add_lora_logits, _MARK, True)
    wrapper.add_lora_logits = add_lora_logits
    runner._get_prompt_logprobs_dict = get_prompt_logprobs
    return True


def _slot_of(runner: Any, manager: Any, request_id: str) -> int:
    """Return the slot of the adapter that a request of the batch uses; -1 for none."""
    row = runner.input_batch.req_id_to_index[request_id]
    lora_id = int(runner.input_batch.request_lora_mapping[row])
    return manager._adapter_manager.lora_index_to_id.index(lora_id) if lora_id else -1


def rebuild_moe_kernels(model: torch.nn.Module) -> int:
    """Make the next reload prepack expert weights again; call it before the reload.

    vLLM takes an existing kernel for a sign that the weights may be copied in place
    and skips the CPU's prepacking (0.32: 2.6 nats off, silently).
    """
    num_reset = 0
    for module in model.modules():
        method: Any = getattr(module, "quant_method", None)
        if getattr(method, "moe_kernel", None) is not None:
            method.moe_kernel = None
            num_reset += 1
    return num_reset


def refill_released(model: torch.nn.Module) -> int:
    """Give weights that MLA's AMX backend has released memory again; call it before the reload.

    The layer is built with its whole weight, which vLLM then copies to that of no elements: the
    reload fails midway. The backend packs and releases it again (read in 0.32, not run).
    """
    reload: Any = importlib.import_module("vllm.model_executor.model_loader.reload")
    num_refilled = 0
    for layer in model.modules():
        weight = layer._parameters.get("weight")
        if weight is None or weight.numel() or not hasattr(layer, "_cpu_skip_gemm_dispatch"):
            continue
        recorded = reload.layerwise.get_layerwise_info(layer).restore_metadata[0]["weight"]
        weight.data = torch.empty_like(recorded, device=weight.device)
        num_refilled += 1
    return num_refilled


def repack_tied(layers: Iterable[torch.nn.Module]) -> None:
    """Prepack again layers that share their weight with one that was reloaded.

    A tied lm_head's weight is the embedding's and is right after a reload. But the
    CPU multiplies by a packed copy of it, which vLLM does not renew (0.32: 14 nats
    off, silently, for every model with ``tie_word_embeddings``).
    """
    for layer in layers:
        method: Any = getattr(layer, "quant_method", None)
        if method is not None and hasattr(layer, "cpu_linear"):
            method.process_weights_after_loading(layer)
