"""How a pool comes to serve again what it should: clones, restores, lost catalogs."""
