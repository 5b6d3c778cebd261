"""State that the decisions are made on: frozen values, and the pool as a whole."""
