"""Samples from the pool: what a trainer asks for, and what it gets."""
