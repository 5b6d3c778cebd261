"""Runtime that carries out decisions: the driver, the catalog, calls to replicas, live groups."""
