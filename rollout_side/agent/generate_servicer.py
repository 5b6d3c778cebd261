"""GenerateService: requests for tokens, translated for the engine."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any

import grpc

from rollout_side.agent.agent import Agent
from rollout_side.generation import FinishReason, GenerateOrder, SampleChunk
from weft_rl.contract.errors import InvalidRequestError
from weft_rl.contract.names import BASE_POLICY, PolicyVersion
from weft_rl.contract.sampling import Sampling
from weft_rl.rpc.codec import version_to_proto
from weft_rl.rpc.inbound import on_call_end
from weft_rl.v1 import generate_pb2 as pb
from weft_rl.v1.generate_pb2_grpc import GenerateServiceServicer

_FINISH_REASONS = {
    None: pb.FINISH_REASON_UNSPECIFIED,
    FinishReason.STOP: pb.FINISH_REASON_STOP,
    FinishReason.LENGTH: pb.FINISH_REASON_LENGTH,
    FinishReason.ABORT: pb.FINISH_REASON_ABORT,
}


class GenerateServicer(GenerateServiceServicer):
    """One replica's service; see protos/weft/v1/generate.proto."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent

    async def Generate(  # noqa: N802
        self, request: pb.GenerateRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[pb.GenerateResponse]:
        version = self._agent.requested(request.policy)
        adapter = None if version.policy == BASE_POLICY else version
        # Nothing is awaited since the name was looked up: what it stands for is there.
        answer = self._agent.engine.generate(
            GenerateOrder(
                prompt=_prompt(request),
                adapter=adapter,
                num_samples=request.sampling.num_samples or 1,
                sampling=_sampling(request.sampling),
                strict=request.strict,
                exact_base=adapter is None and request.policy != BASE_POLICY,
                chunk_tokens=request.chunk_tokens,
            )
        )
        on_call_end(context, answer.end)
        try:
            admission: pb.Admission | None = None
            capabilities = self._agent.engine.capabilities
            async for chunks in answer.chunks():
                if admission is None:
                    admission = pb.Admission(
                        adapter=version_to_proto(adapter) if adapter else None,
                        base_version=answer.base,
                        logprobs_mode=capabilities.logprobs_mode,
                        logprobs_truncated=capabilities.logprobs_truncated,
                        prompt_token_ids=answer.prompt_token_ids,
                    )
                    yield _response(chunks, adapter, admission)
                else:
                    yield _response(chunks, adapter)
        finally:
            answer.end()


def _prompt(request: pb.GenerateRequest) -> str | list[int]:
    """Return the prompt to complete: text or token ids, as given.

    Raises:
        InvalidRequestError: It is empty.
    """
    prompt = request.text or list(request.token_ids.ids)
    if not prompt:
        raise InvalidRequestError("the prompt is empty; give token_ids or text")
    return prompt


def _sampling(given: pb.Sampling) -> Sampling:
    return Sampling(
        temperature=given.temperature if given.HasField("temperature") else 1.0,
        top_p=given.top_p if given.HasField("top_p") else 1.0,
        top_k=given.top_k,
        min_p=given.min_p,
        repetition_penalty=(
            given.repetition_penalty if given.HasField("repetition_penalty") else 1.0
        ),
        seed=given.seed if given.HasField("seed") else None,
        max_tokens=given.max_tokens or None,
        min_tokens=given.min_tokens,
        stop=tuple(given.stop),
        stop_token_ids=tuple(given.stop_token_ids),
        ignore_eos=given.ignore_eos,
    )


def _response(
    chunks: Sequence[SampleChunk],
    adapter: PolicyVersion | None,
    admission: pb.Admission | None = None,
) -> pb.GenerateResponse:
    response = pb.GenerateResponse(admission=admission)
    for chunk in chunks:
        made = response.chunks.add(
            index=chunk.index,
            token_ids=chunk.token_ids,
            logprobs=chunk.logprobs,
            finish_reason=_FINISH_REASONS[chunk.finish_reason],
        )
        if chunk.finish_reason is not None:
            if adapter is not None:
                made.adapter.CopyFrom(version_to_proto(adapter))
            for span in chunk.base_spans:
                made.base_spans.add(
                    version=span.version,
                    start=span.start,
                    end=span.end,
                    older_cache=span.older_cache,
                )
    return response
