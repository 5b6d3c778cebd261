"""Integration of ms-swift: its GRPO and GKD trainers push, and the pool generates for them.

``install`` is called before ``swift.rlhf_main``; see docs/integrations/ms-swift.md.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from typing import Any

from swift import rlhf_trainers
from swift.infer_engine.protocol import (
    ChatCompletionResponse,
    ChatCompletionResponseChoice,
    ChatMessage,
    RolloutInferRequest,
    RolloutOutput,
    UsageInfo,
)
from swift.rlhf_trainers import rollout_mixin
from transformers import TrainerCallback

from trainer_side import (
    PolicyVersion,
    Publisher,
    RolloutClient,
    Sample,
    Sampling,
    UnsupportedError,
)
from trainer_side.integrations.policies import open_publisher, push_policy
from weft_rl.contract.names import BASE_POLICY

#: What a request may carry beside its messages, and a replica does not take.
_MEDIA = ("images", "audios", "videos")
#: What ms-swift asks of vLLM and GenerateService does not know, where it is not as here.
_WITHOUT = {
    "structured_outputs_regex": None,
    "prompt_logprobs": None,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "num_beams": 1,
    "n": 1,
}


class WeftClient:
    """Client that the trainer takes for one of vLLM servers; on the main process alone."""

    use_async_engine = False
    enable_multi_turn = False
    enable_lora = False
    use_gym_env = False

    def __init__(self, coordinator: str, options: Mapping[str, Any]) -> None:
        self._client = RolloutClient(coordinator, **options)
        self._version: PolicyVersion | None = None
        self._template: Any = None

    def serve(self, version: PolicyVersion, template: Any) -> None:
        """Generate with ``version`` from now on.

        Args:
            template: Template of the trainer, which makes messages into tokens.
        """
        self._version = version
        if self._template is None:
            self._template = copy(template)
            self._template.padding_free, self._template.sequence_parallel_size = False, 1
            self._template.set_mode("vllm")

    def infer(
        self,
        infer_requests: Sequence[Mapping[str, Any]],
        request_config: Mapping[str, Any],
        **others: Any,
    ) -> list[RolloutOutput]:
        """Return a completion of each request, in their order; equal prompts are one group.

        Raises:
            UnsupportedError: A request has media, or asks for more than sampling.
            WeftError: See ``RolloutClient``.
        """
        if self._version is None:
            raise UnsupportedError("nothing was pushed: generation begins with a push")
        groups: dict[tuple[int, ...], list[int]] = {}
        for index, request in enumerate(infer_requests):
            groups.setdefault(self._prompt(request), []).append(index)
        outputs: dict[int, RolloutOutput] = {}
        # An adapter is asked for by its exact version; of the base a replica serves one alone,
        # this or a newer one.
        version, is_base = self._version, self._version.policy == BASE_POLICY
        for size in {len(indices) for indices in groups.values()}:
            prompts = [prompt for prompt, indices in groups.items() if len(indices) == size]
            answers = self._client.generate(
                prompts,
                model=version.policy if is_base else version,
                n=size,
                sampling=self._sampling(request_config),
                min_version=version if is_base else None,
            )
            for prompt, answer in zip(prompts, answers, strict=True):
                for index, sample in zip(groups[prompt], answer.samples, strict=True):
                    outputs[index] = self._output(prompt, sample)
        return [outputs[index] for index in range(len(infer_requests))]

    def _prompt(self, request: Mapping[str, Any]) -> tuple[int, ...]:
        if given := [name for name in _MEDIA if request.get(name)]:
            raise UnsupportedError(f"{', '.join(given)}: replicas take token ids alone")
        inputs = self._template.encode(RolloutInferRequest(**request))
        return tuple(inputs["input_ids"])

    def _sampling(self, config: Mapping[str, Any]) -> Sampling:
        """Return ms-swift's sampling parameters as Weft's, with the stop words of the template."""
        asked = {name: config.get(name, usual) for name, usual in _WITHOUT.items()}
        if given := sorted(name for name, usual in _WITHOUT.items() if asked[name] != usual):
            raise UnsupportedError(f"{', '.join(given)}: not known to replicas")
        names = ("temperature", "top_p", "min_p", "repetition_penalty", "seed", "max_tokens")
        stop, stop_token_ids = list[str](), list[int]()
        tokenizer = self._template.tokenizer
        for word in [*(config.get("stop") or ()), *self._template.template_meta.stop_words]:
            text = word if isinstance(word, str) else tokenizer.decode(word)
            ids = tokenizer.encode(text, add_special_tokens=False)
            if len(ids) == 1:
                stop_token_ids.append(ids[0])
            else:
                stop.append(text)
        return Sampling(
            top_k=max(0, config.get("top_k") or 0),  # vLLM's -1 considers all tokens, too
            stop=tuple(dict.fromkeys(stop)),
            stop_token_ids=tuple(dict.fromkeys(stop_token_ids)),
            **{name: config[name] for name in names if config.get(name) is not None},
        )

    def _output(self, prompt: Sequence[int], sample: Sample) -> RolloutOutput:
        tokens = sample.token_ids.tolist()
        text = self._template.decode_generate_ids(tokens)
        choice = ChatCompletionResponseChoice(
            index=0,
            message=ChatMessage(role="assistant", content=text),
            finish_reason=sample.finish_reason,
            token_ids=tokens,
        )
        usage = UsageInfo(len(prompt), len(tokens), len(prompt) + len(tokens))
        return RolloutOutput(
            response=ChatCompletionResponse(
                model=str(self._version), choices=[choice], usage=usage
            ),
            response_token_ids=[tokens],
            rollout_logprobs=[sample.logprobs.tolist()],
            rollout_infos={"weft_version": int(sample.versions.min())},
        )

    # What is left of ms-swift's servers: there is no group to form, and no cache to reset.

    def get_engine_type(self) -> None:
        pass

    def reset_mm_cache(self) -> None:
        pass

    def init_communicator(self, device: Any = None) -> None:
        pass

    def close_communicator(self) -> None:
        pass


class _ClosingCallback(TrainerCallback):  # type: ignore[misc]  # transformers is not read by mypy
    """Callback that gives up the leases when training has ended, so that the next one need not
    wait."""

    def __init__(self, pushing: list[Publisher]) -> None:
        self._pushing = pushing

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Close the publishers; a later push would make another one."""
        while self._pushing:
            self._pushing.pop().close()


def install(
    coordinator: str,
    *,
    policy: str = BASE_POLICY,
    trainer_id: str = "ms-swift",
    publisher: Mapping[str, Any] | None = None,
    client: Mapping[str, Any] | None = None,
) -> None:
    """Have ms-swift's trainers push to the pool, and generate with it, in this process.

    They are configured to use vLLM servers, as usual: ``--use_vllm true --vllm_mode server
    --vllm_server_host weft``, whatever host that is. Every rank calls this before ``rlhf_main``.

    Args:
        coordinator: HOST:PORT.
        policy: Policy that a LoRA adapter is pushed as; "base" has it merged into the base on its
            way out. Full fine-tuning pushes the base.
        trainer_id: Trainer id of the ``Publisher``.
        publisher, client: Further arguments of ``Publisher`` and ``RolloutClient``; the
            publisher's ``options`` may be a mapping.
    """
    pushing: list[Publisher] = []

    def push(trainer: Any, skip_async_check: bool = False) -> None:
        """Push the trained weights, on every rank; generation uses them from then on."""
        if trainer.args.async_generate and not skip_async_check:
            trainer._wait_queue()
        if not pushing:  # made by all ranks at once
            pushing.append(open_publisher(coordinator, trainer_id, publisher or {}))
            trainer.add_callback(_ClosingCallback(pushing))
        version = push_policy(pushing[0], trainer.model_wrapped, policy).version
        if trainer.accelerator.is_main_process:
            trainer.vllm_client.serve(version, trainer.template)

    def make_client(**servers: Any) -> WeftClient:
        return WeftClient(coordinator, client or {})

    rlhf_trainers.VLLMClient = make_client
    rollout_mixin.is_vllm_available = lambda: True  # not here, and it need not be
    rollout_mixin.check_vllm_version_ge = lambda version: True
    rollout_mixin.RolloutTrainerMixin._move_model_to_vllm = push
