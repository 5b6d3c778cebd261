"""An engine is asked for tokens of each kind before its replica is ready."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.e2e.engine_process import LORA_ARGS, EngineProcess, run_child
from tests.models import make_model

_MISSING = "cpu_gemm_wna16"


def _lack_an_operation(*args: Any) -> None:
    """Run an engine whose layers with a LoRA use an operation that no library has."""
    import torch
    from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU

    own = PunicaWrapperCPU.add_lora_linear

    def add_lora_linear(self: Any, *args: Any, **more: Any) -> Any:
        if self.is_used:
            return getattr(torch.ops._C, _MISSING + "_of_nobody")()
        return own(self, *args, **more)

    def update_metadata(self: Any, mapping: Any, *args: Any, **more: Any) -> Any:
        self.is_used = any(mapping.prompt_mapping)
        return metadata(self, mapping, *args, **more)

    metadata = PunicaWrapperCPU.update_metadata
    PunicaWrapperCPU.is_used = False
    PunicaWrapperCPU.add_lora_linear = add_lora_linear
    PunicaWrapperCPU.update_metadata = update_metadata
    run_child(*args)


def test_an_engine_that_would_end_at_its_first_adapter_is_refused(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    model = make_model("qwen3", tmp_path / "model")
    with pytest.raises(RuntimeError) as refused:
        EngineProcess(model, tuple(LORA_ARGS), child=_lack_an_operation).start()
    assert (
        f"the engine of {model} loads, and fails at a prompt with an adapter: vLLM's build for "
        f"this machine has no operation {_MISSING}_of_nobody, which the model needs"
    ) in str(refused.value)
    assert "EngineCore encountered" not in capfd.readouterr().err  # it ended as it is told to
