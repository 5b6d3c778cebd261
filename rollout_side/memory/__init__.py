"""Where a worker holds the bytes of versions: staged, served, retained, arriving."""
