# ms-swift's GRPO over a pool, whose replicas serve the same model: docs/integrations/ms-swift.md.
torchrun --standalone --nproc-per-node 1 from_swift_rollout.py --vllm_server_host weft \
    --rlhf_type grpo --use_vllm true --vllm_mode server \
    --model Qwen/Qwen3-0.6B --tuner_type lora --lora_rank 16 --target_modules all-linear \
    --dataset prompts.jsonl --reward_funcs num_characters \
    --num_generations 4 --per_device_train_batch_size 8 --max_completion_length 32 \
    --max_steps 3 --output_dir out "$@"
