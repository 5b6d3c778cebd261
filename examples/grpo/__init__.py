"""GRPO with rollouts from real vLLM replicas, in minutes on a CPU: see README.md."""
