"""verl's own PPO trainer, by GRPO on a CPU, over a pool: a process of ``test_verl.py``.

``python -m tests.integrations.verl.train FOLDER COORDINATOR NUM_RANKS [POLICY]``: the model lies
in FOLDER/model; with a POLICY, a LoRA adapter of it is trained.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import datasets
import verl.trainer
from hydra import compose, initialize_config_dir
from omegaconf import DictConfig
from verl.trainer.main_ppo import run_ppo
from verl.trainer.main_ppo_v0 import TaskRunner

#: Pushes: one before the first step, and one after each.
NUM_STEPS = 3
_SETTINGS = """
data.train_batch_size=8 data.max_prompt_length=16 data.max_response_length=8
data.dataloader_num_workers=0
actor_rollout_ref.model.use_remove_padding=False
actor_rollout_ref.model.enable_gradient_checkpointing=False
+actor_rollout_ref.model.override_config.attn_implementation=eager
actor_rollout_ref.actor.strategy=fsdp2 actor_rollout_ref.actor.use_torch_compile=False
actor_rollout_ref.actor.fsdp_config.model_dtype=fp32
actor_rollout_ref.actor.fsdp_config.use_torch_compile=False
+actor_rollout_ref.actor.fsdp_config.mixed_precision.param_dtype=fp32
+actor_rollout_ref.actor.fsdp_config.mixed_precision.reduce_dtype=fp32
+actor_rollout_ref.actor.fsdp_config.mixed_precision.buffer_dtype=fp32
actor_rollout_ref.actor.optim.lr=1e-2 actor_rollout_ref.actor.ppo_mini_batch_size=8
actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=8
actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=8
actor_rollout_ref.rollout.n=4 actor_rollout_ref.rollout.tensor_model_parallel_size=1
actor_rollout_ref.rollout.agent.num_workers=1
actor_rollout_ref.rollout.name=weft
actor_rollout_ref.rollout.checkpoint_engine.backend=weft
+actor_rollout_ref.rollout.checkpoint_manager_class=trainer_side.integrations.verl.WeftCheckpointManager
algorithm.adv_estimator=grpo reward.num_workers=1
trainer.use_v1=False trainer.device=cpu trainer.nnodes=1 trainer.total_epochs=1
trainer.val_before_train=False trainer.test_freq=-1 trainer.save_freq=-1
ray_kwargs.ray_init.num_cpus=16 +ray_kwargs.ray_init.include_dashboard=False
"""


def reward(data_source: str, solution_str: str, **others: Any) -> float:
    """Something to learn: words of an even number."""
    words = [word for word in solution_str.split() if word[1:].isdigit()]
    return sum(int(word[1:]) % 2 == 0 for word in words) / 8


def configured(folder: Path, coordinator: str, num_ranks: int, policy: str = "") -> DictConfig:
    """verl's configuration of a training; writes its prompts into ``folder``."""
    prompts = [f"w{5 + i} w{9 + i} w{30 + i}" for i in range(8 * NUM_STEPS)]
    rows = [
        {
            "prompt": [{"role": "user", "content": prompt}],
            "data_source": "tiny",
            "reward_model": {"ground_truth": ""},
            "extra_info": {"index": index},
        }
        for index, prompt in enumerate(prompts)
    ]
    data = folder / "prompts.parquet"
    datasets.Dataset.from_list(rows).to_parquet(data)
    kwargs = "actor_rollout_ref.rollout.checkpoint_engine.engine_kwargs.weft"
    overrides = [
        *_SETTINGS.split(),
        f"data.train_files={data}",
        f"data.val_files={data}",
        f"actor_rollout_ref.model.path={folder}/model",
        f"reward.custom_reward_function.path={__file__}",
        "reward.custom_reward_function.name=reward",
        f"trainer.n_gpus_per_node={num_ranks}",
        f"+ray_kwargs.ray_init.num_gpus={num_ranks}",
        f"trainer.total_training_steps={NUM_STEPS}",
        f"trainer.default_local_dir={folder}/out",
        "trainer.logger=[console,file]",
        f"+{kwargs}.coordinator={coordinator}",
    ]
    if policy:
        overrides += [
            "actor_rollout_ref.model.lora_rank=8",
            "actor_rollout_ref.model.target_modules=all-linear",
            f"+{kwargs}.policy={policy}",
        ]
    config_dir = str(Path(verl.trainer.__file__).parent / "config")
    with initialize_config_dir(config_dir, version_base=None):
        return compose("ppo_trainer", overrides=overrides)


if __name__ == "__main__":
    given_folder, given_coordinator, given_ranks, *given_policy = sys.argv[1:]
    run_ppo(
        configured(Path(given_folder), given_coordinator, int(given_ranks), *given_policy),
        TaskRunner,
    )
