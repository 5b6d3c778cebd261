"""A model's parameters as they lie: whole, or sharded over the trainer's ranks."""
