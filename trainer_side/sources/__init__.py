"""Where a push's tensors come from: modules, adapters, files."""
