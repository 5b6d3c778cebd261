"""Caches of an engine that hold what a base has computed, emptied at every switch.

This is the one place that says what is emptied. A cache belongs here if its keys are content
(tokens, an image) and its values follow from weights; docs/architecture.md lists them all.
"""

from __future__ import annotations

from typing import Any

from rollout_side.vllm_engine.compat import requests
from weft_rl.contract.errors import LoadFailedError


class EngineCaches:
    """Caches of one engine; every coroutine is awaited while generation is paused.

    Args:
        engine: vLLM's ``AsyncLLM``.
    """

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        model = engine.model_config
        #: Whether it keeps what an encoder has made of images or sounds, or of queries.
        self.has_encoder = bool(
            model.is_multimodal_model or model.is_encoder_decoder or model.runner_type == "pooling"
        )
        #: Whether blocks of the KV cache are kept outside it, too.
        self.has_connector = engine.vllm_config.kv_transfer_config is not None

    async def try_to_empty(self) -> bool:
        """Empty the caches of KV blocks; return False if some blocks are on their way.

        Running requests are computed anew, under the weights of that time.
        """
        try:
            return await self._reset_blocks()
        except Exception:
            if self._engine.errored:
                raise
            return False  # vLLM raises where a request waits for blocks from outside

    async def forget(self, *, keep_running: bool) -> None:
        """Prevent new work from using what the former base has computed.

        Args:
            keep_running: Whether running requests go on over the blocks that they have.

        Raises:
            LoadFailedError: Old blocks could be used: dirty.
        """
        if keep_running:
            await requests.keep_requests(self._engine)
        elif not await self._reset_blocks():
            raise LoadFailedError(
                "the engine could not reset its KV cache; old blocks would be used under new "
                "weights",
                metadata={"dirty": "true"},
            )
        if self.has_encoder:
            await self._engine.reset_encoder_cache()

    async def _reset_blocks(self) -> bool:
        # Where there is no connector, older versions answer that it could not be reset.
        outside = {"reset_connector": True} if self.has_connector else {}
        answer = await self._engine.reset_prefix_cache(reset_running_requests=True, **outside)
        return answer is True
