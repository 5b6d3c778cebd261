"""Conversation of a replica with the pool: registration, heartbeats, orders."""
