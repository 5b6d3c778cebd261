"""Requests for the samples of one prompt, checked before anything is sent."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from trainer_side.rollouts.images import ImagePrompt, image_messages
from weft_rl.contract.errors import InvalidRequestError
from weft_rl.contract.names import BASE_POLICY, PolicyVersion, check_name, version_of
from weft_rl.contract.sampling import MAX_SEED, Sampling, check_num_samples
from weft_rl.rpc.codec import SAMPLING
from weft_rl.v1 import generate_pb2 as pb

#: Text, which the model's own tokenizer makes into tokens, or token ids; with images or without.
Prompt = str | Sequence[int] | ImagePrompt
OnError = Literal["raise", "keep"]

#: Tokens that a sample is taken to have where the request does not bound it, and an image.
_USUAL_TOKENS = 1024
#: Samples are wanted whole; pieces only tell that the replica goes on, also where it makes less
#: than a token a second of each sample (see ``stall_seconds``).
_CHUNK_TOKENS = 32


@dataclass(frozen=True)
class WantedVersions:
    """Policy and versions that may answer."""

    policy: str
    exact: int | None = None
    at_least: int | None = None

    def __str__(self) -> str:
        if self.exact is not None:
            return f"{self.policy}@{self.exact}"
        if self.at_least is not None:
            return f"{self.policy}@{self.at_least} or a newer one"
        return self.policy

    @property
    def name(self) -> str:
        """Name that a replica is asked for."""
        return self.policy if self.exact is None else f"{self.policy}@{self.exact}"

    @property
    def is_base(self) -> bool:
        """True if it is the base model itself."""
        return self.policy == BASE_POLICY


def wanted_of(
    model: str | PolicyVersion, min_version: str | PolicyVersion | None
) -> WantedVersions:
    """Return the versions that a caller asks for; see ``RolloutClient.generate``.

    Raises:
        InvalidRequestError: The arguments contradict each other.
        InvalidNameError: No policy can have that name, or it is no version.
    """
    if isinstance(model, PolicyVersion) or "@" in str(model):
        if min_version is not None:
            raise InvalidRequestError(
                f"model={model} is one version, and min_version={min_version} asks for others: "
                "give one of them"
            )
        exact = version_of(model)
        return WantedVersions(exact.policy, exact=exact.version)
    policy = check_name(model, "policy")
    if min_version is None:
        return WantedVersions(policy)
    return WantedVersions(policy, at_least=number_of(policy, "min_version", min_version))


def number_of(policy: str, name: str, given: str | PolicyVersion) -> int:
    """Return the number of a policy's version that was given as argument ``name``.

    Raises:
        InvalidRequestError: It is a version of another policy.
        InvalidNameError: It is no version.
    """
    version = version_of(given)
    if version.policy != policy:
        raise InvalidRequestError(f"{name}={version} is no version of {policy}")
    return version.version


@dataclass(frozen=True, kw_only=True)
class PromptRequest:
    """Prompt with the requirements of its samples."""

    index: int
    """Index of the prompt, among those of the call or stream."""
    prompt: str | Sequence[int]
    wanted: WantedVersions
    num_samples: int
    """Number of samples of the prompt."""
    sampling: Sampling
    strict: bool
    timeout_seconds: float
    images: tuple[pb.Image, ...] = ()

    @property
    def cost_tokens(self) -> int:
        """Estimated cost for a replica, in tokens."""
        prompt = len(self.prompt) + len(self.images) * _USUAL_TOKENS
        return prompt + self.num_samples * (self.sampling.max_tokens or _USUAL_TOKENS)

    @property
    def known_token_ids(self) -> list[int]:
        """Token ids of the prompt; empty where the replica makes them."""
        return [] if isinstance(self.prompt, str) or self.images else list(self.prompt)

    def next_samples(self, are_whole: Sequence[bool]) -> list[int]:
        """Return the samples that the next request asks for; empty when all are whole.

        With a seed only neighbours go together: the engine gives the i-th sample of a request
        the request's seed plus i.
        """
        missing = [i for i, is_whole in enumerate(are_whole) if not is_whole]
        if self.sampling.seed is None:
            return missing
        return [i for at, i in enumerate(missing) if i == missing[0] + at]

    def request(self, wanted: WantedVersions, samples: Sequence[int]) -> pb.GenerateRequest:
        """Return the message that asks a replica for some of the prompt's samples.

        Each sample of each prompt has a seed of its own, wherever it is made. With one seed for all
        prompts, the same random numbers would draw them.
        """
        how = self.sampling
        stops = {"stop": how.stop, "stop_token_ids": how.stop_token_ids}
        sampling = SAMPLING.encode(how, num_samples=len(samples), **stops)
        if how.seed is not None:
            first = self.index * self.num_samples + samples[0]
            sampling.seed = (how.seed + first) % (MAX_SEED + 1)
        request = pb.GenerateRequest(
            policy=wanted.name,
            strict=self.strict,
            sampling=sampling,
            chunk_tokens=_CHUNK_TOKENS,
            images=self.images,
        )
        if isinstance(self.prompt, str):
            request.text = self.prompt
        else:
            request.token_ids.ids.extend(self.prompt)
        return request


class CheckedPrompt(NamedTuple):
    """Prompt in the form that it is sent in."""

    prompt: str | list[int]
    images: tuple[pb.Image, ...] = ()


def checked_prompt(prompt: Any) -> CheckedPrompt:
    """Return the prompt, its token ids as a list of integers, and the messages of its images.

    Raises:
        InvalidRequestError: It is empty, or neither text nor token ids, or has no such images.
    """
    if isinstance(prompt, ImagePrompt):
        return CheckedPrompt(_text_or_ids(prompt.prompt), image_messages(prompt.images))
    return CheckedPrompt(_text_or_ids(prompt))


def _text_or_ids(prompt: Any) -> str | list[int]:
    ids: str | list[int]
    if isinstance(prompt, str):
        ids = prompt
    else:
        try:
            ids = [*map(operator.index, prompt.tolist() if hasattr(prompt, "tolist") else prompt)]
        except TypeError:
            ids = [-1]
        if ids and not 0 <= min(ids) <= max(ids) < 2**32:
            raise InvalidRequestError(
                f"{repr(prompt)[:80]} is no prompt: give text, or one sequence of token ids"
            )
    if not ids:
        raise InvalidRequestError("a prompt is empty: give at least one token")
    return ids


def checked_prompts(prompts: Any) -> list[CheckedPrompt]:
    """Return prompts, each as ``checked_prompt`` gives it.

    Raises:
        InvalidRequestError: One cannot be a prompt, or the argument is a single prompt.
    """
    if isinstance(prompts, str | ImagePrompt) or (
        not hasattr(prompts, "tolist") and prompts and all(type(each) is int for each in prompts)
    ):
        raise InvalidRequestError("give a list of prompts; for a single one, a list of one")
    return [checked_prompt(prompt) for prompt in prompts]


def check_sampling(sampling: Sampling, num_samples: int) -> None:
    """Refuse what is no sampling options, or a number of samples that they do not go with."""
    if not isinstance(sampling, Sampling):
        raise InvalidRequestError(f"sampling={sampling!r:.80}: give trainer_side.Sampling(...)")
    check_num_samples(num_samples, sampling, name="n")


def closed_error(what: str = "RolloutClient") -> InvalidRequestError:
    """Return the error of calls on a closed client or stream."""
    return InvalidRequestError(f"this {what} is closed", reason="PUBLISHER_CLOSED")
