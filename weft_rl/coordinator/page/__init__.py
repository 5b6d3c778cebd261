"""Web page of a pool: its history, the JSON that the page draws, and its files."""
