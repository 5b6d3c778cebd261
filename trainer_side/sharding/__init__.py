"""Pushes by several ranks: division among the senders."""
