"""Code inside vLLM's worker processes, and its messages to the server's process."""
