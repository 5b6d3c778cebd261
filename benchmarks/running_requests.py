"""``python -m benchmarks.running_requests``: the largest gap between tokens, as clients of a
replica see it while a base is pushed, by what becomes of running requests.

One real vLLM replica of a small model on the CPU, four streams of tokens, a replica's start for
each choice. ``benchmarks.gpu --running-requests`` measures the same on GPUs.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

from benchmarks.machine import describe
from tests.e2e.replicas import MODEL_NAME, running_coordinator, running_replicas
from tests.models import load_hf, make_tokenizer
from trainer_side import Publisher
from weft_rl.cli.demo.processes import Process

_STREAMS = 4
_WARM = 1


def _model(path: Path, layers: int) -> Path:
    """A model of random weights whose steps are long beside those of a tiny one."""
    import transformers

    config = transformers.Qwen2Config(
        vocab_size=4096, hidden_size=512, intermediate_size=1536, num_hidden_layers=layers,
        num_attention_heads=8, num_key_value_heads=4, max_position_embeddings=512,
        tie_word_embeddings=False, bos_token_id=1, eos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(path)
    make_tokenizer(path)
    return path


def measure(work: Path, model_dir: Path, choice: str, pushes: int) -> None:
    """Print the gaps of one choice."""
    gaps, usual, pauses = list[float](), list[float](), list[float]()
    with ExitStack() as stack:
        target = stack.enter_context(running_coordinator(work)).target
        options = ("--running-requests", choice, "--staging-memory-gib", "2")
        (url,) = stack.enter_context(running_replicas(work, target, [model_dir], options=options))
        args = ("-m", "benchmarks.token_gaps", url, MODEL_NAME, str(_STREAMS))
        clients = Process("clients", args, work, {})
        stack.callback(clients.stop)
        clients.line(lambda text: text == "ready", 60)
        publisher = stack.enter_context(Publisher(target, trainer_id="bench", progress=None))
        model = load_hf(model_dir)
        for number in range(_WARM + pushes):
            time.sleep(1.0)
            clients.tell("take")
            quiet = clients.answer(30)
            report = publisher.push_base(model).report
            time.sleep(1.0)
            clients.tell("take")
            seen = clients.answer(30)
            if number >= _WARM:
                gaps.append(seen["max_ms"])
                usual.append(quiet["median_ms"])
                pauses.append(report.pause_seconds * 1e3)
    print(
        f"{choice}: largest gap median {statistics.median(gaps):.0f} ms ({min(gaps):.0f} to "
        f"{max(gaps):.0f}) of {pushes} pushes, pause median {statistics.median(pauses):.0f} ms; "
        f"between tokens usually {statistics.median(usual):.1f} ms",
        flush=True,
    )


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--pushes", type=int, default=6)
    parser.add_argument("--choices", nargs="+", default=["recompute", "keep"])
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="weft-bench-") as folder:
        model_dir = _model(Path(folder) / "model", arguments.layers)
        print(describe())
        for choice in arguments.choices:
            work = Path(folder) / choice
            work.mkdir()
            measure(work, model_dir, choice, arguments.pushes)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
