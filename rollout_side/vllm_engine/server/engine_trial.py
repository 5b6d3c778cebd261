"""Trial of an engine before its replica says ready: tokens of each kind that it will serve.

A model can load and fail at its first token: an operation that vLLM's build for this machine lacks,
a kernel that refuses a shape. Such a replica would take requests, and end at the first.
"""

from __future__ import annotations

import asyncio
import importlib
import logging
from collections.abc import AsyncGenerator, Callable, Mapping
from typing import Any, Final

from rollout_side.vllm_engine.compat import bridges
from rollout_side.vllm_engine.http.served_models import FIRST_LORA_ID
from rollout_side.vllm_engine.loading import lora_hook
from rollout_side.vllm_engine.server.requests_at_switch import EngineCaches
from rollout_side.vllm_engine.worker.rank_results import check_results
from rollout_side.vllm_engine.worker.trial import TRIAL_ADAPTER
from weft_rl.contract.errors import TransferTimeoutError, UnsupportedError
from weft_rl.contract.sampling import Sampling

_log = logging.getLogger(__name__)

#: Deadline of the whole trial. Kernels may be compiled for the first request.
TRIAL_SECONDS: Final = 600.0
#: Id that no other adapter gets.
_LORA_ID = FIRST_LORA_ID - 1
#: Tokens of a prompt: of one token alone a prefill would be a decode.
_PROMPT_TOKENS = 4
#: Edges of an image in pixels, and samples of a sound: a second.
_EDGE, _SAMPLES = 64, 16_000

Prompt = Mapping[str, Any]


class EngineTrial:
    """Trial of one engine; used once, on its event loop, before it takes requests. It leaves
    nothing behind: no block or item in a cache, no adapter, no count."""

    def __init__(
        self,
        engine: Any,
        generate: Callable[..., AsyncGenerator[Any, None]],
        caches: EngineCaches,
    ) -> None:
        self._engine, self._generate, self._caches = engine, generate, caches
        self._model = engine.vllm_config.model_config
        self._asked_for = "anything"

    async def run(self) -> None:
        """Generate some tokens of each kind."""
        try:
            async with asyncio.timeout(TRIAL_SECONDS):
                if "generate" not in await self._engine.get_supported_tasks():
                    return  # what a pooling model is asked for depends on its task
                with bridges.uncounted(self._engine):
                    await self._try_each()
                await self._empty_caches()
        except TimeoutError:
            raise TransferTimeoutError(
                f"the engine was asked for {self._asked_for} before it serves, and gave no token "
                f"within {TRIAL_SECONDS:g} s; its last words are above"
            ) from None
        except Exception as error:
            if not self._engine.errored:
                raise
            raise self._refusal("its process has ended, with the reason above") from error

    async def _try_each(self) -> None:
        if not self._model.is_encoder_decoder:
            await self._try("a plain prompt", self._plain_prompt())
            if self._engine.vllm_config.lora_config is not None:
                await self._try("a prompt with an adapter", self._plain_prompt(), _LORA_ID)
        if self._model.is_multimodal_model:
            for kind, prompt in self._prompts_with_items():
                await self._try(kind, prompt)

    async def _try(self, kind: str, prompt: Prompt, lora_id: int = 0) -> None:
        """Generate a first and a later token, and what is drafted between them."""
        self._asked_for = kind
        drafting = self._engine.vllm_config.speculative_config
        num_tokens = 2 + (drafting.num_speculative_tokens if drafting is not None else 0)
        params = bridges.sampling_params(
            Sampling(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
        )
        lora = lora_hook.lora_request(TRIAL_ADAPTER, lora_id) if lora_id else None
        begun = check_results(
            await self._engine.collective_rpc("weft_begin_trial", args=(lora_id,))
        )
        if lora is None or all(rank["has_adapter"] for rank in begun):
            try:
                async for _ in self._generate(prompt, params, "weft-trial", lora_request=lora):
                    pass
            except Exception as error:
                if self._engine.errored:
                    raise
                # vLLM takes no such prompt, which was made up here, and no step has run.
                _log.debug("the engine was not tried with %s: %r", kind, error)
        ended = check_results(await self._engine.collective_rpc("weft_end_trial"))
        if failure := next((rank["failure"] for rank in ended if rank["failure"]), ""):
            raise self._refusal(failure)

    def _refusal(self, reason: str) -> UnsupportedError:
        return UnsupportedError(
            f"the engine of {self._model.model} loads, and fails at {self._asked_for}: {reason}"
        )

    def _plain_prompt(self) -> Prompt:
        first = getattr(self._model.hf_text_config, "bos_token_id", None)
        token = first if isinstance(first, int) and 0 <= first < self._model.get_vocab_size() else 0
        return {"prompt_token_ids": [token] * _PROMPT_TOKENS}

    def _prompts_with_items(self) -> list[tuple[str, Prompt]]:
        """Return prompts with an image and with a sound, where the model takes them. Both are
        small: those that vLLM would make are as large as the model allows."""
        prompts: list[tuple[str, Prompt]] = []
        try:
            processor = self._engine.renderer.get_mm_processor()
            taken = processor.info.allowed_mm_limits
            for name, kind, make in (("image", "an image", _image), ("audio", "a sound", _sound)):
                if taken.get(name):
                    text = processor.dummy_inputs.get_dummy_text({name: 1})
                    prompt = {"prompt": text, "multi_modal_data": {name: [make()]}}
                    prompts.append((f"a prompt with {kind}", prompt))
        except Exception as error:  # noqa: BLE001 - of a processor that comes with a model
            _log.debug("vLLM makes no prompts with items for this model: %r", error)
        return prompts

    async def _empty_caches(self) -> None:
        # Blocks that cannot be given up now are right ones: the next switch empties their cache.
        await self._caches.try_to_empty()
        if self._caches.has_encoder:
            await self._engine.reset_encoder_cache()
        if self._model.is_multimodal_model:
            await self._engine.reset_mm_cache()


def _image() -> Any:
    return importlib.import_module("PIL.Image").new("RGB", (_EDGE, _EDGE), color=255)


def _sound() -> Any:
    numpy = importlib.import_module("numpy")
    return numpy.zeros(_SAMPLES, dtype=numpy.float32)
