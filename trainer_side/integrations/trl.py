"""Integration of TRL's GRPOTrainer and RLOOTrainer: the pool serves and generates for them.

A trainer that was built with ``use_vllm=False`` is given an object in place of TRL's vLLM backend:
TRL tells it when to sync weights, on every rank, and asks it for completions. Nothing of TRL is
replaced but attributes of that one trainer, and no vLLM is needed where it trains.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import fields
from typing import Any

from accelerate.utils import broadcast_object_list, gather_object

from trainer_side.integrations.policies import push_policy
from trainer_side.publisher import Publisher
from trainer_side.push_request import PushResult
from trainer_side.rollouts.client import RolloutClient
from trainer_side.rollouts.sample import SampleGroup
from weft_rl.contract.errors import InvalidRequestError, UnsupportedError, WeftError
from weft_rl.contract.names import check_name
from weft_rl.contract.sampling import Sampling

#: Of GRPOConfig.generation_kwargs, which names what vLLM's SamplingParams does.
_NAMED_ALIKE = {field.name for field in fields(Sampling)}


def attach(
    trainer: Any, publisher: Publisher, rollouts: RolloutClient, *, policy: str
) -> PoolGeneration:
    """Have a trainer push to the pool and generate from it.

    Called on every rank, once the trainer is built and before it trains.

    Args:
        trainer: A GRPOTrainer or RLOOTrainer (or of a class derived from one), built with
            ``use_vllm=False``, TRL's default.
        publisher: Publisher, made after the trainer, on every rank.
        rollouts: Client, used on the main process alone.
        policy: ``base`` pushes every weight (a PEFT model's adapter merged in); any other
            name, the PEFT model's adapter as versions of that policy.

    Returns:
        The new ``trainer.vllm_generation``.

    Raises:
        UnsupportedError: The trainer, or something that it is to generate by, is not supported.
        InvalidRequestError: The trainer has a vLLM of its own.
        InvalidNameError: No policy can have that name.
    """
    from trl import GRPOTrainer, RLOOTrainer  # takes long, and nothing else needs it

    check_name(policy, "policy")
    if not isinstance(trainer, GRPOTrainer | RLOOTrainer):
        raise UnsupportedError(
            f"{type(trainer).__name__} is neither GRPOTrainer nor RLOOTrainer (for "
            "AsyncGRPOTrainer see trainer_side.integrations.trl_async)"
        )
    if trainer.use_vllm:
        raise InvalidRequestError(
            f"this {type(trainer).__name__} has a vLLM of its own, or is attached already: build "
            "it with use_vllm=False"
        )
    generation = PoolGeneration(trainer, publisher, rollouts, policy)
    trainer.vllm_generation, trainer.use_vllm, trainer.vllm_mode = generation, True, "server"
    trainer._last_loaded_step = -1  # the step of the last sync: none has been
    return generation


class PoolGeneration:
    """Backend in place of TRL's vLLM backend. Both methods are collective."""

    def __init__(
        self, trainer: Any, publisher: Publisher, rollouts: RolloutClient, policy: str
    ) -> None:
        self._trainer, self._publisher = trainer, publisher
        self._rollouts, self._policy = rollouts, policy
        self._sampling = sampling_of(trainer)
        self.pushed: PushResult | None = None
        """Result of the last push, whose version generates; None before the first."""

    def sync_weights(self) -> None:
        """Push the weights.

        TRL calls it before the first generation, and before the first one after an optimizer step.
        """
        # As DDP, FSDP and DeepSpeed hold it, which is known only now.
        model = self._trainer.model_wrapped
        self.pushed = push_policy(self._publisher, model, self._policy)
        mode = "train" if model.training else "eval"
        for name, value in self.pushed.metrics().items():
            self._trainer._metrics[mode][name].append(value)  # TRL logs their means

    def generate(
        self,
        prompts: list[list[int]],
        images: list[Any] | None,
        num_generations: int,
        profiler: AbstractContextManager[Any] | None = None,
    ) -> tuple[list[list[int]], list[list[int]], list[list[list[float]]], list[list[list[int]]]]:
        """Complete this rank's prompts by exactly the version that was pushed.

        Args:
            prompts: Token ids, each prompt as often in a row as it is to be completed; such a row
                may span ranks.
            images: None, or nothing but None.
            num_generations: Completions of each prompt.
            profiler: TRL's, around the generation.

        Returns:
            A prompt, a completion, its tokens' log-probabilities and their ids for each of
            ``prompts``; the last two in lists of one.

        Raises:
            WeftError: Generation failed for one rank; raised on every rank.
        """
        accelerator = self._trainer.accelerator
        has_images = any(image is not None for image in images or ())
        shares = gather_object([(prompts, has_images)])  # by rank
        outcome: tuple[Any, ...] | WeftError | None = None
        if accelerator.is_main_process:
            try:
                with profiler or nullcontext():
                    outcome = _as_trl_has_it(self._sample(shares, num_generations))
            except WeftError as error:  # the others wait to hear of it
                outcome = error
        (outcome,) = broadcast_object_list([outcome])
        if isinstance(outcome, WeftError):
            raise outcome
        assert outcome is not None
        begin = sum(len(share) for share, _ in shares[: accelerator.process_index])
        completions, logprobs, tokens = (part[begin : begin + len(prompts)] for part in outcome)
        return prompts, completions, logprobs, tokens

    def _sample(
        self, shares: list[tuple[list[list[int]], bool]], num_generations: int
    ) -> list[SampleGroup]:
        """Return a group for each prompt of all ranks."""
        if any(has_images for _, has_images in shares):
            raise UnsupportedError("prompts with images cannot be sent to the pool")
        assert self.pushed is not None  # TRL syncs first
        repeated = [prompt for share, _ in shares for prompt in share]
        return self._rollouts.generate(
            repeated[::num_generations],
            model=self.pushed.version,
            n=num_generations,
            sampling=self._sampling,
        )


def _as_trl_has_it(
    groups: list[SampleGroup],
) -> tuple[list[list[int]], list[list[list[float]]], list[list[list[int]]]]:
    """Return completions, log-probabilities and token ids of all samples, prompt by prompt."""
    samples = [sample for group in groups for sample in group.samples]
    completions = [sample.token_ids.tolist() for sample in samples]
    logprobs = [[[each] for each in sample.logprobs.tolist()] for sample in samples]
    return completions, logprobs, [[[each] for each in ids] for ids in completions]


def sampling_of(trainer: Any) -> Sampling:
    """Return a trainer's sampling settings.

    Raises:
        UnsupportedError: A setting is one that a replica does not offer; names it.
    """
    given = trainer.args.generation_kwargs or {}
    further = {name: value for name, value in given.items() if value is not None}
    refused = sorted(further.keys() - _NAMED_ALIKE)
    if trainer.args.vllm_structured_outputs_regex is not None:
        refused.append("vllm_structured_outputs_regex")
    if refused:
        raise UnsupportedError(
            f"the pool cannot sample with {', '.join(refused)}; generation_kwargs may have "
            f"{', '.join(sorted(_NAMED_ALIKE))}"
        )
    usual = {
        "temperature": trainer.temperature,
        "top_p": trainer.top_p,
        "top_k": max(0, trainer.top_k or 0),  # vLLM's -1 considers all tokens, too
        "min_p": trainer.min_p or 0.0,
        "repetition_penalty": trainer.repetition_penalty,
        "max_tokens": trainer.max_completion_length,
    }
    return Sampling(**{**usual, **further})
