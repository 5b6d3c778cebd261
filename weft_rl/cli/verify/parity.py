"""Comparison of replicas' log-probabilities with those that transformers computes locally."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import torch

from weft_rl.contract.errors import InvalidRequestError
from weft_rl.contract.names import PolicyVersion
from weft_rl.contract.tensors import DataType
from weft_rl.rpc.channel import open_channel
from weft_rl.rpc.status import error_from_rpc
from weft_rl.v1 import generate_pb2 as pb
from weft_rl.v1.generate_pb2_grpc import GenerateServiceStub

#: vLLM's modes in which replicas return log-probabilities, not logits.
MODES = ("processed_logprobs", "raw_logprobs")
_CALL_SECONDS = 300.0
_NUM_PROMPTS, _PROMPT_TOKENS, _MAX_TOKENS = 3, 8, 16
#: Kernels that add float32 in another order differ by some 1e-6 in all layers together.
_FLOAT32_BOUND = 5e-5
# Two computations in a short type differ from the exact one by rounding, each by its own; the
# largest difference of one over a few tokens may well be twice that of the other.
_ROUNDINGS = 4.0
_EPSILON = {DataType.BFLOAT16: 2.0**-8, DataType.FLOAT16: 2.0**-11}


@dataclass(frozen=True)
class SampledTokens:
    """Tokens that a replica sampled after a prompt, with its log-probabilities."""

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    mode: str


@dataclass(frozen=True)
class Parity:
    """Difference of a replica's log-probabilities from those of the local model."""

    num_tokens: int
    largest: float
    mean: float
    bound: float
    """Limit of ``largest``; 0 where none is known: see ``bound_of``."""

    @property
    def is_fine(self) -> bool:
        """True if it is within the bound, or there is none."""
        return not self.bound or self.largest <= self.bound


def bound_of(dtype: DataType, rounding: float) -> float:
    """Return the largest accepted difference of log-probabilities computed in ``dtype``.

    Args:
        dtype: Type that the replicas compute in.
        rounding: Largest difference, at these tokens, of the local model in that type from the
            same weights in float32.
    """
    if dtype == DataType.FLOAT32:
        return _FLOAT32_BOUND
    return max(_ROUNDINGS * rounding, _EPSILON.get(dtype, 0.0))


def compared(
    sampled: Sequence[SampledTokens], exact: Sequence[Sequence[float]], bound: float
) -> Parity:
    """Compare a replica's log-probabilities with the local ones, token by token."""
    apart = [
        abs(theirs - ours)
        for one, of_one in zip(sampled, exact, strict=True)
        for theirs, ours in zip(one.logprobs, of_one, strict=True)
    ]
    return Parity(len(apart), max(apart), sum(apart) / len(apart), bound)


def default_prompts(vocab_size: int, special: Set[int] = frozenset()) -> list[pb.TokenIds]:
    """Return prompts of token ids, spread over the vocabulary; the same at each call.

    Args:
        special: Token ids that no prompt has: an engine expects an image at the one that stands
            for images.
    """
    usual = [token for token in range(vocab_size) if token not in special]
    return [
        pb.TokenIds(
            ids=[usual[(7919 * k + 104_729 * i) % len(usual)] for i in range(_PROMPT_TOKENS)]
        )
        for k in range(1, _NUM_PROMPTS + 1)
    ]


def sample(
    address: str, version: PolicyVersion, prompts: Sequence[str | pb.TokenIds]
) -> list[SampledTokens]:
    """Have a replica complete each prompt twice: greedily, and at temperature 1. Both times its
    log-probabilities are of the model's own distribution.

    Raises:
        WeftError: It does not serve that version, refuses, or does not answer.
    """
    ways = [pb.Sampling(temperature=0), pb.Sampling(temperature=1, seed=7)]
    with open_channel(address) as channel:
        stub = GenerateServiceStub(channel)
        try:
            return [_sample(stub, version, prompt, way) for prompt in prompts for way in ways]
        except grpc.RpcError as error:
            raise error_from_rpc(error) from error


def _sample(
    stub: GenerateServiceStub,
    version: PolicyVersion,
    prompt: str | pb.TokenIds,
    sampling: pb.Sampling,
) -> SampledTokens:
    sampling.max_tokens, sampling.ignore_eos = _MAX_TOKENS, True
    request = pb.GenerateRequest(policy=str(version), strict=True, sampling=sampling)
    if isinstance(prompt, str):
        request.text = prompt
    else:
        request.token_ids.CopyFrom(prompt)
    admission, tokens, logprobs = pb.Admission(), list[int](), list[float]()
    for response in stub.Generate(request, timeout=_CALL_SECONDS):
        admission.MergeFrom(response.admission)
        for chunk in response.chunks:
            tokens += chunk.token_ids
            logprobs += chunk.logprobs
    ids = list(admission.prompt_token_ids) or list(request.token_ids.ids)
    return SampledTokens(tuple(ids), tuple(tokens), tuple(logprobs), admission.logprobs_mode)


def _token_ids(config: Mapping[Any, Any]) -> Iterator[int]:
    """Yield the token ids that a configuration, or one inside it, names, alone or in a list."""
    for key, value in config.items():
        if isinstance(value, Mapping):
            yield from _token_ids(value)
        elif str(key).endswith(("_token_id", "_token_index")):  # keys of labels are numbers
            found = value if isinstance(value, list | tuple) else [value]
            yield from (each for each in found if isinstance(each, int))


class LocalModel:
    """Local model, on the CPU, in the element type that replicas compute in.

    Args:
        base: Directory of the base model.
        adapter: Directory of an adapter on it.
        dtype: Element type of the replicas.

    Raises:
        ImportError: transformers, PEFT for an adapter, or what the model's class needs, is not
            here.
        InvalidRequestError: They cannot load it.
    """

    def __init__(self, base: Path, adapter: Path | None, dtype: DataType) -> None:
        import transformers

        transformers.logging.set_verbosity_error()
        transformers.logging.disable_progress_bar()
        kind = getattr(torch, dtype.torch_name)
        try:
            config = transformers.AutoConfig.from_pretrained(base, local_files_only=True)
            # As vLLM does: of a model that sees, no class for text alone has all the weights.
            named = getattr(transformers, (config.architectures or [""])[0], None)
            model = (named or transformers.AutoModelForCausalLM).from_pretrained(
                base, dtype=kind, local_files_only=True
            )
            if adapter is not None:
                import peft

                model = peft.PeftModel.from_pretrained(model, str(adapter)).to(kind)
        except (OSError, ValueError, RuntimeError, KeyError) as error:
            raise InvalidRequestError(
                f"transformers cannot load {adapter or base}: {str(error)[:300]}"
            ) from error
        self._model: Any = model.eval()
        self._is_exact = dtype == DataType.FLOAT32

    @property
    def vocab_size(self) -> int:
        """Size of its vocabulary."""
        return int(self._model.config.get_text_config().vocab_size)

    @property
    def special_tokens(self) -> set[int]:
        """Token ids that its configuration names: of an image, say, or of the end of a text."""
        return set(_token_ids(self._model.config.to_dict()))

    def score(self, sequences: Sequence[SampledTokens]) -> tuple[list[list[float]], float]:
        """Compute the tokens' log-probabilities in float32, of weights rounded to the replicas'
        type. Return also their largest difference from those computed in that type. Called once:
        the model is in float32 afterwards."""
        rounded = [] if self._is_exact else self._logprobs(sequences)
        self._model.float()
        exact = self._logprobs(sequences)
        pairs = zip(rounded, exact, strict=False)
        apart = [abs(a - b) for of, ex in pairs for a, b in zip(of, ex, strict=True)]
        return exact, max(apart, default=0.0)

    def _logprobs(self, sequences: Sequence[SampledTokens]) -> list[list[float]]:
        known: dict[tuple[tuple[int, ...], tuple[int, ...]], list[float]] = {}
        with torch.no_grad():
            for one in sequences:
                key = (one.prompt, one.tokens)
                if key in known:  # another replica's, of the same tokens
                    continue
                ids = torch.tensor([[*one.prompt, *one.tokens]])
                logits = self._model(input_ids=ids).logits[0, len(one.prompt) - 1 : -1]
                logprobs = torch.log_softmax(logits.float(), dim=-1)
                picked = logprobs.gather(1, torch.tensor(one.tokens).unsqueeze(1))
                known[key] = picked.squeeze(1).tolist()
        return [known[one.prompt, one.tokens] for one in sequences]
