"""Checkpoints on disk: their files, what these hold, and what is remembered of them."""
