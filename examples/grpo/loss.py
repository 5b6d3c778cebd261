"""The loss of GRPO, position by position: prompts padded on the left, completions on the right.

A row is ``[pad pad p p p | c c c pad]``: all completions begin at one column, and what the model
says at a column is about the token of the next one.
"""

from __future__ import annotations

import torch

#: How far from 1 an importance ratio may be right after a push, in fp32. vLLM and transformers
#: agree within 1e-5; a token that is scored at its neighbour's place is off by far more.
MAX_DISTANCE = 1e-3


class MisalignedError(Exception):
    """The trainer's log-probabilities are not of the tokens, or the weights, that were sampled."""


def model_inputs(
    prompt_ids: torch.Tensor,
    prompt_mask: torch.Tensor,
    completion_ids: torch.Tensor,
    completion_mask: torch.Tensor,
) -> dict[str, torch.Tensor]:
    """What the model is called with; positions count from each prompt's first real token.

    Args:
        prompt_ids, prompt_mask: [samples, prompt width], padded on the left.
        completion_ids, completion_mask: [samples, completion width], padded on the right.
    """
    mask = torch.cat([prompt_mask, completion_mask], dim=1).long()
    return {
        "input_ids": torch.cat([prompt_ids, completion_ids], dim=1),
        "attention_mask": mask,
        "position_ids": (mask.cumsum(dim=1) - 1).clamp(min=0),
    }


def completion_logprobs(
    logits: torch.Tensor, completion_ids: torch.Tensor, temperature: float = 1.0
) -> torch.Tensor:
    """The log-probability of each token of the completions, [samples, completion width].

    Args:
        logits: The model's, [samples, prompt width + completion width, vocabulary].
        completion_ids: The tokens; what is said of padding means nothing.
        temperature: What they were sampled at.
    """
    width = completion_ids.shape[1]
    # The first token is what the prompt's last column is about; the last column is about nothing.
    about = logits[:, -width - 1 : -1].float() / temperature
    return about.log_softmax(dim=-1).gather(-1, completion_ids.unsqueeze(-1)).squeeze(-1)


def importance_ratios(
    logprobs: torch.Tensor, sampled_logprobs: torch.Tensor, mask: torch.Tensor
) -> torch.Tensor:
    """How much likelier each token is now than where it was sampled; 1 at padding."""
    return torch.where(mask.bool(), logprobs - sampled_logprobs, 0.0).exp()


def check_on_policy(ratios: torch.Tensor, bound: float = MAX_DISTANCE) -> float:
    """Samples of the weights as they are have ratios of 1; returns the largest distance from it.

    The mean alone would not do: it tends to 1 whatever the two distributions are.

    Raises:
        MisalignedError: A ratio is farther from 1 than ``bound``.
    """
    distance = float((ratios.detach() - 1).abs().max())
    if not distance <= bound:
        raise MisalignedError(
            f"an importance ratio is {distance:.3g} from 1 right after a push (bound {bound:g})"
        )
    return distance


def group_advantages(rewards: torch.Tensor, group_size: int) -> torch.Tensor:
    """How much better each sample is than the others of its prompt, in standard deviations.

    Args:
        rewards: [samples], the samples of a prompt side by side.
    """
    groups = rewards.view(-1, group_size)
    centred = groups - groups.mean(dim=1, keepdim=True)
    return (centred / (groups.std(dim=1, keepdim=True) + 1e-4)).flatten()


def grpo_loss(
    ratios: torch.Tensor, advantages: torch.Tensor, mask: torch.Tensor, clip: float = 0.2
) -> torch.Tensor:
    """The clipped objective, the mean over all tokens of the batch."""
    gains = advantages.unsqueeze(1)
    smaller = torch.minimum(ratios * gains, ratios.clamp(1 - clip, 1 + clip) * gains)
    return -(smaller * mask).sum() / mask.sum()
