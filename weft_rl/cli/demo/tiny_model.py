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
    """Load the model in fp32, on CPU, in evaluation mode."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()


def _make_tokenizer() -> Any:
    """Make a tokenizer of one byte a token, of the class that AutoTokenizer takes for a Qwen2."""
    from tokenizers.pre_tokenizers import ByteLevel
    from transformers import Qwen2Tokenizer

    # "À" stands for byte 0xC0, which no UTF-8 text holds: its place is that of <eos>.
    tokens = ["<eos>", *sorted({*ByteLevel.alphabet()} - {"À"})]
    assert len(tokens) == VOCAB_SIZE
    vocab = {token: number for number, token in enumerate(tokens)}
    return Qwen2Tokenizer(vocab, merges=[], unk_token="<eos>", eos_token="<eos>", pad_token="<eos>")


@torch.no_grad()
def log_probs(model: Any, prompt: list[int], tokens: list[int]) -> list[float]:
    """Compute the log-probability of each of ``tokens`` after ``prompt``, by Hugging Face."""
    logits = model(torch.tensor([prompt + tokens])).logits[0].double()
    rows = torch.log_softmax(logits[len(prompt) - 1 : -1], dim=-1)
    return [float(rows[i, token]) for i, token in enumerate(tokens)]
