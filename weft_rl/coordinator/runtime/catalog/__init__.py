"""What survives the coordinator: one SQLite file, checked when it is opened."""
