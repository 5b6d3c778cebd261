"""The task, its tokenizer and its model, all made here: sums of two digits, a character a token."""

from __future__ import annotations

import functools
import logging
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

#: The largest answer: two digits and the end of the sequence, and one token to be wrong by.
MAX_TOKENS = 4
_SPECIAL = ("<pad>", "<s>", "</s>", "<unk>")
PAD, BOS, EOS, UNKNOWN = range(len(_SPECIAL))
_CHARACTERS = "0123456789+=-*. "
_VOCABULARY = 32
_LARGEST = 9


@dataclass(frozen=True)
class Problem:
    """A prompt such as ``7+8=`` and what its answer must be worth."""

    prompt: str
    answer: int


def problems(count: int, rng: random.Random) -> list[Problem]:
    """Draw problems: half of them are written with spaces, so prompts are of two lengths."""
    drawn = []
    for _ in range(count):
        a, b = rng.randint(0, _LARGEST), rng.randint(0, _LARGEST)
        plus = rng.choice(("+", " + "))
        drawn.append(Problem(f"{a}{plus}{b}=", a + b))
    return drawn


def guess(rng: random.Random) -> int:
    """A number that looks like an answer."""
    return rng.randint(0, 2 * _LARGEST)


def rewards(answers: Sequence[str], expected: Sequence[int]) -> torch.Tensor:
    """1.0 for each answer that is worth what is expected, else 0.0; float32."""
    marks = [_is_right(*pair) for pair in zip(answers, expected, strict=True)]
    return torch.tensor(marks, dtype=torch.float32)


@functools.lru_cache(maxsize=4096)
def _is_right(answer: str, expected: int) -> bool:
    """By math-verify, whose own time limits are signals, which only main threads may set; what
    four characters say is worked out at once."""
    # Imported here, for it takes a while, and the warm-up needs none of it.
    from math_verify import parse, verify

    # It warns, whenever it is asked without a time limit, that there is none.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    gold = parse(str(expected), parsing_timeout=None)
    return bool(verify(gold, parse(answer, parsing_timeout=None), timeout_seconds=None))


def make_tokenizer() -> Any:
    """A character is a token; nothing is downloaded."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {token: number for number, token in enumerate((*_SPECIAL, *_CHARACTERS))}
    characters = Tokenizer(models.WordLevel(vocabulary, unk_token=_SPECIAL[UNKNOWN]))
    characters.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    characters.decoder = decoders.Fuse()
    pad, bos, eos, unknown = _SPECIAL
    return PreTrainedTokenizerFast(
        tokenizer_object=characters, pad_token=pad, bos_token=bos, eos_token=eos, unk_token=unknown
    )


def make_model(seed: int) -> Any:
    """A Qwen3 of 0.5 million random fp32 weights.

    What it ends with, the output layer, is drawn four times wider than usual: adapters leave that
    layer as it is, and how sure a model can be is bounded by it.
    """
    from transformers import AutoModelForCausalLM, Qwen3Config

    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=_VOCABULARY,
        hidden_size=128,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=32,  # the smallest that vLLM computes on a CPU
        max_position_embeddings=128,
        tie_word_embeddings=False,
        bos_token_id=BOS,
        eos_token_id=EOS,
        pad_token_id=PAD,
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        model.lm_head.weight.mul_(4)
    return model
