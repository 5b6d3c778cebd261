"""Replicas: who is in the pool, what each serves, and who may be sent requests."""
