"""What the coordinator remembers, and what happens: versions, transfers, events."""
