"""AsyncGRPOTrainer over a pool, on a CPU: ``python -m tests.integrations.trl.async_trainer
TARGET MODEL WORK POLICY MAX_STALENESS STEPS``; says in a line of JSON how it went.

TRL has it on CUDA alone. Here attention of packed rows is torch's, and nothing is said of the
device's speed.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")

import torch

from tests.integrations.trl.rank import LORA, even_tokens, load, logprobs_of
from weft_rl.contract.errors import WeftError

_NUM_GENERATIONS = 4
_BATCH = 8


class TorchAttention:
    """In place of FlashAttention 3."""

    @staticmethod
    def flash_attn_varlen_func(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, ends_q: torch.Tensor,
        ends_k: torch.Tensor, *_: Any, softmax_scale: float | None = None, **__: Any,
    ) -> torch.Tensor:  # fmt: skip
        """Causal attention of each row (tokens, heads, dim), aligned at the end."""
        out, repeats = torch.empty_like(q), q.shape[1] // k.shape[1]
        rows = zip(ends_q[:-1], ends_q[1:], ends_k[:-1], ends_k[1:], strict=True)
        for a, b, c, d in rows:
            mask = torch.ones(b - a, d - c, dtype=torch.bool).tril(int((d - c) - (b - a)))
            keys, values = (each[c:d].repeat_interleave(repeats, 1) for each in (k, v))
            heads = [each.transpose(0, 1) for each in (q[a:b], keys, values)]
            out[a:b] = torch.nn.functional.scaled_dot_product_attention(
                *heads, attn_mask=mask, scale=softmax_scale
            ).transpose(0, 1)
        return out


class Watch:
    """Takes note of the weights of each version as it is pushed, and says of each sample that
    TRL takes from its queue which versions' weights give its log-probabilities."""

    def __init__(self, trainer: Any, judge: Any) -> None:
        self._trainer, self._judge = trainer, judge.eval()
        self.weights: dict[int, dict[str, torch.Tensor]] = {}
        self.samples: list[dict[str, Any]] = []
        self._sync, self._get = trainer._sync_weight, trainer.rollout_queue.get
        trainer._sync_weight = self._sync_and_keep
        for callback in trainer.callback_handler.callbacks:
            if getattr(callback, "fn", None) == self._sync:
                callback.fn = self._sync_and_keep
        trainer.rollout_queue.get = self._get_and_judge

    def _sync_and_keep(self) -> None:
        self._sync()
        module = self._trainer.accelerator.unwrap_model(self._trainer.model)
        self.weights[self._trainer.model_version] = {
            name: each.detach().clone() for name, each in module.state_dict().items()
        }

    def _get_and_judge(self, *args: Any, **named: Any) -> Any:
        sample = self._get(*args, **named)
        errors = {version: self._error(version, sample) for version in self.weights}
        self.samples.append({"version": sample.model_version, "errors": errors})
        return sample

    def _error(self, version: int, sample: Any) -> float:
        """How far from 1 the ratio of its tokens is at most, with a version's weights."""
        self._judge.load_state_dict(self.weights[version])
        ids, is_made = sample.input_ids, sample.completion_mask.astype(bool)
        mine = logprobs_of(self._judge, ids[~is_made].tolist(), ids[is_made].tolist())
        theirs = torch.from_numpy(sample.old_log_probs[is_made])
        return float(((mine - theirs).exp() - 1).abs().max())


def main(target: str, model: str, work: str, policy: str, staleness: str, steps: str) -> None:
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import PreTrainedTokenizerFast
    from trl.experimental.async_grpo import AsyncGRPOConfig, async_grpo_trainer, packing

    from trainer_side import Publisher
    from trainer_side.integrations.trl_async import PoolAsyncGRPOTrainer

    torch.set_num_threads(1)
    packing._flash_attn = lambda: TorchAttention
    async_grpo_trainer.get_peak_flops_per_device = lambda *_, **__: None
    tokenizer = PreTrainedTokenizerFast.from_pretrained(model)
    # Words are tokens; "w9" stands for what a chat template puts before an answer.
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %} w9"
    tokenizer.response_template = {
        "defaults": {"role": "assistant"},
        "start_anchor": " w9",
        "fields": {"content": {"content": "text", "close_pattern": "</s>"}},
    }
    prompts = [f"w{5 + i} w{60 + 7 * i} w{30 + i}" for i in range(16)]
    is_lora = policy != "base"
    args = AsyncGRPOConfig(
        output_dir=work,
        per_device_train_batch_size=_BATCH,
        num_generations=_NUM_GENERATIONS,
        max_completion_length=6,
        max_steps=int(steps),
        max_staleness=int(staleness),
        # Samples wait in TRL's queue for no longer than they may.
        queue_maxsize=_BATCH,
        max_inflight_tasks=_BATCH,
        token_budget=0,
        weight_sync_steps=1,
        learning_rate=1e-3,
        lr_scheduler_type="constant",
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        disable_tqdm=True,
    )
    answers, sys.stdout = sys.stdout, sys.stderr  # trainers print what they log
    with Publisher(target, trainer_id="trl-async", progress=None) as publisher:
        trainer = PoolAsyncGRPOTrainer(
            model,
            even_tokens,
            args,
            Dataset.from_list([{"prompt": [{"role": "user", "content": p}]} for p in prompts]),
            tokenizer,
            peft_config=LoraConfig(**LORA) if is_lora else None,
            publisher=publisher,
            coordinator=target,
            policy=policy,
        )
        watch = Watch(trainer, load(model, lora=is_lora))
        try:
            trainer.train()
            outcome: dict[str, Any] = {}
        except WeftError as error:
            outcome = {"error": error.reason, "message": error.message}
        except Exception as error:
            outcome = {"error": type(error).__name__, "message": str(error)}
    logs = [
        {"ratio": log["ratio"], "staleness": log["sample/staleness_max"]}
        for log in trainer.state.log_history
        if "ratio" in log
    ]
    found = {"versions": list(watch.weights), "logs": logs, "samples": watch.samples}
    print(json.dumps({**outcome, **found}), file=answers, flush=True)
    os._exit(0)  # TRL's queues may keep a process that has failed


if __name__ == "__main__":
    main(*sys.argv[1:])
