"""A page to look at a pool: its history, the JSON that the page draws, and its files."""
