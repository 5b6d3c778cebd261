# verl's GRPO over a pool, whose replicas serve the same model: docs/integrations/verl.md.
python -m verl.trainer.main_ppo \
    algorithm.adv_estimator=grpo \
    data.train_files=prompts.parquet data.val_files=prompts.parquet data.train_batch_size=8 \
    data.max_prompt_length=64 data.max_response_length=32 \
    actor_rollout_ref.model.path=Qwen/Qwen3-0.6B actor_rollout_ref.actor.strategy=fsdp2 \
    actor_rollout_ref.actor.ppo_mini_batch_size=8 \
    actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=8 \
    actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=8 \
    actor_rollout_ref.rollout.n=4 \
    reward.custom_reward_function.path=reward.py reward.custom_reward_function.name=reward \
    trainer.nnodes=1 trainer.n_gpus_per_node=1 trainer.total_training_steps=3 \
    trainer.use_v1=False \
    actor_rollout_ref.rollout.name=weft \
    actor_rollout_ref.rollout.tensor_model_parallel_size=1 \
    actor_rollout_ref.rollout.checkpoint_engine.backend=weft \
    +actor_rollout_ref.rollout.checkpoint_engine.engine_kwargs.weft.coordinator=${WEFT_COORDINATOR:-127.0.0.1:50051} \
    +actor_rollout_ref.rollout.checkpoint_manager_class=trainer_side.integrations.verl.WeftCheckpointManager \
    "$@"
