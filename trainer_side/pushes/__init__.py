"""Push as each rank of a trainer carries it out: gathered, sharded, or of named tensors."""
