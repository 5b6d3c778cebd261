"""What runs inside vLLM's worker processes, and what it says to the server's."""
