"""Pushes by several ranks: which of them sends what."""
