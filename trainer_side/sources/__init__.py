"""Sources of a push's tensors: modules, adapters, files."""
