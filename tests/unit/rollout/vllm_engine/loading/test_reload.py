"""What vLLM's own reload says of layers without weights."""

from __future__ import annotations

import logging

import pytest

from rollout_side.vllm_engine.loading.reload import quiet_about_idle_layers


def test_layers_that_have_no_weights_are_no_warning(caplog: pytest.LogCaptureFixture) -> None:
    logger = logging.getLogger("vllm.model_executor.model_loader.reload.layerwise")
    with quiet_about_idle_layers():
        logger.warning("%s: Failed to load weights", "Attention")
        logger.warning("something else")
    assert [record.getMessage() for record in caplog.records] == ["something else"]
    logger.warning("%s: Failed to load weights", "Attention")
    assert len(caplog.records) == 2
