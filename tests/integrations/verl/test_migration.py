"""The command that takes the place of verl's checkpoint engine."""

from __future__ import annotations

from pathlib import Path

import datasets

from tests.integrations.migration import run_pasted
from tests.integrations.parity import sampled, version
from tests.integrations.pool import serving

_ON_A_CPU = """
    data.dataloader_num_workers=0 actor_rollout_ref.model.use_remove_padding=False
    actor_rollout_ref.model.enable_gradient_checkpointing=False
    +actor_rollout_ref.model.override_config.attn_implementation=eager
    actor_rollout_ref.actor.use_torch_compile=False
    actor_rollout_ref.actor.fsdp_config.model_dtype=fp32
    actor_rollout_ref.actor.fsdp_config.use_torch_compile=False
    +actor_rollout_ref.actor.fsdp_config.mixed_precision.param_dtype=fp32
    +actor_rollout_ref.actor.fsdp_config.mixed_precision.reduce_dtype=fp32
    +actor_rollout_ref.actor.fsdp_config.mixed_precision.buffer_dtype=fp32
    actor_rollout_ref.rollout.agent.num_workers=1 reward.num_workers=1 trainer.device=cpu
    trainer.val_before_train=False trainer.test_freq=-1 trainer.save_freq=-1
    trainer.logger=[console] +ray_kwargs.ray_init.num_gpus=1
    ray_kwargs.ray_init.num_cpus=16 +ray_kwargs.ray_init.include_dashboard=False
"""
_REWARD = """
def reward(data_source, solution_str, **others):
    return float(len(set(solution_str)))
"""


def test_from_the_checkpoint_engine(tmp_path: Path) -> None:
    rows = [
        {
            "prompt": [{"role": "user", "content": f"w{5 + i} w{9 + i}"}],
            "data_source": "tiny",
            "reward_model": {"ground_truth": ""},
            "extra_info": {"index": i},
        }
        for i in range(32)
    ]
    datasets.Dataset.from_list(rows).to_parquet(tmp_path / "prompts.parquet")
    (tmp_path / "reward.py").write_text(_REWARD)
    file = "from_verl_checkpoint_engine.sh"
    with serving(tmp_path) as served:
        coordinator = served.pool.coordinator
        command = ["bash", "-e", file, *_ON_A_CPU.split()]
        run_pasted(tmp_path, [file], command, coordinator, served.model, {})
        assert version(sampled(coordinator, "base")) == 4  # one before the first of three steps
