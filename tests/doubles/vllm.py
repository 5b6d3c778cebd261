"""vLLM's engine in the place of the real one: records what a replica calls, answers as told."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable, Iterable
from types import SimpleNamespace
from typing import Any

from rollout_side.spill.folder import SpillFolder, SpillSettings
from rollout_side.vllm_engine.http.middleware import RequestTracker
from rollout_side.vllm_engine.http.served_models import ServedModels
from rollout_side.vllm_engine.replica import EngineParts, VllmReplica
from rollout_side.vllm_engine.server.initial_checkpoint import InitialCheckpoint
from rollout_side.vllm_engine.server.requests_at_switch import RequestsAtSwitch
from rollout_side.vllm_engine.server.worker_calls import Deadlines
from rollout_side.vllm_engine.worker.holdings import HoldingsPage
from rollout_side.vllm_engine.worker.rank_results import RankResult
from weft_rl.contract.capabilities import Capabilities, RunningRequests
from weft_rl.contract.group import GroupTicket
from weft_rl.contract.names import PolicyVersion
from weft_rl.contract.tensors import DataType, Reference

BASE = PolicyVersion("base", 3)
TICKET = GroupTicket(
    coordinator="", host="", group_id="g", token="", epoch=1, rank=1, size=2, backend="gloo"
)


def ok(rank: int = 0, **value: Any) -> RankResult:
    return RankResult(
        ok=True,
        rank=rank,
        seconds=0.0,
        error_reason="",
        error_message="",
        metadata={},
        value=value,
    )


def failed(reason: str, *, rank: int = 0, dirty: bool = False) -> RankResult:
    return RankResult(
        ok=False,
        rank=rank,
        seconds=0.0,
        error_reason=reason,
        error_message="no",
        metadata={"dirty": "true"} if dirty else {},
        value={},
    )


class FakeEngine:
    """Records what is called; answers as told, per method.

    Args:
        num_ranks: Workers.
        sees: Whether its model has an encoder of images.
        connector: Whether blocks of its KV cache are kept elsewhere, too.
    """

    errored = False
    generate: Any = None

    def __init__(self, num_ranks: int = 1, *, sees: bool = False, connector: bool = False) -> None:
        self.model_config = SimpleNamespace(
            is_multimodal_model=sees, is_encoder_decoder=False, runner_type="generate"
        )
        self.vllm_config = SimpleNamespace(kv_transfer_config=object() if connector else None)
        self.renderer = SimpleNamespace(mm_processor_cache=None)
        self.calls: list[str] = []
        self.answers: dict[str, Callable[[], list[RankResult]]] = {}
        self.hang: dict[str, asyncio.Event] = {}
        self.failures: dict[str, Exception] = {}
        #: Of each worker method, what it was called with last.
        self.last_args: dict[str, tuple[Any, ...]] = {}
        self.reset_works = True
        #: What the next resets do instead: an answer, or what they raise.
        self.resets: list[bool | Exception | None] = []
        self.salts: list[str] = []
        self.num_ranks = num_ranks
        self.engine_core = self
        self.output_processor = SimpleNamespace(request_states={})

    async def collective_rpc(self, method: str, args: Any) -> list[RankResult]:
        discarded = method == "weft_wake" and args[0]
        self.calls.append("weft_wake discarded" if discarded else method)
        self.last_args[method] = tuple(args)
        await self._answer(method)
        if method in self.answers:
            return self.answers[method]()
        values = {
            "weft_handle": {"handle": b"h"},
            "weft_discard": {"changed": False, "kept": False},
            "weft_loaded": {"load_seconds": 2.0, "has_draft": False},
            "weft_apply_base": {"has_draft": False},
            "weft_keep_base": {"num_undo": 0},
            "weft_take_back": {"transfer_id": "", "content_digest": b""},
            "weft_sleep": {"is_free": True},
        }
        value = values.get(method, {})
        return [ok(rank, **value) for rank in range(self.num_ranks)]

    async def _answer(self, method: str) -> None:
        if method in self.hang:
            await self.hang[method].wait()
        if method in self.failures:
            raise self.failures[method]

    async def pause_scheduler_async(self, mode: str, clear_cache: bool) -> None:
        assert mode in ("keep", "abort")
        assert not clear_cache
        self.calls.append("pause" if mode == "keep" else "abort all")
        await self._answer("pause")

    async def resume_scheduler_async(self) -> None:
        self.calls.append("resume")
        await self._answer("resume")

    async def sleep(self, level: int) -> None:
        self.calls.append(f"sleep {level}")
        await self._answer("sleep")

    async def wake_up(self, tags: list[str]) -> None:
        self.calls.append(f"wake {' '.join(tags)}")

    async def update_weight_version(self, text: str) -> None:
        self.calls.append(text)

    async def call_utility_async(self, method: str) -> None:
        self.calls.append(method)
        await self._answer(method)

    async def reset_prefix_cache(
        self, *, reset_running_requests: bool, reset_connector: bool = False
    ) -> bool | None:
        assert reset_running_requests
        self.calls.append("reset all" if reset_connector else "reset")
        answer = self.resets.pop(0) if self.resets else self.reset_works
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def reset_encoder_cache(self) -> None:
        self.calls.append("reset encoder")
        await self._answer("reset encoder")

    async def add_request_async(self, request: Any) -> None:
        """Of ``engine_core``."""
        self.salts.append(request.cache_salt)


def sampling_params(sampling: object, num_samples: int = 1, chunk_tokens: int = 0) -> Any:
    """Return a double of vLLM's ``SamplingParams``, for ``bridges.sampling_params``."""
    return SimpleNamespace(n=num_samples)


class GeneratingEngine(FakeEngine):
    """Also answers requests, with the tokens that a test ``emits``: they wait in the queue of
    outputs until the one task that takes them in, as vLLM's does.

    Args:
        names_weights: Whether outputs name the weights behind their tokens (0.32 and later).
    """

    def __init__(self, *, names_weights: bool = False, **settings: bool) -> None:
        super().__init__(**settings)
        self.names_weights = names_weights
        self.outputs_queue = asyncio.Queue[tuple[str, int, list[int], str]]()
        self._collectors: dict[str, asyncio.Queue[Any]] = {}
        self._states: dict[tuple[str, int], Any] = self.output_processor.request_states
        self._handler = asyncio.ensure_future(self._take_outputs())
        self.prompts: list[Any] = []
        #: Of the KV cache: what requests come with; ``salts`` is what they are sent with.
        self.given_salt: str | None = None
        #: Raised by the next request.
        self.refusal: Exception | None = None

    def emit(self, request_id: str, tokens: list[int], finish: str = "", index: int = 0) -> None:
        """Put tokens out."""
        self.outputs_queue.put_nowait((request_id, index, tokens, finish))

    async def _take_outputs(self) -> None:
        while True:
            output = await self.outputs_queue.get()
            for _ in range(3):  # it is interrupted between two parts of an output
                await asyncio.sleep(0)
            self._take(*output)

    def _take(self, request_id: str, index: int, tokens: list[int], finish: str) -> None:
        state = self._states.get((request_id, index))
        if state is None:
            return
        state.tokens += tokens
        # What 0.26 hands over with an output that has no token.
        logprobs = state.tokens[-len(tokens) :]
        if finish:
            del self._states[request_id, index]
        completion = SimpleNamespace(
            index=index,
            token_ids=tokens,
            logprobs=[{token: SimpleNamespace(logprob=-token / 100)} for token in logprobs],
            finish_reason=finish or None,
        )
        if self.names_weights:
            span = SimpleNamespace(version="base@7", start=0, end=len(state.tokens))
            completion.weight_versions = [span] if finish else None
        is_last = not any(of == request_id for of, _ in self._states)
        output = SimpleNamespace(outputs=[completion], finished=is_last, prompt_token_ids=[1, 2])
        self._collectors[request_id].put_nowait(output)

    async def generate(
        self, prompt: Any, params: Any, request_id: str, *, lora_request: Any = None
    ) -> AsyncGenerator[Any, None]:
        self.prompts.append(prompt)
        if self.refusal is not None:
            raise self.refusal
        for i in range(params.n):
            state = SimpleNamespace(
                external_req_id=request_id,
                request_index=i,
                tokens=[],
                lora_name=lora_request and lora_request.lora_name,
            )
            state.detokenizer = SimpleNamespace(
                num_output_tokens=lambda state=state: len(state.tokens)
            )
            if self.names_weights:
                state.weight_version_starts = []
            self._states[request_id, i] = state
        sent = SimpleNamespace(cache_salt=self.given_salt, external_req_id=request_id)
        await self.add_request_async(sent)
        self._collectors[request_id] = asyncio.Queue()
        while True:
            output = await self._collectors[request_id].get()
            yield output
            if output.finished:
                return

    async def abort(self, request_ids: str | Iterable[str]) -> None:
        request_ids = [request_ids] if isinstance(request_ids, str) else list(request_ids)
        self.calls.append(f"abort {' '.join(request_ids)}")
        for request_id, index in list(self._states):
            if request_id in request_ids:
                self._take(request_id, index, [], "abort")

    def close(self) -> None:
        """End its task."""
        self._handler.cancel()


def make_replica(
    engine: FakeEngine,
    load_seconds: float = 5.0,
    restore_seconds: float = 5.0,
    call_seconds: float = 5.0,
    spills: bool = False,
    in_place: bool = False,
    holdings: HoldingsPage | None = None,
    running_requests: RunningRequests = "recompute",
    can_sleep: bool = False,
    draft_fingerprint: str = "",
) -> VllmReplica:
    serving = SimpleNamespace(
        lora_requests={}, base_model_paths=[SimpleNamespace(name="tiny", model_path="tiny")]
    )
    serving.is_base_model = lambda name: name in [path.name for path in serving.base_model_paths]
    parts: Any = EngineParts(
        engine=engine,
        holdings=holdings or HoldingsPage(),
        models=ServedModels(serving),
        http=SimpleNamespace(port=1),  # type: ignore[arg-type]
        tracker=RequestTracker(),
        requests=RequestsAtSwitch(engine, running_requests),
        initial_checkpoint=InitialCheckpoint("dummy"),
        cleanup=contextlib.AsyncExitStack(),
    )
    spill_folder = SpillFolder(
        SpillSettings(directory="/nonexistent", capacity_bytes=0, owner="r0"), "f" * 64
    )
    return VllmReplica(
        parts,
        capabilities=Capabilities(
            engine_version="0",
            can_sleep=can_sleep,
            draft_fingerprint=draft_fingerprint,
            base_fingerprint="",
            architecture="",
            base_dtype=DataType.FLOAT32,
            adapter_dtype=DataType.FLOAT32,
            tensor_parallel_size=engine.num_ranks,
            loads_in_place=in_place,
            running_requests=running_requests,
        ),
        reference=Reference("", ()),
        model_name="tiny",
        worker_pids=(),
        deadlines=Deadlines(
            load_seconds=load_seconds,
            restore_seconds=restore_seconds,
            call_seconds=call_seconds,
        ),
        spill_folder=spill_folder if spills else None,
    )


def started(num_ranks: int = 1, **settings: Any) -> tuple[FakeEngine, VllmReplica]:
    """Return an engine, and a replica of it with these settings of ``make_replica``."""
    engine = FakeEngine(num_ranks)
    return engine, make_replica(engine, **settings)
