"""What an engine is asked for before its replica says ready."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncGenerator
from types import SimpleNamespace
from typing import Any

import pytest

from rollout_side.vllm_engine.server import engine_trial
from rollout_side.vllm_engine.server.engine_trial import EngineTrial
from weft_rl.contract.errors import TransferTimeoutError, UnsupportedError

EMPTIED = ["blocks", "outputs", "items"]


class Engine:
    """As vLLM's ``AsyncLLM``; ``fails_at`` is the request that its worker fails at."""

    def __init__(
        self,
        *,
        lora: bool = False,
        drafts: int = 0,
        items: dict[str, int] | None = None,
        fails_at: int = 0,
        tasks: tuple[str, ...] = ("generate",),
    ) -> None:
        self.vllm_config = SimpleNamespace(
            model_config=SimpleNamespace(
                model="org/m",
                is_encoder_decoder=False,
                is_multimodal_model=items is not None,
                hf_text_config=SimpleNamespace(bos_token_id=1),
                get_vocab_size=lambda: 256,
            ),
            lora_config=object() if lora else None,
            speculative_config=SimpleNamespace(num_speculative_tokens=drafts) if drafts else None,
        )
        text = SimpleNamespace(get_dummy_text=lambda counts: f"<{next(iter(counts))}>")
        info = SimpleNamespace(allowed_mm_limits=items)
        processor = SimpleNamespace(dummy_inputs=text, info=info)
        self.renderer = SimpleNamespace(get_mm_processor=lambda: processor)
        self.logger_manager = SimpleNamespace(record=lambda **_: self.counted.append("a step"))
        self.tasks, self.fails_at = tasks, fails_at
        self.errored = self.dies = self.hangs = False
        self.refuses: tuple[int, ...] = ()
        self.makes_adapters = True
        self.asked: list[tuple[Any, Any, Any]] = []
        self.counted: list[str] = []
        self.emptied: list[str] = []
        self.trials: list[str] = []

    async def get_supported_tasks(self) -> tuple[str, ...]:
        return self.tasks

    async def collective_rpc(self, method: str, args: tuple[Any, ...] = ()) -> list[dict[str, Any]]:
        if self.errored:
            raise EngineDeadError
        self.trials.append(method)
        has_failed = self.fails_at and len(self.asked) == self.fails_at
        value = {"has_adapter": self.makes_adapters, "failure": "no kernel" if has_failed else ""}
        return [{"ok": True, "value": value}]

    async def generate(
        self, prompt: Any, params: Any, request_id: str, lora_request: Any
    ) -> AsyncGenerator[Any, None]:
        self.asked.append((prompt, params, lora_request))
        if len(self.asked) in self.refuses:
            raise ValueError("the prompt has no place for an image")
        if self.dies:
            self.errored = True
            raise EngineDeadError
        if self.hangs:
            await asyncio.sleep(60)
        self.logger_manager.record(scheduler_stats=None)
        yield object()

    async def reset_mm_cache(self) -> None:
        self.emptied.append("items")

    async def reset_encoder_cache(self) -> None:
        self.emptied.append("outputs")

    async def try_to_empty(self) -> bool:
        self.emptied.append("blocks")
        return False

    async def try_it(self) -> None:
        sees = self.vllm_config.model_config.is_multimodal_model
        caches: Any = SimpleNamespace(has_encoder=sees, try_to_empty=self.try_to_empty)
        await EngineTrial(self, self.generate, caches).run()


class EngineDeadError(Exception):
    """As vLLM's."""


@pytest.fixture(autouse=True)
def _vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    def record(**fields: Any) -> Any:
        return SimpleNamespace(**fields)

    params = SimpleNamespace(SamplingParams=record, RequestOutputKind=SimpleNamespace(DELTA=0))
    request = SimpleNamespace(LoRARequest=record)
    monkeypatch.setitem(sys.modules, "vllm.sampling_params", params)  # type: ignore[arg-type]
    monkeypatch.setitem(sys.modules, "vllm.lora.request", request)  # type: ignore[arg-type]


async def test_a_plain_prompt_is_tried_past_its_first_token_and_leaves_no_trace() -> None:
    engine = Engine()
    await engine.try_it()
    ((prompt, params, lora),) = engine.asked
    assert prompt == {"prompt_token_ids": [1, 1, 1, 1]}
    assert (params.max_tokens, params.ignore_eos, params.temperature) == (2, True, 0)
    assert lora is None
    assert not engine.counted
    assert engine.emptied == ["blocks"]
    engine.logger_manager.record()
    assert engine.counted  # from then on


@pytest.mark.parametrize(
    ("what", "makes_adapters", "max_tokens"),
    [
        ({"drafts": 3}, True, [5]),  # as far as a draft is verified
        ({"items": {"image": 0}}, True, [2]),  # --limit-mm-per-prompt
        ({"lora": True}, False, [2]),
        ({"tasks": ("embed",)}, True, []),
    ],
    ids=["draft", "no items", "no adapters", "pooling"],
)
async def test_what_is_not_served_is_not_tried(
    what: dict[str, Any], makes_adapters: bool, max_tokens: list[int]
) -> None:
    engine = Engine(**what)
    engine.makes_adapters = makes_adapters
    await engine.try_it()
    assert [params.max_tokens for _, params, _ in engine.asked] == max_tokens


async def test_each_kind_that_is_served_is_tried() -> None:
    engine = Engine(lora=True, items={"image": 1, "audio": 2, "video": 1})
    await engine.try_it()
    plain, adapter, image, sound = engine.asked
    assert [plain[2], adapter[2].lora_name] == [None, "weft-trial@0"]
    assert image[0]["prompt"] == "<image>"
    assert image[0]["multi_modal_data"]["image"][0].size == (64, 64)
    assert len(sound[0]["multi_modal_data"]["audio"][0]) == 16_000
    assert engine.trials == ["weft_begin_trial", "weft_end_trial"] * 4
    assert engine.emptied == EMPTIED


@pytest.mark.parametrize(
    ("fails_at", "text"),
    [
        (1, "the engine of org/m loads, and fails at a plain prompt: no kernel"),
        (2, "the engine of org/m loads, and fails at a prompt with an adapter: no kernel"),
        (3, "the engine of org/m loads, and fails at a prompt with an image: no kernel"),
    ],
)
async def test_a_kind_that_fails_is_named_with_the_engines_reason(fails_at: int, text: str) -> None:
    engine = Engine(lora=True, items={"image": 1}, fails_at=fails_at)
    with pytest.raises(UnsupportedError) as refused:
        await engine.try_it()
    assert refused.value.message == text
    assert len(engine.asked) == fails_at


async def test_an_engine_that_dies_is_refused() -> None:
    engine = Engine()
    engine.dies = True
    with pytest.raises(UnsupportedError, match="fails at a plain prompt: its process has ended"):
        await engine.try_it()


async def test_an_engine_that_hangs_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_trial, "TRIAL_SECONDS", 0.05)
    engine = Engine()
    engine.hangs = True
    with pytest.raises(TransferTimeoutError, match=r"a plain prompt .* no token within 0\.05 s"):
        await engine.try_it()


async def test_a_prompt_that_vllm_refuses_proves_nothing() -> None:
    """It was made up: where an image goes into a prompt, only the model's processor knows."""
    engine = Engine(items={"image": 1})
    engine.refuses = (2,)
    await engine.try_it()
    assert engine.emptied == EMPTIED
