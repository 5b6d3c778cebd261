"""Memory in which a worker holds the bytes of versions: staged, served, retained, arriving."""
