"""Parameters of a model as they lie: whole, or sharded over the trainer's ranks."""
