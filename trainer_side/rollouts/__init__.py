"""Samples from the pool: a trainer's requests and the results."""
