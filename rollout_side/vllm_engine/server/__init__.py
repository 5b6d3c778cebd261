"""vLLM's process that serves: how it starts, what it answers, and how it switches."""
