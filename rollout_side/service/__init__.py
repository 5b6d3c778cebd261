"""Process of a replica: its start, and its metrics."""
