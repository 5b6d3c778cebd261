"""Lists of what the coordinator remembers, and of what happens: versions, transfers, events."""
