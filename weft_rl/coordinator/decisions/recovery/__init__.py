"""Recovery of what a pool should serve: clones, restores, lost catalogs."""
