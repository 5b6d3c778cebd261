"""A tiny random Qwen2 with a tokenizer, made on the spot: nothing is downloaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

VOCAB_SIZE = 256


def make_model(path: Path, seed: int = 0, **sizes: int) -> None:
    """Save a two-layer fp32 Qwen2ForCausalLM and its tokenizer under ``path``.

    Weights are drawn five times wider than usual, so that its log-probabilities
    are peaked enough to tell right weights from wrong ones. ``sizes`` override the
    config's.
    """
    from transformers import Qwen2Config, Qwen2ForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    torch.manual_seed(seed)
    settings: dict[str, Any] = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "initializer_range": 0.1,
        "tie_word_embeddings": False,
        "bos_token_id": 0,
        "eos_token_id": 0,
        "pad_token_id": 0,
    }
    config = Qwen2Config(**settings | sizes)
    Qwen2ForCausalLM(config).to(torch.float32).save_pretrained(path)
    _make_tokenizer().save_pretrained(path)


def load_model(path: Path) -> Any:
    """The model in fp32, on CPU, in evaluation mode."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()


def _make_tokenizer() -> Any:
    """One word a token, so that any text has a tokenisation and back."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace
    from transformers import PreTrainedTokenizerFast

    words = {"<eos>": 0, "<unk>": 1} | {f"w{i}": i for i in range(2, VOCAB_SIZE)}
    tokenizer = Tokenizer(WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", eos_token="<eos>", pad_token="<eos>"
    )


@torch.no_grad()
def log_probs(model: Any, prompt: list[int], tokens: list[int]) -> list[float]:
    """Log-probability of each of ``tokens`` after ``prompt``, by Hugging Face."""
    logits = model(torch.tensor([prompt + tokens])).logits[0].double()
    rows = torch.log_softmax(logits[len(prompt) - 1 : -1], dim=-1)
    return [float(rows[i, token]) for i, token in enumerate(tokens)]
