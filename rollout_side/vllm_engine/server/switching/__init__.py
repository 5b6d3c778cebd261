"""How an engine goes from one base to another, and to sleep: what pauses it, and for whom."""
