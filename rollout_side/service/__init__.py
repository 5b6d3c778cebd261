"""A replica's process: its start, and its metrics."""
