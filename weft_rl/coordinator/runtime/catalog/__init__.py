"""Durable state of the coordinator: one SQLite file, checked when it is opened."""
